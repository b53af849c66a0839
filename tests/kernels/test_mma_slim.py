"""Slim kernels: few rows, or few columns, by kernels without tensor cores; what is refused, and that none spills."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import changed

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.kernels import base
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma import slim
from cutjax.kernels.problem import LAYOUTS
from cutjax.runtime import compiler, settings
from cutjax.runtime.launch import Pointer

H, F32 = np.dtype(jnp.bfloat16), jnp.float32


def problem(m=1, n=4096, k=4096, layout="nn", arch="sm_80", dtype=H, **more):
    return cutjax.Problem.of(m, n, k, layout, dtype, dtype, dtype, arch=arch, **more)


def test_few_rows_and_few_columns_are_slim():
    row, column = (
        next(config for config in cutjax.candidates(asked) if config.slim)
        for asked in (problem(), problem(4096, 1, layout="nt"))
    )
    assert (row.bm, row.swap) == (1, False)
    assert (column.bm, column.swap) == (1, True)
    assert not any(config.slim for config in cutjax.candidates(problem(5, 4096)))
    assert {config.bm for config in slim.configs(problem(3))} == {4}


def test_few_rows_of_each_group():
    """A tile has no more rows than a group has, about, and b of a group is read once."""
    grouped = problem(64, 1024, 512, groups=32, ragged="m")
    config = next(slim.configs(grouped))
    kernel = mma.resolved(grouped, config)
    assert config.bm == 2
    assert (kernel.tiles, kernel.columns) == (64 * 1024 // config.bn, 1024 // config.bn)
    assert not list(slim.configs(changed(grouped, groups=8)))


def test_the_plan_of_swapped_operands():
    asked = problem(1000, 3, 64, layout="nt")
    config = next(config for config in slim.configs(asked) if config.swap and not cutjax.reasons(config, asked))
    kernel = mma.resolved(asked, config)
    values = {argument.name: argument.value for argument in kernel.arguments}
    assert (values["base_a"], values["base_b0"]) == (Pointer(1), Pointer(0))
    assert [values[name].value for name in ("m", "n", "k")] == [3, 1000, 64]
    assert kernel.problem == asked
    assert "_swap" in kernel.name


def summed(acc):
    return acc, acc.sum(-2)


@pytest.mark.parametrize(
    ("asked", "fields", "why"),
    [
        (problem(8), {"epilogue": summed}, "reductions are of 16 rows at a time"),
        (problem(4096, 4), {"epilogue": summed, "swap": True}, "swap with a reduction"),
        (problem(64, 64, groups=16, ragged="m"), {"swap": True}, "in groups: slim kernels"),
        (problem(layout="nt"), {"bn": 256, "wn": 128, "sliced_k": 1}, "and 2 share 32 of them"),
        (problem(2, dtype=np.dtype("float16"), math="f16"), {}, "slim kernels add up in"),
    ],
)
def test_what_is_refused(asked, fields, why):
    if function := fields.get("epilogue"):
        epilogue = trace(function, [jax.ShapeDtypeStruct((asked.m, asked.n), F32)], ()).epilogue
        asked = dataclasses.replace(asked, epilogue=epilogue)
    config = cutjax.MmaConfig(
        4,
        fields.get("bn", 32),
        128,
        4,
        fields.get("wn", 32),
        fields.get("sliced_k", 8),
        stages=1,
        swap=fields.get("swap", False),
    )
    assert why in "; ".join(cutjax.reasons(config, asked))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"bm": 4, "wm": 4}, "a slim kernel has 1, in registers"),
        ({"bm": 4, "wm": 16, "stages": 1}, "bm=4: a multiple of wm=16"),
        ({"swap": True}, "slim kernels alone swap operands"),
        ({"sliced_k": 8}, "of a slim kernel up to 16"),
    ],
)
def test_fields_that_no_config_has(fields, why):
    with pytest.raises(ValueError, match=why):
        cutjax.MmaConfig(**{"wn": 32, "bn": 32} | fields)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
def test_configs_compile_without_spills(layout):
    """The most rows, where loads are of any size and where they are of 16 bytes."""
    for i, asked in enumerate((problem(4, layout=layout), problem(2, 1001, 1003, layout))):
        served = [config for config in slim.configs(asked) if not cutjax.reasons(config, asked)]
        for config in [served[0], served[-1]][i:]:
            kernel = mma.resolved(asked, config)
            cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch="sm_80")
            assert cubin.resources.spill_store_bytes == 0, f"{kernel.name}: {cubin.resources}"


def test_a_decoding_step_is_two_kernels(monkeypatch):
    """One token through a layer with everything fused; its weights are read once."""
    names = []

    def note(source, *, name, arch):
        names.append(name)
        return compiler.Cubin(b"cubin", compiler.Resources(None, None, None, None, None), "", 0.0, False)

    monkeypatch.setattr(base, "compile_kernel", note)
    x, w, v = (jax.ShapeDtypeStruct(shape, H) for shape in ((1, 2048), (2048, 8192), (8192, 2048)))
    with settings.override(target_arch="sm_80"), cutjax.use_backend("cuda"):
        jax.jit(lambda x, w, v: cutjax.mlp(x, w, v, gate=w)).trace(x, w, v).lower(lowering_platforms=("cuda",))
    assert len(names) == 2
    assert all(name.startswith("mma_bf16") for name in names)
