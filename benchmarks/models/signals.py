"""Convolutional networks of signals and of volumes in flax.linen: HiFi-GAN's generator, and a 3-D U-Net."""

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
class Generator:
    """Sizes of HiFi-GAN's generator; the defaults are those of V1.

    Attributes:
      width: after the first convolution; every stage halves it.
      strides: of each stage, whose window is twice as long.
      windows: of the residual blocks of each stage, whose results are averaged.
      dilations: of the convolutions of a residual block.
      bands: of the spectrogram.
    """

    width: int = 512
    strides: tuple[int, ...] = (8, 8, 2, 2)
    windows: tuple[int, ...] = (3, 7, 11)
    dilations: tuple[int, ...] = (1, 3, 5)
    bands: int = 80


class HiFiGAN(nn.Module):
    """Spectrograms ``[batch, frames, bands]`` -> signals ``[batch, samples, 1]``."""

    sizes: Generator
    way: Way
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the signals."""
        sizes, conv = self.sizes, functools.partial(self.way.conv, dtype=self.dtype)
        leaky = functools.partial(nn.leaky_relu, negative_slope=0.1)
        width = sizes.width
        x = conv(width, (7,), name="first")(x.astype(self.dtype))
        for stage, stride in enumerate(sizes.strides):
            width //= 2
            up = self.way.conv_transpose(width, (2 * stride,), (stride,), dtype=self.dtype, name=f"up_{stage}")
            x = up(leaky(x))
            blocks = []
            for window in sizes.windows:
                y = x
                for dilation in sizes.dilations:
                    name = f"stage_{stage}_{window}_{dilation}"
                    z = conv(width, (window,), kernel_dilation=dilation, name=f"{name}_a")(leaky(y))
                    y = y + conv(width, (window,), name=f"{name}_b")(leaky(z))
                blocks.append(y)
            x = sum(blocks) / len(blocks)
        return jnp.tanh(conv(1, (7,), name="last")(nn.leaky_relu(x)))


class UNet3D(nn.Module):
    """Volumes ``[batch, x, y, z, channels]`` -> logits ``[batch, x, y, z, classes]``."""

    widths: tuple[int, ...]
    classes: int
    way: Way
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        last, kept = len(self.widths) - 1, []
        x = x.astype(self.dtype)
        for level, width in enumerate(self.widths):
            x = self._pair(x, width, f"down_{level}")
            if level < last:
                kept.append(x)
                x = nn.max_pool(x, (2, 2, 2), (2, 2, 2))
        for level, width in reversed([*enumerate(self.widths[:-1])]):
            two = (2, 2, 2)
            x = self.way.conv_transpose(width, two, two, dtype=self.dtype, name=f"up_{level}")(x)
            x = self._pair(jnp.concatenate([kept[level], x], -1), width, f"join_{level}")
        return self.way.conv(self.classes, (1, 1, 1), dtype=self.dtype, name="head")(x)

    def _pair(self, x: Array, width: int, name: str) -> Array:
        """Returns the images after two convolutions, each with a norm and a leaky ReLU."""
        for part in "ab":
            x = self.way.conv(width, (3, 3, 3), use_bias=False, dtype=self.dtype, name=f"{name}_{part}")(x)
            x = nn.GroupNorm(num_groups=8, dtype=self.dtype, name=f"{name}_{part}_norm")(x)
            x = nn.leaky_relu(x)
        return x
