"""The predicted time of XLA's convolutions, which are cuDNN's: the roofline, times what is true of their geometry."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from cutjax.kernels.device import Device
from cutjax.kernels.operand import Im2col
from cutjax.kernels.problem import Problem
from cutjax.kernels.xla_tails import library_has
from cutjax.runtime.architectures import number

LAUNCH_US = 2.0
LAUNCHES_US = 4.0  # of a convolution, with the transposed weights
DEPTHWISE_FLOPS = 12e12  # a second, of the kernels for groups of one channel
# What XLA takes over the time of its steps, as a logarithm: a sum over what is true of a convolution, by its form.
# Fitted to where XLA is fast, of 560 convolutions on an H200 (benchmarks/fit_convolutions.py): running a kernel where
# XLA leads costs a user speed, running XLA where a kernel is faster only does not bring any.
WEIGHTS: dict[str, dict[str, float]] = {
    "forward": {
        "always": -0.302,
        "launch": 0.222,
        "both": 0.228,
        "multiplies": 0.395,
        "waves": 0.377,
        "thin": 0.147,
        "narrow": 0.038,
        "odd": 0.492,
        "apart": 0.199,
        "dilated_line": 0.0538,
        "dilated_plane": 0.132,
        "depthwise_line": 2.79,
        "uneven": 0.093,
        "far": 0.398,
        "few": 0.0729,
        "padded": 0.507,
    },
    "gradient": {
        "always": -0.3,
        "launch": 0.242,
        "both": 0.343,
        "multiplies": 0.31,
        "waves": 0.526,
        "thin": 0.126,
        "narrow": 0.0436,
        "odd": 0.176,
        "apart": 0.09,
        "dilated_line": 0.075,
        "dilated_plane": 0.144,
        "spread": 0.37,
        "depthwise_line": 2.53,
        "uneven": 0.32,
        "far": 0.501,
        "few": 0.0863,
        "padded": 0.792,
    },
    "weights": {
        "always": -0.394,
        "launch": 0.401,
        "both": 0.316,
        "multiplies": 0.471,
        "waves": 0.713,
        "thin": 0.14,
        "narrow": 0.0731,
        "odd": 0.163,
        "apart": 0.0643,
        "dilated_line": 3.67,
        "dilated_plane": 1.77,
        "depthwise_line": 2.48,
        "depthwise_plane": 0.15,
        "depthwise_taps": -0.17,
        "depthwise_small": 0.08,
        "uneven": 0.0496,
        "far": 0.393,
        "few": 0.0245,
        "padded": 0.325,
    },
}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A convolution as cuDNN sees it.

    Attributes:
      form: "forward"; "gradient" of the images, whose weights are read transposed; "weights", their gradient.
      view: the windows.
      n: columns of a group.
      flops: operations, those of padding too, without those of zeros between the pixels of spread images.
      bytes: of each array once.
    """

    form: str
    view: Im2col
    n: int
    flops: float
    bytes: int

    @classmethod
    def of(cls, p: Problem) -> Geometry:
        """Returns that of a problem whose a has a view of windows."""
        view = p.a.view
        assert isinstance(view, Im2col)
        form = "weights" if p.a.contiguous == "mn" else "gradient" if p.bs[0].contiguous == "k" else "forward"
        flops = 2 * p.m * p.n * p.k * p.batch_size / math.prod(view.spread)
        elements = (view.elements + (view.columns + view.rows) * p.n) * p.batch_size
        return cls(form, view, p.n // view.groups, flops, elements * p.a.dtype.itemsize)

    def roofline_us(self, device: Device, dtype: np.dtype) -> tuple[float, float]:
        """Returns the times of the operations, and of the bytes, at the device's rates."""
        return 1e6 * self.flops / device.peak(dtype), 1e6 * self.bytes / device.bytes_per_second

    def steps_us(self, device: Device, dtype: np.dtype) -> float:
        """Returns the time of all that XLA does, as its programs show it: what it multiplies, and each pass it makes.

        Tiles multiply zeros for channels that they have and a convolution has not, and forward those between pixels.
        The weights are transposed beforehand, or their gradient afterwards; images that are padded unevenly or spread
        are written so; those of three axes are transposed to channels first and back.
        """
        view, size = self.view, dtype.itemsize
        flop_us, byte_us = self.roofline_us(device, dtype)
        images, weights = view.elements * size, view.columns * view.groups * self.n * size
        result = self.bytes - images - weights
        copied = 2 * weights
        spread = math.prod(view.spread)
        if self.depthwise:
            flop_us *= spread * device.peak(dtype) / DEPTHWISE_FLOPS
        else:
            flop_us *= self.wasted * (spread if self.form == "forward" else 1)
        if self.uneven and self.form == "gradient" and spread > 1:
            copied += 2 * result  # cut out of a larger one
        elif self.uneven or (spread > 1 and (self.form == "forward" or self.depthwise)):
            along = zip(view.image, view.spread, view.low, _high(view), strict=True)
            pixels = math.prod((extent - 1) * step + 1 + max(0, low) + high for extent, step, low, high in along)
            copied += 2 * view.images * pixels * view.channels * view.groups * size
        if len(view.window) == 3:
            copied += 4 * (images + result)
        if self.few_colours:
            copied += 2 * images * 8 // self.colours
        copy_us = 1e6 * copied / device.bytes_per_second
        return LAUNCHES_US + copy_us + (flop_us + byte_us if self.depthwise else max(flop_us, byte_us))

    @property
    def depthwise(self) -> bool:
        """True if each channel is a group."""
        return self.view.groups > 1 and self.view.channels == 1

    @property
    def wasted(self) -> float:
        """Flops of tiles over those of the convolution."""
        view = self.view
        if view.groups > 1:
            return max(1.0, 64 / self.n)
        channels = self.colours if self.few_colours else view.channels
        tile = 8 if channels < 8 else 64 if self.form == "weights" else 32
        return math.ceil(self.n / 64) * 64 / self.n * math.ceil(channels / tile) * tile / channels

    def _idle(self, rows: int, sms: int) -> float:
        """Returns the time of whole waves of tiles over that of their number, where fewer than SMs are parts of k.

        Of the better of two tiles, of 128 and of 256 rows by up to 128 columns, and over that of tiles of 64 columns.
        """
        halves = math.ceil(self.n / 64)
        columns, found = math.ceil(halves / 2) if halves > 1 else 1, math.inf
        for size in (128, 256):
            tiles = math.ceil(rows / size) * columns * self.view.groups
            done = tiles * max(1, sms // tiles)
            found = min(found, math.ceil(done / sms) * sms / done)
        return found * columns * min(2, halves) / halves

    @property
    def colours(self) -> int:
        """Channels of a pixel: patches have those of a row of them, square ones of as many as there are rows."""
        view = self.view
        rows = view.window[-2] if len(view.window) > 1 and view.window[-1] == 1 else 1
        return view.channels // rows if view.channels % rows == 0 else view.channels

    @property
    def few_colours(self) -> bool:
        """True if windows are patches of pixels of few channels."""
        return not self.depthwise and self.colours < 8 and self.colours < self.view.channels

    @property
    def uneven(self) -> bool:
        """True if an axis is not padded alike at both ends: cuDNN pads so, XLA copies the images.

        What the last stride leaves of an image counts as padding of either kind.
        """
        view = self.view
        if self.form == "gradient" and max(view.spread) > 1:
            left = zip(_high(view), view.low, view.spread, strict=True)
        else:
            left = zip(view.low, _high(view), view.strides, strict=True)
        return any(not 0 <= max(0, one) - max(0, other) < step for one, other, step in left)

    def true(self, p: Problem) -> dict[str, float]:
        """Returns the facts that the model adds up: 0 or 1, or how far one holds."""
        view, device = self.view, p.device
        flop_us, byte_us = self.roofline_us(device, p.a.dtype)
        least, most = sorted((flop_us, byte_us))
        depthwise = self.depthwise
        dense = not depthwise
        axes = sum(size > 1 for size in view.window)
        rows, columns = (view.columns, self.n) if self.form == "weights" else (view.rows, self.n)
        tiles = math.ceil(rows / 128) * math.ceil(columns / 128) * view.groups
        reaches = [step * (size - 1) for step, size in zip(view.dilation, view.window, strict=True)]
        pads = [*zip(view.low, _high(view), strict=True)]
        dilated = any(step > 1 and size > 1 for step, size in zip(view.dilation, view.window, strict=True))
        multiplies = flop_us / (flop_us + byte_us)
        return {
            "always": 1,
            "launch": (launch := min(1.0, 4 / most)),
            "both": least / most,
            "multiplies": multiplies,
            "waves": dense * multiplies * math.log(self._idle(rows, device.sms)),
            "thin": dense * _below(view.channels, 128),
            "narrow": dense * _below(self.n, 128),
            "odd": dense and (view.channels % 8 != 0 or self.n % 8 != 0),
            "apart": view.taps > 1 and all(map(_apart, view.strides, view.window, view.grid)),
            "dilated_line": dilated and axes == 1,
            "dilated_plane": dilated and axes > 1,
            "spread": self.form == "gradient" and math.prod(view.spread) > 1 and not self.uneven,
            "depthwise_line": depthwise and axes == 1,
            "depthwise_plane": depthwise and axes > 1,
            "depthwise_taps": depthwise and axes > 1 and math.log2(view.taps / 9),
            "depthwise_small": depthwise and axes > 1 and _below(view.image[-1], 56),
            "uneven": self.uneven,
            # Beyond what TMA's maps of images of three axes reach cuDNN takes kernels of sm_80.
            "far": max(reaches) > 31 or max(map(max, pads)) > 16,
            "few": max(0.0, math.log2(device.sms / tiles)),
            # Pixels are padded to 8 channels by a pass of cuDNN's own, which is slow.
            "padded": (1 - launch) * (dense and view.groups == 1 and view.channels < 8 and not self.few_colours),
        }


def _high(view: Im2col) -> list[int]:
    """Returns the elements of zero after each axis, as the last window has them."""
    last = [step * (size - 1) for step, size in zip(view.strides, view.grid, strict=True)]
    reaches = [step * (size - 1) for step, size in zip(view.dilation, view.window, strict=True)]
    sizes = [step * (size - 1) for step, size in zip(view.spread, view.image, strict=True)]
    pads = zip(last, reaches, view.low, sizes, strict=True)
    return [max(0, at + reach - low - size) for at, reach, low, size in pads]


def _apart(stride: int, window: int, grid: int) -> bool:
    """True if windows share no element along an axis."""
    return stride >= window or grid == 1


def _below(size: int, of: int) -> float:
    return max(0.0, math.log2(of / size))


@functools.lru_cache(maxsize=4096)
def time_us(p: Problem) -> float:
    """Returns the time that XLA may take for a convolution, and for a pass over its result where an epilogue follows.

    It was measured in 16 bits on an H200. Elsewhere, and in other dtypes, XLA is taken to reach the roofline.
    """
    device, of = p.device, Geometry.of(p)
    us = LAUNCH_US + max(of.roofline_us(device, p.a.dtype))
    if p.a.bits == 16 and number(device.arch) == 90:
        true = of.true(p)
        over = sum(weight * true[name] for name, weight in WEIGHTS[of.form].items())
        us = max(us, of.steps_us(device, p.a.dtype) * math.exp(over))
    if p.plain:
        return us
    product, operands = p.m * p.n * p.products * p.a.dtype.itemsize, p.bytes - p.result_bytes - p.bare.bytes
    operands += p.bare.result_bytes
    if p.products == 1 and library_has(p.epilogue, of.form):
        return us + 1e6 * operands / device.bytes_per_second
    return us + 1 + 1e6 * (product + operands + p.result_bytes) / device.bytes_per_second
