"""The whole library on the mma family: every operation lowers to its kernels alone, and none of these spills."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from operations import OPERATIONS, operands, uses

import cutjax
from cutjax.kernels import base, families
from cutjax.kernels.mma import kernel as mma
from cutjax.runtime import compiler, settings

WIDE = {"logits", "bias", "s", "of_groups"}  # operands that are float32 beside narrow ones
# No family reduces over rows that have groups.
OTHERS = "cuda_kernel", "dispatch and combine", "grouped_gemm, epilogue"
PRODUCTS = [name for name, op in OPERATIONS.items() if name not in OTHERS and not op.operands.startswith("logits")]


@pytest.fixture
def texts(monkeypatch):
    """The texts of the kernels that are lowered, by name and architecture; none is compiled."""
    found = {}

    def note(source, *, name, arch):
        found[name, arch] = source
        return compiler.Cubin(b"cubin", compiler.Resources(None, None, None, None, None), "", 0.0, False)

    monkeypatch.setattr(base, "compile_kernel", note)
    return found


def narrow(name, dtype):
    names = OPERATIONS[name].operands.split()
    wide = () if name.endswith("gemm, sum") else WIDE  # there they are factors
    wanted = [x.dtype == jnp.float32 and of not in wide for of, x in zip(names, operands(name), strict=True)]
    return [x.astype(dtype) if cast else x for cast, x in zip(wanted, operands(name), strict=True)]


def lowered(fn, *args, arch="sm_80"):
    with cutjax.use_backend("cuda"), settings.override(target_arch=arch):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    assert not re.search(r"stablehlo\.dot|chlo\.ragged_dot", text)
    found = re.findall(r'@cutjax_launch.*kernel = "([\w ]+)"', text)
    assert all(name.startswith(("mma_", "network_", "route_", "direct_", "causal_")) for name in found), found
    return found


def compile_all(texts):
    def one(item):
        (name, arch), source = item
        return name, compiler.compile_kernel(source, name=name, arch=arch)

    with ThreadPoolExecutor(2) as pool:
        for name, cubin in pool.map(one, texts.items()):
            assert "warning" not in cubin.log, f"{name}: {cubin.log}"
            assert cubin.resources.spill_store_bytes == 0, f"{name}: {cubin.resources}"


@pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
def test_every_operation_and_its_gradient_are_kernels(texts):
    # Convolutions by weights of each example, sums over some axes of images, and one step of a sequence have no kernel.
    for name in (name for name in PRODUCTS if name not in ("conv, reductions", "causal_conv1d_update")):
        args = narrow(name, jnp.bfloat16)
        for use in ("value", "gradient", "batch of values")[: 2 if name.startswith(("conv", "causal")) else 3]:
            assert kernels(lowered(uses(name)[use], *args)), f"{name}, {use}"
    assert len(texts) > 45
    compile_all(dict(list(texts.items())[::10]))


@pytest.mark.parametrize(("arch", "dtype"), [("sm_75", "float16"), ("sm_89", "bfloat16"), ("sm_120a", "float16")])
@pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
def test_other_architectures(texts, arch, dtype):
    for name in ("gemm, epilogue", "syrk", "grouped_gemm", "grouped_outer, accumulate"):
        assert kernels(lowered(OPERATIONS[name].fn, *narrow(name, dtype), arch=arch))
    compile_all(texts)


def symmetric(m=4096, k=512, out="bfloat16", arch="sm_80"):
    half = jnp.dtype(jnp.bfloat16)
    return cutjax.Problem.of(m, m, k, "nt", half, half, jnp.dtype(out), arch=arch, symmetric=True)


@pytest.mark.parametrize("out", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
def test_symmetric_results_of_any_size_of_elements(out):
    asked = symmetric(out=out)
    configs = cutjax.candidates(asked)
    assert all(config.bm % 64 == config.bn % 64 == 0 for config in configs)
    widest = mma.resolved(asked, max(configs, key=lambda config: config.wn))
    odd = mma.resolved(symmetric(1001, out=out), configs[0])
    compiled = (widest, odd) if out == "bfloat16" else (widest,)
    compile_all({(kernel.name, "sm_80"): kernel.source for kernel in compiled})


def test_symmetric_tiles_are_those_of_a_triangle():
    square = next(config for config in cutjax.candidates(symmetric()) if (config.bm, config.bn) == (128, 128))
    kernel = mma.resolved(symmetric(), square)
    assert kernel.tiles == 32 * 33 // 2
    # A tile off 64 x 64 blocks would leave out part of a block on the diagonal.
    low = mma.resolve(symmetric(), mma.Config(64, 32, 64, 32, 32))
    assert isinstance(low, tuple)
    assert "64x64" in low[0]


def test_results_in_an_order_of_their_own_have_rows_of_any_length():
    heads = (0, 2, 1, 3)
    shape = jax.ShapeDtypeStruct((2, 3, 8, 8), jnp.bfloat16), jax.ShapeDtypeStruct((2, 3, 8, 5), jnp.bfloat16)
    for arch, order in (("sm_80", heads), ("sm_90a", ())):
        problem = cutjax.Problem.of_arrays(*shape, layout="nn", out_dtype=jnp.bfloat16, arch=arch)
        assert families.in_order(problem, ((), (), heads)).orders[2] == order
