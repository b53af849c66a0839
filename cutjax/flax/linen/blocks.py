"""Blocks of several products for Flax Linen: MLP, GatedMLP and MoE."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike

from cutjax.flax.experts import check_experts, experts
from cutjax.flax.linear import Activation, feed_forward, named_arguments, places
from cutjax.flax.linen.linear import Dense, promoted

_KERNEL_INIT = nn.initializers.lecun_normal()
_EXPERTS_INIT = nn.initializers.lecun_normal(batch_axis=(0,))  # of [experts, k, n]: the variance is that of one expert


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

    Raises:
      TypeError: if there is no such argument, with a list of those there are; when called, if the activation is no
        function.
      ValueError: when called, if the inputs are a scalar, or ``save`` or ``precision`` is unknown.
      flax.errors.ScopeParamShapeError: when applied, if the parameters are of inputs of another size.

    Examples:
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
        x, *arrays = promoted(self, inputs, *kernels, *biases)
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

    Raises:
      TypeError, ValueError, flax.errors.ScopeParamShapeError: as of ``MLP``.

    Examples:
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

    Raises:
      TypeError: if there is no such argument, with a list of those there are; when called, if the activation is no
        function.
      ValueError: when called, if the numbers of experts, of groups and k contradict each other, the scoring is unknown,
        or the inputs have no axis of tokens.
      flax.errors.ScopeParamShapeError: when applied, if the parameters are of inputs of another size.

    Examples:
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
        x, *kernels = promoted(self, inputs, *kernels)
        sows = not self.is_initializing() and any(map(self.is_mutable_collection, ("losses", "intermediates")))
        names = "k", "activation", "scoring", "renormalize", "num_groups", "groups_per_token", "scale"
        options = {name: getattr(self, name) for name in (*names, "precision", "save")}
        y, aux = experts(x, logits, kernels, bias=bias, return_aux=sows, **options)
        for name, value in aux.items():
            collection = "losses" if name.endswith("_loss") else "intermediates"
            self.sow(collection, name, value, init_fn=lambda value=value: jnp.zeros_like(value), reduce_fn=operator.add)
        return y
