"""GPT-2 as `transformers` 4.x has it in Flax (FlaxGPT2LMHeadModel), without dropout: the same layers and parameters.

A test compares the logits with those of `transformers`. It is written again because that package takes no layers of
another kind, and so that a benchmark needs no installation of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.models.ways import Way

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model; the defaults are those of GPT-2 medium."""

    width: int = 1024
    heads: int = 16
    layers: int = 24
    context: int = 1024
    vocabulary: int = 50257


class Conv1D(nn.Module):
    """A dense layer with its kernel stored [outputs, inputs], as the original has it, and an activation."""

    features: int
    way: Way
    dtype: Any
    activation: Callable[[Array], Array] | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns ``activation(x @ kernel.T + bias)``."""
        kernel = self.param("kernel", nn.initializers.normal(0.02), (self.features, x.shape[-1]))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        kernel, bias = kernel.transpose().astype(self.dtype), bias.astype(self.dtype)
        y = self.way.dot_general(x.astype(self.dtype), kernel, (((x.ndim - 1,), (0,)), ((), ()))) + bias
        return y if self.activation is None else self.activation(y)


class Attention(nn.Module):
    """Causal attention with the scores, their bias and the softmax in the model's dtype."""

    sizes: Sizes
    way: Way
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        width, heads = self.sizes.width, self.sizes.heads
        qkv = _dense(self.way, 3 * width, self.dtype, "c_attn")(x)
        q, k, v = (part.reshape(*x.shape[:-1], heads, width // heads) for part in jnp.split(qkv, 3, axis=-1))
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        bias = jnp.where(mask, 0, jnp.finfo(self.dtype).min).astype(self.dtype)
        scores = self.way.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(q.shape[-1]).astype(self.dtype), k) + bias
        mixed = self.way.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
        return _dense(self.way, width, self.dtype, "c_proj")(mixed.reshape(x.shape))


class MLP(nn.Module):
    """Two layers with the tanh form of GELU between them."""

    way: Way
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        hidden = _dense(self.way, 4 * x.shape[-1], self.dtype, "c_fc", nn.gelu)(x)
        return _dense(self.way, x.shape[-1], self.dtype, "c_proj")(hidden)


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it and a residual around it."""

    sizes: Sizes
    way: Way
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        y = nn.LayerNorm(1e-5, dtype=self.dtype, name="ln_1")(x)
        x = x + Attention(self.sizes, self.way, self.dtype, name="attn")(y)
        y = nn.LayerNorm(1e-5, dtype=self.dtype, name="ln_2")(x)
        return x + MLP(self.way, self.dtype, name="mlp")(y)


class Blocks(nn.Module):
    """All blocks, named by their numbers."""

    sizes: Sizes
    way: Way
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        for i in range(self.sizes.layers):
            x = Block(self.sizes, self.way, self.dtype, name=str(i))(x)
        return x


class Transformer(nn.Module):
    """Embeddings, blocks, a norm, and logits by the embedding's own weights."""

    sizes: Sizes
    way: Way
    dtype: Any

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        """Returns the logits of tokens ``[batch, time]``."""
        init = nn.initializers.normal(0.02)
        wte = nn.Embed(self.sizes.vocabulary, self.sizes.width, dtype=self.dtype, embedding_init=init, name="wte")
        wpe = nn.Embed(self.sizes.context, self.sizes.width, dtype=self.dtype, embedding_init=init, name="wpe")
        x = wte(tokens) + wpe(jnp.arange(tokens.shape[-1])[None])
        x = Blocks(self.sizes, self.way, self.dtype, name="h")(x)
        x = nn.LayerNorm(1e-5, dtype=self.dtype, name="ln_f")(x)
        head = wte.embedding.T.astype(self.dtype)
        return self.way.dot_general(x, head, (((x.ndim - 1,), (0,)), ((), ())))


class GPT2(nn.Module):
    """Tokens ``[batch, time]`` -> logits ``[batch, time, vocabulary]``."""

    sizes: Sizes
    way: Way
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        """Returns the logits."""
        return Transformer(self.sizes, self.way, self.dtype, name="transformer")(tokens)


def _dense(way: Way, features: int, dtype: Any, name: str, activation: Callable[[Array], Array] | None = None) -> Any:
    if way.name == "flax":  # which has layers with kernels [inputs, outputs] only
        return way.dense(features, dtype=dtype, activation=activation, name=name)
    return Conv1D(features, way, dtype, activation, name=name)


def params_of(way: Way, params: Any) -> Any:
    """Returns the parameters for a way, from those for "jax"."""
    if way.name != "flax":
        return params

    def kernel(path: Any, x: Array) -> Array:
        return x.T if jax.tree_util.keystr(path).endswith("['kernel']") else x

    return jax.tree_util.tree_map_with_path(kernel, params)
