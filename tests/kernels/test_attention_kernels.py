"""Kernels of attention of few query rows: that they compile without spills, what is refused, and what is chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutjax.epilogue.trace import trace
from cutjax.kernels import attention
from cutjax.kernels.device import reference
from cutjax.runtime import compiler

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


def masked(x, lengths):
    return jnp.where(jnp.arange(x.shape[-1]) < lengths, x / 8, -jnp.inf)


def problem(sizes, arch="sm_90a", expression=masked, dtype=BF16, out_dtype=None):
    """Sizes are batch, heads, group, time, keys, key_size and value_size."""
    batch, heads, group, time, keys, key_size, value_size = sizes
    lengths = jnp.zeros((batch, 1, 1, 1, 1), jnp.int32)
    traced = trace(expression, [jax.ShapeDtypeStruct((batch, heads, group, time, keys), F32)], [lengths])
    q = jax.ShapeDtypeStruct((batch, heads, group, time, key_size), dtype)
    k, v = (jax.ShapeDtypeStruct((batch, keys, heads, size), dtype) for size in (key_size, value_size))
    params = {"expression": traced.epilogue.primal, "keys_first": (True, True), "device": reference(arch)}
    return attention.Problem.of(q, k, v, out_dtype=out_dtype or dtype, **params)


def with_arrays(x, lengths):
    """With a bias of all scores, in memory, and a bound."""
    bias = jnp.zeros(x.shape, BF16).at[0].set(1)
    return masked(jnp.tanh(x / 20) * 20, lengths) + bias.astype(F32)


SHAPES = [(16, 8, 4, 1, 1024, 128, 128), (1, 8, 4, 4, 4096, 128, 128), (4, 16, 1, 1, 512, 64, 64)]
SHAPES += [(2, 2, 8, 1, 300, 96, 80), (2, 4, 2, 1, 512, 256, 256), (2, 2, 8, 4, 512, 128, 128)]
SHAPES += [(2, 2, 8, 2, 512, 256, 256)]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_kernels_compile_without_spills(arch):
    for sizes in SHAPES if arch == "sm_90a" else SHAPES[:2]:
        kernel = attention.choose(problem(sizes, arch, with_arrays), "auto").resolved
        assert kernel is not None
        for entry in kernel.entries:
            cubin = compiler.compile_source(entry.source, name=entry.name, arch=arch)
            assert "warning" not in cubin.log, cubin.log
            found = cubin.resources
            assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0), entry.name


@pytest.mark.parametrize(
    "sizes", [*SHAPES, (1, 1, 1, 1, 1, 16, 16), (1, 1, 1, 1, 5000, 16, 16), (300, 8, 1, 1, 64, 64, 64)]
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_every_part_has_keys(sizes, arch):
    """And all together have all; blocks fit the shared memory of an SM."""
    asked = problem(sizes, arch)
    for config in attention.configs(asked):
        kernel = attention.Kernel(asked, config)
        assert not kernel.reasons()
        assert (config.parts - 1) * kernel.keys_of_part < asked.keys <= config.parts * kernel.keys_of_part
        assert kernel.blocks_per_sm * kernel.shared_bytes <= asked.device.shared_bytes_per_sm


def test_parts_fill_the_sms():
    """Sequences and heads enough to fill them take one launch; one sequence is divided."""
    many, one = (attention.choose(problem((b, 8, 4, 1, 8192, 128, 128)), "auto").resolved for b in (16, 1))
    assert many is not None
    assert one is not None
    assert (len(many.entries), len(one.entries)) == (1, 2)
    assert 100 <= 8 * one.config.parts <= 132


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (problem((2, 2, 2, 1, 0, 64, 64)), "a size is 0"),
        (problem((2, 2, 2, 1, 64, 64, 64), "sm_75"), "sm_80 and later"),
        (problem((2, 2, 2, 1, 64, 64, 64), dtype=F32), "multiply 16 bits"),
        (problem((2, 2, 11, 3, 64, 64, 64)), "more than 32"),
        (problem((2, 2, 17, 1, 64, 64, 256)), "more than registers hold"),
        (problem((2, 2, 1, 1, 64, 72, 64)), "multiples of 16"),
        (problem((2, 2, 1, 1, 64, 64, 272)), "multiples of 16"),
        (problem((2, 2, 1, 1, 64, 64, 64), expression=lambda x, _: jax.scipy.special.erfinv(x)), "not inlined"),
    ],
)
def test_refusals(asked, why):
    found = attention.choose(asked, "auto")
    assert found.resolved is None
    assert why in "; ".join(found.reasons)
