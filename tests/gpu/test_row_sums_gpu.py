"""Sums over rows on the device: of integers exact, of Gaussian numbers near float64, in programs as plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.primitives.row_sums import row_sums_p

pytestmark = pytest.mark.gpu
SHAPES = [(2, 300, 48), (1, 7, 1), (3, 50, 21), (256, 49, 1152), (8, 4096, 320), (64, 3136, 144), (1, 100000, 32)]


def sums_of(expression, *arrays):
    """The sums of a kernel, which must be one, over rows."""

    def added(*xs):
        return [y.astype(jnp.float32).sum(1) for y in expression(*xs)]

    def run(x, *operands):
        traced = trace(added, [jax.ShapeDtypeStruct(x.shape, x.dtype)], operands)
        return traced.finish(row_sums_p.bind(x, *traced.operands, expression=traced.epilogue, backend="cuda"))

    (row,) = cutjax.explain(run, platform="cuda")(*arrays).rows
    assert row.kernel.startswith("row_sums_")
    return jax.jit(run)(*arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers(shape, dtype):
    """Products of small integers: any order of additions is exact."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-3, 4, shape).astype(np.float32) for _ in range(2))
    row = rng.integers(-2, 3, (shape[0], 1, shape[2])).astype(np.float32)
    got = sums_of(
        lambda x, y, row: [x, x * y + row, jnp.where(y > 0, x, 0)], *(jnp.asarray(a, dtype) for a in (x, y, row))
    )
    for share, want in zip(got, (x, x * y + row, np.where(y > 0, x, 0)), strict=True):
        np.testing.assert_array_equal(np.asarray(share), want.sum(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_gaussian(shape):
    """Of SiLU's derivative, to the rounding of float32's sums: 2^-21 of each term's magnitude."""
    keys = jax.random.split(jax.random.key(0), 3)
    g, y = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    scale = 1 + jax.random.normal(keys[2], (1, 1, shape[2])) / 8

    def derivative(g, y, scale):
        t = y.astype(scale.dtype) * scale
        s = 1 / (1 + jnp.exp(-t))
        d = g.astype(scale.dtype) * (s + t * s * (1 - s))
        return [d, d * t]

    got = sums_of(lambda g, y, scale: derivative(g, y, scale), g, y, scale)
    with jax.enable_x64(True):
        exact = derivative(*(jnp.asarray(np.asarray(a, np.float64)) for a in (g, y, scale)))
        magnitudes = [np.asarray(jnp.abs(e).sum(1)) for e in exact]
        exact = [np.asarray(e.sum(1)) for e in exact]
    for share, want, size in zip(got, exact, magnitudes, strict=True):
        assert (np.abs(np.asarray(share) - want) <= 2.0**-20 * size + 1e-6).all()


def test_a_program():
    """A squeeze, its gate and a group norm behind a convolution, with gradients."""

    def loss(x, w, g, v):
        y = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        apart = y.reshape(*y.shape[:-1], 8, -1).astype(jnp.float32)
        mean = apart.mean((1, 2, 4), keepdims=True)
        var = jnp.square(apart).mean((1, 2, 4), keepdims=True) - jnp.square(mean)
        y = jax.nn.silu(((apart - mean) * jax.lax.rsqrt(var + 1e-3)).reshape(y.shape)).astype(y.dtype)
        y = y * jax.nn.sigmoid(y.mean((1, 2), keepdims=True) @ g)
        return jnp.square((y @ v).astype(jnp.float32)).mean()

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (16, 56, 56, 3), (3, 3, 3, 64), (64, 64), (64, 32)
    args = [jax.random.normal(key, s, jnp.bfloat16) / s[-2] ** 0.5 for key, s in zip(keys, shapes, strict=True)]
    step = jax.value_and_grad(loss, (1, 2, 3))
    fused = cutjax.fuse(step, policy="always")
    assert "row_sums" in str(jax.make_jaxpr(fused)(*args))
    exact = step(*(a.astype(jnp.float32) for a in args))
    everything = map(jax.tree.leaves, (jax.jit(fused)(*args), jax.jit(step)(*args), exact))
    for got, plain, want in zip(*everything, strict=True):
        got, plain = (np.asarray(y, np.float32) - np.asarray(want) for y in (got, plain))
        assert np.linalg.norm(got) <= 1.5 * np.linalg.norm(plain) + 1e-3 * np.linalg.norm(want)
