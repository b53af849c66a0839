"""Conv and ConvTranspose of Flax Linen, with bias and activation in the kernel."""

from __future__ import annotations

import jax
from flax import linen as nn

from cutjax.flax.convolution import along, check_groups, convolve, convolve_transposed, masked
from cutjax.flax.linear import Activation, named_arguments, places
from cutjax.flax.linen.linear import promoted


@named_arguments
class Conv(nn.Conv):
    """``flax.linen.Conv`` with ``activation(conv(inputs, kernel) + bias)`` in one kernel.

    Takes all arguments of ``flax.linen.Conv``, and has its parameters.

    Attributes:
      activation: any elementwise function written in JAX, run in float32 before the result is rounded; or None.

    Raises:
      TypeError: if there is no such argument, with a list of those there are; when called, if the activation is no
        function.
      ValueError: when called, if the channels do not divide into groups, the inputs have too few axes, the padding is
        of another number of axes, or the mask's shape is not the kernel's.
      flax.errors.ScopeParamShapeError: when applied, if the parameters are of inputs of another size.

    Examples:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.Conv(16, (3, 3), strides=2, activation=jax.nn.silu)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))
      >>> y.shape, jax.tree.map(jnp.shape, variables)
      ((2, 4, 4, 16), {'params': {'bias': (16,), 'kernel': (3, 3, 3, 16)}})
    """

    activation: Activation | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns ``[..., *spatial, features]``, of inputs ``[..., *spatial, channels]``."""
        (last,) = places("Conv", (-1,), inputs.shape)
        channels, groups = inputs.shape[last], self.feature_group_count
        check_groups("Conv", channels, groups)
        shape = (*along(self.kernel_size, 1), channels // groups, self.features)
        kernel = masked("Conv", self.param("kernel", self.kernel_init, shape, self.param_dtype), self.mask)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel, bias = promoted(self, inputs, kernel, bias)
        make = self.conv_general_dilated_cls
        return convolve(self, x, kernel, bias, convolution=self.conv_general_dilated if make is None else make())


@named_arguments
class ConvTranspose(nn.ConvTranspose):
    """``flax.linen.ConvTranspose`` with bias and activation in the kernel.

    Takes all arguments of ``flax.linen.ConvTranspose``, and has its parameters. With the padding "CIRCULAR" bias and
    activation follow in steps of their own.

    Attributes:
      activation: as of ``Conv``.

    Raises:
      TypeError, ValueError, flax.errors.ScopeParamShapeError: as of ``Conv``.

    Examples:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.ConvTranspose(16, (2, 2), (2, 2), activation=jax.nn.relu)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))
      >>> y.shape, jax.tree.map(jnp.shape, variables)
      ((2, 16, 16, 16), {'params': {'bias': (16,), 'kernel': (2, 2, 3, 16)}})
    """

    activation: Activation | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns ``[..., *spatial, features]``, of inputs ``[..., *spatial, channels]``."""
        (last,) = places("ConvTranspose", (-1,), inputs.shape)
        channels = inputs.shape[last], self.features
        shape = (*along(self.kernel_size, 1), *(channels[::-1] if self.transpose_kernel else channels))
        kernel = masked("ConvTranspose", self.param("kernel", self.kernel_init, shape, self.param_dtype), self.mask)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel, bias = promoted(self, inputs, kernel, bias)
        return convolve_transposed(self, x, kernel, bias)
