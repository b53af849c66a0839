"""The operations in plain JAX: rows in groups by masks, layers of experts, routing. See grouped_oracle for numpy.

Each is one program where it is called outside jit, and its equations within.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

program = functools.partial(jax.jit, inline=True)


@functools.partial(program, static_argnames="m")
def rows(sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """The group of each row, [m], and if it has one, [m, 1], for sizes that are not hostile."""
    ends, at = jnp.cumsum(sizes), jnp.arange(m, dtype=sizes.dtype)
    group = jnp.minimum(jnp.searchsorted(ends, at, side="right"), sizes.shape[0] - 1)
    return group, (at < ends[-1])[:, None]


def _mask(sizes: jax.Array, m: int) -> jax.Array:
    ends = jnp.cumsum(sizes, -1)
    rows = jnp.arange(m, dtype=sizes.dtype)[:, None]
    return (rows >= (ends - sizes)[..., None, :]) & (rows < ends[..., None, :])  # [*B, m, g]


@functools.partial(program, static_argnames="layout")
def masked_multiply(x: jax.Array, w: jax.Array, sizes: jax.Array, layout: str = "nn") -> jax.Array:
    """grouped_gemm as one masked product, for sizes that are not hostile."""
    mask = _mask(sizes, x.shape[-2]).astype(x.dtype)
    return jnp.einsum("...mg,...mk,...gkn->...mn", mask, x, w if layout == "nn" else w.mT)


@program
def masked_outer(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    """grouped_outer as one masked product, for sizes that are not hostile."""
    return jnp.einsum("...mg,...mk,...mn->...gkn", _mask(sizes, a.shape[-2]).astype(a.dtype), a, b)


@functools.partial(program, static_argnames="activation")
def grouped_mlp(x, w1, w2, sizes, gate=None, row_scale=None, activation=jax.nn.gelu):
    """Rows gather their weights; only those that have a group count."""
    group, has = rows(sizes, x.shape[0])

    def product(x, w):
        return jnp.einsum("mk,mkn->mn", x, w[group])

    x = jnp.where(has, x, 0)
    z = product(x, w1)
    h = activation(z) if gate is None else activation(product(x, gate)) * z
    y = product(h, w2) * (1 if row_scale is None else jnp.where(has, row_scale, 0))
    return jnp.where(has, y, 0)


def _scores(logits, scoring):
    return jax.nn.softmax(logits) if scoring == "softmax" else jax.nn.sigmoid(logits)


@functools.partial(program, static_argnames=("k", "scoring", "renormalize"))
def route(logits, k=2, scoring="softmax", renormalize=True, bias=None):
    """Indices and weights by definition: scores of all experts, the k best by score and bias, divided by their sum."""
    scores = _scores(logits, scoring)
    best = jnp.argsort(-lax.stop_gradient(scores + (0 if bias is None else bias)), stable=True)[..., :k]
    weights = jnp.take_along_axis(scores, best, -1)
    return best, weights / weights.sum(-1, keepdims=True) if renormalize else weights


@functools.partial(program, static_argnames=("k", "activation", "scoring", "renormalize"))
def moe(
    x, logits, gate, up, down, k=2, *, activation=jax.nn.silu, scoring="softmax", renormalize=True, selection_bias=None
):
    """All experts for all tokens, and a sum with weights of which all but k are zero."""
    scores = _scores(logits, scoring)
    best = lax.stop_gradient(scores if selection_bias is None else scores + selection_bias)
    chosen = (best[..., None, :] > best[..., None]).sum(-1) < k  # fewer than k are better
    weights = jnp.where(chosen, scores, 0)
    if renormalize:
        weights /= weights.sum(-1, keepdims=True)
    h = activation(jnp.einsum("...td,edh->...teh", x, gate)) * jnp.einsum("...td,edh->...teh", x, up)
    return jnp.einsum("...te,...teh,ehn->...tn", weights, h, down)


@functools.partial(program, static_argnames=("k", "scoring"))
def load_balance_loss(logits, k=2, scoring="softmax", bias=None):
    experts = logits.shape[-1]
    indices = route(logits, k, scoring, False, bias)[0]
    share = jax.nn.one_hot(indices, experts).sum(-2).mean(0) / k
    scores = _scores(logits, scoring)
    return experts * (share * (scores / scores.sum(-1, keepdims=True)).mean(0)).sum()


def linear_cross_entropy(
    x, w, labels, bias=None, where=None, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"
):
    """As optax has it, of logits in float32 or wider."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    logits = jnp.matmul(x.astype(wide), w.astype(wide))
    logits = logits if bias is None else logits + bias.astype(wide)
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    lse = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    smooth = label_smoothing * logits.mean(-1) if label_smoothing else 0.0
    losses = lse - (1 - label_smoothing) * picked - smooth + z_loss * lse**2
    losses = losses if where is None else jnp.where(where, losses, 0)
    count = losses.size if where is None else jnp.broadcast_to(where, losses.shape).sum(dtype=losses.dtype)
    return (losses if reduction == "none" else losses.sum() / (count if reduction == "mean" else 1)).astype(x.dtype)
