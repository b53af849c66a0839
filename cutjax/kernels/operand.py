"""The matrices that a problem multiplies: their elements, how they lie in memory, and how they are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import starmap
from typing import Literal

import numpy as np

from cutjax.dtypes import are_narrow, bits_of, short
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.joined import Joined

Order = tuple[int, ...]  # an array's axes as they lie in memory, the slowest first; () is row-major


@dataclasses.dataclass(frozen=True)
class Scale:
    """The factors of an operand's blocks: it is ``(values - zero) * factor``, with one of each for a block.

    They are arrays that lie in memory as the values do, ``[.., m / mn, k / k]`` beside values ``[.., m, k]``, with as
    many matrices.

    Attributes:
      dtype: of a factor.
      mn: rows of a, or columns of b, that share one.
      k: elements along the contraction that share one.
      zero: dtype of the zero points; None where there are none.
    """

    dtype: np.dtype
    mn: int
    k: int
    zero: np.dtype | None = None

    @property
    def arrays(self) -> tuple[np.dtype, ...]:
        """The dtypes of its arrays: the factors, and the zero points where there are some."""
        return (self.dtype,) if self.zero is None else (self.dtype, self.zero)

    @property
    def text(self) -> str:
        """The words for its blocks."""
        zero = "" if self.zero is None else f" and {short(self.zero.name)} zero points"
        return f"{self.mn} x {self.k}, {short(self.dtype.name)} scales{zero}"


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Rows of the array in an order that is data: an index, of int32, for each row of the matrix.

    They are rows of a, along m, or, where its layout is "t", along the contraction. An index that is no row's, such as
    -1, makes a row of zeros.

    Attributes:
      rows: of the array.
      pairs: 0 where an index is a row's. Else indices are those of pairs, so many of each row in sequence, as those of
        tokens and their experts are; and what an array of pairs has of their places in the matrix is one more array
        behind the indices, which kernels do not read.
    """

    rows: int
    pairs: int = 0

    @property
    def arrays(self) -> int:
        """Number of arrays beside the array of rows."""
        return 2 if self.pairs else 1

    def text(self, name: str) -> str:
        """Returns the words for the operand of that name."""
        return f"rows of {name} gathered of {self.rows}"


@dataclasses.dataclass(frozen=True)
class Im2col:
    """The windows of images with channels last, ``[images, *image, groups * channels]``: those of a convolution.

    The matrix has a row for each window and a column for each element of one, in the order ``(*tap, channel)``: along k
    of a forward convolution (``contiguous="k"``), along m of a weight gradient, whose k are windows (``"mn"``). Element
    ``(tap, channel)`` of the window at place p of the grid is the image's at ``(strides * p + dilation * tap - low) /
    spread``: zero outside of it, and where that is no whole number.

    With groups, rows are as many, and a column of the result has those channels of the image that are its group's: of n
    columns the first ``n / groups`` have the first ``channels``.

    Attributes:
      images: how many.
      image: sizes along the one to three axes of an image.
      grid: sizes of the grid of windows.
      window, strides, dilation: along each axis.
      spread: steps between the image's elements along each axis, with zeros between: lax's ``lhs_dilation``.
      low: elements of zero before each axis; negative where so many elements are left out.
      channels: of a pixel, in one group.
      groups: of channels (lax's ``feature_group_count``).
    """

    images: int
    image: tuple[int, ...]
    grid: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    spread: tuple[int, ...]
    low: tuple[int, ...]
    channels: int
    groups: int = 1

    @property
    def rows(self) -> int:
        """Windows of all images."""
        return self.images * math.prod(self.grid)

    @property
    def taps(self) -> int:
        """Places of a window."""
        return math.prod(self.window)

    @property
    def columns(self) -> int:
        """Elements of a window."""
        return self.taps * self.channels

    @property
    def multiplied(self) -> int:
        """Elements of the matrix in one group, but for those that ``spread`` makes zero."""
        axes = zip(self.grid, self.window, self.strides, self.dilation, self.spread, self.low, strict=True)
        return self.images * math.prod(starmap(_pairs, axes)) * self.channels

    @property
    def elements(self) -> int:
        """Elements of the images."""
        return self.images * math.prod(self.image) * self.groups * self.channels

    def text(self, name: str) -> str:
        """Returns the words for the operand of that name."""
        sizes = self.images, *self.image, self.groups * self.channels
        along = {"strides": self.strides, "dilation": self.dilation, "spread": self.spread}
        more = "".join(f" {word} {_by(steps)}" for word, steps in along.items() if set(steps) != {1})
        more += f" in {self.groups} groups" if self.groups > 1 else ""
        return f"windows {_by(self.window)}{more} of {name} {_by(sizes)}"


@dataclasses.dataclass(frozen=True)
class Taps:
    """The weights of a convolution, some of the taps of an array or all of them in another order.

    The array is ``[*stored, channels, n]`` (``contiguous="mn"``) or ``[*stored, n / groups, groups * channels]``
    (``"k"``), channels being those of a group that are summed over. k counts ``(*tap, channel)``, and tap t along an
    axis is at place ``first + step * t`` of it. Weights in order, with ``contiguous="mn"``, are a plain matrix.

    Attributes:
      stored: sizes of the array along the window's axes.
      window: taps along each axis.
      first: the place of the first one.
      step: places from one to the next, negative where they are flipped.
      groups: of channels.
    """

    stored: tuple[int, ...]
    window: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]
    groups: int = 1

    def text(self, name: str) -> str:
        """Returns the words for the operand of that name."""
        return f"taps {_by(self.window)} of {name} {_by(self.stored)}"


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Rows of the result that lie apart: row ``(image, *i)`` of the grid is pixel ``first + step * i`` of an image.

    Attributes:
      grid: sizes of the grid that rows count, after the images.
      image: sizes of an image of the result.
      first, step: along each axis.
    """

    grid: tuple[int, ...]
    image: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]


def _pairs(grid: int, window: int, stride: int, dilation: int, spread: int, low: int) -> int:
    """Returns the pairs of a place and a tap along one axis that meet an element, or the zeros around the image."""

    def first(places: int) -> int:
        return sum((stride * p + dilation * t - low) % spread == 0 for p in range(places) for t in range(window))

    return grid // spread * first(spread) + first(grid % spread) if spread > 1 else grid * window


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix that is multiplied.

    Attributes:
      dtype: of its elements.
      contiguous: the axis whose neighbours are neighbours in memory: the contraction, or the other one.
      batch: batch shape, each axis the result's or 1.
      order: of its axes in memory.
      bits: that an element takes in memory; 0 stands for those of the dtype.
      scale: its factors; None where there are none.
      view: how the matrix is read of the array; None where it is the array.
      prologue: what is made of the array's elements before they are multiplied, in the dtype of its result; rows and
        columns of its operands are the array's. None where elements are multiplied as they are.
    """

    dtype: np.dtype
    contiguous: Literal["k", "mn"] = "k"
    batch: tuple[int, ...] = ()
    order: Order = ()
    bits: int = 0
    scale: Scale | None = None
    view: Gathered | Im2col | Taps | Joined | None = None
    prologue: Epilogue | None = None

    def __post_init__(self):
        if type(self.dtype) is not np.dtype:
            object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if not self.bits:
            object.__setattr__(self, "bits", bits_of(self.dtype))
        if self.contiguous not in ("k", "mn"):
            raise ValueError(f"Operand: contiguous={self.contiguous!r}, expected 'k' or 'mn'")

    @property
    def gathered(self) -> bool:
        """True if its rows are in an order that is data."""
        return isinstance(self.view, Gathered)

    @property
    def plain(self) -> bool:
        """True if the matrix is an array of whole elements as they are."""
        beside = self.scale or self.view or self.prologue
        return self.bits == 8 * self.dtype.itemsize and beside is None

    def array(self, length: int, k: int) -> tuple[int, int]:
        """Returns the rows, and the elements of each, of the array of a matrix whose m or n axis is so long."""
        view = self.view
        if isinstance(view, Gathered):
            return view.rows, k if self.contiguous == "k" else length
        if isinstance(view, Im2col):
            return view.images * math.prod(view.image), view.groups * view.channels
        if isinstance(view, Taps):
            channels, stored = k // max(1, math.prod(view.window)), math.prod(view.stored)
            if self.contiguous == "mn":
                return stored * channels, length
            return stored * (length // view.groups), view.groups * channels
        return (length, k) if self.contiguous == "k" else (k, length)

    def read(self, length: int, k: int) -> int:
        """Returns the bytes that are read at least, scales too, for a matrix whose m or n axis is so long."""
        view, elements = self.view, length * k
        if isinstance(view, Im2col):  # strides may leave pixels out
            elements = min(view.elements, view.rows * view.columns * view.groups)
        blocks, arrays = math.prod(self.blocks(length, k)), self.scale.arrays if self.scale else ()
        return self.bytes(elements) + sum(-(-blocks * bits_of(dtype) // 8) for dtype in arrays) + self.beside(length, k)

    def beside(self, length: int, k: int) -> int:
        """Returns the bytes of a prologue's operands for one matrix."""
        specs = self.prologue.operands if self.prologue else ()
        rows, columns = self.array(length, k)
        return sum((rows if x.row else 1) * (columns if x.col else 1) * bits_of(np.dtype(x.dtype)) // 8 for x in specs)

    @property
    def arrays(self) -> int:
        """Number of arrays beside the first: others along k, a scale and zero points, or a prologue's operands."""
        if isinstance(self.view, Joined):
            return len(self.view.ks) - 1
        return len(self.prologue.operands) if self.prologue else len(self.scale.arrays) if self.scale else 0

    def text(self, name: str) -> str:
        """Returns the words for the view and the blocks of the operand of that name, each after a comma."""
        view = f", {self.view.text(name)}" if self.view else ""
        view += f", prologue {name} = {self.prologue.text(name)}" if self.prologue else ""
        return f"{view}, {name} in blocks of {self.scale.text}" if self.scale else view

    def blocks(self, length: int, k: int) -> tuple[int, int]:
        """Returns the rows, and the elements of each, of a matrix of its scales; (0, 0) where it has none."""
        if self.scale is None:
            return 0, 0
        of_mn, of_k = -(-length // self.scale.mn), -(-k // self.scale.k)
        return (of_mn, of_k) if self.contiguous == "k" else (of_k, of_mn)

    def bytes(self, elements: int) -> int:
        """Returns the memory that so many neighbours take."""
        return -(-elements * self.bits // 8)

    def elements(self, size: int) -> int:
        """Returns the number of neighbours in so many bytes."""
        return 8 * size // self.bits

    def of(self, dtype: np.dtype) -> Operand:
        """Returns the same matrix in another dtype."""
        return self if dtype == self.dtype else dataclasses.replace(self, dtype=dtype, bits=0)

    def dequantized(self, dtype: np.dtype) -> Operand:
        """Returns the same matrix in a dtype that its factors are multiplied into."""
        return dataclasses.replace(self, dtype=dtype, bits=0, scale=None)

    @property
    def made(self) -> Operand:
        """The matrix that a prologue makes of this one."""
        if self.prologue is None:
            return self
        return dataclasses.replace(self, dtype=np.dtype(self.prologue.outputs[0].dtype), bits=0, prologue=None)

    @property
    def along_k(self) -> Operand:
        """This matrix along the contraction; one that lies otherwise is copied, in row-major order."""
        return self if self.contiguous == "k" else dataclasses.replace(self, contiguous="k", order=())

    def narrow_beside(self, other: Operand) -> bool:
        """True if its elements of 8 bits or 4, without scales, are multiplied as the other's of 16."""
        return self.scale is None and are_narrow(other.dtype, self.dtype)


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of rows, or of the contraction, whose sizes are data.

    Attributes:
      count: how many.
      axis: what they divide. "m": the rows of a, each group with its own matrix in ``b[..., groups, k, n]``; rows of no
        group are zero in the result. "k": the contraction, of operands ``a[..., k, m]`` and ``b[..., k, n]``, each
        group with its own result in ``d[..., groups, m, n]``. "n": the columns, in the transpose of the first.
      leading: whether the sizes start with that of the rows before the first group: ``int32[..., leading + groups]``.
      batch: batch shape of the sizes.
    """

    count: int
    axis: Literal["m", "k", "n"]
    leading: bool = False
    batch: tuple[int, ...] = ()

    def __post_init__(self):
        if self.axis not in ("m", "k", "n") or self.count < 0:
            raise ValueError(f"Groups: {self.count} of axis={self.axis!r}, expected 'm', 'k' or 'n'")

    @property
    def transposed(self) -> Groups:
        """The groups of the transposed result."""
        return dataclasses.replace(self, axis={"m": "n", "n": "m"}.get(self.axis, self.axis))


def strides(shape: Sequence[int], order: Order = ()) -> list[int]:
    """Returns the elements between neighbours along each axis of an array; 0 where there is but one."""
    found, step = [0] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        found[axis] = step if shape[axis] != 1 else 0
        step *= shape[axis]
    return found


def merged(
    batch: Sequence[int], moves: Sequence[Sequence[bool]], apart: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the batch axes as the fewest ``(size, *moves)``, outermost first, each with the last axis it is made of.

    Args:
      batch: sizes of the axes, of which those of size 1 are dropped.
      moves: of each array, whether it moves along each axis. Neighbours that move the same arrays are merged,
      apart: and in the arrays of these strides where a step along the outer one is as many along the inner one as that
        is long.
    """

    def follow(outer: int, inner: int) -> bool:
        return all(of[outer] == of[inner] * batch[inner] for of in apart if of[inner] and of[outer])

    found: list[tuple[int, tuple[int, ...]]] = []
    for axis, (size, *moving) in enumerate(zip(batch, *moves, strict=True)):
        if size == 1:
            continue
        if found and found[-1][1][1:] == tuple(moving) and follow(found[-1][0], axis):
            found[-1] = (axis, (found[-1][1][0] * size, *moving))
        else:
            found.append((axis, (size, *moving)))
    return found


def floors(count: int, step: int, first: int, divisor: int) -> int:
    """Returns the sum of ``(first + i * step) // divisor`` over so many i from 0 on, in Euclid's steps."""
    total = 0
    while count > 0 and divisor:
        total += count * (count - 1) // 2 * (step // divisor) + count * (first // divisor)
        step, first = step % divisor, first % divisor
        last = step * count + first  # the points below a line, counted along the other axis
        count, first, step, divisor = last // divisor, last % divisor, divisor, step
    return total
