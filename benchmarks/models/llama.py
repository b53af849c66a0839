"""Blocks like Llama's, and like DeepSeek's with experts; and a stack of them that decodes with a cache."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.models.ways import Way

Array = jax.Array
Cache = tuple[Array, Array]  # keys and values [batch, time, kv_heads, size]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a block; its second half is a gated MLP, or experts beside one of `shared` features."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    experts: int = 0
    k: int = 0
    shared: int = 0

    @property
    def size(self) -> int:
        """Features of a head."""
        return self.width // self.heads


def rotate(x: Array, positions: Array) -> Array:
    """Rotary position embedding of x ``[batch, time, heads, size]``, in f32."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


@functools.cache
def attention_implementation() -> str:
    """Returns that of ``jax.nn.dot_product_attention``: "cudnn", where it works."""
    q = jax.ShapeDtypeStruct((1, 128, 8, 128), jnp.bfloat16)
    attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    try:
        jax.jit(attention).lower(q, q, q).compile()
    except Exception:  # which depends on the device and on the version of cuDNN
        return "xla"
    return "cudnn"


class Attention(nn.Module):
    """Causal attention by ``jax.nn.dot_product_attention``; over a cache by two einsums and a softmax."""

    sizes: Sizes
    way: Way
    dtype: Any
    param_dtype: Any
    joined: bool = False  # queries, keys and values by one product, as they are served

    @nn.compact
    def __call__(self, x: Array, cache: Cache | None, position: Array) -> tuple[Array, Cache]:
        """Returns the result, and the keys and values."""
        sizes, (batch, time, _) = self.sizes, x.shape
        dense = functools.partial(
            self.way.dense_general, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
        )
        names = {"query": sizes.heads, "key": sizes.kv_heads, "value": sizes.kv_heads}
        if self.joined:
            qkv = dense((sum(names.values()), sizes.size), name="qkv")(x)
            q, k, v = jnp.split(qkv, list(itertools.accumulate(names.values()))[:-1], axis=-2)
        else:
            q, k, v = (dense((heads, sizes.size), name=name)(x) for name, heads in names.items())
        positions = position + jnp.arange(time)
        q, k = rotate(q, positions), rotate(k, positions)
        if cache is None:
            implementation = "xla" if self.is_initializing() else attention_implementation()
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        else:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
                for old, new in zip(cache, (k, v), strict=True)
            )
            q = q.reshape(batch, time, sizes.kv_heads, -1, sizes.size)
            scores = self.way.einsum("btkqd,bskd->bkqts", q, k).astype(jnp.float32) * sizes.size**-0.5
            visible = jnp.arange(k.shape[1]) <= positions[:, None]
            weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)).astype(v.dtype)
            mixed = self.way.einsum("bkqts,bskd->btkqd", weights, v).reshape(batch, time, sizes.heads, sizes.size)
        return dense(sizes.width, axis=(-2, -1), name="out")(mixed), (k, v)


class Block(nn.Module):
    """Attention, then a gated MLP or experts, each with a norm before it and a residual around it."""

    sizes: Sizes
    way: Way
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32
    joined: bool = False

    @nn.compact
    def __call__(self, x: Array, cache: Cache | None = None, position: Array | int = 0) -> tuple[Array, Cache]:
        """Returns the result, and the keys and values."""
        sizes, dtypes = self.sizes, {"dtype": self.dtype, "param_dtype": self.param_dtype}
        y = nn.RMSNorm(name="attention_norm", **dtypes)(x)
        attention = Attention(sizes, self.way, joined=self.joined, name="attention", **dtypes)
        y, cache = attention(y, cache, jnp.asarray(position))
        x = x + y
        y = nn.RMSNorm(name="mlp_norm", **dtypes)(x)
        if sizes.experts:
            experts = self.way.moe(sizes.hidden, sizes.experts, sizes.k, name="moe", **dtypes)(y)
            return x + experts + self.way.gated_mlp(sizes.shared, name="shared", **dtypes)(y), cache
        return x + self.way.gated_mlp(sizes.hidden, name="mlp", **dtypes)(y), cache


class Stack(nn.Module):
    """Some blocks between an embedding and a head, over caches."""

    sizes: Sizes
    layers: int
    vocabulary: int
    way: Way
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: Array, caches: list[Cache], position: Array) -> tuple[Array, list[Cache]]:
        """Returns logits ``[batch, time, vocabulary]``, and the caches."""
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.dtype}  # as served: no f32 copy
        x, written = nn.Embed(self.vocabulary, self.sizes.width, name="embed", **dtypes)(tokens), []
        for i, cache in enumerate(caches):
            x, cache = Block(self.sizes, self.way, joined=True, name=f"block_{i}", **dtypes)(x, cache, position)
            written.append(cache)
        x = nn.RMSNorm(name="norm", **dtypes)(x)
        return self.way.dense(self.vocabulary, use_bias=False, name="head", **dtypes)(x), written
