"""Steps of a convolution, and the boxes of pixels that they are computed of."""

from __future__ import annotations

import dataclasses
import functools
import math

from cutjax.kernels.halo.config import Config
from cutjax.kernels.halo.operands import PLACE, ROW, packing_of, taken
from cutjax.kernels.operand import Im2col
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.packed import Packing, padded_to

SPANS = (128, 64, 32)  # bytes of a pixel in shared memory
BOX = 256  # pixels of a TMA box along an axis


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The steps of a config, of one problem. Axes are counted from the innermost one on.

    A row of a box is a pixel's piece of channels. Of packed windows, those of few channels, it is a row of memory, of
    which a window begins every 16 bytes: those of neighbours share the rest of theirs.

    Attributes:
      problem, config: which.
    """

    problem: Problem
    config: Config

    @functools.cached_property
    def view(self) -> Im2col:
        """The windows as they are multiplied."""
        return taken(self.problem)

    @property
    def packing(self) -> Packing | None:
        """The packing of windows of few channels."""
        return packing_of(self.problem)

    @property
    def of_columns(self) -> bool:
        """True if weights lie along their columns."""
        return self.packing is not None or self.problem.bs[0].contiguous == "mn"

    @property
    def axes(self) -> int:
        """Axes of an image."""
        return len(self.view.window)

    @functools.cached_property
    def chunk(self) -> int:
        """Channels of a piece: as many as make the fewest bytes."""
        size, channels = self.problem.a.bytes(1), self.view.channels
        if self.packing:
            return padded_to(channels, 32 // size)
        lengths = (span // size for span in SPANS if self.view.groups == 1 or channels * size % span == 0)
        return min(lengths, key=lambda length: padded_to(channels, length))

    @property
    def pieces(self) -> int:
        """Pieces of a pixel's channels."""
        return -(-self.view.channels // self.chunk)

    @property
    def span(self) -> int:
        """Bytes from a window to the next one along the innermost axis."""
        return PLACE if self.packing else self.chunk * self.problem.a.bytes(1)

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
        return self.view.window[0] if self.axes > 1 and self.view.strides[0] == 1 else 1

    @property
    def step(self) -> int:
        """Pixels from a step along the outermost axis to the next."""
        if self.axes == 1:
            return 64
        return self.view.dilation[0] if self.view.strides[0] == 1 else 1

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Pixels of the result in a step along each axis, and images."""
        sizes = [8, *[1] * self.axes]
        sizes[self.group_axis] *= 8
        return tuple(sizes)

    @functools.cached_property
    def box(self) -> tuple[int, ...]:
        """Rows of the image that a step needs along each axis, and images."""
        along = zip(self.sizes, self.taps, self.view.strides[::-1], self.view.dilation[::-1], strict=False)
        found = [(size - 1) * stride + (taps - 1) * dilation + 1 for size, taps, stride, dilation in along]
        if self.packing:
            size = self.problem.a.bytes(1)
            found[0] = -(-(PLACE * (self.sizes[0] - 1) + self.chunk * size) // (ROW * size))
        return (*found, self.sizes[-1])

    @property
    def row(self) -> int:
        """Elements of a row of a box."""
        return ROW if self.packing else self.chunk

    @property
    def taps(self) -> tuple[int, ...]:
        """Taps along each axis, those that are stacked being one."""
        taps = self.view.window[::-1]
        return (*taps[:-1], taps[-1] // self.stacked)

    @property
    def pitches(self) -> list[int]:
        """Bytes of a box from window to window along each axis, and from image to image."""
        row = self.problem.a.bytes(self.row)
        return [row * math.prod(self.box[:axis]) if axis else self.span for axis in range(self.axes + 1)]

    @property
    def group_bytes(self) -> int:
        """Bytes from a group of 8 pixels to the next."""
        axis = self.group_axis
        return self.pitches[axis] * (8 if axis == 0 else self.view.strides[::-1][axis] if axis < self.axes else 1)

    @property
    def box_bytes(self) -> int:
        """Bytes that are loaded for a step and a piece."""
        return self.problem.a.bytes(self.row) * math.prod(self.box)

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
        size = self.view.taps * self.pieces * self.problem.a.bytes(self.config.bn * self.chunk)
        return -(-size // 1024) * 1024
