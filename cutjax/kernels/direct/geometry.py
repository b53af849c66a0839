"""The geometry of a convolution of each channel by itself: which channels make a pair, and how axes lie in an image."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.problem import Problem

WIDEST_SLIDING = 8  # window whose pixels a thread has in registers


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis: place i reads under tap k the u-th element of the image, ``spread u = stride i + dilation k - low``.

    Attributes:
      window, stride, dilation, spread: the kernel's.
      low: less than spread.
      every: places, and elements, that have one remainder by this are an axis of their own.
      first: where in the image u = 0 is, of those whose remainder is 0.
      image, grid: sizes.
    """

    window: int
    stride: int
    dilation: int
    spread: int
    low: int
    every: int
    first: int
    image: int
    grid: int

    @classmethod
    def of(cls, image: int, grid: int, window: int, stride: int, dilation: int, spread: int, low: int) -> Axis:
        """Makes one of what a view says of it."""
        dilation = dilation if window > 1 else 1
        every = dilation if stride == spread == 1 else 1
        before, low = divmod(low, spread)
        return cls(window, stride, dilation // every, spread, low, every, -before, image, grid)

    @property
    def places(self) -> int:
        """Places of one remainder, at most."""
        return -(-self.grid // self.every)

    @property
    def steps(self) -> tuple[int, int]:
        """Rows of the image, and of the grid, after which all repeats."""
        common = math.gcd(self.stride, self.spread)
        return self.stride // common, self.spread // common

    @functools.cached_property
    def open(self) -> tuple[int, int]:
        """The first row of the grid in which the image's rows of step 0 take part, and from there on how many."""
        read, done = self.steps
        found = [
            at // self.stride
            for s in range(read)
            for k in range(self.window)
            if (at := self.spread * s + self.low - self.dilation * k) % self.stride == 0
        ] or [0]
        return min(found), max(max(found) - min(found) + 1, done)

    def count(self, strip: int) -> int:
        """Returns the elements of the image that so many places read, those between them too."""
        return (self.stride * (strip - 1) + self.dilation * (self.window - 1) - self.low) // self.spread + 1


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A problem that the family serves.

    Attributes:
      view: of its images.
      gradient: whether it is of weights.
      channels, multiplier: of a group, those of the image and those of the result, of which one is 1.
      planes, rows, columns: the axes, of which the first ones of fewer than three have size 1. Where images have one
        axis alone, a result goes along it row by row; a weight gradient has strips of it.
    """

    view: Im2col
    gradient: bool
    channels: int
    multiplier: int
    planes: Axis
    rows: Axis
    columns: Axis

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """The three axes."""
        return self.planes, self.rows, self.columns

    @property
    def pairs(self) -> int:
        """Pairs of a channel of the image and one of the result."""
        return self.view.groups * self.channels * self.multiplier

    @property
    def taps(self) -> int:
        """Taps of a window."""
        return self.view.taps

    @property
    def along(self) -> bool:
        """True where a thread goes along a row, strip by strip, since images have but one."""
        return self.gradient and self.rows.grid == self.rows.window == 1

    @property
    def slides(self) -> bool:
        """True if a window moves along one axis without steps, few taps of one channel to one."""
        axis, others = self.rows, (self.planes, self.columns)
        plain = axis.stride == axis.spread == axis.dilation == axis.every == 1 and axis.window <= WIDEST_SLIDING
        alone = all(other.window == other.grid == other.image == 1 for other in others)
        return plain and alone and not self.gradient and self.channels == self.multiplier == 1

    def strips(self, strip: int) -> int:
        """Returns the number of strips beside each other."""
        return self.columns.every * (1 if self.along else -(-self.columns.places // strip))

    def lines(self, strip: int) -> int:
        """Returns the number of rows, or strips, that a thread could go through."""
        return -(-self.columns.places // strip) if self.along else self.rows.places

    def chunks(self, strip: int, rows: int) -> int:
        """Returns the number of chunks of so many rows, or of so many strips of a row."""
        return self.rows.every * -(-self.lines(strip) // rows)

    def items(self, strip: int, rows: int) -> int:
        """Returns the number of chunks of strips."""
        return self.strips(strip) * self.chunks(strip, rows) * self.planes.grid * self.view.images


@functools.lru_cache(maxsize=1024)
def geometry_of(problem: Problem) -> Geometry | None:
    """Returns the geometry of a problem; None of one that is no convolution, or of more channels to more."""
    view = problem.a.view
    if not isinstance(view, Im2col) or problem.n % view.groups or not view.groups:
        return None
    multiplier = problem.n // view.groups
    if min(view.channels, multiplier) != 1:
        return None
    gradient = problem.a.contiguous == "mn"
    fields = view.image, view.grid, view.window, view.strides, view.dilation, view.spread, view.low
    axes = [Axis.of(*sizes) for sizes in zip(*fields, strict=True)]
    none = Axis.of(1, 1, 1, 1, 1, 1, 0)
    axes = [*axes, none] if len(axes) == 1 and not gradient else axes
    planes, rows, columns = [none] * (3 - len(axes)) + axes
    return Geometry(view, gradient, view.channels, multiplier, planes, rows, columns)


def places_of(problem: Problem) -> tuple[int, int, int, int]:
    """Returns the place of the first tap's weights, counted in taps of the array, and the steps along each axis."""
    b, view = problem.bs[0], problem.a.view
    assert isinstance(view, Im2col)
    taps = b.view if isinstance(b.view, Taps) else None
    stored = taps.stored if taps else view.window
    first = taps.first if taps else (0,) * len(stored)
    step = taps.step if taps else (1,) * len(stored)
    strides = [math.prod(stored[i + 1 :]) for i in range(len(stored))]
    steps = [by * stride for by, stride in zip(step, strides, strict=True)]
    steps = steps if len(steps) > 1 else [*steps, 0]  # one axis alone is that of rows
    d, h, w = [0] * (3 - len(steps)) + steps
    return int(np.dot(first, strides)), d, h, w
