"""The kernel of a causal convolution's gradients: exact on the host, refusals, and that it compiles without spills."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest

from cutjax.epilogue.trace import trace
from cutjax.kernels.device import reference
from cutjax.kernels.direct import causal
from cutjax.kernels.direct.config import Config
from cutjax.primitives.causal import gradient_before
from cutjax.runtime import compiler

needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")
needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))


def problem(
    images, length, channels, width=4, dtype="bfloat16", bias: str | None = "bfloat16", f=jax.nn.silu, arch="sm_90a"
):
    dtype, of_bias = jnp.dtype(dtype), None if bias is None else jnp.dtype(bias)
    acc = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    gradient = gradient_before(trace(f, [acc], ()).epilogue, dtype)
    sums = (dtype,) if of_bias is None else (dtype, of_bias)
    return causal.Gradients(images, length, channels, width, dtype, of_bias, sums, gradient, reference(arch))


def by_hand(x, w, bias, dy, derivative):
    """In float64: the gradients of sequences, weights and the bias."""
    halo, length = len(w) - 1, x.shape[1]
    padded = np.pad(x, [(0, 0), (halo, 0), (0, 0)])
    before = sum(padded[:, k : k + length] * w[k] for k in range(len(w))) + bias
    g = derivative(before) * dy
    behind = np.pad(g, [(0, 0), (0, halo), (0, 0)])
    dx = sum(behind[:, halo - k : halo - k + length] * w[k] for k in range(len(w)))
    dw = np.stack([np.sum(padded[:, k : k + length] * g, (0, 1)) for k in range(len(w))])
    return dx, dw, np.sum(g, (0, 1))


# Images, length, channels, width, dtype, that of the bias, and a config's channels, rows, rows ahead, lanes, threads.
CASES = [
    (2, 23, 16, 4, "bfloat16", "bfloat16", (4, 8, 4, 4, 16)),
    (3, 7, 10, 4, "float16", None, (2, 16, 2, 4, 16)),
    (1, 40, 12, 2, "float32", "float32", (4, 9, 3, 2, 8)),
    (2, 19, 5, 3, "bfloat16", "float32", (1, 5, 4, 8, 8)),
    (2, 11, 8, 1, "float32", "bfloat16", (2, 4, 2, 4, 16)),
    (1, 2, 8, 4, "bfloat16", None, (8, 64, 8, 1, 4)),
    (1, 30, 8, 7, "bfloat16", "bfloat16", (4, 10, 1, 2, 4)),
]


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_small_integers_are_exact(case, tmp_path):
    """With a square as the activation: its derivative reads the sums before it. What is outside must not be read."""
    images, length, channels, width, dtype, bias, (pairs, rows, ahead, lanes, threads) = case
    asked = problem(images, length, channels, width, dtype, bias, lambda a: a * a * 0.5)
    found = causal.resolve(asked, Config(pairs, 1, rows, lanes, threads, ahead, 1))
    assert isinstance(found, causal.Kernel), found
    rng = np.random.default_rng(length)
    x, dy = (rng.integers(-1, 2, (images, length, channels)) for _ in range(2))
    w, b = rng.integers(-1, 2, (width, channels)), rng.integers(-1, 2, channels) * (bias is not None)
    given = [x.astype(dtype), w.astype(dtype), *[b.astype(bias)] * (bias is not None), dy.astype(dtype)]
    arrays = [kernel_host.aligned(array) for array in given]
    arrays += [kernel_host.aligned(np.full(out.shape, np.nan, out.dtype)) for out in found.results]
    for entry in found.entries:
        kernel_host.run(entry, arrays, tmp_path, blocks=entry.blocks)
    wanted = by_hand(x, w, b, dy, lambda before: before)[: 2 + (bias is not None)]
    for got, exact in zip(arrays[len(given) : -1], wanted, strict=True):
        np.testing.assert_array_equal(got, np.asarray(exact).astype(got.dtype))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (problem(2, 8, 4, dtype="float64"), "f64: the kernels are of bf16, f16, f32"),
        (problem(2, 8, 4, width=9), "width 9, at most 8"),
        (problem(2, 0, 4), "a size is 0"),
        (problem(2, 8, 4, arch="sm_70"), "sm_75 and later"),
        (problem(2, 8, 4, f=lambda a: a * jax.lax.broadcasted_iota(jnp.float32, a.shape, 1)), "where elements lie"),
    ],
)
def test_what_is_refused(asked, why):
    found = causal.choose(asked)
    assert not found.served
    assert why in "; ".join(found.reasons)


@pytest.mark.versions  # of NVRTC
@needs_nvrtc
@pytest.mark.parametrize(
    ("asked", "arch"),
    [
        (problem(2, 4096, 4096), "sm_90a"),
        (problem(8, 2048, 5120, bias=None, f=lambda a: a), "sm_80"),
        (problem(1, 333, 1537, dtype="float16", width=3, f=jax.nn.gelu), "sm_75"),
        (problem(4, 1000, 768, dtype="float32", bias="float32", width=2), "sm_100a"),
    ],
)
def test_kernels_compile_without_spills(asked, arch):
    found = causal.choose(asked).resolved
    assert found is not None
    for entry in found.entries:
        cubin = compiler.compile_source(entry.source, name=entry.name, arch=arch)
        assert "warning" not in cubin.log
        assert (cubin.resources.spill_store_bytes, cubin.resources.spill_load_bytes) == (0, 0), entry.name
