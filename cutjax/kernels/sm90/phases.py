"""Convolutions of spread images in phases, which one kernel computes as matrices of their own, of as many rows each.

Where a phase has fewer places than another, what is past them is computed too, and stored nowhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

from cutjax.kernels import convolution
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.packed import in_order, view_of


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
