"""Problems that are several products: those that a sum adds up, and those of one a by several b."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from cutjax.dtypes import decodes
from cutjax.epilogue.expression import identity
from cutjax.kernels.joined import Joined
from cutjax.kernels.problem import Problem


@functools.lru_cache(maxsize=1024)
def summands(problem: Problem) -> tuple[Problem, ...]:
    """Returns the products that a problem adds up, without its epilogue; itself where it is no sum."""
    view = problem.a.view
    if not isinstance(view, Joined):
        return (problem,)
    a, *bs = (dataclasses.replace(x, view=None) for x in (problem.a, *problem.bs))
    return tuple(dataclasses.replace(problem.bare, k=k, a=a, bs=tuple(bs)) for k in view.ks)


def blocks(problem: Problem, depth: Any) -> Any:
    """Returns the blocks of so many elements that the contraction takes: each summand ends with its own."""
    return sum(-(-summand.k // depth) for summand in summands(problem))


def extent(problem: Problem, depth: Any) -> Any:
    """Returns the contraction as a kernel counts it: that of a sum is of whole blocks."""
    return blocks(problem, depth) * depth if len(summands(problem)) > 1 else problem.k


def alone(problem: Problem) -> tuple[Problem, ...]:
    """Returns the plain products that a sum, or the products of one a by several b, can be made of; else none.

    Of weights that are decoded an epilogue is a pass over all of them, whose sums take no more memory than the weights
    would if they were dequantized.
    """
    acc, found = problem.accumulator, summands(problem)
    if len(found) > 1 and problem.products == 1:
        return tuple(dataclasses.replace(summand, epilogue=identity(problem.out_dtype, acc)) for summand in found)
    if problem.products > 1 and decodes(problem.a.dtype, problem.bs[0].dtype):
        one = dataclasses.replace(problem, bs=problem.bs[:1], epilogue=identity(acc, acc), in_place=())
        wide = problem.a.bytes(problem.matrices[1] * problem.n * problem.k)
        return (one,) * problem.products if one.result_bytes <= wide else ()
    if problem.products == 1 or not problem.epilogue.identities:
        return ()
    dtypes = (np.dtype(out.dtype) for out in problem.epilogue.outputs)
    return tuple(dataclasses.replace(problem, bs=problem.bs[:1], epilogue=identity(out, acc)) for out in dtypes)


def reasons(problem: Problem) -> list[str]:
    """Returns the reasons against kernels for a sum of products."""
    if len(summands(problem)) == 1:
        return []
    found, operands = [], (problem.a, *problem.bs)
    if problem.symmetric or problem.strided or problem.divided == "k":
        found.append("a sum of symmetric products, of ones in groups of k, or of arrays in an order of their own")
    if any(x.scale or x.prologue for x in operands) or len({x.bits for x in operands}) > 1:
        found.append("a sum of products with scales, prologues, or operands of different sizes")
    return found
