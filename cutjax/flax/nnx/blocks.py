"""Blocks of several products for Flax NNX: MLP, GatedMLP and MoE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes, initializers
from flax.typing import Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from cutjax.flax.experts import check_experts, experts
from cutjax.flax.linear import Activation, check_activation, feed_forward, named_arguments
from cutjax.flax.nnx.linear import Linear, promoted, value

_KERNEL_INIT = initializers.lecun_normal()
_EXPERTS_INIT = initializers.lecun_normal(batch_axis=(0,))  # of [experts, k, n]: the variance is that of one expert
_BIAS_INIT = initializers.zeros_init()
_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


@named_arguments
class MLP(nnx.Module):
    """Two linear layers: ``activation(x @ up + bias) @ down + bias``, by ``cutjax.mlp``.

    The parameters are those of two ``Linear``, ``up`` and ``down``, so a checkpoint of a block that has two of
    Flax's under these names loads.

    Args:
      in_features: size of the inputs' last axis.
      hidden_features: size of what lies between the layers.
      out_features: size of the result's last axis; in_features by default.
      activation: any elementwise function written in JAX.
      use_bias: whether both layers have a bias.
      dtype: that of the computation; None infers it from inputs and parameters, as Flax does.
      param_dtype: that of the parameters.
      precision: of both products.
      kernel_init: initializer of the kernel of ``up``.
      bias_init: of its bias.
      down_kernel_init: of the kernel of ``down``; kernel_init by default.
      down_bias_init: of its bias; bias_init by default.
      promote_dtype: as of ``flax.nnx.Linear``.
      save: what is kept for the backward pass, as in ``cutjax.mlp``.
      rngs: the stream "params" makes the parameters.
      kernel_metadata: of the kernel of ``up``, such as ``{"out_sharding": (None, "model")}``.
      bias_metadata: of its bias.
      down_kernel_metadata: of the kernel of ``down``.
      down_bias_metadata: of its bias.

    Raises:
      TypeError: if there is no such argument, with a list of those there are, or the activation is no function.
      ValueError: when called, if the last axis of the inputs is not in_features, or ``save`` or ``precision`` is
        unknown.

    Examples:
      >>> import cutjax.flax.nnx, jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = cutjax.flax.nnx.MLP(16, 64, activation=jax.nn.relu, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 16))).shape
      (2, 8, 16)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = jax.nn.gelu,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = _KERNEL_INIT,
        bias_init: Initializer = _BIAS_INIT,
        down_kernel_init: Initializer | None = None,
        down_bias_init: Initializer | None = None,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        save: str = "default",
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        down_kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        down_bias_metadata: Mapping[str, Any] = _NO_METADATA,
    ):
        check_activation(type(self).__name__, activation)
        common = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "precision": precision}
        common |= {"promote_dtype": promote_dtype, "rngs": rngs}
        up = {"kernel_init": kernel_init, "bias_init": bias_init}
        up |= {"kernel_metadata": kernel_metadata, "bias_metadata": bias_metadata}
        down = {"kernel_init": down_kernel_init or kernel_init, "bias_init": down_bias_init or bias_init}
        down |= {"kernel_metadata": down_kernel_metadata, "bias_metadata": down_bias_metadata}
        if self._gated:
            self.gate = Linear(in_features, hidden_features, **up, **common)
        self.up = Linear(in_features, hidden_features, **up, **common)
        self.down = Linear(hidden_features, in_features if out_features is None else out_features, **down, **common)
        self.activation = activation
        self.dtype = dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.save = save

    _gated = False

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the result for inputs ``[..., in_features]``."""
        layers = (self.gate, self.up, self.down) if self._gated else (self.up, self.down)
        found = (inputs, *(x.kernel[...] for x in layers), *(value(x.bias) for x in layers))
        x, *arrays = promoted(self, *found)
        options = {"activation": self.activation, "precision": self.precision, "save": self.save}
        return feed_forward(type(self).__name__, x, arrays[: len(layers)], arrays[len(layers) :], **options)


@named_arguments
class GatedMLP(MLP):
    """``(activation(x @ gate) * (x @ up)) @ down``, by ``cutjax.mlp``: SwiGLU, where the activation is ``jax.nn.silu``.

    The parameters are those of three ``Linear``: ``gate``, ``up`` and ``down``. Takes the arguments of ``MLP``; those
    of its ``up`` are of ``gate`` too.

    Args:
      activation: any elementwise function written in JAX, of the gate; ``jax.nn.silu`` by default.
      use_bias: whether the three layers have a bias; False by default.

    Raises:
      TypeError, ValueError: as of ``MLP``.

    Examples:
      >>> import cutjax.flax.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = cutjax.flax.nnx.GatedMLP(16, 64, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 16))).shape
      (2, 8, 16)
    """

    _gated = True

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = jax.nn.silu,
        use_bias: bool = False,
        **kwargs: Any,
    ):
        super().__init__(in_features, hidden_features, out_features, activation=activation, use_bias=use_bias, **kwargs)


class SelectionBias(nnx.Variable):
    """The bias of ``MoE`` that chooses experts and does not weigh them: a state, not a parameter.

    Examples:
      >>> import cutjax.flax.nnx
      >>> from flax import nnx
      >>> layer = cutjax.flax.nnx.MoE(16, 32, num_experts=4, use_selection_bias=True, rngs=nnx.Rngs(0))
      >>> layer.selection_bias[...] += 0.5
      >>> nnx.state(layer, cutjax.flax.nnx.SelectionBias)["selection_bias"][...].tolist()
      [0.5, 0.5, 0.5, 0.5]
    """


@named_arguments
class MoE(nnx.Module):
    """A mixture of gated experts: a router, ``cutjax.moe``, and the auxiliary losses.

    No token is dropped. The parameters are ``router.kernel`` ``[in_features, experts]``, ``gate_kernel`` and
    ``up_kernel`` ``[experts, in_features, hidden_features]`` and ``down_kernel`` ``[experts, hidden_features,
    out_features]``.

    Args:
      in_features: size of the inputs' last axis.
      hidden_features: size of what lies between an expert's products.
      num_experts: the number of experts.
      k: how many of them a token is sent to.
      out_features: size of the result's last axis; in_features by default.
      activation: any elementwise function written in JAX, of the gate.
      scoring: "softmax" or "sigmoid", see ``cutjax.route``.
      renormalize: whether a token's weights are divided by their sum, see ``cutjax.route``.
      num_groups: how many groups of neighbours the experts are divided into.
      groups_per_token: how many of them, the best, a token's experts are of. A group's score is that of its best
        expert, with the scoring "sigmoid" the sum of its two best.
      scale: what the result is multiplied by, such as the 2.5 of DeepSeek-V3.
      use_selection_bias: whether there is a ``selection_bias`` ``[experts]``, a ``SelectionBias``, zero at first; the
        program around the layer changes it.
      dtype: that of the experts' computation; None infers it from inputs and parameters.
      param_dtype: that of the parameters.
      router_dtype: that of the router's computation.
      precision: of all products.
      kernel_init: initializer of ``gate_kernel`` and ``up_kernel``. It is called with their shape, of three axes.
      down_kernel_init: of ``down_kernel``; kernel_init by default.
      router_kernel_init: of the router's kernel.
      promote_dtype: as of ``flax.nnx.Linear``.
      save: what is kept for the backward pass, as in ``cutjax.moe``.
      rngs: the stream "params" makes the parameters.
      kernel_metadata: of ``gate_kernel`` and ``up_kernel``, such as ``{"out_sharding": ("expert", None, None)}``.
      down_kernel_metadata: of ``down_kernel``.
      router_kernel_metadata: of the router's kernel.

    Raises:
      TypeError: if there is no such argument, with a list of those there are, or the activation is no function.
      ValueError: if the numbers of experts, of groups and k contradict each other, or the scoring is unknown; when
        called, if the last axis of the inputs is not in_features, or they have no axis of tokens.

    Examples:
      >>> import cutjax.flax.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = cutjax.flax.nnx.MoE(16, 32, num_experts=8, k=2, rngs=nnx.Rngs(0))
      >>> y, aux = layer(jnp.ones((2, 5, 16)), return_aux=True)
      >>> y.shape, sorted(aux)
      ((2, 5, 16), ['load_balance_loss', 'router_z_loss', 'tokens_per_expert'])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        k: int = 2,
        out_features: int | None = None,
        *,
        activation: Activation = jax.nn.silu,
        scoring: str = "softmax",
        renormalize: bool = True,
        num_groups: int = 1,
        groups_per_token: int = 1,
        scale: float = 1.0,
        use_selection_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        router_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = _EXPERTS_INIT,
        down_kernel_init: Initializer | None = None,
        router_kernel_init: Initializer = _KERNEL_INIT,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        save: str = "default",
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        down_kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        router_kernel_metadata: Mapping[str, Any] = _NO_METADATA,
    ):
        check_activation("MoE", activation)
        check_experts(num_experts, k, scoring, num_groups, groups_per_token)
        out_features = in_features if out_features is None else out_features
        self.router = Linear(
            in_features,
            num_experts,
            use_bias=False,
            dtype=router_dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=router_kernel_init,
            kernel_metadata=router_kernel_metadata,
            rngs=rngs,
        )
        wide = num_experts, in_features, hidden_features
        narrow = num_experts, hidden_features, out_features
        down_init = down_kernel_init or kernel_init
        self.gate_kernel = nnx.Param(kernel_init(rngs.params(), wide, param_dtype), **kernel_metadata)
        self.up_kernel = nnx.Param(kernel_init(rngs.params(), wide, param_dtype), **kernel_metadata)
        self.down_kernel = nnx.Param(down_init(rngs.params(), narrow, param_dtype), **down_kernel_metadata)
        bias = SelectionBias(jnp.zeros(num_experts, jnp.float32)) if use_selection_bias else None
        self.selection_bias = nnx.data(bias)
        self.k = k
        self.activation = activation
        self.scoring = scoring
        self.renormalize = renormalize
        self.num_groups = num_groups
        self.groups_per_token = groups_per_token
        self.scale = scale
        self.dtype = dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.save = save

    def __call__(self, inputs: jax.Array, *, return_aux: bool = False) -> Any:
        """Returns the result for inputs ``[..., tokens, in_features]``.

        With ``return_aux`` also a dict: "load_balance_loss" and "router_z_loss", to be multiplied by coefficients and
        added to the loss, and "tokens_per_expert", int32 ``[experts]``.
        """
        kernels = self.gate_kernel[...], self.up_kernel[...], self.down_kernel[...]
        x, *kernels = promoted(self, inputs, *kernels)
        names = "k", "activation", "scoring", "renormalize", "num_groups", "groups_per_token", "scale"
        options = {name: getattr(self, name) for name in (*names, "precision", "save")}
        bias = value(self.selection_bias)
        y, aux = experts(x, self.router(inputs), kernels, bias=bias, return_aux=return_aux, **options)
        return (y, aux) if return_aux else y
