"""gemm alone: broadcast batches, sizes of zero, what a vmap folds or never copies, compilations. Else: the battery."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, compare, integers, normal
from jax.experimental import jet
from jax.test_util import check_grads

import cutjax

LAYOUTS = ("nn", "nt", "tn", "tt")
M, K, N = 4, 8, 6


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


# Each layout with and without a batch that is shared.
BATCHES = [
    ((3,), (3,)),
    ((2, 1), (3,)),
    ((), (3,)),
    ((3,), ()),
    ((2, 3), (2, 1)),
    ((1, 3), (2, 1)),
    ((2, 1, 3), (5, 1)),
]


@pytest.mark.parametrize(
    ("layout", "a_batch", "b_batch"), [(LAYOUTS[i % 4], *batches) for i, batches in enumerate(BATCHES)]
)
def test_value_and_gradients(layout, a_batch, b_batch):
    a, b = operands(layout, a_batch, b_batch)
    g = integers(2, oracle(a, b, layout).shape)

    def take(f):
        def both(a, b):
            y, pull = jax.vjp(functools.partial(f, layout=layout), a, b)
            return y, pull(g)

        return both

    compare(take, (cutjax.gemm, oracle), (a, b))


def test_numerical_derivatives():
    """Against differences of values, where every other test has plain JAX's derivatives to compare with."""
    with jax.enable_x64(True):
        a, b = operands("tn", (2,), (), np.float64)
        a, b = np.asarray(a) / 4, np.asarray(b) / 4
        fn = jax.jit(lambda a, b: jnp.tanh(cutjax.gemm(a, b, layout="tn") / 8))
        check_grads(fn, (a, b), order=2, modes=["fwd", "rev"])


def test_shared_weights_fold_into_rows():
    """The batch of a product with one matrix b is more rows, and so is that of every gradient."""
    x, w = operands("nn", (3, 5))
    flat = "60x6x8 nn f32 x f32 by tf32 -> f32"
    assert gemms(cutjax.gemm, x, w) == [flat]
    assert gemms(jax.vmap(jax.vmap(cutjax.gemm, (0, None)), (0, None)), x, w) == [flat]
    assert gemms(jax.vmap(cutjax.gemm, (1, None)), x[0], w) == ["20x6x8 nn f32 x f32 by tf32 -> f32"]
    gradient = jax.grad(lambda x, w: cutjax.gemm(x, w).sum(), (0, 1))
    assert sorted(gemms(gradient, x, w)) == ["60x8x6 nt f32 x f32 by tf32 -> f32", "8x6x60 tn f32 x f32 by tf32 -> f32"]


@pytest.mark.versions
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


@pytest.mark.versions
def test_vmap_adds_its_axis_where_an_operand_has_it():
    a, b = operands("tn", (3, 2), (3, 2))
    for axes in ((1, 1), (1, None), (None, 1)):
        f = jax.vmap(functools.partial(cutjax.gemm, layout="tn"), axes, 1)
        x, y = (v if axis is not None else v[:, 0] for v, axis in zip((a, b), axes, strict=True))
        assert "transpose" not in {eqn.primitive.name for eqn in jax.make_jaxpr(f)(x, y).eqns}


def test_a_product_of_what_the_last_step_made():
    x, w = operands("nn", m=K, n=K)
    w = w.at[:].set(jnp.eye(K)) + jnp.eye(K, k=1)

    def take(product):
        layer = jax.checkpoint(product)

        def scanned(x, w):
            def step(h, _):
                h = layer(h, w)
                return h, h.sum()

            h, sums = jax.lax.scan(step, x, None, length=3)
            return (h * sums.sum()).sum()

        def looped(x, w):
            return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, layer(s[1], w)), (0, x))[1]

        return lambda x, w: (jax.value_and_grad(scanned, (0, 1))(x, w), jax.jvp(looped, (x, w), (x, w)))

    compare(take, (cutjax.gemm, oracle), (x, w))


@pytest.mark.versions
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


@pytest.mark.versions
def test_donated_arguments():
    a, b = operands("nn", m=K, n=K)
    expected = oracle(a, b)
    donated = jax.jit(lambda a, b: cutjax.gemm(a, b), donate_argnums=0)
    np.testing.assert_array_equal(donated(a, b), expected)
    assert a.is_deleted()


SIZES = [{"m": 0}, {"n": 0}, {"k": 0}, {"a_batch": (0,), "b_batch": (0,)}, {"a_batch": (0,)}, {"b_batch": (0,)}]


@pytest.mark.parametrize(("layout", "sizes"), [(LAYOUTS[i % 4], sizes) for i, sizes in enumerate(SIZES)], ids=str)
def test_zero_sizes(layout, sizes):
    a, b = operands(layout, **sizes)

    def take(f):
        def both(a, b):
            y, pull = jax.vjp(functools.partial(f, layout=layout), a, b)
            return y, pull(jnp.ones_like(y))

        return both

    compare(take, (cutjax.gemm, oracle), (a, b))
    assert not np.any(cutjax.gemm(a, b, layout=layout))


@pytest.mark.versions
@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (lambda x, w: cutjax.gemm(x, w), jnp.matmul),
        (lambda x, w: cutjax.gemm(x, w, epilogue=jnp.sin), lambda x, w: jnp.sin(x @ w)),
        (lambda x, w: cutjax.syrk(x), lambda x, w: x @ x.T),
    ],
    ids=["product", "epilogue", "syrk"],
)
def test_taylor_series(ours, plain):
    """jax.experimental.jet: three terms, in both operands."""
    x, w = normal(0, (3, 4)), normal(1, (4, 5))
    series = [x * 2, x + 1, x], [w, w - 1, w * 3]
    got, expected = (jet.jet(f, (x, w), series) for f in (ours, plain))
    jax.tree.map(lambda y, z: close(y, z, 1e-4), got, expected)  # f32 sums of terms up to the third power


@pytest.mark.versions
def test_taylor_series_of_groups_are_refused():
    x, w = normal(0, (3, 4)), normal(1, (2, 4, 5))
    with pytest.raises(NotImplementedError, match="cutjax_grouped_gemm: jax"):
        jet.jet(lambda x: cutjax.grouped_gemm(x, w, jnp.array([2, 1])), (x,), ([x],))
