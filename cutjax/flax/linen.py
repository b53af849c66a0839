"""Layers of Flax Linen on cutjax's kernels: Flax's own with a fused activation, and MLP, GatedMLP and MoE."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike

from cutjax.flax.experts import check_experts, experts
from cutjax.flax.linear import (
    Activation,
    einsum,
    einsum_bias_shapes,
    feed_forward,
    is_product,
    linear,
    named_arguments,
    places,
)

__all__ = ["MLP", "Dense", "DenseGeneral", "Einsum", "GatedMLP", "MoE"]

_KERNEL_INIT = nn.initializers.lecun_normal()
_EXPERTS_INIT = nn.initializers.lecun_normal(batch_axis=(0,))  # of [experts, k, n]: the variance is that of one expert


@named_arguments
class Dense(nn.Dense):
    """``flax.linen.Dense`` with ``activation(inputs @ kernel + bias)`` in one kernel.

    Takes all arguments of ``flax.linen.Dense``, and has its parameters.

    Attributes:
      activation: any elementwise function written in JAX, run in float32 before the result is rounded; or None.

    Example:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.Dense(32, activation=jax.nn.gelu)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 16)))
      >>> y.shape, jax.tree.map(jnp.shape, variables)
      ((2, 8, 32), {'params': {'bias': (32,), 'kernel': (16, 32)}})
    """

    activation: Activation | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns ``activation(inputs @ kernel + bias)``, of ``[..., k]``."""
        features, shape = (self.features,), jnp.shape(inputs)
        axis = places("Dense", (-1,), shape)
        kernel = self.param("kernel", self.kernel_init, (shape[-1], *features), self.param_dtype)
        bias = self.param("bias", self.bias_init, features, self.param_dtype) if self.use_bias else None
        x, kernel, bias = _promoted(self, inputs, kernel, bias)
        return linear(
            "Dense",
            x,
            kernel,
            bias if bias is None else bias.reshape((1,) * (x.ndim - 1) + features),
            ((axis, (0,)), ((), ())),
            activation=self.activation,
            dot_general=self.dot_general if self.dot_general_cls is None else self.dot_general_cls(),
            precision=self.precision,
        )


@named_arguments
class DenseGeneral(nn.DenseGeneral):
    """``flax.linen.DenseGeneral`` with bias and activation in the kernel.

    Takes all arguments of ``flax.linen.DenseGeneral``, and has its parameters.

    Attributes:
      activation: as of ``Dense``.

    Example:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.DenseGeneral((4, 8), axis=(-2, -1))
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 3, 16)))
      >>> y.shape, jax.tree.map(jnp.shape, variables)
      ((2, 4, 8), {'params': {'bias': (4, 8), 'kernel': (3, 16, 4, 8)}})
    """

    activation: Activation | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the inputs with the axes of features, the last, in place of those that the kernel multiplies."""
        features, axis, batch = _axes(self.features), _axes(self.axis), tuple(sorted(_axes(self.batch_dims)))
        if batch != tuple(range(len(batch))):
            return super().__call__(inputs)  # which says what is wrong with them
        axis = places("DenseGeneral", axis, inputs.shape)
        size = tuple(inputs.shape[i] for i in batch)
        depth = tuple(inputs.shape[i] for i in axis)
        groups = (math.prod(size) * math.prod(depth), math.prod(features))
        kernel = self.param("kernel", _flat(self.kernel_init, groups), (*size, *depth, *features), self.param_dtype)
        bias = None
        if self.use_bias:
            init = _flat(self.bias_init, (math.prod(size) * math.prod(features),))
            bias = self.param("bias", init, (*size, *features), self.param_dtype)
        x, kernel, bias = _promoted(self, inputs, kernel, bias)
        rows = tuple(x.shape[i] if i in batch else 1 for i in range(x.ndim) if i not in axis)
        return linear(
            "DenseGeneral",
            x,
            kernel,
            bias if bias is None else bias.reshape(*rows, *features),
            ((axis, tuple(range(len(batch), len(batch) + len(axis)))), (batch, batch)),
            activation=self.activation,
            dot_general=self.dot_general if self.dot_general_cls is None else self.dot_general_cls(),
            precision=self.precision,
        )


@named_arguments
class Einsum(nn.Einsum):
    """``flax.linen.Einsum`` with bias and activation in the kernel, where the equation is one product of matrices.

    Takes all arguments of ``flax.linen.Einsum``, and has its parameters.

    Attributes:
      activation: as of ``Dense``.

    Example:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.Einsum((16, 4, 8), "btd,dhk->bthk", activation=jax.nn.relu)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 16)))
      >>> y.shape, jax.tree.map(jnp.shape, variables)
      ((2, 5, 4, 8), {'params': {'bias': (4, 8), 'kernel': (16, 4, 8)}})
    """

    activation: Activation | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Returns the activation of the equation's result and the bias; the equation is given here or there."""
        equation = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if not is_product(equation):
            return super().__call__(inputs, einsum_str)  # which says what is wrong with it
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, shape = None, ()
        if self.use_bias:
            own, shape = einsum_bias_shapes(equation, inputs, kernel)
            bias = self.param("bias", self.bias_init, own, self.param_dtype)
        x, kernel, bias = _promoted(self, inputs, kernel, bias)
        return einsum(
            "Einsum",
            equation,
            x,
            kernel,
            bias if bias is None else bias.reshape(shape),
            activation=self.activation,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )


class _Linear(nn.Module):
    """The parameters of a Dense layer."""

    shape: tuple[int, int]
    use_bias: bool
    param_dtype: Dtype
    kernel_init: Initializer
    bias_init: Initializer

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        return kernel, self.param("bias", self.bias_init, self.shape[1:], self.param_dtype) if self.use_bias else None


@named_arguments
class MLP(nn.Module):
    """Two linear layers: ``activation(x @ up + bias) @ down + bias``, by ``cutjax.mlp``.

    The parameters are those of two ``Dense``, named ``up`` and ``down``, so a checkpoint of a block that has two of
    Flax's under these names loads.

    Attributes:
      hidden_features: size of what lies between the layers.
      out_features: size of the result's last axis; that of the inputs by default.
      activation: any elementwise function written in JAX.
      use_bias: whether both layers have a bias.
      dtype: that of the computation; None infers it from inputs and parameters, as Flax does.
      param_dtype: that of the parameters.
      precision: of both products.
      kernel_init: initializer of the kernel of ``up``, such as one made by ``flax.linen.with_partitioning``.
      bias_init: of its bias.
      down_kernel_init: of the kernel of ``down``; kernel_init by default.
      down_bias_init: of its bias; bias_init by default.
      promote_dtype: as of ``flax.linen.Dense``.
      save: what is kept for the backward pass, as in ``cutjax.mlp``.

    Example:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.MLP(64, activation=jax.nn.relu)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 16)))
      >>> y.shape, sorted(variables["params"])
      ((2, 8, 16), ['down', 'up'])
    """

    hidden_features: int
    out_features: int | None = None
    activation: Activation = jax.nn.gelu
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = _KERNEL_INIT
    bias_init: Initializer = nn.initializers.zeros_init()
    down_kernel_init: Initializer | None = None
    down_bias_init: Initializer | None = None
    promote_dtype: Callable[..., Any] = promote_dtype
    save: str = "default"

    _names = ("up", "down")

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the result for inputs ``[..., k]``."""
        (last,) = places(type(self).__name__, (-1,), jnp.shape(inputs))
        k, kernels, biases = inputs.shape[last], [], []
        for name in self._names:
            shape, inits = (k, self.hidden_features), (self.kernel_init, self.bias_init)
            if name == "down":
                shape = self.hidden_features, k if self.out_features is None else self.out_features
                inits = self.down_kernel_init or inits[0], self.down_bias_init or inits[1]
            kernel, bias = _Linear(shape, self.use_bias, self.param_dtype, *inits, name=name)()
            kernels, biases = [*kernels, kernel], [*biases, bias]
        x, *arrays = _promoted(self, inputs, *kernels, *biases)
        options = {"activation": self.activation, "precision": self.precision, "save": self.save}
        return feed_forward(type(self).__name__, x, arrays[: len(kernels)], arrays[len(kernels) :], **options)


@named_arguments
class GatedMLP(MLP):
    """``(activation(x @ gate) * (x @ up)) @ down``, by ``cutjax.mlp``: SwiGLU, where the activation is ``jax.nn.silu``.

    The parameters are those of three ``Dense``: ``gate``, ``up`` and ``down``. Takes the arguments of ``MLP``; those of
    its ``up`` are of ``gate`` too.

    Attributes:
      activation: any elementwise function written in JAX, of the gate; ``jax.nn.silu`` by default.
      use_bias: whether the three layers have a bias; False by default.

    Example:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.GatedMLP(64)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 16)))
      >>> y.shape, sorted(variables["params"])
      ((2, 8, 16), ['down', 'gate', 'up'])
    """

    activation: Activation = jax.nn.silu
    use_bias: bool = False

    _names = ("gate", "up", "down")


@named_arguments
class MoE(nn.Module):
    """A mixture of gated experts: a router, ``cutjax.moe``, and the auxiliary losses.

    No token is dropped. The parameters are those of ``cutjax.flax.nnx.MoE``. Where the collection "losses" is mutable,
    "load_balance_loss" and "router_z_loss" are sown into it, summed over calls, to be multiplied by coefficients and
    added to the loss; where "intermediates" is, "tokens_per_expert", int32 ``[experts]``.

    Attributes:
      hidden_features: size of what lies between an expert's products.
      num_experts: the number of experts.
      k: how many of them a token is sent to.
      out_features: size of the result's last axis; that of the inputs by default.
      activation: any elementwise function written in JAX, of the gate.
      scoring: "softmax" or "sigmoid", see ``cutjax.route``.
      renormalize: whether a token's weights are divided by their sum, see ``cutjax.route``.
      num_groups: how many groups of neighbours the experts are divided into.
      groups_per_token: how many of them, the best, a token's experts are of, as in ``cutjax.flax.nnx.MoE``.
      scale: what the result is multiplied by, such as the 2.5 of DeepSeek-V3.
      use_selection_bias: whether there is a variable "selection_bias" ``[experts]`` in the collection "router_state",
        zero at first; the program around the layer changes it.
      dtype: that of the experts' computation; None infers it from inputs and parameters.
      param_dtype: that of the parameters.
      router_dtype: that of the router's computation.
      precision: of all products.
      kernel_init: initializer of ``gate_kernel`` and ``up_kernel``. It is called with their shape, of three axes.
      down_kernel_init: of ``down_kernel``; kernel_init by default.
      router_kernel_init: of the router's kernel.
      promote_dtype: as of ``flax.linen.Dense``.
      save: what is kept for the backward pass, as in ``cutjax.moe``.

    Example:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer, x = cutjax.flax.linen.MoE(32, num_experts=8, k=2), jnp.ones((2, 5, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> y, state = layer.apply(variables, x, mutable=["losses"])
      >>> y.shape, sorted(state["losses"])
      ((2, 5, 16), ['load_balance_loss', 'router_z_loss'])
    """

    hidden_features: int
    num_experts: int
    k: int = 2
    out_features: int | None = None
    activation: Activation = jax.nn.silu
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    use_selection_bias: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    router_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = _EXPERTS_INIT
    down_kernel_init: Initializer | None = None
    router_kernel_init: Initializer = _KERNEL_INIT
    promote_dtype: Callable[..., Any] = promote_dtype
    save: str = "default"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the result for inputs ``[..., tokens, k]``."""
        check_experts(self.num_experts, self.k, self.scoring, self.num_groups, self.groups_per_token)
        router = Dense(
            self.num_experts,
            use_bias=False,
            dtype=self.router_dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            kernel_init=self.router_kernel_init,
            name="router",
        )
        logits, d = router(inputs), inputs.shape[-1]
        wide = self.num_experts, d, self.hidden_features
        narrow = self.num_experts, self.hidden_features, d if self.out_features is None else self.out_features
        down_init = self.down_kernel_init or self.kernel_init
        kernels = [self.param(name, self.kernel_init, wide, self.param_dtype) for name in ("gate_kernel", "up_kernel")]
        kernels.append(self.param("down_kernel", down_init, narrow, self.param_dtype))
        bias = None
        if self.use_selection_bias:
            bias = self.variable("router_state", "selection_bias", jnp.zeros, self.num_experts, jnp.float32).value
        x, *kernels = _promoted(self, inputs, *kernels)
        sows = not self.is_initializing() and any(map(self.is_mutable_collection, ("losses", "intermediates")))
        names = "k", "activation", "scoring", "renormalize", "num_groups", "groups_per_token", "scale"
        options = {name: getattr(self, name) for name in (*names, "precision", "save")}
        y, aux = experts(x, logits, kernels, bias=bias, return_aux=sows, **options)
        for name, value in aux.items():
            collection = "losses" if name.endswith("_loss") else "intermediates"
            self.sow(collection, name, value, init_fn=lambda value=value: jnp.zeros_like(value), reduce_fn=operator.add)
        return y


def _promoted(layer: Any, *arrays: Any) -> Any:
    """Returns arrays in the dtype that the layer computes in."""
    return layer.promote_dtype(*arrays, dtype=layer.dtype)


def _axes(axes: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(axes) if isinstance(axes, Iterable) else (axes,)


def _flat(init: Initializer, flat: tuple[int, ...]) -> Callable[..., Any]:
    """Returns the initializer of a flat shape, its array reshaped, in its box of metadata if it has one."""

    def reshaped(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        value = init(key, flat, dtype)
        if isinstance(value, meta.AxisMetadata):
            return meta.replace_boxed(value, value.unbox().reshape(shape))
        return value.reshape(shape)

    return reshaped
