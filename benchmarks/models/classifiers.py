"""Convolutional classifiers of images in flax.nnx: ResNet-50, ConvNeXt-T and EfficientNet-B0, without dropout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models.layers import Maker

Array = jax.Array


# Of a residual branch's last norm, as it begins: many recipes have 0. At 1 rounding grows from block to block, and the
# gradients of ResNet-50 in bfloat16 are noise: on a CPU 1.2 of their norm from those in float32, at 0.2 0.3 of it.
LAST_SCALE = 0.2


class Bottleneck(nnx.Module):
    """A residual block of ResNet: 1x1, 3x3 with the stride, and 1x1 to four times the width."""

    def __init__(self, make: Maker, cin: int, width: int, stride: int):
        cout = 4 * width
        sizes = (cin, width, 1, 1), (width, width, 3, stride), (width, cout, 1, 1)
        self.convs = nnx.List([make.conv(*size, use_bias=False) for size in sizes])
        scales = 1.0, 1.0, LAST_SCALE
        self.norms = nnx.List([make.batch_norm(size[1], scale) for size, scale in zip(sizes, scales, strict=True)])
        same = stride == 1 and cin == cout
        self.shortcut = nnx.data(None if same else make.conv(cin, cout, 1, stride, use_bias=False))
        self.shortcut_norm = nnx.data(None if same else make.batch_norm(cout))

    def __call__(self, x: Array) -> Array:
        """Returns images of the width times four."""
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = jax.nn.relu(y) if i < 2 else y
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return jax.nn.relu(y + x)


class ResNet(nnx.Module):
    """Images ``[batch, height, width, 3]`` -> logits ``[batch, classes]``."""

    def __init__(self, make: Maker, width: int = 64, depths: Sequence[int] = (3, 4, 6, 3), classes: int = 1000):
        self.stem, self.norm = make.conv(3, width, 7, 2, use_bias=False), make.batch_norm(width)
        blocks, cin = [], width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                blocks.append(Bottleneck(make, cin, width << stage, 2 if stage and not i else 1))
                cin = 4 * (width << stage)
        self.blocks, self.head = nnx.List(blocks), make.linear(cin, classes)

    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        x = jax.nn.relu(self.norm(self.stem(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class ConvNeXtBlock(nnx.Module):
    """Each channel by itself in 7x7, then an MLP of each pixel, scaled by channel, and a residual around them."""

    def __init__(self, make: Maker, width: int):
        self.depthwise = make.conv(width, width, 7, feature_group_count=width)
        self.norm = make.layer_norm(width)
        self.up, self.down = make.linear(width, 4 * width, activation=jax.nn.gelu), make.linear(4 * width, width)
        self.scale = nnx.Param(jnp.full((width,), 1e-6))

    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        return x + self.scale[...].astype(x.dtype) * self.down(self.up(self.norm(self.depthwise(x))))


class ConvNeXt(nnx.Module):
    """Images ``[batch, height, width, 3]`` -> logits ``[batch, classes]``."""

    def __init__(self, make: Maker, width: int = 96, depths: Sequence[int] = (3, 3, 9, 3), classes: int = 1000):
        widths = [width << stage for stage in range(len(depths))]
        steps = [(3, width, 4), *((cin, cout, 2) for cin, cout in itertools.pairwise(widths))]
        self.steps = nnx.List([make.conv(*step, step[2], padding="VALID") for step in steps])
        self.norms = nnx.List([make.layer_norm(size) for size in (width, *widths[:-1], widths[-1])])
        stages = (
            [ConvNeXtBlock(make, width) for _ in range(depth)] for width, depth in zip(widths, depths, strict=True)
        )
        self.stages, self.head = nnx.List([nnx.List(stage) for stage in stages]), make.linear(widths[-1], classes)

    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        for i, (step, stage) in enumerate(zip(self.steps, self.stages, strict=True)):
            x = step(self.norms[i](x)) if i else self.norms[0](step(x))
            for block in stage:
                x = block(x)
        return self.head(self.norms[-1](x.mean((1, 2))))


class MBConv(nnx.Module):
    """An inverted bottleneck: channels expanded, each by itself, weighed by what is in all of the image, projected."""

    def __init__(self, make: Maker, cin: int, cout: int, expand: int, size: int, stride: int):
        wide = cin * expand
        sizes = [(cin, wide, 1, 1), (wide, wide, size, stride), (wide, cout, 1, 1)][expand == 1 :]
        groups = [wide if a == b == wide and k > 1 else 1 for a, b, k, _ in sizes]
        self.convs = nnx.List(
            [make.conv(*each, use_bias=False, feature_group_count=g) for each, g in zip(sizes, groups, strict=True)]
        )
        self.norms = nnx.List([make.batch_norm(each[1]) for each in sizes])
        self.squeeze = make.linear(wide, max(1, cin // 4), activation=jax.nn.silu)
        self.excite = make.linear(max(1, cin // 4), wide, activation=jax.nn.sigmoid)
        self.residual = stride == 1 and cin == cout

    def __call__(self, x: Array) -> Array:
        """Returns images of other channels."""
        y = x
        for conv, norm in list(zip(self.convs, self.norms, strict=True))[:-1]:
            y = jax.nn.silu(norm(conv(y)))
        y = y * self.excite(self.squeeze(y.mean((1, 2))))[:, None, None]
        y = self.norms[-1](self.convs[-1](y))
        return x + y if self.residual else y


# Expansion, channels, blocks, stride and window of each stage.
STAGES = (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5)
STAGES = *STAGES, (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)


class EfficientNet(nnx.Module):
    """Images ``[batch, height, width, 3]`` -> logits ``[batch, classes]``."""

    def __init__(
        self,
        make: Maker,
        width: int = 32,
        stages: Sequence[Sequence[int]] = STAGES,
        last: int = 1280,
        classes: int = 1000,
    ):
        blocks, cin = [], width
        for expand, cout, count, stride, size in stages:
            for i in range(count):
                blocks.append(MBConv(make, cin, cout, expand, size, 1 if i else stride))
                cin = cout
        self.blocks = nnx.List(blocks)
        self.stem, self.stem_norm = make.conv(3, width, 3, 2, use_bias=False), make.batch_norm(width)
        self.last, self.last_norm = make.conv(cin, last, 1, use_bias=False), make.batch_norm(last)
        self.head = make.linear(last, classes)

    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        x = jax.nn.silu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        x = jax.nn.silu(self.last_norm(self.last(x)))
        return self.head(x.mean((1, 2)))
