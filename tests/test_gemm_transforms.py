"""gemm under every transformation, against plain JAX: what must hold whoever runs the product."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import cutjax

LAYOUTS = ("nn", "nt", "tn", "tt")
M, K, N = 4, 8, 6


def integers(seed: int, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """-2..2: every order of summation is exact, so results must be equal."""
    return jax.random.randint(jax.random.key(seed), shape, -2, 3).astype(dtype)


def operands(layout: str, a_batch=(), b_batch=(), dtype=jnp.float32, m=M, n=N, k=K) -> tuple[jax.Array, jax.Array]:
    a = (m, k) if layout[0] == "n" else (k, m)
    b = (k, n) if layout[1] == "n" else (n, k)
    return integers(0, (*a_batch, *a), dtype), integers(1, (*b_batch, *b), dtype)


def oracle(a: jax.Array, b: jax.Array, layout: str = "nn") -> jax.Array:
    a = a if layout[0] == "n" else a.mT
    b = b if layout[1] == "n" else b.mT
    return jnp.matmul(a, b)


def gemms(fn, *args) -> list[str]:
    """The products of a function: what explain sees."""
    return [str(row.choice.problem) for row in cutjax.explain(fn)(*args).rows for _ in range(row.count)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("a_batch", "b_batch"),
    [
        ((), ()),
        ((3,), ()),
        ((), (3,)),
        ((3,), (3,)),
        ((2, 1), (3,)),
        ((2, 3), (2, 1)),
        ((1, 3), (2, 1)),
        ((2, 1, 3), (5, 1)),
    ],
)
def test_value_and_gradients(layout, a_batch, b_batch):
    a, b = operands(layout, a_batch, b_batch)
    expected, vjp = jax.vjp(functools.partial(oracle, layout=layout), a, b)
    got, got_vjp = jax.vjp(jax.jit(functools.partial(cutjax.gemm, layout=layout)), a, b)
    np.testing.assert_array_equal(got, expected)
    g = integers(2, expected.shape)
    for x, y in zip(got_vjp(g), vjp(g), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jvp(layout):
    a, b = operands(layout)
    da, db = integers(3, a.shape), integers(4, b.shape)
    got = jax.jvp(functools.partial(cutjax.gemm, layout=layout), (a, b), (da, db))
    expected = jax.jvp(functools.partial(oracle, layout=layout), (a, b), (da, db))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("a_batch", [(), (2,)])
def test_second_order(layout, a_batch):
    with jax.enable_x64(True):
        a, b = operands(layout, a_batch, (), np.float64)
        check_grads(
            lambda a, b: jnp.tanh(cutjax.gemm(a, b, layout=layout) / 8), (a / 4, b / 4), order=2, modes=["fwd", "rev"]
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hessian_vector_product(layout):
    a, b = operands(layout)

    def loss(product, a, b):
        return (product(a, b, layout=layout) ** 2).sum()

    def product_of(product):
        grad = jax.grad(functools.partial(loss, product), (0, 1))
        forward_over_reverse = jax.jvp(grad, (a, b), (u, v))
        reverse_over_reverse = jax.vjp(grad, a, b)[1]((u, v))
        return forward_over_reverse, reverse_over_reverse

    u, v = integers(5, a.shape), integers(6, b.shape)
    jax.tree.map(np.testing.assert_array_equal, product_of(cutjax.gemm), product_of(oracle))


AXES = [axes for axes in itertools.product((None, 0, 1, 2), repeat=2) if axes != (None, None)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_vmap(layout, axes):
    a, b = operands(layout)
    a, b = (x if axis is None else jnp.stack([x, x + 1, -x], axis) for x, axis in zip((a, b), axes, strict=True))
    for out in (0, 1, 2):
        got = jax.jit(jax.vmap(functools.partial(cutjax.gemm, layout=layout), axes, out))(a, b)
        np.testing.assert_array_equal(got, jax.vmap(functools.partial(oracle, layout=layout), axes, out)(a, b))


@pytest.mark.parametrize("layout", ["nn", "tt"])
@pytest.mark.parametrize("inner", [(0, None), (None, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("outer", [(0, None), (None, 3), (1, 1), (3, 0)], ids=str)
def test_vmap_nested(layout, inner, outer):
    a, b = operands(layout)
    for axes, size in ((inner, 2), (outer, 3)):
        a, b = (
            x if axis is None else jnp.stack([x + i for i in range(size)], min(axis, x.ndim))
            for x, axis in zip((a, b), axes, strict=True)
        )
    outer = tuple(axis if axis is None else min(axis, x.ndim - 1) for axis, x in zip(outer, (a, b), strict=True))

    def nest(fn):
        return jax.vmap(jax.vmap(functools.partial(fn, layout=layout), inner), outer)

    np.testing.assert_array_equal(jax.jit(nest(cutjax.gemm))(a, b), nest(oracle)(a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_of_grad_and_grad_of_vmap(layout, axes):
    a, b = operands(layout)
    a, b = (x if axis is None else jnp.stack([x, x + 1, -x], axis) for x, axis in zip((a, b), axes, strict=True))

    def loss(product, a, b):
        return (product(a, b, layout=layout) ** 2).sum()

    def both(product):
        f = functools.partial(loss, product)
        mapped = jax.vmap(jax.grad(f, (0, 1)), axes)(a, b)
        summed = jax.grad(lambda a, b: jax.vmap(f, axes)(a, b).sum(), (0, 1))(a, b)
        return mapped, summed

    jax.tree.map(np.testing.assert_array_equal, both(cutjax.gemm), both(oracle))


def test_shared_weights_fold_into_rows():
    """The batch of a product with one matrix b is more rows, and so is that of every gradient."""
    x, w = operands("nn", (3, 5))
    flat = "60x6x8 nn f32 x f32 -> f32"
    assert gemms(cutjax.gemm, x, w) == [flat]
    assert gemms(jax.vmap(jax.vmap(cutjax.gemm, (0, None)), (0, None)), x, w) == [flat]
    assert gemms(jax.vmap(cutjax.gemm, (1, None)), x[0], w) == ["20x6x8 nn f32 x f32 -> f32"]
    gradient = jax.grad(lambda x, w: cutjax.gemm(x, w).sum(), (0, 1))
    assert sorted(gemms(gradient, x, w)) == ["60x8x6 nt f32 x f32 -> f32", "8x6x60 tn f32 x f32 -> f32"]


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_never_copies(axes):
    """No transpose, broadcast or concatenation around a mapped product: b, when shared, is read with stride 0."""
    a, b = operands("tn", *((3,) if axis == 0 else () for axis in axes))
    jaxpr = jax.make_jaxpr(jax.vmap(functools.partial(cutjax.gemm, layout="tn"), axes))(a, b)
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert names <= {"cutjax_gemm", "broadcast_in_dim", "reshape", "squeeze"}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "broadcast_in_dim":
            assert eqn.invars[0].aval.size == eqn.outvars[0].aval.size


def test_vmap_adds_its_axis_where_an_operand_has_it():
    a, b = operands("tn", (3, 2), (3, 2))
    for axes in ((1, 1), (1, None), (None, 1)):
        f = jax.vmap(functools.partial(cutjax.gemm, layout="tn"), axes, 1)
        x, y = (v if axis is not None else v[:, 0] for v, axis in zip((a, b), axes, strict=True))
        assert "transpose" not in {eqn.primitive.name for eqn in jax.make_jaxpr(f)(x, y).eqns}


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable], ids=["nothing", "dots"])
def test_checkpoint(policy):
    x, w = operands("nn", n=K)

    def loss(product, x, w):
        layer = jax.checkpoint(lambda x: jnp.maximum(product(x, w), 0), policy=policy)
        return layer(layer(x)).sum()

    got, expected = (jax.jit(jax.grad(functools.partial(loss, f), (0, 1)))(x, w) for f in (cutjax.gemm, oracle))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_scan_and_while():
    x, w = operands("nn", m=K, n=K)
    w = w.at[:].set(jnp.eye(K)) + jnp.eye(K, k=1)

    def scanned(product, x, w):
        def step(h, _):
            h = product(h, w)
            return h, h.sum()

        h, sums = jax.lax.scan(step, x, None, length=3)
        return (h * sums.sum()).sum()

    def looped(product, x, w):
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, product(s[1], w)), (0, x))[1]

    got, expected = (
        jax.jit(jax.value_and_grad(functools.partial(scanned, f), (0, 1)))(x, w) for f in (cutjax.gemm, oracle)
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    got, expected = (jax.jvp(functools.partial(looped, f), (x, w), (x, w)) for f in (cutjax.gemm, oracle))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_eager_calls_do_not_recompile(caplog):
    a, b = operands("nt", m=5)

    def call(**options):
        caplog.clear()
        cutjax.gemm(a, b, layout="nt", config=cutjax.Config(bm=64, bn=16), **options)
        return [record.getMessage() for record in caplog.records if "ompil" in record.getMessage()]

    with jax.log_compiles():
        assert any("cutjax_gemm" in message for message in call())
        assert call() == []
        assert call(backend="auto", out_dtype="float32") == []
        assert call(out_dtype=jnp.bfloat16)


def test_disable_jit():
    a, b = operands("nn")
    with jax.disable_jit():
        np.testing.assert_array_equal(cutjax.gemm(a, b), oracle(a, b))


def test_donated_arguments():
    a, b = operands("nn", m=K, n=K)
    expected = oracle(a, b)
    donated = jax.jit(lambda a, b: cutjax.gemm(a, b), donate_argnums=0)
    np.testing.assert_array_equal(donated(a, b), expected)
    assert a.is_deleted()


SIZES = [{"m": 0}, {"n": 0}, {"k": 0}, {"a_batch": (0,), "b_batch": (0,)}, {"a_batch": (0,)}, {"b_batch": (0,)}]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_zero_sizes(layout, sizes):
    a, b = operands(layout, **sizes)
    expected, vjp = jax.vjp(functools.partial(oracle, layout=layout), a, b)
    got, got_vjp = jax.vjp(functools.partial(cutjax.gemm, layout=layout), a, b)
    np.testing.assert_array_equal(got, expected)
    assert not np.any(got)
    jax.tree.map(np.testing.assert_array_equal, got_vjp(jnp.ones_like(got)), vjp(jnp.ones_like(expected)))
