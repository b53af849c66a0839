"""The ways to run a model: the layers and functions that it is built from, and what is wrapped around the whole.

"jax", "fuse", "step" and the recipes of float8 are the same program, without cutjax. All ways have the same parameters,
but that "int4" has those of its products quantized.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

import cutjax
from benchmarks.models.layers import Layers, drop_ins, ours, plain

WAYS = ("jax", "dropin", "fuse", "step", "flax")
RECIPES = ("fp8-tensor", "fp8-row", "fp8-block")
Array = jax.Array


class Way(NamedTuple):
    """Name, Linen's modules by role, products outside of modules, layers of NNX, and the transformations around.

    Those are of the differentiated function, and of the whole step, which overwrites its first argument. The dtype is
    that in which layers of NNX compute.
    """

    name: str
    dense: Callable[..., Any]
    dense_general: Callable[..., Any]
    gated_mlp: Callable[..., Any]
    moe: Callable[..., Any]
    dot_general: Callable[..., Array]
    einsum: Callable[..., Array]
    layers: Layers
    transform: Callable[[Callable], Callable] = lambda function: function
    of_step: Callable[[Callable], Callable] = lambda function: function
    dtype: Any = jnp.bfloat16


def way(name: str) -> Way:
    """Returns the way of that name; "onehot" is "jax" with every expert for every token, "float32" in that dtype."""
    if name == "jax":
        return Way(name, Dense, nn.DenseGeneral, GatedMLP, MoE, jax.lax.dot_general, jnp.einsum, plain())
    if name == "onehot":
        return way("jax")._replace(name=name, moe=EveryExpert)
    if name == "float32":
        return way("jax")._replace(name=name, transform=exactly, dtype=jnp.float32)
    if name == "dropin":
        dense = functools.partial(Dense, dot_general=cutjax.dot_general)
        return Way(
            name,
            dense,
            functools.partial(nn.DenseGeneral, dot_general=cutjax.dot_general),
            functools.partial(GatedMLP, dense=dense),
            functools.partial(MoE, dense=dense, ragged_dot=cutjax.ragged_dot),
            cutjax.dot_general,
            cutjax.einsum,
            drop_ins(),
        )
    if name == "fuse":
        return way("jax")._replace(name=name, transform=cutjax.fuse)
    if name in RECIPES:
        return way("jax")._replace(name=name, transform=functools.partial(cutjax.fuse, fp8=name.removeprefix("fp8-")))
    if name == "step":
        return way("jax")._replace(name=name, of_step=functools.partial(cutjax.fuse, donate_argnums=0))
    if name == "flax":
        from cutjax.flax import linen

        modules = linen.Dense, linen.DenseGeneral, linen.GatedMLP, linen.MoE
        return Way(name, *modules, cutjax.dot_general, cutjax.einsum, ours())
    if name == "int4":
        return way("flax")._replace(name=name, einsum=jnp.einsum, transform=cutjax.fuse)
    raise ValueError(f"unknown way {name!r}, expected one of {(*WAYS, *RECIPES, 'int4')}")


def exactly(function: Callable) -> Callable:
    """Returns the function with products of float32 that round operands nowhere."""

    def found(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args)

    return found


class Dense(nn.Dense):
    """The dense layer of Flax, and an activation after it."""

    activation: Callable[[Array], Array] | None = None

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Returns ``activation(inputs @ kernel + bias)``."""
        y = super().__call__(inputs)
        return y if self.activation is None else self.activation(y)


class GatedMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    hidden_features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    dense: Callable[..., Any] = nn.Dense

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        dense = functools.partial(self.dense, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
        gate, up = (dense(self.hidden_features, name=name)(x) for name in ("gate", "up"))
        return dense(x.shape[-1], name="down")(nn.silu(gate) * up)


class MoE(nn.Module):
    """Gated experts, of which each token takes k, as a JAX user writes them: sorted rows and ``jax.lax.ragged_dot``."""

    hidden_features: int
    num_experts: int
    k: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    dense: Callable[..., Any] = nn.Dense
    ragged_dot: Callable[..., Array] = jax.lax.ragged_dot

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        tokens = x.reshape(-1, x.shape[-1])
        scores = jax.nn.softmax(self._scores(tokens))
        best, chosen = jax.lax.top_k(scores, self.k)
        out = self.mixed(tokens, best / best.sum(-1, keepdims=True), chosen, *self._weights(x.shape[-1]))
        return out.reshape(x.shape)

    def _scores(self, tokens: Array) -> Array:
        dtypes: dict[str, Any] = {"dtype": jnp.float32, "param_dtype": self.param_dtype}
        return self.dense(self.num_experts, use_bias=False, name="router", **dtypes)(tokens)

    def _weights(self, features: int) -> list[Array]:
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        wide, narrow = (features, self.hidden_features), (self.hidden_features, features)
        shapes = {"gate_kernel": wide, "up_kernel": wide, "down_kernel": narrow}
        params = (self.param(name, init, (self.num_experts, *s), self.param_dtype) for name, s in shapes.items())
        return [w.astype(self.dtype or w.dtype) for w in params]

    def mixed(self, x: Array, weights: Array, chosen: Array, gate: Array, up: Array, down: Array) -> Array:
        """Returns the weighted sum of the chosen experts' results for each row of x."""
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.num_experts).astype(jnp.int32)
        rows = x[order // self.k]
        hidden = nn.silu(self.ragged_dot(rows, gate, sizes)) * self.ragged_dot(rows, up, sizes)
        out = self.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order][:, None].astype(x.dtype)
        return out[jnp.argsort(order)].reshape(-1, self.k, x.shape[-1]).sum(1)


class EveryExpert(MoE):
    """Experts without groups: every expert for every token, times 0 where it was not chosen."""

    def mixed(self, x: Array, weights: Array, chosen: Array, gate: Array, up: Array, down: Array) -> Array:
        """Returns the weighted sum of the chosen experts' results for each row of x."""
        weights = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(chosen, self.num_experts)).astype(x.dtype)
        hidden = nn.silu(jnp.einsum("td,edh->teh", x, gate)) * jnp.einsum("td,edh->teh", x, up)
        return jnp.einsum("teh,ehd->td", hidden * weights[..., None], down)
