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
# What XLA takes over the roofline, as its logarithm: a sum over what is true of a convolution, by its form. Fitted to
# where XLA is fast, of 194 convolutions on an H200 (benchmarks/fit_convolutions.py): running a kernel where XLA leads
# costs a user speed, running XLA where a kernel is faster only does not bring any.
WEIGHTS: dict[str, dict[str, float]] = {
    "forward": {
        "always": -0.12,
        "launch": 0.11,
        "both": 0.79,
        "multiplies": 0.22,
        "thin": 0.36,
        "apart": 1.0,
        "spread": 0.57,
        "line": 0.091,
        "volume": 0.39,
        "depthwise_line": 2.7,
        "depthwise_taps": 0.3,
        "uneven": 0.42,
        "far": 0.29,
        "few": 0.17,
    },
    "gradient": {
        "always": -0.23,
        "launch": 0.38,
        "both": 0.34,
        "multiplies": 0.28,
        "thin": 0.1,
        "narrow": 0.33,
        "odd": 1.1,
        "strided": 0.044,
        "apart": 1.8,
        "spread": 0.0085,
        "line": 0.11,
        "depthwise_line": 2.2,
        "depthwise_taps": 0.3,
        "uneven": 0.8,
        "far": 0.49,
        "few": 0.29,
    },
    "weights": {
        "always": 0.14,
        "launch": 0.77,
        "both": 0.16,
        "multiplies": 0.04,
        "thin": 0.072,
        "narrow": 0.17,
        "odd": 0.45,
        "apart": 0.77,
        "dilated": 2.2,
        "dilated_line": 2.4,
        "volume": 0.52,
        "depthwise": 0.09,
        "depthwise_line": 2.2,
        "depthwise_taps": 0.17,
        "uneven": 0.32,
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

    def true(self, p: Problem) -> dict[str, float]:
        """Returns the facts that the model adds up: 0 or 1, or how far one holds."""
        view, device = self.view, p.device
        flop_us, byte_us = self.roofline_us(device, p.a.dtype)
        least, most = sorted((flop_us, byte_us))
        depthwise = view.groups > 1 and view.channels == 1
        dense = not depthwise
        axes = sum(size > 1 for size in view.window)
        rows, columns = (view.columns, self.n) if self.form == "weights" else (view.rows, self.n)
        tiles = math.ceil(rows / 128) * math.ceil(columns / 128) * view.groups
        reaches = [step * (size - 1) for step, size in zip(view.dilation, view.window, strict=True)]
        pads = [*zip(view.low, _high(view), strict=True)]
        dilated = any(step > 1 and size > 1 for step, size in zip(view.dilation, view.window, strict=True))
        return {
            "always": 1,
            "launch": min(1.0, 4 / most),
            "both": least / most,
            "multiplies": flop_us / (flop_us + byte_us),
            "thin": dense * _below(view.channels, 64),
            "narrow": dense * _below(self.n, 64),
            "odd": dense and (view.channels % 8 != 0 or self.n % 8 != 0),
            "strided": max(view.strides) > 1,
            "apart": view.taps > 1 and all(map(_apart, view.strides, view.window, view.grid)),
            "spread": math.log2(math.prod(view.spread)),
            "dilated": dilated,
            "dilated_line": dilated and axes == 1,
            "line": axes == 1,
            "volume": axes == 3,
            "volume_spread": axes == 3 and math.prod(view.spread) > 1,
            "groups": dense and view.groups > 1,
            "depthwise": depthwise,
            "depthwise_line": depthwise and axes == 1,
            "depthwise_taps": depthwise * math.log2(view.taps),
            "uneven": any(
                max(0, low) != high for low, high in pads
            ),  # cuDNN pads both sides alike: XLA copies the images
            # Beyond what TMA's maps of images of three axes reach cuDNN takes kernels of sm_80.
            "far": max(reaches) > 31 or max(map(max, pads)) > 16,
            "few": max(0.0, math.log2(device.sms / tiles)),
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
        us *= math.exp(max(0.0, sum(weight * true[name] for name, weight in WEIGHTS[of.form].items())))
    if p.plain:
        return us
    product, operands = p.m * p.n * p.products * p.a.dtype.itemsize, p.bytes - p.result_bytes - p.bare.bytes
    operands += p.bare.result_bytes
    if p.products == 1 and library_has(p.epilogue, of.form):
        return us + 1e6 * operands / device.bytes_per_second
    return us + 1 + 1e6 * (product + operands + p.result_bytes) / device.bytes_per_second
