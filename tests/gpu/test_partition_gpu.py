"""Products that jit divides over GPUs: each shard runs a kernel, and values are exact."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

pytestmark = pytest.mark.gpu
P = jax.P
H = jnp.bfloat16
M, K, N, G = 1024, 512, 768, 8


def integers(seed, *shape):
    """-1..1: sums of products of these are exact in f32."""
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


SIZES = np.array([200, 0, 301, 7, 64, 128, 1, 300], np.int32)  # some rows are of no group
X, W, V, ROW = integers(0, M, K), integers(1, K, N), integers(2, N, K), integers(3, M, N)
GROUPS, XS = integers(4, G, K, N), integers(5, 4, M // 4, K)

gemm = functools.partial(cutjax.gemm, backend="cuda")


def grouped(x, w):
    return cutjax.grouped_gemm(x, w, jnp.asarray(SIZES), backend="cuda", out_dtype=jnp.float32)


def plain_grouped(x, w):
    return jax.lax.ragged_dot(x, w, jnp.asarray(SIZES))


# fn, in bf16 with f32 results; plain, in f32; operands; how they lie on a mesh axis "x".
CASES = {
    "rows": (functools.partial(gemm, out_dtype=jnp.float32), jnp.matmul, (X, W), (P("x"), P())),
    "columns": (functools.partial(gemm, out_dtype=jnp.float32), jnp.matmul, (X, W), (P(), P(None, "x"))),
    "partial sums": (functools.partial(gemm, out_dtype=jnp.float32), jnp.matmul, (X, W), (P(None, "x"), P("x"))),
    "batch": (functools.partial(gemm, out_dtype=jnp.float32), jnp.matmul, (XS, W), (P("x"), P())),
    "rows of a batch": (functools.partial(gemm, out_dtype=jnp.float32), jnp.matmul, (XS, W), (P(None, "x"), P())),
    "epilogue": (
        lambda x, w, r: gemm(x, w, epilogue=lambda acc, r: (acc + r.astype(acc.dtype), acc.sum(0)), operands=(r,)),
        lambda x, w, r: (x @ w + r, (x @ w).sum(0)),
        (X, W, ROW),
        (P("x"), P(), P("x")),
    ),
    "groups of rows": (grouped, plain_grouped, (X, GROUPS), (P("x"), P())),
    "groups over devices": (grouped, plain_grouped, (X, GROUPS), (P(), P("x"))),
    "rows and groups over the same devices": (grouped, plain_grouped, (X, GROUPS), (P("x"), P("x"))),
    "symmetric": (
        lambda x: cutjax.syrk(x, backend="cuda", out_dtype=jnp.float32),
        lambda x: x @ x.T,
        (X,),
        (P(None, "x"),),
    ),
}


def loss(fn, *args):
    outs = fn(*args)
    return sum(y.astype(jnp.float32).sum() for y in jax.tree.leaves(outs)), outs


@pytest.fixture
def mesh(gpus):
    if len(gpus) < 2:
        pytest.skip(f"needs 2 GPUs, there is {len(gpus)}")
    return jax.make_mesh((len(gpus),), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=gpus)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, mesh):
    fn, plain, args, specs = CASES[name]

    def both(fn):
        return jax.jit(jax.grad(functools.partial(loss, fn), tuple(range(len(args))), has_aux=True))

    laid = [jax.device_put(x.astype(H), jax.NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]
    compiled = both(fn).lower(*laid).compile()
    assert "cutjax_launch" in compiled.as_text()
    with jax.default_matmul_precision("highest"):
        expected = both(plain)(*args)
    for got, want in zip(jax.tree.leaves(compiled(*laid)), jax.tree.leaves(expected), strict=True):
        # Gradients, and what an epilogue returns in the operands' dtype, are rounded once.
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want.astype(got.dtype)))


def test_explicit_axes(gpus):
    """Products in groups on explicit axes; types say how results and gradients lie."""
    if len(gpus) < 2:
        pytest.skip(f"needs 2 GPUs, there is {len(gpus)}")
    there = jax.make_mesh((len(gpus),), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=gpus)
    both = lambda fn: jax.jit(jax.grad(functools.partial(loss, fn), (0, 1), has_aux=True))  # noqa: E731
    with jax.default_matmul_precision("highest"):
        expected = both(plain_grouped)(X, GROUPS)
    with jax.set_mesh(there):
        laid = jax.device_put(X.astype(H), P("x")), jax.device_put(GROUPS.astype(H), P(None, None, "x"))
        compiled = both(grouped).lower(*laid).compile()
        assert "cutjax_launch" in compiled.as_text()
        gradients, y = compiled(*laid)
        assert [g.sharding.spec for g in (*gradients, y)] == [P("x", None), P(None, None, "x"), P("x", None)]
    for got, want in zip((*gradients, y), (*expected[0], expected[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want.astype(got.dtype)))


@pytest.mark.parametrize("spec", [P(None, "x"), P("x")], ids=["columns", "partial sums"])
def test_a_shard_map_that_leaves_an_axis(spec, gpus):
    if len(gpus) < 2:
        pytest.skip(f"needs 2 GPUs, there is {len(gpus)}")
    stages = 2 if len(gpus) > 3 else 1
    auto = (jax.sharding.AxisType.Auto,) * 2
    there = jax.make_mesh((stages, len(gpus) // stages), ("stage", "x"), axis_types=auto, devices=gpus)

    def local(x, w):
        w = jax.lax.with_sharding_constraint(w, jax.NamedSharding(jax.sharding.get_abstract_mesh(), spec))
        return gemm(x, w, out_dtype=jnp.float32)

    with jax.set_mesh(there):
        f = jax.shard_map(local, in_specs=(P("stage"), P()), out_specs=P("stage"), axis_names={"stage"})
        laid = jax.device_put(X.astype(H), P("stage")), jax.device_put(W.astype(H), spec)
        compiled = jax.jit(f).lower(*laid).compile()
        assert "cutjax_launch" in compiled.as_text()
        got = compiled(*laid)
    np.testing.assert_array_equal(np.asarray(got), X @ W)


@pytest.mark.parametrize("specs", [(P("x"), P(), P()), (P(), P(None, "x"), P("x"))], ids=["data", "tensor"])
def test_mlp(specs, mesh):
    args = [x / scale for x, scale in ((X, 1), (W, K**0.5), (V, N**0.5))]
    laid = [jax.device_put(x.astype(H), jax.NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]

    def gradient(mlp):
        return jax.jit(jax.grad(lambda *args: (mlp(*args).astype(jnp.float32) ** 2).mean(), (0, 1, 2)))

    compiled = gradient(lambda x, w, v: cutjax.mlp(x, w, v, gate=w, backend="cuda")).lower(*laid).compile()
    assert compiled.as_text().count("cutjax_launch") >= 6
    expected = gradient(lambda x, w, v: (jax.nn.gelu(x @ w) * (x @ w)) @ v)(*args)
    for got, want in zip(compiled(*laid), expected, strict=True):
        error = np.linalg.norm(np.asarray(got, np.float32) - np.asarray(want)) / np.linalg.norm(np.asarray(want))
        assert error < 2e-2  # a few roundings to bf16, of 2^-9 each, one after the other
