"""Conv and ConvTranspose of Flax NNX, with bias and activation in the kernel."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from cutjax.flax.convolution import check_groups, convolve, convolve_transposed, masked
from cutjax.flax.linear import Activation, check_activation, named_arguments
from cutjax.flax.nnx.linear import value


@named_arguments
class Conv(nnx.Conv):
    """``flax.nnx.Conv`` with ``activation(conv(inputs, kernel) + bias)`` in one kernel.

    Takes all arguments of ``flax.nnx.Conv``, and has its parameters.

    Args:
      activation: any elementwise function written in JAX, run in float32 before the result is rounded; or None.

    Raises:
      TypeError: if there is no such argument, with a list of those there are, or the activation is no function.
      ValueError: if the channels do not divide into groups; when called, if the inputs have other channels or too few
        axes, the padding is of another number of axes, or the mask's shape is not the kernel's.

    Examples:
      >>> import cutjax.flax.nnx, jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = cutjax.flax.nnx.Conv(3, 16, (3, 3), strides=2, activation=jax.nn.silu, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 8, 3))).shape
      (2, 4, 4, 16)
    """

    def __init__(self, *args: Any, activation: Activation | None = None, **kwargs: Any):
        check_activation("Conv", activation)
        super().__init__(*args, **kwargs)
        check_groups("Conv", self.in_features, self.feature_group_count)
        self.activation = activation

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns ``[..., *spatial, out_features]``, of inputs ``[..., *spatial, in_features]``."""
        kernel = masked("Conv", self.kernel[...], self.mask)
        x, kernel, bias = self.promote_dtype((inputs, kernel, value(self.bias)), dtype=self.dtype)
        return convolve(self, x, kernel, bias, convolution=self.conv_general_dilated, out_sharding=out_sharding)


@named_arguments
class ConvTranspose(nnx.ConvTranspose):
    """``flax.nnx.ConvTranspose`` with bias and activation in the kernel.

    Takes all arguments of ``flax.nnx.ConvTranspose``, and has its parameters. With the padding "CIRCULAR" bias and
    activation follow in steps of their own.

    Args:
      activation: as of ``Conv``.

    Raises:
      TypeError, ValueError: as of ``Conv``.

    Examples:
      >>> import cutjax.flax.nnx, jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = cutjax.flax.nnx.ConvTranspose(3, 16, (2, 2), (2, 2), activation=jax.nn.relu, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 8, 3))).shape
      (2, 16, 16, 16)
    """

    def __init__(self, *args: Any, activation: Activation | None = None, **kwargs: Any):
        check_activation("ConvTranspose", activation)
        super().__init__(*args, **kwargs)
        self.activation = activation

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns ``[..., *spatial, out_features]``, of inputs ``[..., *spatial, in_features]``."""
        kernel = masked("ConvTranspose", self.kernel[...], self.mask)
        x, kernel, bias = self.promote_dtype((inputs, kernel, value(self.bias)), dtype=self.dtype)
        return convolve_transposed(self, x, kernel, bias)
