"""Convolutions of spread images in phases, which one kernel computes as matrices of their own, of as many rows each.

Where a phase has fewer places than another, what is past them is computed too, and stored nowhere. Where pixels are
no longer than a line of memory, phases along the last axes are columns beside each other instead: neighbouring pixels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.kernels import convolution
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.packed import are_few, in_order, size_of, spread, view_of

_LINE = 128  # bytes of memory: pixels of no more are columns beside each other, of two lines at most
# Of so many lines where the last axis has them and windows are this short, so that zeros in them cost less than rows in
# lines apart: 64 channels at strides of 4, windows of 384, took 55.5 us in place of 78 to 87, and 12.2 of 14.0 to 14.6.
_LINES, _SHORT = 4, 512


class Along(NamedTuple):
    """A phase along an axis.

    Attributes:
      taps: that it has.
      offset: how many pixels further on the first of them is than in the phase where that is the least.
      weights: where those of the first are in the array, as a sum over axes.
      first: pixel of the result.
    """

    taps: int
    offset: int
    weights: int
    first: int


@dataclasses.dataclass(frozen=True)
class Phases:
    """The differences from phase to phase.

    Attributes:
      along: of each axis, the phases along it, those of most taps first.
      image: sizes of an image of the result.
      step: pixels from a row of a phase to the next, along each axis.
      runs: of columns in memory that a row has, each a pixel further along the axis before the last.
    """

    along: tuple[tuple[Along, ...], ...]
    image: tuple[int, ...]
    step: tuple[int, ...]
    runs: int = 1

    @property
    def count(self) -> int:
        """The number of phases."""
        return math.prod(map(len, self.along))

    @property
    def taps(self) -> tuple[int, ...]:
        """The taps of each phase."""
        return tuple(math.prod(x.taps for x in axes) for axes in itertools.product(*self.along))

    def reach(self, dilation: tuple[int, ...]) -> int:
        """Returns the furthest pixel of a window, along any axis, from where the first one begins."""
        along = zip(self.along, dilation, strict=True)
        return max(x.offset + max(x.taps - 1, 0) * by for axis, by in along for x in axis)


def counts(view: Im2col) -> tuple[int, ...]:
    """Returns the phases along each axis."""
    along = zip(view.grid, view.strides, view.spread, strict=True)
    return tuple(min(spread // math.gcd(stride, spread), grid) for grid, stride, spread in along)


def phases(problem: Problem) -> tuple[Problem, Phases]:
    """Returns the problem of the deepest phase there could be, of as many rows as any has, and the phases."""
    view, b = view_of(problem), problem.bs[0]
    assert view is not None
    taps = b.view if isinstance(b.view, Taps) else in_order(view)
    parts = list(convolution.phases(view, taps))
    inner = [math.prod(taps.stored[axis + 1 :]) for axis in range(len(view.grid))]
    found, fields = [], {name: [] for name in ("grid", "window", "strides", "dilation", "low", "step")}
    for axis, count in enumerate(counts(view)):
        of_axis = {pixels.first[axis]: (of, chosen) for of, chosen, pixels in parts}
        assert len(of_axis) == count
        met = [(of, chosen) for of, chosen in of_axis.values() if of.window[axis]]
        some, step = met[0] if met else (parts[0][0], parts[0][1])
        low = max((of.low[axis] for of, _ in met), default=0)
        entries = [
            Along(of.window[axis], low - of.low[axis], chosen.first[axis] * inner[axis], first)
            if of.window[axis]
            else Along(0, 0, 0, first)
            for first, (of, chosen) in of_axis.items()
        ]
        found.append(tuple(sorted(entries, key=lambda x: -x.taps)))
        fields["low"].append(low)
        fields["grid"].append(max(of.grid[axis] for of, _ in of_axis.values()))
        fields["window"].append(max(1, *(of.window[axis] for of, _ in of_axis.values())))
        fields["strides"].append(some.strides[axis])
        fields["dilation"].append(some.dilation[axis])
        fields["step"].append(step.step[axis])
    spread, step = (1,) * len(view.grid), tuple(fields.pop("step"))
    whole = dataclasses.replace(view, **{name: tuple(values) for name, values in fields.items()}, spread=spread)
    chosen = dataclasses.replace(taps, window=whole.window, first=(0,) * len(spread), step=step)
    a, bs = dataclasses.replace(problem.a, view=whole), (dataclasses.replace(b, view=chosen),) * len(problem.bs)
    part = dataclasses.replace(problem, m=whole.rows, k=whole.columns, a=a, bs=bs)
    return part, Phases(tuple(found), view.grid, parts[0][2].step)


@dataclasses.dataclass(frozen=True)
class Beside:
    """Weights whose columns are those of several phases.

    Attributes:
      stored: sizes of the array along the window's axes.
      places: of each of the last axes, each tap along it and each phase: where that is in the array; -1 where the phase
        has no such tap.
      along_k: whether weights lie along the channels.
    """

    stored: tuple[int, ...]
    places: tuple[tuple[tuple[int, ...], ...], ...]
    along_k: bool

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return f"of {'x'.join(str(len(axis[0])) for axis in self.places)} pixels beside each other"

    def made(self, x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the weights of all taps, zero where a phase has none."""
        x, count = x.reshape(*self.stored, -1, x.shape[-1]), len(self.places)
        for i, axis in enumerate(reversed(range(len(self.stored) - count, len(self.stored)))):
            places = np.asarray(self.places[count - 1 - i])
            x = jnp.take(x, np.maximum(places, 0), axis)
            there = (places >= 0).reshape(*places.shape, *(1,) * (x.ndim - axis - 2))
            x = jnp.moveaxis(jnp.where(there, x, np.zeros((), x.dtype)), axis + 1, -3 - i)
        if not self.along_k:  # [.., *phases, channels, n]
            x = jnp.moveaxis(x, -2, -2 - count)
            return (x.reshape(-1, math.prod(x.shape[-1 - count :])),)
        return (x.reshape(-1, x.shape[-1]),)


def parts(problem: Problem) -> tuple[Problem, Phases | None, tuple[Prepared, ...]]:
    """Returns a problem without spread, or of the deepest phase, the phases, and weights that are prepared for it."""
    problem, weights, runs = beside(problem)
    view = view_of(problem)
    if view is None or not (spread(view) or runs > 1):
        return problem, None, weights
    part, of = phases(problem)
    if runs > 1:  # rows of pixels, which follow each other along the axis before the last
        image, step = list(of.image), list(of.step)
        image[-2], step[-2] = image[-2] * runs, runs
        of = dataclasses.replace(of, image=tuple(image), step=tuple(step), runs=runs)
    return part, of, weights


@functools.lru_cache(maxsize=1024)
def beside(problem: Problem) -> tuple[Problem, tuple[Prepared, ...], int]:
    """Returns the problem in which short pixels beside each other are one row, of so many runs in memory.

    Those of the last axis lie beside each other, those of the one before it in rows of pixels. The weights are prepared
    as it reads them.
    """
    view, b, pixel = view_of(problem), problem.bs[0], problem.n * problem.out_dtype.itemsize
    if view is None or not spread(view) or view.groups > 1 or not problem.plain or pixel > _LINE:
        return problem, (), 1
    taps = b.view if isinstance(b.view, Taps) else in_order(view)
    of_view, of_taps, counts, places = view, taps, [], []
    for axis in reversed(range(max(0, len(view.image) - 2), len(view.image))):
        n = problem.n * math.prod(counts)
        found = _along(view, taps, axis)
        if found is None:
            break
        short = not counts and _with(of_view, axis, found[0]).columns <= _SHORT
        if len(found[2][0]) * n * problem.out_dtype.itemsize > (_LINES if short else 2) * _LINE:
            break
        if counts and (n % 16 or are_few(view, size_of(problem))):  # runs are whole units, of windows as they are
            break
        of_view, of_taps = _with(of_view, axis, found[0]), _with(of_taps, axis, found[1])
        counts, places = [len(found[2][0]), *counts], [found[2], *places]
    if not counts:
        return problem, (), 1
    along_k, n = b.contiguous == "k", problem.n * math.prod(counts)
    plain = not along_k and of_taps == in_order(of_view)
    a, b = dataclasses.replace(problem.a, view=of_view), dataclasses.replace(b, view=None if plain else of_taps)
    read, written = (math.prod(x.stored) * view.channels * size for x, size in ((taps, problem.n), (of_taps, n)))
    weights = Prepared("b", 1, (Beside(taps.stored, tuple(places), along_k),), b.bytes(read), b.bytes(written))
    found = dataclasses.replace(problem, m=of_view.rows, n=n, k=of_view.columns, a=a, bs=(b,))
    return found, (weights,), counts[0] if len(counts) > 1 else 1


def _along(
    view: Im2col, taps: Taps, axis: int
) -> tuple[dict[str, int], dict[str, int], tuple[tuple[int, ...], ...]] | None:
    """Returns the sizes of an axis of windows, and of weights, of all its phases, and the places of their taps."""
    if view.spread[axis] == 1:
        return None
    names = "image", "grid", "window", "strides", "dilation", "spread", "low"
    own = dataclasses.replace(view, **{name: getattr(view, name)[axis : axis + 1] for name in names})
    chosen = (getattr(taps, name)[axis : axis + 1] for name in ("stored", "window", "first", "step"))
    found = list(convolution.phases(own, Taps(*chosen)))
    met = [part for part, _, _ in found if part.window[0]]
    even = len(found) == found[0][2].step[0] and view.grid[axis] % len(found) == 0
    if not met or not even or {part.dilation for part in met} != {(1,)}:
        return None
    low = max(part.low[0] for part in met)
    window = max(low - part.low[0] + part.window[0] for part in met)

    def place(tap: int, part: Im2col, chosen: Taps) -> int:
        tap -= low - part.low[0]
        return chosen.first[0] + tap * chosen.step[0] if 0 <= tap < part.window[0] else -1

    places = tuple(tuple(place(tap, part, chosen) for part, chosen, _ in found) for tap in range(window))
    sizes = {"grid": view.grid[axis] // len(found), "window": window, "strides": met[0].strides[0]}
    return (
        sizes | {"dilation": 1, "spread": 1, "low": low},
        {"stored": window, "window": window, "first": 0, "step": 1},
        places,
    )


def _with(view: Any, axis: int, sizes: dict[str, int]) -> Any:
    """Returns a view with other sizes of an axis."""
    fields = {
        name: (*getattr(view, name)[:axis], size, *getattr(view, name)[axis + 1 :]) for name, size in sizes.items()
    }
    return dataclasses.replace(view, **fields)
