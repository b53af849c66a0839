"""Gradients of weights by halos: tiles of pixels, and the boxes of the image and of the result's gradient for each."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from cutjax.kernels import convolution
from cutjax.kernels.halo.geometry import Geometry
from cutjax.kernels.halo.operands import packing_of, taken, view_of
from cutjax.kernels.operand import Im2col
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.packed import apart, padded_to

ROWS = 64  # of a wgmma


@functools.lru_cache(maxsize=1024)
def turned(problem: Problem) -> Problem | None:
    """Returns the problem in which images and the result's gradient change places; None where those stay.

    They do where the gradient has few channels, and the images have not: its windows are packed then.
    """
    view = view_of(problem)
    if view.groups > 1 or {*view.strides, *view.spread} != {1} or packing_of(problem):
        return None
    low = tuple(step * (size - 1) - low for step, size, low in zip(view.dilation, view.window, view.low, strict=True))
    fields = {"image": view.grid, "grid": view.image, "low": low, "channels": problem.n}
    how = {"dtype": problem.a.dtype, "out_dtype": problem.out_dtype, "device": problem.device}
    found = convolution.weight_gradient(dataclasses.replace(view, **fields), view.channels, **how)
    return found if isinstance(found.a.view, Im2col) and packing_of(found) else None


def restored(problem: Problem, x: jax.Array) -> jax.Array:
    """Returns the gradient of weights of what kernels write for it."""
    other = turned(problem)
    read = other or problem
    x = apart(view_of(read), taken(read), packing_of(read), x)
    if other is None:
        return x
    x = x.reshape(view_of(problem).taps, problem.n, view_of(problem).channels)
    return jnp.flip(x, 0).swapaxes(1, 2).reshape(problem.m, problem.n)


@dataclasses.dataclass(frozen=True)
class Tiles(Geometry):
    """The tiles of a config, of one problem: the turned one, where there is such."""

    @property
    def stacked(self) -> int:
        """No taps are columns beside each other but along the innermost axis."""
        return 1

    @property
    def copies(self) -> int:
        """The number of times that columns are rows of a wgmma, with other taps each time."""
        return ROWS // self.config.bn if self.config.taps < self.view.window[-1] else 1

    @property
    def parts(self) -> int:
        """Units of taps along the innermost axis."""
        return -(-self.view.window[-1] // (self.config.taps * self.copies))

    @property
    def taps(self) -> tuple[int, ...]:
        """Taps along each axis that the box of the image is for, of one copy; along a third one of the first plane."""
        first = ((self.parts - 1) * self.copies + 1) * self.config.taps
        return (first, *self.view.window[-2:-3:-1], *[1] * (self.axes - 2))

    @property
    def lead(self) -> int:
        """Pixels before a tile's that the last copy begins with."""
        return (self.copies - 1) * self.copy

    @property
    def copy(self) -> int:
        """Pixels from a copy to the next."""
        return self.config.taps * self.view.dilation[-1]

    @property
    def units(self) -> int:
        """Sums of 64 rows that a block has."""
        return self.parts * math.prod(self.view.window[-2:-1])

    @property
    def planes(self) -> int:
        """Taps along the third axis, each of blocks of its own."""
        return math.prod(self.view.window[:-2])

    @property
    def columns_of_wgmma(self) -> int:
        """Columns of one wgmma."""
        return self.config.taps * self.chunk

    @property
    def gradient_box(self) -> tuple[int, ...]:
        """Pixels of the result's gradient that a tile needs along each axis, and images."""
        return (self.sizes[0] + self.lead, *self.sizes[1:])

    @property
    def gradient_bytes(self) -> int:
        """Bytes of these that are loaded."""
        return self.problem.a.bytes(self.config.bn) * math.prod(self.gradient_box)

    @property
    def offset(self) -> int:
        """The place of the gradient's box in a stage, in bytes."""
        return -(-self.box_bytes // 1024) * 1024

    @property
    def stage_bytes(self) -> int:
        """Shared memory of both boxes."""
        return self.offset + -(-self.gradient_bytes // 1024) * 1024

    @functools.cached_property
    def tiles(self) -> tuple[int, ...]:
        """Tiles along each axis."""
        grid = self.view.grid[::-1]
        return tuple(-(-size // of) for size, of in zip((grid[0] + self.lead, *grid[1:]), self.sizes, strict=False))

    @property
    def count(self) -> int:
        """Tiles of all images."""
        return math.prod(self.tiles) * -(-self.view.images // self.sizes[-1])

    @property
    def sets(self) -> int:
        """Blocks that sum over the same pixels: for other columns, channels and taps along a third axis."""
        return self.columns * self.pieces * self.planes

    @property
    def rows(self) -> int:
        """Rows of what a kernel writes."""
        return self.view.taps * padded_to(self.view.channels, self.chunk)
