"""Causal convolutions of sequences: numpy by hand, lax, state from call to call and from step to step, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, integers, normal
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


@pytest.mark.parametrize("activation", ["silu", None])
def test_derivatives_are_those_of_lax(activation):
    """Of all four arguments, forward and reverse, and of the reverse again."""
    args = normal(0, (2, 6, 3)), normal(1, (4, 3)), normal(2, (3,)), normal(3, (2, 3, 3))
    tangents = tuple(normal(4 + i, x.shape) for i, x in enumerate(args))

    def ours(x, w, bias, state):
        return cutjax.causal_conv1d(x, w, bias, state=state, activation=activation)

    def theirs(x, w, bias, state):
        return by_lax(x, w, bias, state, activation)

    def loss(f):
        return lambda *args: jnp.sum(f(*args) ** 2)

    for transformed in (
        lambda f: jax.jvp(f, args, tangents),
        lambda f: jax.grad(loss(f), (0, 1, 2, 3))(*args),
        lambda f: jax.grad(lambda *args: sum(map(jnp.sum, jax.grad(loss(f), (0, 1, 2, 3))(*args))), (0, 1))(*args),
    ):
        close(transformed(ours), transformed(theirs), 1e-4)


def test_a_batch_of_weights():
    x, ws = integers(0, (3, 2, 6, 4)), integers(1, (3, 4, 4))
    found = jax.vmap(cutjax.causal_conv1d)(x, ws)
    np.testing.assert_array_equal(found, [by_hand(*each) for each in zip(x, ws, strict=True)])


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
