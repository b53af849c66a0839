"""Causal convolutions of sequences: numpy by hand, lax, state from call to call and from step to step, gradients."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, compare, integers, normal
from jax import lax

import cutjax

ACTIVATIONS = {None: lambda x: x, "silu": jax.nn.silu, "swish": jax.nn.silu}


def by_hand(x, w, bias=None, state=None):
    """In float64, before the activation."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    before = np.zeros((*x.shape[:-2], len(w) - 1, x.shape[-1])) if state is None else np.asarray(state, np.float64)
    x = np.concatenate([before, x], -2)
    length = x.shape[-2] - len(w) + 1
    y = sum(x[..., k : k + length, :] * w[k] for k in range(len(w)))
    return y if bias is None else y + np.asarray(bias, np.float64)


def by_lax(x, w, bias, state, activation):
    acc = lax.conv_general_dilated(
        jnp.concatenate([state, x], 1),
        w[:, None],
        (1,),
        "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
        preferred_element_type=jnp.float32,
    )
    return ACTIVATIONS[activation](acc + bias)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("with_state", [False, True])
def test_small_integers_are_exact(width, with_state):
    x, w, bias = integers(0, (2, 3, 5, 6)), integers(1, (width, 6)), integers(2, (6,))
    state = integers(3, (2, 3, width - 1, 6)) if with_state else None
    y, after = cutjax.causal_conv1d(x, w, bias, state=state, return_state=True)
    np.testing.assert_array_equal(y, by_hand(x, w, bias, state))
    before = jnp.zeros((2, 3, width - 1, 6)) if state is None else state
    np.testing.assert_array_equal(after, np.concatenate([before, x], -2)[..., 5:, :])


def test_one_sequence_without_bias():
    x, w = integers(0, (9, 4)), integers(1, (4, 4))
    np.testing.assert_array_equal(cutjax.causal_conv1d(x, w), by_hand(x, w))


@pytest.mark.parametrize("length", [0, 2, 5])
def test_no_sequences(length):
    x, w, state = jnp.zeros((0, length, 3)), integers(1, (4, 3)), jnp.zeros((0, 3, 3))
    y, after = cutjax.causal_conv1d(x, w, state=state, return_state=True)
    assert (y.shape, after.shape) == (x.shape, state.shape)


def plain(x, w, bias, activation):
    padded = jnp.pad(x, [(0, 0), (len(w) - 1, 0), (0, 0)]).astype(jnp.float32)
    acc = sum(padded[:, k : k + x.shape[1]] * w[k].astype(jnp.float32) for k in range(len(w)))
    return activation(acc + bias.astype(jnp.float32)).astype(x.dtype)


def loss(f):
    return lambda *args: jnp.sum(f(*args).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("activation", ["silu", None])
def test_derivatives_are_those_of_lax(activation):
    """Of all four arguments, forward and reverse, and of the reverse again."""
    args = normal(0, (2, 6, 3)), normal(1, (4, 3)), normal(2, (3,)), normal(3, (2, 3, 3))
    tangents = tuple(normal(4 + i, x.shape) for i, x in enumerate(args))

    def ours(x, w, bias, state):
        return cutjax.causal_conv1d(x, w, bias, state=state, activation=activation)

    def theirs(x, w, bias, state):
        return by_lax(x, w, bias, state, activation)

    def transformed(f):
        def gradients(*args):
            return jax.grad(loss(f), (0, 1, 2, 3))(*args)

        def sums(*args):
            return sum(map(jnp.sum, gradients(*args)))

        return lambda *args: (jax.jvp(f, args, tangents), gradients(*args), jax.grad(sums, (0, 1))(*args))

    compare(transformed, (ours, theirs), args, 1e-4)


OF_TWO = (0, None, None)
TRANSFORMED = {
    "jvp": lambda f, *args: jax.jvp(f, args, args),
    "grad": lambda f, *args: jax.grad(loss(f), (0, 1, 2))(*args),
    "grad of w": lambda f, *args: jax.jit(jax.grad(loss(f), 1))(*args),
    "remat": lambda f, *args: jax.grad(loss(jax.checkpoint(f)), (0, 1, 2))(*args),
    "second": lambda f, *args: jax.grad(lambda *a: sum(map(jnp.sum, jax.grad(loss(f), (0, 1, 2))(*a))), (0, 1))(*args),
    "hessian": lambda f, *args: jax.jacfwd(jax.grad(loss(f), 1), 2)(*args),
    "jacrev": lambda f, *args: jax.jacrev(f, 1)(*args),
    "grad of vmap": lambda f, x, *rest: jax.grad(loss(jax.vmap(f, OF_TWO)), (0, 1))(jnp.stack([x, -x]), *rest),
    "vmap of grad": lambda f, x, *rest: jax.vmap(jax.grad(loss(f), (0, 1)), OF_TWO)(jnp.stack([x, -x]), *rest),
    "weights": lambda f, x, w, b: jax.grad(loss(jax.vmap(f, (None, 0, None))), (0, 1))(x, jnp.stack([w, -w]), b),
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.relu])
def test_derivatives_are_those_of_the_formula(name, activation):
    args = normal(0, (2, 7, 3)), normal(1, (3, 3)), normal(2, (3,))
    functions = (
        lambda x, w, b: cutjax.causal_conv1d(x, w, b, activation=activation),
        lambda x, w, b: plain(x, w, b, activation),
    )
    compare(lambda f: functools.partial(TRANSFORMED[name], f), functions, args, 1e-4)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_gradients_have_the_dtypes_of_what_they_are_of(dtype, width):
    args = normal(0, (2, 5, 4), dtype), normal(1, (width, 4), dtype), normal(2, (4,))
    functions = (
        lambda *args: cutjax.causal_conv1d(*args, activation="silu"),
        lambda x, w, b: plain(x, w, b, jax.nn.silu),
    )
    found, wanted = jax.jit(lambda *args: [TRANSFORMED["grad"](f, *args) for f in functions])(*args)
    assert [g.dtype for g in found] == [x.dtype for x in args]
    close(found, wanted, 4 * float(jnp.finfo(dtype).eps))


def test_the_gradients_are_one_operation():
    """Of any number of sequences, in a batch or mapped; beside it the forward pass has the one product."""
    x, w, bias = jnp.ones((3, 2, 8, 16), jnp.bfloat16), jnp.ones((4, 16), jnp.bfloat16), jnp.ones(16)

    def step(x, w, bias):
        one = functools.partial(cutjax.causal_conv1d, activation="silu")
        return jax.grad(loss(jax.vmap(one, OF_TWO)), (0, 1, 2))(x, w, bias)

    rows = cutjax.explain(step, platform="cuda", arch="sm_90a")(x, w, bias).rows
    assert [row.runs.split("_")[0] for row in rows] == ["direct", "direct"]
    assert "causal_gradients" in rows[1].runs


def test_a_number_of_sequences_that_is_not_known():
    x, w, bias = normal(0, (3, 6, 4)), normal(1, (4, 4)), normal(2, (4,))
    gradients = jax.jit(TRANSFORMED["grad"], static_argnums=0)
    step = functools.partial(gradients, functools.partial(cutjax.causal_conv1d, activation="silu"))
    some = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 6, 4"), x.dtype)
    exported = jax.export.export(jax.jit(step))(some, w, bias)
    close(exported.call(x, w, bias), step(x, w, bias), 1e-6)


def test_a_length_that_is_not_known():
    x, w, state = normal(0, (3, 6, 4)), normal(1, (4, 4)), normal(2, (3, 3, 4))
    step = jax.jit(functools.partial(cutjax.causal_conv1d, return_state=True))
    some = jax.ShapeDtypeStruct(jax.export.symbolic_shape("3, t, 4"), x.dtype)
    exported = jax.export.export(jax.jit(lambda x, w, state: step(x, w, state=state)))(some, w, state)
    for length in (1, 2, 6):
        close(exported.call(x[:, :length], w, state), step(x[:, :length], w, state=state), 1e-6)


def test_ranks_are_not_promoted():
    """Whatever the user asks of jax, which names its own functions where it raises."""
    x, w, bias = normal(0, (2, 6, 4)), normal(1, (3, 4)), normal(2, (4,))
    with jax.numpy_rank_promotion("raise"):
        jax.grad(lambda *args: cutjax.causal_conv1d(*args, activation="silu").sum(), (0, 1, 2))(x, w, bias)
        cutjax.causal_conv1d_update(x[:, 0], x[:, 1:3], w, bias)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_steps_are_the_sequence(dtype):
    """Prefilled with its first part, then step by step: what all of it gives at once, but for an order of sums."""
    x, w, bias = normal(0, (2, 9, 8), dtype), normal(1, (4, 8), dtype), normal(2, (8,))
    whole = cutjax.causal_conv1d(x, w, bias, activation="silu")
    ys, state = cutjax.causal_conv1d(x[:, :5], w, bias, activation="silu", return_state=True)
    parts = [ys]
    for t in range(5, 9):
        y, state = cutjax.causal_conv1d_update(x[:, t], state, w, bias, activation="silu")
        parts.append(y[:, None])
    found = jnp.concatenate(parts, 1)
    assert (whole.dtype, state.dtype, state.shape) == (dtype, dtype, (2, 3, 8))
    close(found, whole, 1e-6 if dtype == jnp.float32 else 2**-8)
    np.testing.assert_array_equal(state, x[:, -3:])


@pytest.mark.parametrize("length", [0, 1, 2])
def test_sequences_shorter_than_the_state(length):
    x, w, state = integers(0, (2, length, 4)), integers(1, (4, 4)), integers(2, (2, 3, 4))
    y, after = cutjax.causal_conv1d(x, w, state=state, return_state=True)
    np.testing.assert_array_equal(y, by_hand(x, w, state=state))
    np.testing.assert_array_equal(after, np.concatenate([state, x], 1)[:, length:])


def test_no_channels():
    x, w, state = jnp.zeros((2, 5, 0)), jnp.zeros((4, 0)), jnp.zeros((2, 3, 0))
    assert cutjax.causal_conv1d(x, w).shape == x.shape
    assert cutjax.causal_conv1d_update(x[:, 0], state, w)[0].shape == (2, 0)


X, W = jnp.ones((2, 6, 4)), jnp.ones((3, 4))


@pytest.mark.parametrize(
    ("error", "why", "call"),
    [
        (ValueError, r"expected weights \[width, 4\]", lambda: cutjax.causal_conv1d(X, jnp.ones((3, 5)))),
        (ValueError, r"expected weights \[width, 4\]", lambda: cutjax.causal_conv1d(X, jnp.ones((0, 4)))),
        (ValueError, "x must have rank 2", lambda: cutjax.causal_conv1d(X[0, 0], W)),
        (ValueError, r"bias is \(3,\), expected \(4,\)", lambda: cutjax.causal_conv1d(X, W, jnp.ones(3))),
        (ValueError, r"state is \(2, 3, 4\), expected \(2, 2, 4\)", lambda: cutjax.causal_conv1d(X, W, state=X[:, :3])),
        (ValueError, "unknown activation 'relu6'", lambda: cutjax.causal_conv1d(X, W, activation="relu6")),
        (
            NotImplementedError,
            "causal_conv1d: activation is no elementwise function: cumsum",
            lambda: cutjax.causal_conv1d(X, W, activation=lambda a: jnp.cumsum(a, -1)),
        ),
        (
            NotImplementedError,
            "causal_conv1d_update: activation is no elementwise function: .* a reduction",
            lambda: cutjax.causal_conv1d_update(X[:, 0], X[:, :2], W, activation=jax.nn.softmax),
        ),
        (
            ValueError,
            r"causal_conv1d_update: activation must return one array of its argument's shape \(2, 4\), got tuple",
            lambda: cutjax.causal_conv1d_update(X[:, 0], X[:, :2], W, activation=lambda a: (a, a)),  # pyright: ignore
        ),
        (TypeError, "a name, a function or None, got int", lambda: cutjax.causal_conv1d(X, W, activation=3)),  # pyright: ignore
        (TypeError, "bias must be an array, got float", lambda: cutjax.causal_conv1d(X, W, 1.0)),
        (ValueError, r"x is \(2, 5\), expected \(2, 4\)", lambda: cutjax.causal_conv1d_update(jnp.ones((2, 5)), X, W)),
        (
            ValueError,
            r"state is \(2, 6, 4\), expected \(2, 2, 4\)",
            lambda: cutjax.causal_conv1d_update(X[:, 0], X, W),
        ),
    ],
)
def test_bad_arguments(error, why, call):
    with pytest.raises(error, match=why):
        call()
