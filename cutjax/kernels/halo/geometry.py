"""Steps of a convolution of stride 1, and the boxes of pixels that they are computed of."""

from __future__ import annotations

import dataclasses
import functools
import math

from cutjax.kernels.halo.config import Config
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.problem import Problem

SPANS = (128, 64, 32)  # bytes of a pixel in shared memory
BOX = 256  # pixels of a TMA box along an axis


def view_of(problem: Problem) -> Im2col:
    """Returns the windows of a problem that has such."""
    assert isinstance(problem.a.view, Im2col)
    return problem.a.view


def taps_of(problem: Problem) -> Taps:
    """Returns the taps of its weights, in order where nothing else is said."""
    view, b = view_of(problem), problem.bs[0]
    axes = len(view.window)
    in_order = Taps(view.window, view.window, (0,) * axes, (1,) * axes, view.groups)
    return b.view if isinstance(b.view, Taps) else in_order


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The steps of a config, of one problem. Axes are counted from the innermost one on.

    Attributes:
      problem, config: which.
    """

    problem: Problem
    config: Config

    @functools.cached_property
    def view(self) -> Im2col:
        """The windows."""
        return view_of(self.problem)

    @property
    def axes(self) -> int:
        """Axes of an image."""
        return len(self.view.window)

    @functools.cached_property
    def chunk(self) -> int:
        """Channels of a piece: as many as make the fewest bytes."""
        size = self.problem.a.bytes(1)
        return min((span // size for span in SPANS), key=lambda length: -(-self.view.channels // length) * length)

    @property
    def pieces(self) -> int:
        """Pieces of a pixel's channels."""
        return -(-self.view.channels // self.chunk)

    @property
    def span(self) -> int:
        """Bytes of a pixel's piece."""
        return self.chunk * self.problem.a.bytes(1)

    @property
    def n_chunk(self) -> int:
        """Columns of a row of weights in shared memory, where they lie along columns."""
        return next(chunk for chunk in (64, 32, 16, 8) if self.config.bn % chunk == 0)

    @property
    def group_axis(self) -> int:
        """The axis along which the groups of 8 pixels of a step lie; that after the last is of images."""
        return {"row": 0, "grid": 1, "images": self.axes}[self.config.along]

    @property
    def stacked(self) -> int:
        """Taps along the outermost axis that are columns of one wgmma."""
        return self.view.window[0] if self.axes > 1 else 1

    @property
    def step(self) -> int:
        """Pixels from a step along the outermost axis to the next."""
        return self.view.dilation[0] if self.axes > 1 else 64

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Pixels of the result in a step along each axis, and images."""
        sizes = [8, *[1] * self.axes]
        sizes[self.group_axis] *= 8
        return tuple(sizes)

    @functools.cached_property
    def box(self) -> tuple[int, ...]:
        """Pixels of the image that a step needs along each axis, and images."""
        along = zip(self.sizes, self.taps, self.view.dilation[::-1], strict=False)
        return (*(size + (taps - 1) * dilation for size, taps, dilation in along), self.sizes[-1])

    @property
    def taps(self) -> tuple[int, ...]:
        """Taps along each axis, those that are stacked being one."""
        taps = self.view.window[::-1]
        return (*taps[:-1], taps[-1] // self.stacked)

    @property
    def pitches(self) -> list[int]:
        """Bytes of a box from pixel to pixel along each axis, and from image to image."""
        return [self.span * math.prod(self.box[:axis]) for axis in range(self.axes + 1)]

    @property
    def group_bytes(self) -> int:
        """Bytes from a group of 8 pixels to the next."""
        return self.pitches[self.group_axis] * (8 if self.group_axis == 0 else 1)

    @property
    def box_bytes(self) -> int:
        """Bytes that are loaded for a step and a piece."""
        return self.span * math.prod(self.box)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a box: a swizzle's pattern begins at multiples of 1024."""
        return -(-self.box_bytes // 1024) * 1024

    @property
    def columns(self) -> int:
        """Blocks beside each other."""
        return -(-self.problem.n // self.config.bn)

    @functools.cached_property
    def tiles(self) -> tuple[int, ...]:
        """Tiles along each axis, runs along the outermost."""
        tiles = [-(-grid // size) for grid, size in zip(self.view.grid[::-1], self.sizes, strict=False)]
        tiles[-1] = -(-self.view.grid[0] // (self.step * self.config.steps))
        return tuple(tiles)

    @property
    def apart(self) -> int:
        """Runs beside each other that take all pixels along the outermost axis."""
        return 1 if self.axes == 1 else self.step

    @property
    def runs(self) -> int:
        """Runs of all images, of the same columns."""
        return math.prod(self.tiles) * self.apart * -(-self.view.images // self.sizes[-1])

    @property
    def weight_bytes(self) -> int:
        """Shared memory of the weights of a block's columns."""
        size = self.view.taps * self.pieces * self.config.bn * self.span
        return -(-size // 1024) * 1024
