"""The reasons why a problem has no kernel that do not depend on how a family multiplies."""

from __future__ import annotations

from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import Staging


def of_groups(problem: Problem, staging: Staging) -> list[str]:
    """Returns why groups cannot be walked."""
    found = []
    if problem.groups and problem.a.contiguous != ("k" if problem.divided == "m" else "mn"):
        found.append(f"layout {problem.layout} with groups of {problem.divided}: kernels divide an outer axis of a")
    if problem.groups and staging.reductions:
        found.append("a reduction over rows that have groups")
    return found


def of_sizes(problem: Problem, counted: str) -> list[str]:
    """Returns why sizes and batch axes cannot be served; ``counted`` says what counts with 32 bits."""
    found = []
    if 0 in (problem.m, problem.n, problem.k, problem.batch_size) or (problem.groups and not problem.groups.count):
        found.append("a size is 0: nothing to launch")
    if len(problem.batch_groups) > 3:
        found.append(f"batch {problem.batch}: operands alternate in more than 3 groups of batch axes")
    if max(problem.m, problem.n, problem.k) >= 2**31:
        found.append(f"a size is 2^31 or more: {counted}")
    return found


def of_swap(problem: Problem) -> list[str]:
    """Returns why the operands cannot be swapped."""
    found = []
    if problem.products > 1:
        found.append(f"swap with {problem.products} products: of several b, none can be the one operand of the rows")
    if problem.groups:
        found.append("swap with groups: kernels divide the rows, or the contraction, of operands as they are")
    if problem.symmetric:
        found.append("swap of a symmetric product, which is its own transpose")
    return found


def of_operands(problem: Problem) -> list[str]:
    """Returns why operands cannot be loaded as they are: kernels read matrices of whole elements, all b alike."""
    found = []
    for name, operand in (("a", problem.a), *(("b", b) for b in problem.bs)):
        if operand.bits != 8 * operand.dtype.itemsize:
            found.append(f"{name} in {operand.bits} bits an element: kernels load whole ones")
        if (scale := operand.scale) is not None:
            found.append(f"{name} with scales of {scale.mn} x {scale.k} elements: kernels multiply operands alone")
        if operand.view is not None:
            found.append(f"{name} as {type(operand.view).__name__.lower()}: kernels load rows of the array")
    if len(set(problem.bs)) > 1:
        found.append("matrices b of several kinds: one kernel loads all in one way")
    return list(dict.fromkeys(found))
