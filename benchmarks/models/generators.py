"""Convolutional networks from images to images in flax.nnx: HiFi-GAN's generator, a diffusion and a 3-D U-Net."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models.layers import Maker

Array = jax.Array
leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.1)


class Voice(nnx.Module):
    """A residual block of HiFi-GAN: for each dilation two convolutions over time, a residual around each pair."""

    def __init__(self, make: Maker, width: int, size: int, dilations: Sequence[int]):
        first = [make.conv(width, width, size, kernel_dilation=d, activation=leaky) for d in dilations]
        self.first, self.second = nnx.List(first), nnx.List([make.conv(width, width, size) for _ in dilations])

    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(first(leaky(x)))
        return x


class HiFiGAN(nnx.Module):
    """Spectra ``[batch, frames, bands]`` -> samples ``[batch, 256 frames]``; the defaults are version 1."""

    def __init__(
        self,
        make: Maker,
        bands: int = 80,
        width: int = 512,
        rates: Sequence[int] = (8, 8, 2, 2),
        sizes: Sequence[int] = (3, 7, 11),
        dilations: Sequence[int] = (1, 3, 5),
    ):
        self.first = make.conv(bands, width, 7)
        widths = [width >> i for i in range(len(rates) + 1)]
        self.ups = nnx.List([make.up(widths[i], widths[i + 1], 2 * rate, rate) for i, rate in enumerate(rates)])
        voices = [[Voice(make, width, size, dilations) for size in sizes] for width in widths[1:]]
        self.voices, self.last = nnx.List(list(map(nnx.List, voices))), make.conv(widths[-1], 1, 7, activation=jnp.tanh)

    def __call__(self, x: Array) -> Array:
        """Returns the samples."""
        x = self.first(x)
        for up, voices in zip(self.ups, self.voices, strict=True):
            x = up(leaky(x))
            x = sum(voice(x) for voice in voices) / len(voices)
        return self.last(leaky(x))[..., 0]


class Residual(nnx.Module):
    """A residual block of a diffusion U-Net: norm, SiLU and 3x3 twice, the time's embedding added between."""

    def __init__(self, make: Maker, cin: int, cout: int, time: int):
        self.norms = nnx.List([make.group_norm(cin), make.group_norm(cout)])
        self.first, self.second = make.conv(cin, cout, 3), make.conv(cout, cout, 3)
        self.time = make.linear(time, cout)
        self.shortcut = nnx.data(None if cin == cout else make.conv(cin, cout, 1))

    def __call__(self, x: Array, time: Array) -> Array:
        """Returns images of other channels."""
        y = self.first(jax.nn.silu(self.norms[0](x))) + self.time(time)[:, None, None]
        y = self.second(jax.nn.silu(self.norms[1](y)))
        return y + (x if self.shortcut is None else self.shortcut(x))


class Attention(nnx.Module):
    """Attention of all pixels to all, with a norm before and a residual around it."""

    def __init__(self, make: Maker, width: int, size: int):
        self.norm, self.size = make.group_norm(width), size
        self.qkv, self.out = make.linear(width, 3 * width), make.linear(width, width)

    def __call__(self, x: Array) -> Array:
        """Returns an array like x."""
        n, h, w, c = x.shape
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(n, h * w, -1, self.size), 3, 2)
        return x + self.out(jax.nn.dot_product_attention(q, k, v).reshape(n, h, w, c))


class DiffusionUNet(nnx.Module):
    """Latents ``[batch, height, width, channels]`` and times ``[batch]`` -> the noise, an array like the latents.

    The defaults are the sizes of Stable Diffusion 1's, without attention to a text.
    """

    def __init__(
        self,
        make: Maker,
        channels: int = 4,
        width: int = 320,
        multiples: Sequence[int] = (1, 2, 4, 4),
        blocks: int = 2,
        attention: Sequence[bool] = (True, True, True, False),
        head: int = 40,
    ):
        time, self.width = 4 * width, width
        self.time = nnx.List([make.linear(width, time, activation=jax.nn.silu), make.linear(time, time)])
        self.first, widths = make.conv(channels, width, 3), [width * x for x in multiples]
        skips, cin, downs, ups = [width], width, [], []
        for i, cout in enumerate(widths):
            level = []
            for _ in range(blocks):
                level.append(nnx.List([Residual(make, cin, cout, time)]))
                if attention[i]:
                    level[-1].append(Attention(make, cout, head))
                cin = cout
                skips.append(cin)
            if i + 1 < len(widths):
                level.append(nnx.List([make.conv(cin, cin, 3, 2)]))
                skips.append(cin)
            downs.append(nnx.List(level))
        self.middle = nnx.List(
            [Residual(make, cin, cin, time), Attention(make, cin, head), Residual(make, cin, cin, time)]
        )
        for i, cout in reversed(list(enumerate(widths))):
            level = []
            for _ in range(blocks + 1):
                level.append(nnx.List([Residual(make, cin + skips.pop(), cout, time)]))
                if attention[i]:
                    level[-1].append(Attention(make, cout, head))
                cin = cout
            if i:
                level.append(nnx.List([make.conv(cin, cin, 3)]))
            ups.append(nnx.List(level))
        self.downs, self.ups = nnx.List(downs), nnx.List(ups)
        self.norm, self.last = make.group_norm(cin), make.conv(cin, channels, 3)

    def __call__(self, x: Array, times: Array) -> Array:
        """Returns the noise."""
        angles = times[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(self.width // 2) / (self.width // 2))
        time = self.time[1](self.time[0](jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)))
        time = jax.nn.silu(time)

        def applied(layers: Sequence[nnx.Module], x: Array) -> Array:
            for layer in layers:
                x = layer(x, time) if isinstance(layer, Residual) else layer(x)
            return x

        x = self.first(x)
        skips = [x]
        for level in self.downs:
            for layers in level:
                x = applied(layers, x)
                skips.append(x)
        x = applied(self.middle, x)
        for level in self.ups:
            for layers in level:
                if isinstance(layers[0], Residual):
                    x = applied(layers, jnp.concatenate([x, skips.pop()], -1))
                else:  # twice as large, by the nearest pixel
                    x = applied(layers, x.repeat(2, 1).repeat(2, 2))
        return self.last(jax.nn.silu(self.norm(x)))


class Pair(nnx.Module):
    """Two convolutions of a 3-D U-Net, each with a norm of each channel of an image and a leaky ReLU after it."""

    def __init__(self, make: Maker, cin: int, cout: int, stride: int = 1):
        self.convs = nnx.List([make.conv(cin, cout, 3, stride), make.conv(cout, cout, 3)])
        self.norms = nnx.List([make.group_norm(cout, cout) for _ in range(2)])

    def __call__(self, x: Array) -> Array:
        """Returns images of other channels."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = leaky(norm(conv(x)))
        return x


class UNet3D(nnx.Module):
    """Volumes ``[batch, depth, height, width, channels]`` -> logits ``[batch, depth, height, width, classes]``."""

    def __init__(self, make: Maker, channels: int = 1, widths: Sequence[int] = (32, 64, 128, 256), classes: int = 3):
        sizes = list(zip((channels, *widths), widths, strict=False))
        self.downs = nnx.List([Pair(make, cin, cout, 2 if i else 1) for i, (cin, cout) in enumerate(sizes)])
        back = sizes[:0:-1]
        self.ups = nnx.List([make.up(cout, cin, 2, 2) for cin, cout in back])
        self.pairs = nnx.List([Pair(make, 2 * cin, cin) for cin, _ in back])
        self.last = make.conv(widths[0], classes, 1)

    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        for up, pair, skip in zip(self.ups, self.pairs, skips[-2::-1], strict=True):
            x = pair(jnp.concatenate([up(x), skip], -1))
        return self.last(x)
