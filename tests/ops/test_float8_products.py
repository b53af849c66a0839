"""Products of float8 of arrays that they quantize: of rows in groups, in layers and with epilogues, against numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fp8 import E4M3, E5M2, RECIPES, always, arrays, close, rounded

import cutjax

BF16, F32 = jnp.bfloat16, jnp.float32
M, G, K, N = 60, 3, 200, 72
SIZES = (20, 0, 30)  # ten rows are of no group


def groups():
    ends = np.cumsum(SIZES)
    return [slice(end - size, end) for size, end in zip(SIZES, ends, strict=True)]


def masked(x):
    return np.asarray(x, np.float32) * (np.arange(len(x)) < sum(SIZES))[:, None]


@pytest.mark.parametrize("gradients", [E4M3, E5M2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_in_groups(recipe, gradients):
    """Values, and gradients whose contraction is over the rows of a group: rows of no group reach no scale."""
    x, w, dy = arrays((M, K), (G, K, N), (M, N))
    x, dy = (y.at[sum(SIZES) :].set(jnp.nan) for y in (x, dy))
    fp8 = always(recipe, gradients=gradients)

    @jax.jit
    def run(x, w, dy):
        y, back = jax.vjp(lambda x, w: cutjax.grouped_gemm(x, w, jnp.array(SIZES), fp8=fp8), x, w)
        turned = cutjax.grouped_gemm(x, w.mT, jnp.array(SIZES), layout="nt", fp8=fp8)
        return y, turned, *back(dy)

    y, turned, dx, dw = run(x, w, dy)
    np.testing.assert_array_equal(y, turned)
    q = functools.partial(rounded, recipe=recipe)
    x, dy = (np.where(np.arange(M)[:, None] < sum(SIZES), np.asarray(z), 0) for z in (x, dy))
    of_x, of_dy = q(x, dtype=E4M3), q(dy, dtype=gradients)
    along = q(x.T, dtype=E4M3).T, q(dy.T, dtype=gradients).T
    wanted = np.zeros((M, N)), np.zeros((M, K)), np.zeros((G, K, N))
    for i, rows in enumerate(groups()):
        wanted[0][rows] = of_x[rows] @ q(w[i].T, dtype=E4M3, weights=True).T
        wanted[1][rows] = of_dy[rows] @ q(w[i], dtype=E4M3, weights=True).T
        wanted[2][i] = along[0][rows].T @ along[1][rows]
    for found, exact in zip((y, dx, dw), wanted, strict=True):
        close(found, exact)


@pytest.mark.versions
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers(recipe):
    """A layer of experts in float8 is its products, gradients too; and moe is that of its rows."""
    x, up, down = (y.astype(BF16) for y in arrays((M, K), (G, K, N), (G, N, K)))
    gate, scale, sizes = up * BF16(0.5), jnp.linspace(0.5, 1, M)[:, None], jnp.array(SIZES)
    fp8 = always(recipe)

    def layer(x, gate, up, down):
        return cutjax.grouped_mlp(
            x, up, down, sizes, gate=gate, activation=jax.nn.silu, row_scale=scale, fp8=fp8
        ).astype(F32)

    def apart(x, gate, up, down):
        def act(g, u, s):
            return (jax.nn.silu(g) * u * s).astype(BF16)

        h = cutjax.grouped_gemm(x, (gate, up), sizes, epilogue=act, operands=(scale,), fp8=fp8)
        return cutjax.grouped_gemm(h, down, sizes, fp8=fp8).astype(F32)

    def both(*args):
        return [jax.value_and_grad(lambda *a, f=f: (f(*a) ** 2).mean(), (0, 1, 2, 3))(*args) for f in (layer, apart)]

    (value, grads), (other, others) = jax.jit(both)(x, gate, up, down)
    close(value, other, 1e-2)
    for a, b in zip(grads, others, strict=True):
        assert a.dtype == BF16
        a, b = a.astype(F32), b.astype(F32)
        assert jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < 0.04  # what lies between is rounded elsewhere


@pytest.mark.versions
def test_moe_and_mlp():
    x, w, v, logits = arrays((2, 16, 64), (4, 64, 32), (4, 32, 64), (2, 16, 4), dtype=BF16)
    w, v = w * BF16(0.1), v * BF16(0.1)

    def of(fp8):
        def loss(x, w, v):
            rows = cutjax.moe(x, logits.astype(F32), w, w, v, k=2, fp8=fp8)
            return (cutjax.mlp(rows, w[0], v[0], gate=w[1], fp8=fp8).astype(F32) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, w, v)

    (value, grads), (exact, wanted) = of(always("block")), of(None)
    assert 0.0005 < abs(value / exact - 1) < 0.1
    for a, b in zip(grads, wanted, strict=True):
        a, b = a.astype(F32), b.astype(F32)
        assert 0.01 < jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < 0.2
    np.testing.assert_array_equal(of("block")[0], exact)  # too small to gain


@pytest.mark.versions
def test_transformations_of_groups():
    xs, w = arrays((2, M, K), (G, K, N), dtype=BF16)
    sizes, fp8 = jnp.array([SIZES, (10, 40, 10)]), always("row")

    def f(x, w, sizes):
        return cutjax.grouped_gemm(x, w, sizes, fp8=fp8)

    each = jnp.stack([f(x, w, s) for x, s in zip(xs, sizes, strict=True)])
    np.testing.assert_array_equal(jax.vmap(f, (0, None, 0))(xs, w, sizes), each)

    def loss(x, w):
        return jnp.sin(f(x, w, sizes[0]).astype(F32)).sum()

    wanted = jax.jit(jax.grad(loss, 1))(xs[0], w)
    np.testing.assert_array_equal(jax.jit(jax.grad(jax.checkpoint(loss), 1))(xs[0], w), wanted)
    y, dot = jax.jvp(lambda x: f(x, w, sizes[0]), (xs[0],), (xs[1],))
    np.testing.assert_array_equal(y, each[0])
    np.testing.assert_array_equal(dot, f(xs[1], w, sizes[0]))
    mixed = jax.grad(lambda x: (jax.grad(loss, 1)(x, w).astype(F32) ** 2).sum())(xs[0])
    assert jnp.isfinite(mixed.astype(F32)).all()


def test_refusals_of_fp8():
    x, w = arrays((8, 16), (2, 16, 8))
    with pytest.raises(TypeError, match="grouped_gemm: fp8 must be a recipe"):
        cutjax.grouped_gemm(x, w, jnp.array([4, 4]), fp8=8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown recipe 'rows'"):
        cutjax.grouped_gemm(x, w, jnp.array([4, 4]), fp8="rows")
    with pytest.raises(ValueError, match="unknown accumulate"):
        cutjax.mlp(x, w[0], w[0].T, accumulate="slow")
    highest = cutjax.grouped_gemm(x, w, jnp.array([4, 4]), fp8=always("row"), precision="highest")
    np.testing.assert_array_equal(highest, cutjax.grouped_gemm(x, w, jnp.array([4, 4]), precision="highest"))


@pytest.mark.versions
def test_fuse_of_groups():
    """Programs with lax's ragged_dot, and with ours: each product becomes that of float8, its gradients too."""
    x, up, down = (y.astype(BF16) * BF16(0.2) for y in arrays((M, 64), (G, 64, 32), (G, 32, 64)))
    sizes = jnp.array(SIZES)

    def by_lax(up, down, fp8=None):
        h = jax.nn.silu(jax.lax.ragged_dot(x, up, sizes))
        return (jax.lax.ragged_dot(h, down, sizes).astype(F32) ** 2).sum()

    def ours(up, down, fp8=None):
        return (cutjax.grouped_mlp(x, up, down, sizes, activation=jax.nn.silu, fp8=fp8).astype(F32) ** 2).sum()

    fp8 = always("block", gradients=E5M2)
    wanted = jax.jit(jax.value_and_grad(lambda *w: ours(*w, fp8=fp8), (0, 1)))(up, down)
    exact = jax.jit(jax.value_and_grad(by_lax, (0, 1)))(up, down)[1]
    for program in (by_lax, ours):
        fused = cutjax.fuse(jax.value_and_grad(program, (0, 1)), fp8=fp8)
        value, grads = fused(up, down)
        close(value, wanted[0], 1e-2)
        for a, b, c in zip(grads, wanted[1], exact, strict=True):
            a, b, c = (y.astype(F32) for y in (a, b, c))
            # Where what lies between is rounded otherwise, another number of float8 is the nearest.
            assert jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < 0.05, program
            assert 0.01 < jnp.linalg.norm(a - c) / jnp.linalg.norm(c) < 0.2, program
        shown = str(cutjax.explain(fused, platform="cuda")(up, down))
        for roles in ("activations by weights", "gradients by weights", "activations by gradients"):
            assert f"block, {roles}, gradients float8_e5m2" in shown, (program, shown)


def quantizations(function, *args):
    """The passes of kernels that quantize on an H200: dtype that is read, and both orders or one."""
    rows = cutjax.explain(function, platform="cuda", device="NVIDIA H200")(*args).rows
    problems = [row.choice.problem for row in rows if row.runs.startswith("quantize_")]
    return sorted((p.dtype.name, p.rounded.name, "both" if p.own and p.turned else "one") for p in problems)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_with_scales_of_their_own_are_not_cleared(recipe):
    """What lies in rows of no group reaches the one scale of all, and those of no other row."""
    x, w = (y.astype(BF16) for y in arrays((256, 128), (G, 128, 128)))
    sizes, fp8 = jnp.array([100, 0, 90]), always(recipe)
    found = quantizations(lambda x, w: cutjax.grouped_gemm(x, w, sizes, fp8=fp8), x, w)
    assert len(found) == (1 if recipe == "tensor" else 2)
    y = cutjax.grouped_gemm(x.at[190:].set(jnp.nan), w, sizes, fp8=fp8)
    np.testing.assert_array_equal(y, cutjax.grouped_gemm(x, w, sizes, fp8=fp8))
    assert not y[190:].any()


@pytest.mark.parametrize("recipe", ["row", "block"])
def test_weights_in_float32(recipe):
    """Those that a fused program rounds for its experts alone are quantized as they are, once for both passes."""
    x, up, down = arrays((256, 128), (G, 128, 256), (G, 256, 128))
    x, sizes, fp8 = x.astype(BF16), jnp.array([100, 0, 156]), always(recipe)

    def loss(up, down):
        h = jax.nn.silu(jax.lax.ragged_dot(x, up.astype(BF16), sizes))
        return (jax.lax.ragged_dot(h, down.astype(BF16), sizes).astype(F32) ** 2).sum()

    step = cutjax.fuse(jax.value_and_grad(loss, (0, 1)), fp8=fp8)
    found = quantizations(step, up, down)
    of_weights = [one for one in found if one[0] == "float32"]
    assert of_weights == [("float32", "bfloat16", "both"), ("float32", "bfloat16", "one")]  # x has no gradient
    wide, (of_up, _) = step(up, down)
    narrow, _ = step(up.astype(BF16), down.astype(BF16))
    np.testing.assert_array_equal(wide, narrow)
    exact = jax.grad(loss)(up, down)
    assert jnp.linalg.norm(of_up - exact) / jnp.linalg.norm(exact) < 0.2
