"""Epilogues of products, traced: with what accumulators, and in what dtypes their results are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from cutjax.epilogue.trace import Traced, trace
from cutjax.primitives import derivative
from cutjax.primitives.accumulators import accumulator


def abstract_accumulator(dtype: np.dtype, full: Any, out_dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns the accumulator that an epilogue is traced with: of a product of ``dtype``, with the shape of an aval."""
    return abstract(full, accumulator(dtype, None if isinstance(out_dtype, tuple) else out_dtype))


def abstract(full: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns the shape and the dtype, that of an aval or another, with which a function of a whole array is traced."""
    return jax.ShapeDtypeStruct(full.shape, dtype or full.dtype, sharding=full.sharding, manual_axis_type=full.mat)


def trace_with_dtype(
    where: str,
    fn: Callable[..., Any],
    accs: Sequence[Any],
    operands: Sequence[Any],
    out_dtype: Any,
    groups: int | None = None,
    rows: int = 1,
) -> Traced:
    """Traces a function; its results in the accumulators' dtype are in ``out_dtype``, or each in that of a tuple."""
    if isinstance(out_dtype, tuple):
        fn, out_dtype = casting(where, fn, out_dtype), None
    traced = trace(fn, accs, operands, groups, rows=rows)
    return traced._replace(epilogue=derivative.rounded_once(traced.epilogue, out_dtype))


def with_result_dtype(results: Any, acc: Any, out_dtype: Any) -> Any:
    """Returns results with those of full size and the accumulators' dtype in ``out_dtype``, as a kernel has them."""
    if out_dtype is None or isinstance(out_dtype, tuple):
        return results
    return jax.tree.map(lambda x: x.astype(out_dtype) if (x.shape, x.dtype) == (acc.shape, acc.dtype) else x, results)


def casting(where: str, fn: Callable[..., Any], dtypes: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns the function with each of its results in the dtype asked for."""

    @functools.wraps(fn)
    def cast(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(fn(*args))
        if len(leaves) != len(dtypes):
            raise ValueError(f"{where}: out_dtype has {len(dtypes)} entries, the epilogue returns {len(leaves)} arrays")
        return tree.unflatten(x if t is None else x.astype(t) for x, t in zip(leaves, dtypes, strict=True))

    return cast
