"""Convolutional networks of images in flax.linen: ResNet-50, ConvNeXt-T and EfficientNet-B0, without dropout."""

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
    """Sizes of a network.

    Attributes:
      blocks: of each stage.
      widths: of each stage.
      classes: that are told apart.
    """

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    classes: int = 1000


class Normed(nn.Module):
    """A convolution, the batch's norm, and an activation."""

    way: Way
    features: int
    window: int
    strides: int = 1
    groups: int = 1
    activation: Any = None
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns images of so many features."""
        window, strides = (self.window,) * 2, (self.strides,) * 2
        padding = [((self.window - 1) // 2,) * 2] * 2
        conv = functools.partial(self.way.conv, feature_group_count=self.groups, use_bias=False, dtype=self.dtype)
        x = conv(self.features, window, strides, padding, name="conv")(x)
        x = nn.BatchNorm(use_running_average=False, dtype=self.dtype, name="norm")(x)
        return x if self.activation is None else self.activation(x)


class Bottleneck(nn.Module):
    """Three convolutions with a residual around them, of which the middle one has the strides."""

    way: Way
    width: int
    strides: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns images of four times the width."""
        normed = functools.partial(Normed, self.way)
        y = normed(self.width, 1, activation=nn.relu, name="down")(x)
        y = normed(self.width, 3, self.strides, activation=nn.relu, name="middle")(y)
        y = normed(4 * self.width, 1, name="up")(y)
        if x.shape != y.shape:
            x = normed(4 * self.width, 1, self.strides, name="skip")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images ``[batch, height, width, 3]`` -> logits ``[batch, classes]``."""

    sizes: Sizes
    way: Way
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        sizes = self.sizes
        x = Normed(self.way, sizes.widths[0], 7, 2, activation=nn.relu, name="stem")(x.astype(self.dtype))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, (blocks, width) in enumerate(zip(sizes.blocks, sizes.widths, strict=True)):
            for i in range(blocks):
                strides = 2 if stage and not i else 1
                x = Bottleneck(self.way, width, strides, name=f"stage_{stage}_{i}")(x)
        return self.way.dense(sizes.classes, dtype=self.dtype, name="head")(x.mean((1, 2)))


class ConvNeXtBlock(nn.Module):
    """A convolution of each channel by itself, a norm, an MLP, and a residual around them."""

    way: Way
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        width, dense = x.shape[-1], functools.partial(self.way.dense, dtype=self.dtype)
        y = self.way.conv(width, (7, 7), feature_group_count=width, dtype=self.dtype, name="conv")(x)
        y = nn.LayerNorm(epsilon=1e-6, dtype=self.dtype, name="norm")(y)
        y = dense(4 * width, activation=nn.gelu, name="up")(y)
        y = dense(width, name="down")(y)
        scale = self.param("scale", nn.initializers.constant(1e-6), (width,))
        return x + y * scale.astype(self.dtype)


class ConvNeXt(nn.Module):
    """Images ``[batch, height, width, 3]`` -> logits ``[batch, classes]``."""

    sizes: Sizes
    way: Way
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        norm = functools.partial(nn.LayerNorm, epsilon=1e-6, dtype=self.dtype)
        x = x.astype(self.dtype)
        for stage, (blocks, width) in enumerate(zip(self.sizes.blocks, self.sizes.widths, strict=True)):
            patch = (2, 2) if stage else (4, 4)
            x = norm(name=f"norm_{stage}")(x) if stage else x
            x = self.way.conv(width, patch, patch, "VALID", dtype=self.dtype, name=f"down_{stage}")(x)
            x = x if stage else norm(name="norm_0")(x)
            for i in range(blocks):
                x = ConvNeXtBlock(self.way, self.dtype, name=f"stage_{stage}_{i}")(x)
        x = norm(name="norm")(x.mean((1, 2)))
        return self.way.dense(self.sizes.classes, dtype=self.dtype, name="head")(x)


class Inverted(nn.Module):
    """A wide convolution of each channel by itself, whose channels are weighed, between two of single pixels."""

    way: Way
    features: int
    window: int
    strides: int
    expand: int
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns images of so many features."""
        given, wide = x.shape[-1], x.shape[-1] * self.expand
        normed, dense = functools.partial(Normed, self.way), functools.partial(self.way.dense, dtype=self.dtype)
        y = normed(wide, 1, activation=nn.silu, name="expand")(x) if self.expand > 1 else x
        y = normed(wide, self.window, self.strides, wide, nn.silu, name="depthwise")(y)
        weights = dense(max(1, given // 4), activation=nn.silu, name="squeeze")(y.mean((1, 2), keepdims=True))
        y = y * nn.sigmoid(dense(wide, name="excite")(weights))
        y = normed(self.features, 1, name="project")(y)
        return x + y if x.shape == y.shape else y


# Expansion, window, strides, blocks and width of each stage.
EFFICIENTNET_B0 = (
    (1, 3, 1, 1, 16),
    (6, 3, 2, 2, 24),
    (6, 5, 2, 2, 40),
    (6, 3, 2, 3, 80),
    (6, 5, 1, 3, 112),
    (6, 5, 2, 4, 192),
    (6, 3, 1, 1, 320),
)


class EfficientNet(nn.Module):
    """Images ``[batch, height, width, 3]`` -> logits ``[batch, classes]``."""

    stages: tuple[tuple[int, ...], ...]
    first: int
    last: int
    classes: int
    way: Way
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        x = Normed(self.way, self.first, 3, 2, activation=nn.silu, name="stem")(x.astype(self.dtype))
        for stage, (expand, window, strides, blocks, width) in enumerate(self.stages):
            for i in range(blocks):
                of = self.way, width, window, 1 if i else strides, expand
                x = Inverted(*of, name=f"stage_{stage}_{i}")(x)
        x = Normed(self.way, self.last, 1, activation=nn.silu, name="top")(x)
        return self.way.dense(self.classes, dtype=self.dtype, name="head")(x.mean((1, 2)))
