"""Prologues that kernels compute themselves: what all families share, reasons against one and what a launch is told."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cutjax.dtypes import short
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.arguments import Argument, integer, scale_buffers
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import not_inlined
from cutjax.runtime.launch import Pointer


def reasons(problem: Problem) -> list[str]:
    """Returns the reasons against computing the prologue of a in a kernel; none where it has none."""
    prologue, a = problem.a.prologue, problem.a
    if prologue is None:
        return []
    if why := emit.reasons(prologue):
        return [f"prologue: {each}" for each in why]
    found, out = [], prologue.outputs[0].dtype
    if a.dtype.name != out or out not in ("bfloat16", "float16"):
        found.append(f"a prologue from {short(a.dtype.name)} to {short(out)}: kernels change bf16 or f16 in place")
    if a.view is not None or problem.strided:
        found.append("a prologue of rows that are gathered, windows, or in an order of their own")
    if math.prod(a.batch) > 1:
        found.append(f"a prologue of {math.prod(a.batch)} matrices a: its operands are of one")
    if problem.divided == "k" or problem.symmetric:
        found.append("a prologue in groups of k, or of a symmetric product")
    if emit.places(prologue):
        found.append("a prologue that counts rows or columns through a batch")
    return [*found, *not_inlined(prologue, "a prologue")]


def arguments(problem: Problem, to: str) -> Iterator[Argument]:
    """Yields the sizes of a's array and its prologue's operands, in the order of `told`, for a part of a kernel."""
    if problem.a.prologue is None:
        return
    rows, columns = problem.a.array(problem.m, problem.k)
    yield integer("prologue_rows", rows, to)
    yield integer("prologue_columns", columns, to)
    for i, buffer in enumerate(scale_buffers(problem)[0] if problem.a.arrays else ()):
        yield Argument(f"const char* prologue{i}", Pointer(buffer), to)


def told(prologue: Epilogue) -> str:
    """Returns the text of ``Told``: the sizes of the array and the operands."""
    fields = "".join(f"\n  const char* x{i};" for i in range(len(prologue.operands)))
    return f"struct Told {{\n  int rows, columns;{fields}\n}};\n"
