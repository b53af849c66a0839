"""Layers of Flax NNX by way: Flax's own with an activation after them, with cutjax's drop-ins, and those of cutjax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import cutjax

Array = jax.Array


class Layers(NamedTuple):
    """The classes of layers, each with Flax's arguments and ``activation``."""

    linear: Callable[..., Any]
    conv: Callable[..., Any]
    conv_transpose: Callable[..., Any]


class Activated:
    """An activation after a layer of Flax, before which it stands among the bases."""

    def __init__(self, *args: Any, activation: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.activation = activation

    def __call__(self, inputs: Array) -> Array:
        """Returns ``activation(layer(inputs))``."""
        return self.activated(super().__call__(inputs))  # pyright: ignore[reportAttributeAccessIssue]

    def activated(self, y: Array) -> Array:
        """Returns a layer's result with the activation after it."""
        return y if self.activation is None else self.activation(y)


class Linear(Activated, nnx.Linear):
    """``activation(inputs @ kernel + bias)``."""


class Conv(Activated, nnx.Conv):
    """``activation(conv(inputs, kernel) + bias)``."""


class ConvTranspose(Activated, nnx.ConvTranspose):
    """``activation(conv_transpose(inputs, kernel) + bias)``."""


class DropInTranspose(ConvTranspose):
    """A transposed convolution by the drop-in, for which Flax's layer has no argument; with strings as padding."""

    def __call__(self, inputs: Array) -> Array:
        """Returns ``activation(conv_transpose(inputs, kernel) + bias)``."""
        x, kernel, bias = self.promote_dtype((inputs, self.kernel[...], self.bias[...]), dtype=self.dtype)
        return self.activated(cutjax.conv_transpose(x, kernel, self.strides, self.padding) + bias)


def plain() -> Layers:
    """Returns Flax's own."""
    return Layers(Linear, Conv, ConvTranspose)


def drop_ins() -> Layers:
    """Returns Flax's own with cutjax's drop-ins."""
    return Layers(
        functools.partial(Linear, dot_general=cutjax.dot_general),
        functools.partial(Conv, conv_general_dilated=cutjax.conv_general_dilated),
        DropInTranspose,
    )


def ours() -> Layers:
    """Returns those of cutjax.flax."""
    from cutjax.flax import nnx as layers

    return Layers(layers.Linear, layers.Conv, layers.ConvTranspose)


class Maker(NamedTuple):
    """Makes layers that compute in one dtype, of square windows with Flax's padding "SAME".

    Attributes:
      layers: the classes.
      rngs: of the parameters.
      rank: the axes of an image.
      dtype: of the computation; parameters are float32.
    """

    layers: Layers
    rngs: nnx.Rngs
    rank: int = 2
    dtype: Any = jnp.bfloat16

    def linear(self, cin: int, cout: int, **how: Any) -> Any:
        """Returns a linear layer."""
        return self.layers.linear(cin, cout, dtype=self.dtype, rngs=self.rngs, **how)

    def conv(self, cin: int, cout: int, size: int, stride: int = 1, **how: Any) -> Any:
        """Returns a convolution."""
        how = {"strides": stride, "dtype": self.dtype, "rngs": self.rngs, **how}
        return self.layers.conv(cin, cout, (size,) * self.rank, **how)

    def up(self, cin: int, cout: int, size: int, stride: int, **how: Any) -> Any:
        """Returns a transposed convolution, whose result is so many times as large along each axis."""
        how = {"strides": (stride,) * self.rank, "dtype": self.dtype, "rngs": self.rngs, **how}
        return self.layers.conv_transpose(cin, cout, (size,) * self.rank, **how)

    def batch_norm(self, channels: int, scale: float = 1.0) -> nnx.BatchNorm:
        """Returns the norm of each channel over a batch, whose scale begins at a number."""
        init = nnx.initializers.constant(scale)
        return nnx.BatchNorm(channels, use_running_average=False, dtype=self.dtype, scale_init=init, rngs=self.rngs)

    def group_norm(self, channels: int, groups: int = 32) -> nnx.GroupNorm:
        """Returns the norm of groups of an image's channels."""
        return nnx.GroupNorm(channels, min(groups, channels), dtype=self.dtype, rngs=self.rngs)

    def layer_norm(self, channels: int) -> nnx.LayerNorm:
        """Returns the norm of a pixel's channels."""
        return nnx.LayerNorm(channels, epsilon=1e-6, dtype=self.dtype, rngs=self.rngs)
