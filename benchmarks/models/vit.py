"""The vision transformer ViT-B/16 in flax.linen, without dropout."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.models.ways import Way

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model; the defaults are those of ViT-B/16."""

    width: int = 768
    heads: int = 12
    hidden: int = 3072
    layers: int = 12
    patch: int = 16
    classes: int = 1000


class Block(nn.Module):
    """Attention of all to all and an MLP, each with a norm before it and a residual around it."""

    sizes: Sizes
    way: Way
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        sizes, way, size = self.sizes, self.way, self.sizes.width // self.sizes.heads
        y = nn.LayerNorm(dtype=self.dtype, name="attention_norm")(x)
        dense = functools.partial(way.dense_general, dtype=self.dtype)
        q, k, v = (dense((sizes.heads, size), name=name)(y) for name in ("query", "key", "value"))
        scores = way.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(size).astype(self.dtype), k)
        mixed = way.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
        x = x + dense(sizes.width, axis=(-2, -1), name="out")(mixed)
        y = nn.LayerNorm(dtype=self.dtype, name="mlp_norm")(x)
        y = way.dense(sizes.hidden, dtype=self.dtype, activation=nn.gelu, name="up")(y)
        return x + way.dense(sizes.width, dtype=self.dtype, name="down")(y)


class ViT(nn.Module):
    """Images ``[batch, height, width, 3]`` -> logits ``[batch, classes]``."""

    sizes: Sizes
    way: Way
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, images: Array) -> Array:
        """Returns the logits, of the token that is added in front."""
        sizes, patch = self.sizes, (self.sizes.patch, self.sizes.patch)
        x = nn.Conv(sizes.width, patch, patch, padding="VALID", dtype=self.dtype, name="embed")(images)
        x = x.reshape(len(x), -1, sizes.width)
        first = self.param("first", nn.initializers.zeros, (1, 1, sizes.width)).astype(self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (len(x), 1, sizes.width)), x], 1)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, *x.shape[1:])).astype(self.dtype)
        for i in range(sizes.layers):
            x = Block(sizes, self.way, self.dtype, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return self.way.dense(sizes.classes, dtype=self.dtype, name="head")(x[:, 0])
