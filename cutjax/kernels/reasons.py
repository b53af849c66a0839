"""The reasons why a problem has no kernel that do not depend on how a family multiplies."""

from __future__ import annotations

from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import Staging


def of_groups(problem: Problem, staging: Staging) -> list[str]:
    """Returns the reasons against kernels for a problem's groups."""
    found = []
    if problem.groups and problem.a.contiguous != ("k" if problem.ragged == "m" else "mn"):
        found.append(f"layout {problem.layout} with groups of {problem.ragged}: kernels divide an outer axis of a")
    if problem.groups and staging.reductions:
        found.append("a reduction over rows that have groups")
    return found


def of_sizes(problem: Problem, counted: str) -> list[str]:
    """Returns the reasons against a problem's sizes and batch axes; ``counted`` names the limit of 32 bits."""
    found = []
    if 0 in (problem.m, problem.n, problem.k, problem.batch_size) or (problem.ragged and not problem.groups):
        found.append("a size is 0: nothing to launch")
    if len(problem.batch_groups) > 3:
        found.append(f"batch {problem.batch}: operands alternate in more than 3 groups of batch axes")
    if max(problem.m, problem.n, problem.k) >= 2**31:
        found.append(f"a size is 2^31 or more: {counted}")
    return found


def of_swap(problem: Problem) -> list[str]:
    """Returns the reasons against swapping the operands."""
    found = []
    if problem.products > 1:
        found.append(f"swap with {problem.products} products: of several b, none can be the one operand of the rows")
    if problem.ragged:
        found.append("swap with groups: kernels divide the rows, or the contraction, of operands as they are")
    if problem.symmetric:
        found.append("swap of a symmetric product, which is its own transpose")
    return found
