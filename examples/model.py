"""A decoder-only transformer in flax.nnx, dense or with experts, for any of the ways of ways.py."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from data import VOCABULARY
from flax import nnx
from ways import Way, way

Array = jax.Array
Cache = list[tuple[Array, Array]]  # of each layer, keys and values [batch, context, kv_heads, size]


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes of a model and of its training; weights and optimizer are f32, products are computed in `dtype`."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    dtype: str
    experts: int = 0  # none: a dense model
    k: int = 2  # of the experts, for each token

    @property
    def size(self) -> int:
        """Features of a head."""
        return self.width // self.heads


CONFIGS = {
    "cpu": Setup(128, 4, 2, 320, 3, 64, 16, 1000, 3e-3, "float32"),
    "gpu": Setup(2048, 16, 8, 5632, 12, 1024, 8, 500, 3e-4, "bfloat16"),
}


def rotate(x: Array, positions: Array) -> Array:
    """Rotary position embedding of x ``[batch, time, heads, size]``, in f32."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention; several heads of queries share one of keys and values."""

    def __init__(self, setup: Setup, way: Way, rngs: nnx.Rngs):
        linear = functools.partial(way.linear_general, use_bias=False, dtype=jnp.dtype(setup.dtype), rngs=rngs)
        self.query = linear(setup.width, (setup.heads, setup.size))
        self.key = linear(setup.width, (setup.kv_heads, setup.size))
        self.value = linear(setup.width, (setup.kv_heads, setup.size))
        self.out = linear((setup.heads, setup.size), setup.width, axis=(-2, -1))
        self.einsum = way.einsum

    def __call__(self, x: Array, cache: tuple[Array, Array] | None, position: Array) -> tuple[Array, tuple]:
        batch, time, _ = x.shape
        positions = position + jnp.arange(time)
        q, k, v = rotate(self.query(x), positions), rotate(self.key(x), positions), self.value(x)
        if cache is not None:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), position, axis=1)
                for old, new in zip(cache, (k, v), strict=True)
            )
        q = q.reshape(batch, time, k.shape[2], -1, q.shape[-1])  # [batch, time, kv_heads, queries of each, size]
        scores = self.einsum("btkqd,bskd->bkqts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        visible = jnp.arange(k.shape[1]) <= positions[:, None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)).astype(v.dtype)
        mixed = self.einsum("bkqts,bskd->btkqd", weights, v)
        return self.out(mixed.reshape(batch, time, -1, v.shape[-1])), (k, v)


class Block(nnx.Module):
    """Attention, then a gated MLP or experts, each with a norm before it and a residual around it."""

    def __init__(self, setup: Setup, way: Way, rngs: nnx.Rngs):
        dtype = jnp.dtype(setup.dtype)
        self.attention_norm = nnx.RMSNorm(setup.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(setup, way, rngs)
        self.mlp_norm = nnx.RMSNorm(setup.width, dtype=dtype, rngs=rngs)
        if setup.experts:
            self.mlp = way.moe(setup.width, setup.hidden, setup.experts, setup.k, dtype=dtype, rngs=rngs)
        else:
            self.mlp = way.gated_mlp(setup.width, setup.hidden, dtype=dtype, rngs=rngs)
        self.has_experts = setup.experts > 0

    def __call__(self, x: Array, cache: tuple | None, position: Array) -> tuple[Array, Array, tuple]:
        mixed, cache = self.attention(self.attention_norm(x), cache, position)
        x = x + mixed
        y = self.mlp_norm(x)
        if not self.has_experts:
            return x + self.mlp(y), jnp.float32(0), cache
        y, aux = self.mlp(y, return_aux=True)
        return x + y, aux["load_balance_loss"], cache


class Transformer(nnx.Module):
    """Tokens ``[batch, time]`` -> f32 logits ``[batch, time, VOCABULARY]``."""

    def __init__(self, setup: Setup, way: Way, rngs: nnx.Rngs):
        dtype = jnp.dtype(setup.dtype)
        self.embed = nnx.Embed(VOCABULARY, setup.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(setup, way, rngs) for _ in range(setup.layers)])
        self.norm = nnx.RMSNorm(setup.width, dtype=dtype, rngs=rngs)
        self.head = way.linear(setup.width, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Array, cache: Cache | None = None, position: Array | int = 0):
        """Returns the logits, the mean over the layers of the experts' load-balancing loss, and the cache.

        The tokens stand at `position` and after it. With a cache they see what was written to it before; without one,
        each other.
        """
        x, balances, caches = self.embed(tokens), [], []
        for i, block in enumerate(self.blocks):
            x, balance, written = block(x, cache[i] if cache else None, jnp.asarray(position))
            balances.append(balance)
            caches.append(written)
        return self.head(self.norm(x)).astype(jnp.float32), jnp.mean(jnp.stack(balances)), caches


def build(setup: Setup, name: str = "jax") -> nnx.GraphDef:
    """Returns the graph of the model in that way; the parameters are the same in all."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(setup, way(name), nnx.Rngs(0))))[0]


def init(setup: Setup, seed: int = 0) -> nnx.State:
    """Returns random parameters, the same for all ways."""
    return _init(setup, jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0)
def _init(setup: Setup, key: Array) -> nnx.State:  # compiled once, for all ways
    return nnx.split(Transformer(setup, way("jax"), nnx.Rngs(key)))[1]
