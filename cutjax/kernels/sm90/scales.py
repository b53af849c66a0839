"""Scales of blocks of float8 operands, by which the sums of each block of k are multiplied as they are added up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cutjax.dtypes import FLOAT8, FOUR_BITS, short
from cutjax.kernels import arguments
from cutjax.kernels.arguments import Argument
from cutjax.kernels.columns import each, where
from cutjax.kernels.operand import Scale
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.config import Sizes
from cutjax.kernels.sm90.operands import in_halves

BLOCK = 128  # elements of k, which a stage has of float8


def scaled(problem: Problem) -> bool:
    """True if an operand has scales, and neither is decoded to 16 bits: such are multiplied by theirs before."""
    a, b = problem.a, problem.bs[0]
    return any(x.scale for x in (a, *problem.bs)) and not (in_halves(a, b) or in_halves(b, a))


def reasons(problem: Problem) -> list[str]:
    """Returns the reasons against the scales of a problem's operands."""
    if not scaled(problem):
        return []
    found = []
    for name, operand in (("a", problem.a), ("b", problem.bs[0])):
        if operand.dtype.name not in (*FLOAT8, *FOUR_BITS):
            found.append(f"{name} of {short(operand.dtype.name)} beside scales: kernels promote sums of float8 by them")
        if (scale := operand.scale) is None:
            continue
        if scale.k != BLOCK:
            found.append(f"{name} with scales of {scale.k} elements of k: sums of {BLOCK} are promoted")
        if scale.dtype != np.float32 or scale.zero is not None:
            found.append(f"{name} in blocks of {scale.text}: kernels multiply by f32 scales alone")
    if problem.math:
        found.append(f"scales beside {problem.math}: sums of each block are promoted by them")
    if problem.strided or problem.symmetric or problem.a.view is not None or problem.bs[0].view is not None:
        found.append("scales in an order of their own, of a symmetric product, or of rows that are no array's")
    return found


def by_column(problem: Problem, config: Sizes) -> Any:
    """True if each column of a tile has an entry of its own in shared memory, for a problem as it is multiplied."""
    scale = problem.bs[0].scale
    return scale is not None and _sharing(config, scale) % 8 != 0


def _sharing(config: Sizes, scale: Scale) -> Any:
    """Returns the columns of a tile whose scales are the same wherever in b they are."""
    return each(math.gcd, config.bn, scale.mn)


def bytes_of(problem: Problem, config: Sizes) -> Any:
    """Returns the shared memory that the scales of a stage take, for a problem as it is multiplied."""
    if not scaled(problem):
        return 0
    entries = 0
    if problem.a.scale:
        entries = config.bm
    if scale := problem.bs[0].scale:
        mn, bn = scale.mn, config.bn
        few = (bn + mn - 2 * _sharing(config, scale)) // mn + 1
        entries = entries + problem.products * where(by_column(problem, config), bn, few)
    return (entries + 3) // 4 * 16


def constants(given: Problem) -> dict[str, int]:
    """Returns the constants of the scales in device text: 0 rows or columns share one where there is none."""
    found = {}
    for name, operand in (("A", given.a), ("B", given.bs[0])):
        found[f"{name}_SCALE_MN"] = operand.scale.mn if operand.scale else 0
        found[f"{name}_SCALE_K_MAJOR"] = operand.contiguous == "k"
    return found


def of_scales(given: Problem, swap: bool) -> Iterator[Argument]:
    """Yields the arguments of the scales, those of a first, for a problem of arrays as they were given."""
    if not scaled(given):
        return
    found = list(arguments.scales(given, swap))
    for argument in sorted(found, key=lambda x: x.name.rsplit("_", 1)[-1]):
        yield dataclasses.replace(argument, to="promotion")
