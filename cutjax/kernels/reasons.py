"""The reasons why a problem has no kernel that do not depend on how a family multiplies."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

from cutjax.kernels.arguments import place_steps
from cutjax.kernels.columns import maximum
from cutjax.kernels.operand import Gathered, Im2col, Taps
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import Staging
from cutjax.kernels.sums import extent


def of_groups(problem: Problem, staging: Staging) -> list[str]:
    """Returns the reasons against kernels for a problem's groups."""
    found = []
    if problem.groups and problem.a.contiguous != ("k" if problem.divided == "m" else "mn"):
        found.append(f"layout {problem.layout} with groups of {problem.divided}: kernels divide an outer axis of a")
    whole = problem.divided == "m" and not staging.swap  # rows: a tile has those of one group, and may reduce each
    if problem.groups and any(not whole or out.axes != ("col",) for _, out in staging.reductions):
        found.append("a reduction over rows that have groups")
    return found


def of_sizes(problem: Problem) -> list[str]:
    """Returns the reasons against a problem's sizes and batch axes, whatever the kernel."""
    found, rows = [], problem.a.view.rows if isinstance(problem.a.view, Gathered) else problem.m
    if 0 in (problem.m, problem.n, problem.k, problem.batch_size, rows) or (
        problem.groups and not problem.groups.count
    ):
        found.append("a size is 0: nothing to launch")
    elif not problem.flops:
        found.append("windows meet zeros alone: nothing to launch")
    if len(problem.batch_groups) > 3:
        found.append(f"batch {problem.batch}: operands alternate in more than 3 groups of batch axes")
    elif max(problem.m, problem.n, problem.k, rows) >= 2**31:
        found.append("a size is 2^31 or more: kernels count with 32 bits")
    return found


def counters(
    problem: Problem, tile: tuple[Any, Any, Any], *, tiles: Any, raster: Any, parts: Any = 1, **more: Any
) -> dict[str, Any]:
    """Returns the most that a kernel counts, by name: all but the bytes of arrays in 32 bits.

    Args:
      problem: as it is multiplied.
      tile: rows, columns and depth of what a work item computes at once. Places past an array's end are counted too:
        sizes are rounded up to tiles, and the next one is looked at.
      tiles: work items, the most there may be, of all parts.
      raster: rows or columns of tiles in a band.
      parts: into which the contraction is divided.
      more: what else a family counts, by name.
    """
    p, (height, width, depth) = problem, tile
    return {
        "rows": p.m + 2 * height,
        "columns": p.n + 2 * width,
        "depth": extent(p, depth) + (parts + 1) * depth,
        "tiles": 4 * tiles,  # one that all blocks in flight have gone past, in turns of two
        "tiles of a band": abs(raster) * maximum(-(-p.m // height), -(-p.n // width)),
        "matrices": parts * p.batch_size * (p.groups.count + 64 if p.groups else 1),  # 32 are looked at at once
        "places": _places(p),
        **more,
    }


def pass_32_bits(counts: Mapping[str, Any]) -> Any:
    """True if one of the counters would pass 32 bits."""
    return functools.reduce(operator.or_, (count >= 2**31 for count in counts.values()))


def of_counters(counts: Mapping[str, int], how: str = "") -> list[str]:
    """Returns the reasons against counters that would pass 32 bits, told the most that each counts."""
    if not pass_32_bits(counts):
        return []
    past = [f"{name.replace('_', ' ')} of up to {count:,}" for name, count in counts.items() if count >= 2**31]
    return [f"{' and '.join(past)}{how}: kernels count with 32 bits"]


@functools.lru_cache(maxsize=1024)
def _places(p: Problem) -> int:
    """Returns the rows, or columns, that an epilogue counts through the batch; 0 where it counts none."""
    return max((size for _, size in place_steps(p)), default=0) * max(p.m, p.n)


def of_swap(problem: Problem) -> list[str]:
    """Returns the reasons against swapping the operands."""
    found = ["swap with gathered rows: they are those of the first operand"] * problem.a.gathered
    found += ["swap with windows of images: they are those of the first operand"] * isinstance(problem.a.view, Im2col)
    if problem.divided == "k":
        found.append("swap with groups of k: kernels divide the contraction of operands as they are")
    if problem.symmetric:
        found.append("swap of a symmetric product, which is its own transpose")
    return found


def of_operands(
    problem: Problem,
    a: tuple[type, ...],
    b: tuple[type, ...] = (),
    blocks: bool = False,
    prologues: bool = False,
    across: bool = False,
) -> list[str]:
    """Returns the reasons against loading the operands as they are: kernels read whole elements, all b alike.

    Args:
      problem: whose operands.
      a, b: the views that a family's kernels read each by. Rows of a may be gathered, and those of windows be, of one
        matrix.
      blocks: whether the family says itself which elements of 4 bits, and which scales, its kernels read.
      prologues: whether it says itself which prologues of a they compute.
      across: whether they gather rows of a that lie across the contraction.
    """
    found = []
    for name, operand, views in (("a", problem.a, a), *(("b", x, b) for x in problem.bs)):
        if not blocks and operand.bits != 8 * operand.dtype.itemsize:
            found.append(f"{name} in {operand.bits} bits an element: kernels load whole ones")
        if (scale := operand.scale) is not None and not blocks:
            what = "scales" if scale.zero is None else "scales and zero points"
            found.append(f"{name} with {what} of {scale.mn} x {scale.k} elements: kernels multiply operands alone")
        if operand.prologue is not None and not (prologues and name == "a"):
            found.append(f"{name} with a prologue: kernels multiply elements as they are")
        if operand.view is not None and not isinstance(operand.view, views):
            found.append(f"{name} as {type(operand.view).__name__.lower()}: kernels load rows of the array")
    if problem.a.gathered and problem.a.contiguous != "k" and not across:
        found.append(f"gathered rows of a in layout {problem.layout}: they lie along k")
    if problem.a.gathered and (problem.batch or problem.symmetric or problem.strided):
        found.append("gathered rows of a in a batch, a symmetric product or an order of their own")
    if problem.a.gathered and problem.divided == "k" and problem.a.contiguous == "k":
        found.append("gathered rows of a, which lie along k, in groups of k")
    of_images = isinstance(problem.a.view, Im2col)
    if of_images and (problem.batch or problem.groups or problem.symmetric or problem.strided):
        found.append("windows of images in a batch, groups, a symmetric product or an order of their own")
    if not of_images and any(isinstance(x.view, Taps) for x in problem.bs):
        found.append("b as taps, but a as no windows of images: kernels count taps as elements of windows")
    if len(set(problem.bs)) > 1:
        found.append("matrices b of several kinds: one kernel loads all in one way")
    return list(dict.fromkeys(found))
