"""Operands as boxes and weights hold them: groups that are joined, windows of few channels as overlapping rows."""

from __future__ import annotations

import dataclasses
import functools

from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.prepared import Pad, Prepared, Step
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import packed, windows
from cutjax.kernels.sm90.packed import Packing, padded_to

PLACE = 16  # bytes from a window of few channels to the next, along a row
ROW = 64  # elements of a row in a box of such windows


def view_of(problem: Problem) -> Im2col:
    """Returns the windows of a problem that has such."""
    assert isinstance(problem.a.view, Im2col)
    return problem.a.view


@functools.lru_cache(maxsize=1024)
def packing_of(problem: Problem) -> Packing | None:
    """Returns the packing of windows of so few channels that they begin 16 bytes from each other; None of others."""
    view, size = view_of(problem), problem.a.bytes(1)
    if {*view.strides} == {1} and view.channels * size % PLACE == 0:
        return None
    found = packed.packed(problem)
    if found is None or view.strides[-1] * found.channels * size != PLACE:
        return None
    return dataclasses.replace(found, columns=padded_to(found.columns, ROW // found.channels))


def taken(problem: Problem) -> Im2col:
    """Returns the windows as they are multiplied."""
    if packing := packing_of(problem):
        return packing.view
    view = view_of(problem)
    if view.groups == 1:
        return view
    found = windows.taken(problem)
    assert found is not None
    return found


def taps_of(problem: Problem) -> Taps:
    """Returns the taps of the weights as they are multiplied, in order where nothing else is said."""
    view, b = taken(problem), problem.bs[0]
    return b.view if isinstance(b.view, Taps) and not packing_of(problem) else packed.in_order(view)


@functools.lru_cache(maxsize=1024)
def prepared(problem: Problem) -> tuple[Prepared, ...]:
    """Returns the operands of which a kernel reads copies: of few channels both, weights of groups or odd columns."""
    packing, of, b, found = packing_of(problem), taken(problem), problem.bs[0], []
    view, steps = view_of(problem), list[Step]()
    if packing:
        images = view.images * packing.strides(problem.a.bytes(1))[-1]
        found.append(Prepared("a", 0, (packed.PadImages(packing),), problem.a.bytes(view.elements), images))
        taps = b.view if isinstance(b.view, Taps) else packed.in_order(view)
        steps.append(packed.PackWeights(packing, taps, b.contiguous == "k"))
    elif of.groups < view.groups:
        rows = view.channels if b.contiguous == "mn" else problem.n // view.groups
        steps.append(packed.Join(rows, of.groups, view.groups // of.groups))
    if (packing or b.contiguous == "mn") and problem.n % 8:
        steps.append(Pad(-problem.n % 8, b.bytes(padded_to(problem.n, 8))))
    if steps:
        written = taps_of(problem), problem.n // of.groups
        count = of.groups * of.channels * padded_to(written[1], 8)
        for size in written[0].stored:
            count *= size
        found.append(Prepared("b", 1, tuple(steps), b.bytes(view.columns * problem.n), b.bytes(count)))
    return tuple(found)
