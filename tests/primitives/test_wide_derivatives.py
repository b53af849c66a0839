"""Derivatives of products whose accumulators are float64, integers or complex: JAX's own, with and without epilogue."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

M, K, N = 6, 5, 7


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
        yield


def random(seed, shape, dtype):
    parts = jax.random.normal(jax.random.key(seed), (2, *shape), np.float64)
    x = parts[0] + 1j * parts[1] if jnp.issubdtype(dtype, jnp.complexfloating) else 3 * parts[0]
    return x.astype(dtype)


def derivatives(fn, *args):
    """Values, cotangents and tangents of a function of arrays."""
    values, pull = jax.vjp(fn, *args)
    cotangents = jax.tree.map(lambda x: random(7, x.shape, x.dtype), values)
    return values, pull(cotangents), jax.jvp(fn, args, args)[1]


def check(ours, plain, *args):
    found, wanted = jax.jit(lambda *args: [derivatives(fn, *args) for fn in (ours, plain)])(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        # Sums of up to 7 terms of up to a hundred, in another order.
        eps = float(jnp.finfo(y.dtype).eps)
        np.testing.assert_allclose(x, y, rtol=50 * eps, atol=1000 * eps)


def function(dtype):
    return (lambda x: (2 - 1j) * x * jnp.abs(x)) if jnp.issubdtype(dtype, jnp.complexfloating) else jax.nn.gelu


@pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128"])
def test_dense(dtype):
    act = function(dtype)
    a, b, c = random(0, (M, K), dtype), random(1, (K, N), dtype), random(2, (N,), dtype)
    check(lambda a, b, c: cutjax.gemm(a, b) + c, lambda a, b, c: a @ b + c, a, b, c)
    check(
        lambda a, b, c: cutjax.gemm(a, b, epilogue=lambda acc, c: act(acc + c), operands=(c,)),
        lambda a, b, c: act(a @ b + c),
        *(a, b, c),
    )
    scale = random(3, (M, 1), "float32")
    check(
        lambda a, b, s: cutjax.gemm(a, b, epilogue=lambda acc, s: (acc * s, (acc * s).sum(0)), operands=(s,)),
        lambda a, b, s: (a @ b * s, (a @ b * s).sum(0)),
        *(a, b, scale),
    )


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_second(dtype):
    act = function(dtype)
    a, b = random(0, (M, K), dtype), random(1, (K, N), dtype)

    def gradient(multiply):
        return lambda a, b: jax.vjp(multiply, a, b)[1](random(5, (M, N), dtype))

    check(gradient(lambda a, b: cutjax.gemm(a, b, epilogue=act)), gradient(lambda a, b: act(a @ b)), a, b)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_grouped(dtype):
    act = function(dtype)
    x, w = random(0, (M, K), dtype), random(1, (2, K, N), dtype)
    sizes = jnp.array([2, 4])
    check(
        lambda x, w: cutjax.grouped_gemm(x, w, sizes, epilogue=act),
        lambda x, w: act(jnp.concatenate([x[:2] @ w[0], x[2:] @ w[1]])),
        *(x, w),
    )


@pytest.mark.parametrize(("dtype", "save"), [("int8", "default"), ("uint8", "recompute"), ("int16", "default")])
def test_scales_of_integers(dtype, save):
    """The gradient of a scale reads the accumulators, which no dtype of fewer bits holds."""
    low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    a, b = (jax.random.randint(jax.random.key(i), s, low, high, dtype) for i, s in enumerate([(M, K), (K, N)]))
    a = a // 2
    wide = np.uint32 if dtype[0] == "u" else np.int32
    check(
        lambda s: cutjax.gemm(a, b, epilogue=lambda acc, s: acc.astype(s.dtype) * s, operands=(s,), save=save),
        lambda s: (a.astype(wide) @ b.astype(wide)).astype(s.dtype) * s,
        random(0, (N,), "float32") / 2**30,
    )


@pytest.mark.parametrize("dtype", ["float64", "complex64", "int8"])
def test_lowers_for_cuda(dtype):
    """To XLA's product or to a kernel, of a problem that says the accumulators' dtype."""
    a = jnp.ones((64, 64), dtype)
    act = (lambda acc: acc.astype(np.float32) * 2) if dtype == "int8" else function(dtype)
    (row,) = cutjax.explain(lambda: cutjax.gemm(a, a, epilogue=act), platform="cuda")().rows
    assert row.choice.problem.accumulator == ("int32" if dtype == "int8" else dtype)
    jax.jit(lambda a: cutjax.gemm(a, a, epilogue=act)).trace(a).lower(lowering_platforms=("cuda",))
