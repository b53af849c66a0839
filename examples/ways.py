"""The switch of transformer.py, serve.py and fp8.py: ways to run the same layers.

- ``jax``: Flax's own layers, as anyone writes them.
- ``dropin``: the same layers, given ``cutjax.dot_general``; ``cutjax.einsum`` and ``cutjax.ragged_dot`` beside them.
- ``fuse``: the program of ``jax``, with ``cutjax.fuse`` around the function that is differentiated or served.
- ``flax``: the layers of ``cutjax.flax.nnx``, which have the same parameters.
- ``fp8-tensor``, ``fp8-row``, ``fp8-block``: as ``fuse``, with products in float8 by that recipe, but for the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from data import VOCABULARY
from flax import nnx

import cutjax

WAYS = ("jax", "dropin", "fuse", "flax")
Array = jax.Array


class Way(NamedTuple):
    """Constructors of layers, an einsum, and the transformation of the whole function."""

    linear: Callable[..., Any]
    linear_general: Callable[..., Any]
    gated_mlp: Callable[..., Any]
    moe: Callable[..., Any]
    einsum: Callable[..., Array]
    transform: Callable[[Callable], Callable] = lambda function: function


def way(name: str) -> Way:
    """Returns the way of that name."""
    if name == "jax":
        return Way(nnx.Linear, nnx.LinearGeneral, GatedMLP, MoE, jnp.einsum)
    if name == "dropin":
        linear = functools.partial(nnx.Linear, dot_general=cutjax.dot_general)
        linear_general = functools.partial(nnx.LinearGeneral, dot_general=cutjax.dot_general)
        gated_mlp = functools.partial(GatedMLP, linear=linear)
        moe = functools.partial(MoE, linear=linear, ragged_dot=cutjax.ragged_dot)
        return Way(linear, linear_general, gated_mlp, moe, cutjax.einsum)
    if name == "fuse":
        return way("jax")._replace(transform=cutjax.fuse)
    if name.startswith("fp8-"):
        dot_general = cutjax.fp8_dot_general(name.removeprefix("fp8-"), policy="always")

        def fp8(lhs: jax.ShapeDtypeStruct, rhs: jax.ShapeDtypeStruct) -> Any:
            return None if VOCABULARY in (*lhs.shape, *rhs.shape) else dot_general

        return way("jax")._replace(transform=functools.partial(cutjax.fuse, fp8=fp8))
    if name == "flax":
        from cutjax.flax import nnx as layers

        return Way(layers.Linear, layers.LinearGeneral, layers.GatedMLP, layers.MoE, cutjax.einsum)
    raise ValueError(f"unknown way {name!r}, expected one of {WAYS}")


class GatedMLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, in Flax's own layers."""

    def __init__(self, features: int, hidden: int, *, dtype: Any, rngs: nnx.Rngs, linear: Callable = nnx.Linear):
        make = functools.partial(linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate, self.up, self.down = make(features, hidden), make(features, hidden), make(hidden, features)

    def __call__(self, x: Array) -> Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class MoE(nnx.Module):
    """Gated experts, of which each token takes k: the rows are sorted by expert, for ``jax.lax.ragged_dot``."""

    def __init__(
        self,
        features: int,
        hidden: int,
        num_experts: int,
        k: int,
        *,
        dtype: Any,
        rngs: nnx.Rngs,
        linear: Callable = nnx.Linear,
        ragged_dot: Callable[..., Array] = jax.lax.ragged_dot,
    ):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = linear(features, num_experts, use_bias=False, dtype=jnp.float32, rngs=rngs)
        self.gate_kernel = nnx.Param(init(rngs.params(), (num_experts, features, hidden)))
        self.up_kernel = nnx.Param(init(rngs.params(), (num_experts, features, hidden)))
        self.down_kernel = nnx.Param(init(rngs.params(), (num_experts, hidden, features)))
        self.num_experts, self.k, self.dtype, self.ragged_dot = num_experts, k, dtype, ragged_dot

    def __call__(self, x: Array, *, return_aux: bool) -> tuple[Array, dict[str, Array]]:
        """Returns the result, and the loss that evens out the load of the experts."""
        gate, up, down = (w[...].astype(self.dtype) for w in (self.gate_kernel, self.up_kernel, self.down_kernel))
        tokens = x.reshape(-1, x.shape[-1])
        scores = jax.nn.softmax(self.router(tokens))
        best, chosen = jax.lax.top_k(scores, self.k)
        weights = best / best.sum(-1, keepdims=True)

        order = jnp.argsort(chosen.reshape(-1), stable=True)  # of the pairs (token, expert)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.num_experts).astype(jnp.int32)
        rows = tokens[order // self.k]
        hidden = nnx.silu(self.ragged_dot(rows, gate, sizes)) * self.ragged_dot(rows, up, sizes)
        out = self.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order][:, None].astype(self.dtype)
        out = out[jnp.argsort(order)].reshape(-1, self.k, x.shape[-1]).sum(1)

        shares = sizes.astype(jnp.float32) / order.size
        return out.reshape(x.shape), {"load_balance_loss": self.num_experts * jnp.sum(shares * scores.mean(0))}
