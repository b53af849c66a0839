"""Heads of language models and their losses as people write them: a function of x, w, labels and a bias, each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

B, S, D, V = 2, 6, 16, 40
TOKENS = B * S
PADDED = 33  # columns that are words


def hard(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y)


def picked(logits, y):
    return jnp.take_along_axis(logits, y[..., None], -1)[..., 0]


def integers(x, w, y, b):
    return hard(x @ w, y).mean()


def smoothed(x, w, y, b):
    labels = optax.smooth_labels(jax.nn.one_hot(y, V), 0.1)
    return optax.softmax_cross_entropy((x @ w + b).astype(jnp.float32), labels).mean()


def smoothed_by_hand(x, w, y, b):
    logp = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    return (-0.9 * picked(logp, y) - 0.1 * logp.mean(-1)).mean()


def one_hot_sum(x, w, y, b):
    logp = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    return -jnp.sum(jax.nn.one_hot(y, V) * logp) / TOKENS


def one_hot_mean(x, w, y, b):
    logp = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    return -jnp.mean(jnp.sum(jnp.where(y[..., None] == jnp.arange(V), logp, 0.0), axis=-1))


def in_its_dtype(x, w, y, b):
    return -picked(jax.nn.log_softmax(x @ w + b), y).mean()


def wide(x, w, y, b):
    logits = jnp.einsum("bsd,dv->bsv", x, w, preferred_element_type=jnp.float32)
    return (jax.nn.logsumexp(logits, -1) - picked(logits, y)).mean()


def by_hand(x, w, y, b):
    logits = (x @ w + b).astype(jnp.float32)
    logits = logits - lax.stop_gradient(logits.max(-1, keepdims=True))
    return (jnp.log(jnp.exp(logits).sum(-1)) - picked(logits, y)).mean()


def unshifted(x, w, y, b):
    logits = (x @ w).astype(jnp.float32)
    return (jnp.log(jnp.exp(logits).sum(-1)) - picked(logits, y)).mean()


def of_probabilities(x, w, y, b):
    return -jnp.log(picked(jax.nn.softmax((x @ w).astype(jnp.float32)), y)).mean()


def indexed(x, w, y, b):
    logp = jax.nn.log_softmax((x @ w).astype(jnp.float32)).reshape(-1, V)
    return -logp[jnp.arange(TOKENS), y.reshape(-1)].mean()


def indexed_twice(x, w, y, b):
    logp = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    return -logp[jnp.arange(B)[:, None], jnp.arange(S)[None], y].mean()


def mapped(x, w, y, b):
    def of_token(x, y):
        return -jax.nn.log_softmax((x @ w + b).astype(jnp.float32))[y]

    return jax.vmap(jax.vmap(of_token))(x, y).mean()


def masked(x, w, y, b):
    weights = (y % 3 > 0).astype(jnp.float32)
    return (hard(x @ w, y) * weights).sum() / jnp.maximum(weights.sum(), 1)


def ignored(x, w, y, b):
    ignore = jnp.arange(S) % 2 == 0
    losses = hard(x @ w, jnp.where(ignore, -1000, y))
    return jnp.where(ignore, 0, losses).sum() / (~ignore).astype(jnp.float32).sum()


def z_loss(x, w, y, b):
    logits = (x @ w).astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return (lse - picked(logits, y) + 0.1 * lse**2).mean()


def softcap(x, w, y, b):
    return hard(3.0 * jnp.tanh((x @ w + b).astype(jnp.float32) / 3.0), y).mean()


def smooth_softcap(x, w, y, b):
    logits = 3.0 * jnp.tanh((x @ w).astype(jnp.float32) / 3.0)
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(y, V), 0.1)).mean()


def temperature(x, w, y, b):
    return hard((x @ w + b) / 0.7, y).mean()


def temperature_of_logits(x, w, y, b):
    logits = (x @ w).astype(jnp.float32)
    logits = (logits - lax.stop_gradient(logits.max(-1, keepdims=True))) / 0.7
    return (jnp.log(jnp.exp(logits).sum(-1)) - picked(logits, y)).mean()


def padded_vocabulary(x, w, y, b):
    logits = jnp.where(jnp.arange(V) < PADDED, (x @ w).astype(jnp.float32), -1e9)
    return hard(logits, y % PADDED).mean()


def focal(x, w, y, b):
    logp = picked(jax.nn.log_softmax((x @ w).astype(jnp.float32)), y)
    return -((1 - jnp.exp(logp)) ** 2 * logp).mean()


def shifted(x, w, y, b):
    """As transformers does: the last position predicts nothing."""
    logits = x @ w
    labels = jax.nn.one_hot(y[:, 1:], V)
    return optax.softmax_cross_entropy(logits[:, :-1].astype(jnp.float32), labels).mean()


def tied(x, w, y, b):
    """The head of an embedding that is kept in float32."""
    embedding = w.T.astype(jnp.float32)
    return hard(x @ embedding.astype(x.dtype).T, y).mean()


def transposed(x, w, y, b):
    embedding = w.T.astype(jnp.float32)
    return hard(x @ embedding.T.astype(x.dtype), y).mean()


def words_first(x, w, y, b):
    logits = jnp.einsum("vd,sd->vs", w.T, x.reshape(TOKENS, D)).astype(jnp.float32)
    return (jax.nn.logsumexp(logits, 0) - jnp.take_along_axis(logits, y.reshape(1, -1), 0)[0]).mean()


@jax.custom_vjp
def with_logits(logits, targets):
    """As T5X and MaxText write it, with a derivative of its own."""
    return _with_logits_forward(logits, targets)[0]


def _with_logits_forward(logits, targets, z=0.1):
    most = logits.max(axis=-1, keepdims=True)
    shifted = logits - most
    powers = jnp.exp(shifted)
    sums = jnp.sum(powers, axis=-1, keepdims=True)
    log_softmax = shifted - jnp.log(sums)
    loss = -jnp.sum(targets * log_softmax, axis=-1)
    log_z = jnp.squeeze(jnp.log(sums) + most, axis=-1)
    return (loss + z * lax.square(log_z), z * lax.square(log_z)), (targets, powers, sums, log_softmax, log_z)


def _with_logits_backward(saved, g, z=0.1):
    targets, powers, sums, log_softmax, log_z = saved
    g = g[0]
    of_logits = jnp.expand_dims(1 + 2 * z * log_z, -1) * powers / sums - targets
    return jnp.expand_dims(g, -1) * of_logits, -jnp.expand_dims(g, -1) * log_softmax


with_logits.defvjp(_with_logits_forward, _with_logits_backward)


def t5x(x, w, y, b):
    confidence, low = 0.9, 0.1 / (V - 1)
    targets = jnp.where(y[..., None] == jnp.arange(V), confidence, low).astype(jnp.float32)
    loss, of_z = with_logits((x @ w).astype(jnp.float32), targets)
    return loss.mean() + 0 * of_z.sum()


@jax.custom_vjp
def scattering(logits, y):
    return _scattering_forward(logits, y)[0]


def _scattering_forward(logits, y):
    logp = jax.nn.log_softmax(logits)
    return -logp[jnp.arange(TOKENS), y].mean(), (logp, y)


def _scattering_backward(saved, g):
    logp, y = saved
    return g / TOKENS * jnp.exp(logp).at[jnp.arange(TOKENS), y].add(-1.0), None


scattering.defvjp(_scattering_forward, _scattering_backward)


def own_gradient(x, w, y, b):
    return scattering((x @ w + b).astype(jnp.float32).reshape(TOKENS, V), y.reshape(-1))


def by_the_batch(x, w, y, b):
    """A factor of the gradient that all tokens' losses make."""
    return jnp.log1p(hard(x @ w, y).mean())


def in_chunks(x, w, y, b):
    @jax.checkpoint
    def step(total, xs):
        return total + hard(xs[0] @ w + b, xs[1]).sum(), None

    return lax.scan(step, 0.0, (x, y))[0] / TOKENS


def remat(x, w, y, b):
    return jax.checkpoint(integers)(x, w, y, b)


def jitted(x, w, y, b):
    return jax.jit(integers)(x, w, y, b)


CASES: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        integers, smoothed, smoothed_by_hand, one_hot_sum, one_hot_mean, in_its_dtype, wide, by_hand, unshifted,
        of_probabilities, indexed, indexed_twice, mapped, masked, ignored, z_loss, softcap, smooth_softcap, temperature,
        temperature_of_logits, padded_vocabulary, focal, shifted, tied, transposed, words_first, t5x, own_gradient,
        by_the_batch, in_chunks, remat, jitted,
    )
}  # fmt: skip
AGAIN = ("smooth_softcap", "by_the_batch")  # whose gradients take a fourth product


def inputs(dtype: Any = jnp.float32, scale: float = 1.0) -> tuple[jax.Array, ...]:
    """Returns x, w, labels and a bias."""
    keys = jax.random.split(jax.random.key(0), 3)
    draw = functools.partial(jax.random.normal, dtype=jnp.float32)
    x, w, b = draw(keys[0], (B, S, D)) * scale, draw(keys[1], (D, V)) / 4, draw(keys[2], (V,))
    y = jnp.arange(TOKENS).reshape(B, S) * 7 % V
    return x.astype(dtype), w.astype(dtype), y.at[0, 0].set(-2).astype(jnp.int32), b.astype(dtype)
