"""Routing against its definition, the rows' gather and sum under every transformation, and the router's losses."""

from __future__ import annotations

import functools

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import compare, mesh_of
from checks import normal as random
from oracles import load_balance_loss as plain_loss
from oracles import route as weights_of

import cutjax
from cutjax.ops import routing

T, E, D = 12, 6, 5


def normal(seed, *shape):
    return random(seed, shape)


close = functools.partial(checks.close, tolerance=1e-6)
LOGITS = normal(0, T, E)
route = jax.jit(cutjax.route, static_argnames=("k", "scoring", "renormalize"))  # one program, not one an operation


@pytest.mark.parametrize(
    ("k", "bias", "scoring", "renormalize"),
    [
        (2, None, "softmax", True),
        (1, (E,), "sigmoid", False),
        (2, (T, E), "softmax", False),
        (E, (T, 1), "sigmoid", True),
        (1, None, "softmax", False),
        (2, (E,), "sigmoid", True),
    ],
    ids=str,
)
def test_experts_and_weights(k, scoring, renormalize, bias):
    bias = None if bias is None else normal(1, *bias)
    how = {"scoring": scoring, "renormalize": renormalize}
    got = route(LOGITS, k, selection_bias=bias, **how)
    best = weights_of(LOGITS, k, bias=bias, **how)[0]
    assert got.indices.dtype == got.permutation.dtype == got.inverse.dtype == got.group_sizes.dtype == jnp.int32
    np.testing.assert_array_equal(got.indices, best)

    def take(weights):
        def loss(x):
            return (weights(x) * normal(2, T, k)).sum()

        return lambda x: (weights(x), jax.jvp(jax.grad(loss), (x,), (normal(3, T, E),)))

    functions = (
        lambda x: cutjax.route(x, k, selection_bias=bias, **how).weights,
        lambda x: weights_of(x, k, bias=bias, **how)[1],
    )
    compare(take, functions, (LOGITS,), 1e-6)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_rows_are_sorted_by_expert(batch):
    k = 3
    logits = normal(0, *batch, T, E)
    got = route(logits, k)
    flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[len(batch) :]), got)
    for indices, _, permutation, inverse, sizes in zip(*flat, strict=True):
        np.testing.assert_array_equal(permutation, np.argsort(indices.ravel(), kind="stable"))
        np.testing.assert_array_equal(inverse.ravel()[permutation], np.arange(T * k))
        np.testing.assert_array_equal(sizes, np.bincount(indices.ravel(), minlength=E))
    mapped = functools.partial(cutjax.route, k=k)
    for _ in batch:
        mapped = jax.vmap(mapped)
    close(jax.jit(mapped)(logits), got)


def test_of_equal_scores_the_first_expert_wins():
    assert cutjax.route(jnp.zeros((T, E)), 2).indices.tolist() == [[0, 1]] * T


def test_excluded_experts_and_nan():
    logits = np.array(LOGITS)
    logits[0], logits[1, 4] = [-np.inf, 1, -np.inf, 2, -np.inf, 3], np.nan
    for scoring in routing.SCORING:
        got = route(logits, 3, scoring=scoring)
        assert got.indices[0].tolist() == [5, 3, 1]
        assert got.indices[1, 0] == 4
        np.testing.assert_array_equal(np.isnan(got.weights).any(-1), np.arange(T) == 1)
        gradient = jax.jit(jax.grad(lambda x, s=scoring: cutjax.route(x, 3, scoring=s).weights[:, 0].sum()))(logits)
        np.testing.assert_array_equal(np.isnan(gradient).any(-1), np.arange(T) == 1)
    groups = np.array([0, 0, 0, -np.inf, -np.inf, -np.inf], np.float32)  # the last three experts are out of reach
    got = route(LOGITS, 3, scoring="sigmoid", selection_bias=groups)
    assert int(got.indices.max()) == 2


def test_sigmoids_that_underflow_have_weights():
    got = cutjax.route(jnp.full((1, 2), -200.0), 2, scoring="sigmoid")
    assert got.weights.tolist() == [[0.5, 0.5]]


def test_weights_are_float32():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert jax.eval_shape(cutjax.route, LOGITS.astype(dtype)).weights.dtype == jnp.float32
    rounded = np.asarray(LOGITS).astype(jnp.bfloat16)
    close(route(rounded), route(rounded.astype(np.float32)))


def test_no_token():
    got = route(np.zeros((0, E), np.float32))
    assert got.group_sizes.tolist() == [0] * E
    assert got.dispatch(jnp.zeros((0, D))).shape == got.combine(jnp.zeros((0, D))).shape == (0, D)


# Dispatch and combine.

ROUTING = route(LOGITS, 3)
X, ROWS = normal(1, T, D), normal(2, 3 * T, D)


def dispatched(x, r):
    return x[..., r.permutation // r.inverse.shape[-1], :]


def combined(rows, r):
    return rows[..., r.inverse, :].sum(-2)


PAIRS = {
    "dispatch": (lambda x, r=ROUTING: r.dispatch(x), lambda x, r=ROUTING: dispatched(x, r), X),
    "combine": (lambda x, r=ROUTING: r.combine(x), lambda x, r=ROUTING: combined(x, r), ROWS),
}


@pytest.mark.parametrize("name", PAIRS)
def test_gather_and_sum(name):
    got, expected, x = PAIRS[name]

    def take(f):
        def of(x):
            y, pull = jax.vjp(f, x)
            first = jax.jvp(f, (x,), (x**2,)), pull(y**2), jax.linear_transpose(f, x)(y)
            return *first, jax.hessian(lambda x: (f(x) ** 3).sum())(x), jax.jacfwd(f)(x), jax.jacrev(f)(x)

        return of

    compare(take, (got, expected), (x,), 1e-5)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("mapped", [(1, None), (None, 0), (2, 0)], ids=str)
def test_vmap(name, mapped):
    x = PAIRS[name][2]
    r = ROUTING if mapped[1] is None else route(normal(3, 4, T, E), 3)
    x = np.asarray(x)
    x = x if mapped[0] is None else np.stack([x, -x, x + 1, 2 * x], mapped[0])

    def gradient(f):
        return jax.grad(lambda x, r: (f(x, r) ** 3).sum())

    def take(f):
        batch = jax.vmap(f, mapped)
        return lambda x, r: (
            jax.vmap(gradient(f), mapped)(x, r),
            gradient(batch)(x, r),
            jax.jvp(lambda x: batch(x, r), (x,), (x,)),
        )

    compare(take, PAIRS[name][:2], (x, r), 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_sum_is_rounded_once(dtype):
    rows = (100 * np.asarray(ROWS)).astype(dtype)
    expected = rows[np.asarray(ROUTING.inverse)].astype(np.float32).sum(-2).astype(dtype)
    np.testing.assert_array_equal(ROUTING.combine(rows), expected)
    assert ROUTING.dispatch(X.astype(dtype)).dtype == dtype


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_is_scattered(name):
    got, _, x = PAIRS[name]
    text = str(jax.make_jaxpr(jax.grad(lambda x: jax.vmap(got)(x).sum()))(jnp.stack([x, x])))
    assert "cutjax_dispatch" in text
    assert "cutjax_combine" in text
    assert "scatter" not in text
    lowered = jax.jit(jax.grad(lambda x: got(x).sum())).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "scatter" not in lowered


def test_shard_map():
    """Tokens over one mesh axis, each device its own routing; features over the other."""
    mesh = mesh_of(i=4, j=2)
    p = jax.P

    def layer(x, logits):
        r = cutjax.route(logits, 3)
        return r.combine(r.row_weights() * r.dispatch(x) ** 2)

    x = normal(1, T, 2 * D)
    inside = jax.shard_map(layer, mesh=mesh, in_specs=(p("i", "j"), p("i")), out_specs=p("i", "j"))

    def take(f):
        return lambda *args: (f(*args), jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1))(*args))

    compare(take, (inside, layer), (x, LOGITS), 1e-5)


def test_on_explicit_axes():
    """Tokens divided: what has a row for each lies as they do, what is sorted by expert is whole."""
    mesh = mesh_of(jax.sharding.AxisType.Explicit, i=4)
    with jax.set_mesh(mesh):
        logits, x = (jax.device_put(v, jax.NamedSharding(mesh, jax.P("i"))) for v in (LOGITS, X))
        routing = cutjax.route(logits, 3)
        lies = [y.sharding.spec for y in routing]
        assert lies == [jax.P("i", None), jax.P("i", None), jax.P(None), jax.P("i", None), jax.P(None)]
        close(routing.dispatch(x), ROUTING.dispatch(X))
        close(routing.combine(routing.dispatch(x)), ROUTING.combine(ROUTING.dispatch(X)))


# The losses.


@pytest.mark.parametrize(("k", "scoring"), [(1, "sigmoid"), (2, "softmax")])
def test_load_balance_loss(k, scoring):
    got, expected = (functools.partial(f, k=k, scoring=scoring) for f in (cutjax.load_balance_loss, plain_loss))
    compare(lambda f: lambda x: (jax.value_and_grad(f)(x), jax.hessian(f)(x)), (got, expected), (LOGITS,), 1e-6)
    close(jax.jit(got)(LOGITS.reshape(3, -1, E)), jax.jit(got)(LOGITS))
    assert jax.eval_shape(got, LOGITS.astype(jnp.bfloat16)).dtype == jnp.float32


def test_load_balance_loss_at_its_ends():
    loss = jax.jit(functools.partial(cutjax.load_balance_loss, k=1))
    sure = 100 * np.eye(E, dtype=np.float32)
    assert loss(np.tile(sure, (2, 1))) == 1  # even
    assert loss(sure[np.zeros(T, int)]) == E  # all tokens to one expert
    away = np.array([-2.0] + [0.0] * (E - 1), np.float32)  # what counts is what was chosen: never that of high score
    assert loss(sure[np.zeros(T, int)], selection_bias=away) < 1e-6


def test_router_z_loss():
    def expected(logits):
        return (jnp.log(jnp.exp(logits).sum(-1)) ** 2).mean()

    compare(jax.value_and_grad, (cutjax.router_z_loss, expected), (LOGITS,), 1e-6)
    assert jax.eval_shape(cutjax.router_z_loss, LOGITS.astype(jnp.bfloat16)).dtype == jnp.float32
    assert np.isfinite(jax.jit(cutjax.router_z_loss)(1000 * np.asarray(LOGITS)))


REFUSED = [
    (TypeError, "route: router_logits must be an array, got list", lambda: cutjax.route([[1.0]])),
    (
        TypeError,
        "route: router_logits must be floating-point numbers, got int32",
        lambda: cutjax.route(jnp.ones((2, 3), int)),
    ),
    (ValueError, "route: router_logits must have rank 2 or more", lambda: cutjax.route(LOGITS[0])),
    (TypeError, "route: k must be an int, got float", lambda: cutjax.route(LOGITS, 2.0)),
    (ValueError, r"route: k is 7, but router_logits \(12, 6\) are for 6 experts", lambda: cutjax.route(LOGITS, 7)),
    (ValueError, "route: k is 0", lambda: cutjax.route(LOGITS, 0)),
    (ValueError, "route: unknown scoring 'tanh'", lambda: cutjax.route(LOGITS, scoring="tanh")),
    (
        ValueError,
        r"route: selection_bias is \(5,\), which does not broadcast against \(12, 6\)",
        lambda: cutjax.route(LOGITS, selection_bias=jnp.ones(5)),
    ),
    (
        ValueError,
        r"route: selection_bias is \(1, 12, 6\), which does not broadcast",
        lambda: cutjax.route(LOGITS, selection_bias=LOGITS[None]),
    ),
    (ValueError, r"dispatch: the routing is for rows \[12, d\], got \(36, 5\)", lambda: ROUTING.dispatch(ROWS)),
    (ValueError, r"combine: the routing is for rows \[36, d\], got \(12, 5\)", lambda: ROUTING.combine(X)),
    (TypeError, "load_balance_loss: router_logits", lambda: cutjax.load_balance_loss(jnp.ones((2, 3), int))),
    (ValueError, "load_balance_loss: k is 7", lambda: cutjax.load_balance_loss(LOGITS, 7)),
    (TypeError, "router_z_loss: router_logits", lambda: cutjax.router_z_loss(None)),
]


@pytest.mark.parametrize(("error", "match", "call"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_refused(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_the_choice_is_that_of_top_k():
    """Zeros of either sign, infinities and ties: jax may put 0.0 before -0.0."""
    logits = np.random.default_rng(0).choice([-0.0, 0.0, 1.0, -1.0, -np.inf, np.inf], (64, 8)).astype(np.float32)
    for k in (1, 3, 8):
        both = jax.jit(lambda x, k=k: (cutjax.route(x, k).indices, jax.lax.top_k(x, k)[1]))
        np.testing.assert_array_equal(*both(logits))
