"""Results that a kernel writes in part, of k or of a reduction, and what XLA makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cutjax.epilogue.expression import REDUCTIONS, Output
from cutjax.kernels.problem import Problem


def parts(problem: Problem, splits: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the avals of a kernel's results where k has splits: each product's parts, in the accumulators' dtype."""
    p = problem
    shape = (splits, *p.batch, *[p.groups_along("k")] * (p.divided == "k"), p.m, p.n)
    return (jax.ShapeDtypeStruct(shape, p.accumulator),) * p.products


def written(
    problem: Problem, columns: int, turned: bool = False, shares: int | None = None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the avals of a kernel's results, of which reductions are still one value for each tile's share.

    Of a reduction it is one value for each 16 rows, or of all rows so many ``shares``, for each so many columns, or
    both; of columns alone, rows come last. Where operands are swapped the problem is that of the transposed result, and
    results of full size are ``turned``.
    """
    p, found = problem, []
    for out in p.epilogue.outputs:
        of_rows = shares or -(-p.m // 16) if "row" in out.axes else p.m
        of_columns = -(-p.n // columns) if "col" in out.axes else p.n
        turns = out.axes == ("col",) if out.reduce else turned
        full = (of_rows, of_columns) if out.reduce else (p.m, p.n)
        shape = full[::-1] if turns else full
        found.append(jax.ShapeDtypeStruct((*p.batch, *shape), np.dtype(out.dtype)))
    return tuple(found)


def finish(outputs: Sequence[Output], written: Sequence[jax.Array], _: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the results from the arrays that a kernel writes: reductions are reduced over the tiles' shares."""
    found = []
    for out, x in zip(outputs, written, strict=False):  # there may be scratch after them
        axes = [-2] if len(out.axes) == 1 else [-2, -1]
        found.append(REDUCTIONS[out.reduce](x, axes) if out.reduce else x)
    return found


def finish_parts(
    problem: Problem,
    summed: Callable[[jax.Array], jax.Array],
    written: Sequence[jax.Array],
    arguments: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Returns the results, of the parts of each product: they are added up in order, and made the product.

    Of few rows by narrow weights that stays a pass of its own: XLA would add them up again for each element of what is
    made of them, which took 73 us of a layer of decoding.
    """
    p = problem
    sums = [functools.reduce(jax.lax.add, [parts[i] for i in range(parts.shape[0])]) for parts in written]
    found = p.epilogue.apply([summed(x) for x in sums], arguments[p.arrays :])
    return jax.lax.optimization_barrier(found) if p.few_rows and p.bs[0].bits < 16 else found
