"""Convolutions of spread images in phases, which one kernel computes as matrices of their own, of as many rows each.

Where a phase has fewer places than another, what is past them is computed too, and stored nowhere. Where pixels are
no longer than a line of memory, phases along the last axis are columns beside each other instead: neighbouring pixels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.kernels import convolution
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.packed import in_order, spread, view_of

_LINE = 128  # bytes of memory: pixels of no more are columns beside each other, of two lines at most


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
    """

    along: tuple[tuple[Along, ...], ...]
    image: tuple[int, ...]
    step: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many there are."""
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
      places: of each tap, and each phase, where that is along the last of them; -1 where the phase has no such tap.
      along_k: whether weights lie along the channels.
    """

    stored: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    along_k: bool

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return f"of {len(self.places[0])} pixels beside each other"

    def made(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the weights of all taps, zero where a phase has none."""
        places, axis = np.asarray(self.places), len(self.stored) - 1
        x = x.reshape(*self.stored, -1, x.shape[-1])
        x = jnp.take(x, np.maximum(places, 0), axis)  # [.., taps, phases, rows, columns]
        x = jnp.where((places >= 0)[..., None, None], x, np.zeros((), x.dtype))
        if not self.along_k:
            x = jnp.swapaxes(x, -2, -3)
        return (x.reshape(-1, x.shape[-1] if self.along_k else x.shape[-1] * x.shape[-2]),)


def parts(problem: Problem) -> tuple[Problem, Phases | None, tuple[Prepared, ...]]:
    """Returns a problem without spread, or of the deepest phase, the phases, and weights that are prepared for it."""
    problem, weights = beside(problem)
    view = view_of(problem)
    if view is None or not spread(view):
        return problem, None, weights
    return *phases(problem), weights


@functools.lru_cache(maxsize=1024)
def beside(problem: Problem) -> tuple[Problem, tuple[Prepared, ...]]:
    """Returns the problem in which short pixels beside each other are one row, and the weights as that reads them."""
    view, b = view_of(problem), problem.bs[0]
    pixel = problem.n * problem.out_dtype.itemsize
    if view is None or view.spread[-1] == 1 or view.groups > 1 or not problem.plain or pixel > _LINE:
        return problem, ()
    taps = b.view if isinstance(b.view, Taps) else in_order(view)
    last = {name: getattr(view, name)[-1:] for name in ("grid", "window", "strides", "dilation", "spread", "low")}
    of_taps = {name: getattr(taps, name)[-1:] for name in ("stored", "window", "first", "step")}
    found = list(convolution.phases(dataclasses.replace(view, image=view.image[-1:], **last), Taps(**of_taps)))
    count, met = len(found), [part for part, _, _ in found if part.window[0]]
    even = count == found[0][2].step[0] and view.grid[-1] % count == 0
    if not met or not even or count * pixel > 2 * _LINE or {part.dilation for part in met} != {(1,)}:
        return problem, ()
    low = max(part.low[0] for part in met)
    window = max(low - part.low[0] + part.window[0] for part in met)

    def place(tap: int, part: Im2col, chosen: Taps) -> int:
        tap -= low - part.low[0]
        return chosen.first[0] + tap * chosen.step[0] if 0 <= tap < part.window[0] else -1

    places = tuple(tuple(place(tap, part, chosen) for part, chosen, _ in found) for tap in range(window))
    of_last = {"grid": view.grid[-1] // count, "window": window, "strides": met[0].strides[0], "dilation": 1}
    of_last |= {"spread": 1, "low": low}
    whole = dataclasses.replace(view, **{name: (*getattr(view, name)[:-1], size) for name, size in of_last.items()})
    of_last = {"stored": window, "window": window, "first": 0, "step": 1}
    chosen = dataclasses.replace(taps, **{name: (*getattr(taps, name)[:-1], size) for name, size in of_last.items()})
    along_k, n = b.contiguous == "k", problem.n * count
    plain = not along_k and chosen == in_order(whole)
    a, b = dataclasses.replace(problem.a, view=whole), dataclasses.replace(b, view=None if plain else chosen)
    sizes = [
        b.bytes(math.prod(of.stored) * view.channels * columns) for of, columns in ((taps, problem.n), (chosen, n))
    ]
    weights = Prepared("b", 1, (Beside(taps.stored, places, along_k),), *sizes)
    return dataclasses.replace(problem, m=whole.rows, n=n, k=whole.columns, a=a, bs=(b,)), (weights,)
