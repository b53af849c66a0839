"""Windows of images in other pieces: groups that are joined, and rows of a window that are channels of one place."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.problem import Problem

# Bytes of a row in shared memory, and what those of fewer channels cost over as many in rows of 128: not fitted yet.
_SPANS = {128: 1.0, 64: 1.08, 32: 1.6}
# Groups are as one up to so many bytes of channels, and columns: not fitted yet.
_JOINED = 64, 32
# Where pieces of rows of windows have at most so many times the elements of pieces of channels, rows are channels.
_PACKED = 0.7


def view_of(problem: Problem) -> Im2col | None:
    """Returns the windows by which kernels read a problem's a; None of any other, and of `patches`."""
    view = problem.a.view
    return view if isinstance(view, Im2col) and not patches(problem) else None


def patches(problem: Problem) -> Im2col | None:
    """Returns the windows of a problem whose a is copied as the matrix of them, before a plain product.

    They lie side by side, so the matrix has the images' elements, in another order. Those whose rows TMA can walk are
    read where they lie.
    """
    view = problem.a.view
    if not isinstance(view, Im2col) or problem.bs[0].view is not None or problem.a.dtype.kind == "c":
        return None
    return view if _side_by_side(view) and problem.a.bytes(view.channels) % 16 else None


@functools.lru_cache(maxsize=1024)
def _side_by_side(view: Im2col) -> bool:
    """True if windows share no pixel, leave none out, and are not single."""
    axes = zip(view.image, view.grid, view.window, view.strides, view.dilation, view.spread, view.low, strict=True)
    whole = all(
        image == grid * window and (stride == window or grid == 1) and rest == [1, 1, 0]
        for image, grid, window, stride, *rest in axes
    )
    return whole and view.groups == 1 and view.taps > 1


@dataclasses.dataclass(frozen=True)
class Unfold:
    """Patches of images as rows of a matrix."""

    view: Im2col
    note: str = "in rows of patches"

    def made(self, x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the matrix ``[windows, taps * channels]`` of images ``[pixels, channels]``."""
        view, lead = self.view, x.shape[:-2]
        axes = [size for axis in zip(view.grid, view.window, strict=True) for size in axis]
        x = x.reshape(*lead, view.images, *axes, view.channels)
        first, count = len(lead) + 1, len(view.grid)
        order = (
            *range(first),
            *range(first, first + 2 * count, 2),
            *range(first + 1, first + 2 * count, 2),
            x.ndim - 1,
        )
        return (x.transpose(order).reshape(*lead, view.rows, view.columns),)


def size_of(problem: Problem) -> int:
    """Returns the bytes of an element as it is multiplied."""
    return 2 if problem.math.startswith("bf16") else problem.a.bytes(1)


@functools.lru_cache(maxsize=1024)
def chunk_of(view: Im2col, size: int) -> int:
    """Returns the channels of a piece, elements having so many bytes."""
    spans = [span for span in _SPANS if view.groups == 1 or view.channels * size % span == 0]
    cost = {span // size: _SPANS[span] * padded_to(view.channels, span // size) for span in spans}
    return min(cost, key=lambda length: cost[length])


def are_few(view: Im2col, size: int) -> bool:
    """True if channels, of so many bytes an element, are so few that rows of windows may be packed."""
    return view.channels * size <= min(_SPANS)


def padded_to(channels: int, length: int) -> int:
    """Returns the channels of whole pieces."""
    return -(-channels // length) * length


def spread(view: Im2col) -> bool:
    """True if there are zeros between the elements of images."""
    return set(view.spread) != {1}


def in_order(view: Im2col) -> Taps:
    """Returns all taps of weights as they lie."""
    axes = len(view.window)
    return Taps(view.window, view.window, (0,) * axes, (1,) * axes, view.groups)


def taken(problem: Problem) -> Im2col | None:
    """Returns the windows that a kernel reads.

    So many groups are as one that TMA can load their channels, and that tiles have columns. Of few channels, the rows
    of a window are channels of one place.
    """
    view = view_of(problem)
    if packing := packed(problem):
        return packing.view
    if view is None or view.groups == 1:
        return view
    count = _joined(view, problem.n // view.groups, size_of(problem))
    return dataclasses.replace(view, channels=count * view.channels, groups=view.groups // count)


@functools.lru_cache(maxsize=1024)
def _joined(view: Im2col, columns: int, size: int) -> int:
    def serves(count: int) -> bool:
        least, row, width = min(_SPANS), count * view.channels * size, count * columns
        return row % least == 0 and row >= _JOINED[0] and width >= _JOINED[1] and width % 16 == 0

    counts = (count for count in range(1, view.groups) if view.groups % count == 0)
    return next(filter(serves, counts), view.groups)


@dataclasses.dataclass(frozen=True)
class Join:
    """Weights of joined groups: zero where a row is of another group than a column.

    Attributes:
      rows: of a tap, in a group.
      groups: after it.
      count: of groups in one.
    """

    rows: int
    groups: int
    count: int

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return f"with {self.count} groups as one"

    def made(self, x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the weights ``[taps, count * rows, columns of all groups]``."""
        x = x.reshape(-1, 1, self.rows, self.groups, self.count, x.shape[-1] // (self.groups * self.count))
        own = np.eye(self.count, dtype=bool).reshape(1, self.count, 1, 1, self.count, 1)
        x = jnp.where(own, x, np.zeros((), x.dtype))
        return (x.reshape(x.shape[0], self.count * self.rows, -1),)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Rows of windows as the channels of one place, of images that are padded for it.

    A row begins where its window does, so that those of neighbouring windows share elements.

    Attributes:
      of: the windows.
      channels: of a pixel, with zeros after those that there are: windows begin at multiples of 16 bytes.
      columns: of pixels of a padded image.
    """

    of: Im2col
    channels: int
    columns: int

    @property
    def view(self) -> Im2col:
        """The windows of such places."""
        of = self.of
        along = {"image": of.grid[-1], "window": 1, "strides": 1, "dilation": 1, "low": 0}
        fields = {name: (*getattr(of, name)[:-1], value) for name, value in along.items()}
        return dataclasses.replace(of, **fields, channels=of.window[-1] * self.channels)

    def strides(self, size: int) -> list[int]:
        """Returns the bytes between neighbours along the places of a row, its rows and so on, and images."""
        found = [self.of.strides[-1] * self.channels * size, self.columns * self.channels * size]
        for length in self.of.image[-2::-1]:
            found.append(found[-1] * length)
        return found


@functools.lru_cache(maxsize=1024)
def packed(problem: Problem) -> Packing | None:
    """Returns the packing of rows of windows to channels, where that makes pieces with fewer zeros; else None."""
    view, b, size = view_of(problem), problem.bs[0].view, size_of(problem)
    if view is None or view.groups > 1 or spread(view) or min(view.window) == 0 or view.window[-1] == 1:
        return None
    if not are_few(view, size):  # copying the images would take longer than it saves
        return None
    if view.dilation[-1] > 1 or (isinstance(b, Taps) and (b.stored != view.window or {*map(abs, b.step)} != {1})):
        return None
    stride, channels = view.strides[-1], view.channels
    while stride * channels * size % 16:
        channels += 1
    columns = (view.grid[-1] - 1) * stride + view.window[-1]
    while columns * channels * size % 16:
        columns += 1
    found = Packing(view, channels, columns)
    elements = [of.taps * padded_to(of.channels, chunk_of(of, size)) for of in (found.view, view)]
    return found if elements[0] <= _PACKED * elements[1] else None


def apart(view: Im2col, of: Im2col, packing: Packing | None, x: jax.Array) -> jax.Array:
    """Returns the gradient of a view's weights, of that of the windows that are taken for it, in whole pieces."""
    n = x.shape[-1]
    if x.shape[-2] == view.columns and of.groups == view.groups:
        return x
    x = x.reshape(of.taps, -1, n)[:, : of.channels]
    if packing:
        x = x.reshape(view.taps, packing.channels, n)[:, : view.channels]
    if view.groups > 1:
        count, columns = view.groups // of.groups, n // view.groups
        x = x.reshape(view.taps, count, view.channels, of.groups, count, columns)
        x = jnp.moveaxis(jnp.diagonal(x, axis1=1, axis2=4), -1, 3)  # [taps, channels, groups, count, columns]
    return x.reshape(view.columns, n)


@dataclasses.dataclass(frozen=True)
class PadImages:
    """Pixels around the rows of images, and channels of zeros."""

    packing: Packing

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return f"padded to rows of {self.packing.columns} pixels of {self.packing.channels}"

    def made(self, x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the images ``[rows, columns, channels]``."""
        of, packing = self.packing.of, self.packing
        x = x.reshape(-1, of.image[-1], of.channels)
        around = of.low[-1], packing.columns - of.image[-1] - of.low[-1], 0
        zeros = np.zeros((), x.dtype)
        return (lax.pad(x, zeros, [(0, 0, 0), around, (0, packing.channels - of.channels, 0)]),)


@dataclasses.dataclass(frozen=True)
class PackWeights:
    """Weights of rows of a window, in order.

    Attributes:
      packing: of the images.
      taps: those of the weights.
      along_k: whether they lie along the channels.
    """

    packing: Packing
    taps: Taps
    along_k: bool

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return "in rows of windows"

    def made(self, x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the weights ``[rows of a window, elements of one, n]``."""
        of, channels = self.packing.of, self.packing.channels
        if self.along_k:
            x = jnp.swapaxes(x.reshape(*of.window, -1, of.channels), -1, -2)
        x = x.reshape(*of.window, of.channels, -1)
        x = jnp.flip(x, [axis for axis, step in enumerate(self.taps.step) if step < 0])
        more = [*((0, 0, 0) for _ in of.window), (0, channels - of.channels, 0), (0, 0, 0)]
        x = lax.pad(x, np.zeros((), x.dtype), more)
        return (x.reshape(math.prod(of.window[:-1]), of.window[-1] * channels, -1),)
