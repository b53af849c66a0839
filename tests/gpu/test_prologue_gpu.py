"""Kernels that compute a prologue in their loads, on a GPU: small integers to the bit, gradients, random numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers, normal

import cutjax
from cutjax import MmaConfig

pytestmark = pytest.mark.gpu
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

CONFIGS = {
    None: None,
    "tiles": MmaConfig(32, 64, 64, 16, 32, 1, 3),
    "sliced": MmaConfig(64, 64, 64, 32, 32, 2, 3),
    "parts": MmaConfig(16, 64, 64, 16, 32, 1, 4, splits=4),
}
SIZES = ((1, 4096, 512), (16, 512, 4096), (33, 1000, 1064), (300, 264, 520))
LAYOUTS = ("nn", "nt", "tn", "tt")


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def of_all(a, r, g, f):
    """Infinite past the end of k, where what is loaded is zero: that may not be seen."""
    return jnp.where(a == 0, jnp.inf, a * r + g * f)


def operands(m, k, layout, dtype):
    shape = (m, k) if layout[0] == "n" else (k, m)
    rng = np.random.default_rng(4)
    r = jnp.asarray(rng.integers(1, 3, (shape[0], 1)), F32)
    g, f = jnp.asarray(rng.integers(-1, 2, shape[1:]), dtype), jnp.asarray(rng.integers(-1, 2, shape), dtype)
    return jnp.asarray(rng.choice([-2, -1, 1, 2], shape), dtype), (r, g, f)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
def test_small_integers_are_exact(dtype, layout, name):
    for m, n, k in SIZES:
        a, given = operands(m, k, layout, dtype)
        b = integers(1, (k, n) if layout[1] == "n" else (n, k), dtype)

        def product(a, b, *given, layout=layout):
            how = {"layout": layout, "out_dtype": F32, "backend": "cuda", "config": CONFIGS[name]}
            return cutjax.gemm(a, b, prologue=of_all, prologue_operands=given, **how)

        made = np.asarray(of_all(a, *given).astype(dtype), np.float64)
        wide = np.asarray(b, np.float64)
        expected = (made if layout[0] == "n" else made.T) @ (wide if layout[1] == "n" else wide.T)
        np.testing.assert_array_equal(np.asarray(jax.jit(product)(a, b, *given)), expected)


@pytest.mark.parametrize("sizes", [(7, 0, 30), (64, 1, 200, 0, 35)], ids=str)
def test_groups_are_exact(sizes):
    m, n, k = sum(sizes), 520, 256
    a, (r, g, f) = operands(m, k, "nn", BF16)
    w = integers(2, (len(sizes), k, n), BF16)

    def product(a, w, r, g, f):
        how = {"prologue": of_all, "prologue_operands": (r, g, f), "out_dtype": F32, "backend": "cuda"}
        return cutjax.grouped_gemm(a, w, jnp.array(sizes, jnp.int32), **how)

    made = np.asarray(of_all(a, r, g, f).astype(BF16), np.float64)
    group = np.repeat(np.arange(len(sizes)), sizes)
    expected = np.concatenate([made[group == i] @ np.asarray(w[i], np.float64) for i in range(len(sizes))])
    np.testing.assert_array_equal(np.asarray(jax.jit(product)(a, w, r, g, f)), expected)


@pytest.mark.parametrize("rows", [4, 64])
def test_a_norm_before_a_layer(rows):
    """RMSNorm's scale in front of a gated layer, values and gradients, beside plain JAX in float32."""
    d, h = 512, 1024
    x, g = normal(0, (rows, d), BF16), (1 + normal(1, (d,)) / 8).astype(BF16)
    up, gate, down = (normal(i, shape, F32) / shape[0] ** 0.5 for i, shape in ((2, (d, h)), (3, (d, h)), (4, (h, d))))
    ws = [w.astype(BF16) for w in (up, gate, down)]

    def norm(x, r, g):
        return x * r * g

    def scale(x):
        return jax.lax.rsqrt((x.astype(F32) ** 2).mean(-1, keepdims=True) + 1e-6)

    def ours(x, g, up, gate, down):
        how = {"prologue": norm, "prologue_operands": (scale(x), g), "backend": "cuda"}
        return cutjax.mlp(x, up, down, gate=gate, activation=jax.nn.silu, **how)

    def plain(x, g, up, gate, down):
        y = norm(x, scale(x), g)
        return (jax.nn.silu(y @ gate) * (y @ up)) @ down

    def loss(fn):
        return jax.jit(jax.value_and_grad(lambda *xs: (fn(*xs).astype(F32) ** 2).mean(), tuple(range(5))))

    got = loss(ours)(x, g, *ws)
    with jax.default_matmul_precision("highest"):
        expected = loss(plain)(*(v.astype(F32) for v in (x, g, *ws)))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        theirs = np.asarray(theirs)
        assert np.abs(np.asarray(mine, np.float32) - theirs).max() <= 3e-2 * np.abs(theirs).max()
