"""Convolutions of spread images in phases, which one kernel computes as matrices of their own, of as many rows each."""

from __future__ import annotations

import dataclasses
import itertools
import math

from cutjax.kernels import convolution
from cutjax.kernels.operand import Im2col, Pixels, Taps
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.packed import in_order, view_of


@dataclasses.dataclass(frozen=True)
class Phases:
    """The differences from phase to phase.

    Attributes:
      along: of each axis, and each phase along it: its taps, how many pixels further on the first one is than that of
        the phase where that is the least, and where its weights are in the array, as a sum over axes.
      pixels: of each phase, where its rows are in the images of the result.
    """

    along: tuple[tuple[tuple[int, int, int], ...], ...]
    pixels: tuple[Pixels, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        """The taps of each phase."""
        return tuple(math.prod(taps for taps, _, _ in axes) for axes in itertools.product(*self.along))

    def reach(self, dilation: tuple[int, ...]) -> int:
        """Returns the furthest pixel of a window, along any axis, from where the first one begins."""
        along = zip(self.along, dilation, strict=True)
        return max(offset + max(taps - 1, 0) * by for axis, by in along for taps, offset, _ in axis)


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
            (of.window[axis], low - of.low[axis], chosen.first[axis] * inner[axis]) if of.window[axis] else (0, 0, 0)
            for of, chosen in of_axis.values()
        ]
        found.append(tuple(entries))
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
    return part, Phases(tuple(found), tuple(pixels for _, _, pixels in parts))
