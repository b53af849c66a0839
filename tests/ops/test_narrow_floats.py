"""Floats of fewer than 16 bits: their derivatives are not rounded to them before they are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import same

import cutjax
from cutjax.primitives import accumulators, derivative

NARROW = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu")
CASES = [(dtype, out) for dtype in NARROW for out in ("float32", "bfloat16", "float16")]
CASES.remove(("float8_e8m0fnu", "float16"))  # XLA's CPU backend adds this one up in float8_e8m0fnu
M, K, N = 4, 8, 16
S = jnp.array([M])


def values(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Numbers that every dtype here holds; float8_e8m0fnu has neither zero nor sign."""
    return jax.device_put(np.random.default_rng(seed).choice([1.0, 2.0, 4.0], shape).astype(dtype))


def plain(x, w, out):
    return jnp.matmul(x, w, preferred_element_type=out)


def fused(x, w, out):
    return cutjax.gemm(x, w, epilogue=lambda acc: acc * 1.0, out_dtype=out)


OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "gemm": lambda x, w, out: cutjax.gemm(x, w, out_dtype=out),
    "nt": lambda x, w, out: cutjax.gemm(x, w.mT, layout="nt", out_dtype=out),
    "fused": fused,
    "grouped_gemm": lambda x, w, out: cutjax.grouped_gemm(x, w[None], S, out_dtype=out),
    "grouped_fused": lambda x, w, out: cutjax.grouped_gemm(
        x, w[None], S, epilogue=lambda acc: acc * 1.0, out_dtype=out
    ),
    "ragged_dot": lambda x, w, out: cutjax.ragged_dot(x, w[None], S, preferred_element_type=out),
    "grouped_outer": lambda x, w, out: cutjax.grouped_outer(x.mT, w, jnp.array([K]), out_dtype=out)[0],
}


def derivatives(product, x, w, out):
    """The value, both gradients of a scaled sum, whose cotangent is 1000, and the tangent."""

    def loss(x, w):
        return (product(x, w, out).astype(jnp.float32) * 1000.0).sum() / 1000.0

    gradients = jax.grad(lambda x, w: loss(x, w), (0, 1))(x, w)
    tangent = jax.jvp(lambda x: product(x, w, out), (x,), (x,))
    return jax.tree.map(lambda v: v.astype(jnp.float32), (gradients, tangent))


# All pairs of gemm; of the others a third, each another one.
PAIRS = [
    (name, *case)
    for turn, name in enumerate(OPERATIONS)
    for i, case in enumerate(CASES)
    if name == "gemm" or (i + turn) % 3 == 0
]


@pytest.mark.parametrize(("name", "dtype", "out"), PAIRS)
def test_as_matmul(name, dtype, out):
    x, w = values(0, (M, K), dtype), values(1, (K, N), dtype)

    @jax.jit
    def both(x, w):
        return [derivatives(product, x, w, out) for product in (OPERATIONS[name], plain)]

    got, expected = both(x, w)
    same(got, expected)
    if dtype != "float8_e4m3b11fnuz":  # which holds 30 at most
        assert all(np.isfinite(v).all() for v in jax.tree.leaves(got))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "grouped_outer"])
@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16])
def test_a_cotangent_beyond_the_operands_range(name, out):
    """1000 is none of float8_e4m3fn's numbers; 1000 * 0.0625 = 62.5 is near one."""
    x, w = jnp.full((M, 1), 1, jnp.float8_e4m3fn), jnp.full((1, 1), 0.0625, jnp.float8_e4m3fn)
    (dx,) = jax.vjp(lambda x: OPERATIONS[name](x, w, out), x)[1](jnp.full((M, 1), 1000, out))
    assert dx.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(dx.astype(jnp.float32), np.full((M, 1), 64))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemm", "float8_e4m3fn"),
        ("fused", "float8_e5m2"),
        ("grouped_gemm", "float8_e4m3fn"),
        ("ragged_dot", "float8_e5m2"),
    ],
)
def test_second_derivatives(name, dtype):
    x, w = values(0, (M, K), dtype), values(1, (K, N), dtype)

    def second(product, x, w):
        def loss(x, w):
            return jnp.sin(product(x, w, jnp.float32) / 64).sum() * 64

        _, dot = jax.jvp(jax.grad(loss, (0, 1)), (x, w), (x, w))
        _, vjp = jax.vjp(jax.grad(loss), x, w)
        return jax.tree.map(lambda v: v.astype(jnp.float32), (dot, vjp(x)))

    got, expected = jax.jit(lambda x, w: [second(f, x, w) for f in (OPERATIONS[name], plain)])(x, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(a).all()
        # A step of the dtype apart, which is what rounding to it in another place makes.
        np.testing.assert_allclose(a, b, rtol=2 * float(jnp.finfo(dtype).eps), atol=0.1)


def mlp(x, w, v, b, b2):
    return cutjax.mlp(x, w, v, b1=b, b2=b2, gate=w, activation=jax.nn.silu, out_dtype=jnp.float32)


def grouped_mlp(x, w, v, b, b2):
    scale = b[:1, None] * jnp.ones((M, 1))
    y = cutjax.grouped_mlp(
        x, w[None], v[None], S, gate=w[None], activation=jax.nn.silu, row_scale=scale, out_dtype=jnp.float32
    )
    return y + b2


def grouped_bias(x, w, v, b, b2):
    h = cutjax.grouped_gemm(x, w[None], S, epilogue=jnp.add, operands=(b[None, None],))
    return cutjax.grouped_gemm(h, v[None], S, out_dtype=jnp.float32) + b2


def moe(x, w, v, b, b2):
    ones = jnp.zeros((M, 1))
    return cutjax.moe(x, ones, w[None], w[None], v[None], 1).astype(jnp.float32) + b.sum() + b2.sum()


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (mlp, "float8_e4m3fn"),
        (mlp, "float8_e5m2"),
        (grouped_mlp, "float8_e5m2"),
        (grouped_bias, "float8_e4m3fn"),
        (moe, "float8_e4m3fn"),
    ],
)
def test_layers(layer, dtype):
    """Near those of the same numbers in float32, where a cotangent is beyond the operands' range."""
    rng = np.random.default_rng(0)
    x, w, v = (jax.device_put((rng.standard_normal(s) / 4).astype(dtype)) for s in ((M, K), (K, N), (N, K)))
    b, b2 = jnp.full(N, 0.5), jnp.full(K, 0.25)

    def gradients(x, w, v, b, b2):
        return jax.grad(lambda *args: (layer(*args) * 2000).sum() / 2000, (0, 1, 2, 3, 4))(x, w, v, b, b2)

    got = jax.jit(gradients)(x, w, v, b, b2)
    expected = jax.jit(gradients)(*(np.asarray(y).astype(np.float32) for y in (x, w, v)), b, b2)
    for y, z in zip(jax.tree.map(lambda y: np.asarray(y).astype(np.float32), got), expected, strict=True):
        assert np.isfinite(y).all()
        # The cotangent of what lies between the products may be of the operands' dtype, as in plain JAX.
        # float8_e5m2 rounds by 2^-3, and the terms of a sum cancel: 0.27, or less where XLA leaves a rounding out.
        np.testing.assert_allclose(y, z, atol=np.abs(z).max() * 0.35)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_narrow_integers(dtype):
    """Sums are those of int32, and stay so where the result is wider."""
    x = jnp.full((2, 600), 7, dtype)
    np.testing.assert_array_equal(cutjax.gemm(x, x.T, out_dtype=jnp.int32), np.full((2, 2), 49 * 600))
    np.testing.assert_array_equal(cutjax.gemm(x, x.T, out_dtype=jnp.float32), np.full((2, 2), 49.0 * 600))
    got = cutjax.ragged_dot(x, x.T[None], jnp.array([2]), preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(got, np.full((2, 2), 49 * 600))


def test_dtypes():
    bf16, f16, f32, f8 = (jnp.dtype(t) for t in ("bfloat16", "float16", "float32", "float8_e4m3fn"))
    for wide in (bf16, f16, f32, jnp.dtype("complex64")):
        assert accumulators.cotangent_dtype(wide, f32) == wide
    assert accumulators.cotangent_dtype(jnp.dtype("int8"), f32) == f32  # integers hold no cotangent
    found: list[Any] = [accumulators.cotangent_dtype(f8, g) for g in (f8, bf16, f16, f32)]
    assert found == [bf16, bf16, f32, f32]
    jaxpr = jax.make_jaxpr(lambda x: cutjax.gemm(x, x, epilogue=lambda acc: acc))(jnp.ones((2, 2), f8))
    (eqn,) = jaxpr.jaxpr.eqns
    assert derivative.saved_dtype(eqn.params["epilogue"], f8) == bf16


def test_float4():
    """XLA's CPU backend has it in some programs only, so both are eager."""
    x = jnp.full((2, 2), 1.5).astype(jnp.float4_e2m1fn)

    def both(product):
        gradient = jax.grad(lambda x: product(x, x).astype(jnp.float32).sum())(x)
        return [v.astype(jnp.float32) for v in (product(x, x), gradient)]

    jax.tree.map(np.testing.assert_array_equal, both(cutjax.gemm), both(jnp.matmul))
