"""Checks of the arguments that operations share, and the errors that say what is wrong with one."""

from __future__ import annotations

import functools
import math
import operator
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.rules import refuse_reduced
from cutjax.dtypes import are_alike, are_narrow
from cutjax.kernels.families import CONFIGS
from cutjax.primitives import derivative
from cutjax.primitives.accumulators import accumulator, converted, multiplied_in
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.groups import rows_of_groups

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def check_config(config: Any, where: str) -> None:
    """Raises if a pinned config is none."""
    if config is not None and not isinstance(config, CONFIGS):
        raise TypeError(f"{where}: config must be a cutjax.Config or cutjax.MmaConfig, got {type(config).__name__}")


def check_accumulate(accumulate: Any, where: str) -> None:
    """Raises unless it says how sums are accumulated."""
    if accumulate not in dot_precision.ACCUMULATE:
        raise ValueError(f"{where}: unknown accumulate {accumulate!r}, expected one of {dot_precision.ACCUMULATE}")


def check_save(save: Any, where: str) -> None:
    """Raises unless it says what is kept for the derivative."""
    if save not in derivative.SAVE:
        raise ValueError(f"{where}: unknown save {save!r}, expected one of {derivative.SAVE}")


def check_epilogue(
    b: Any, epilogue: Any, operands: Any, out_dtype: Any, save: str, where: str = "gemm", name: str = "b"
) -> None:
    """Raises where an epilogue, its operands, ``save`` and b do not fit; ``name`` is that of the argument b."""
    check_save(save, where)
    if not isinstance(operands, tuple | list):
        got = type(operands).__name__
        raise TypeError(f"{where}: operands must be a tuple, got {got}; write operands=(x,) for one")
    if epilogue is not None:
        if not callable(epilogue):
            raise TypeError(f"{where}: epilogue must be a function, got {type(epilogue).__name__}")
        return
    if len(operands):
        raise ValueError(f"{where}: {len(operands)} operands, but no epilogue that would take them")
    if isinstance(b, tuple):
        raise TypeError(f"{where}: {name} is a tuple, so the product needs an epilogue that takes as many accumulators")
    if isinstance(out_dtype, tuple):
        raise TypeError(f"{where}: out_dtype is a tuple, but without an epilogue there is one result")


def elementwise_of(x: jax.Array, y: Any, dtype: np.dtype, where: str, name: str) -> jax.Array:
    """Returns the result of a function of x, of that name; raises unless it is one array like it, for a dtype."""
    is_array = isinstance(y, jax.Array | np.ndarray | np.generic)
    if not is_array or y.shape != x.shape:
        came = f"shape {y.shape}" if is_array else type(y).__name__
        raise ValueError(f"{where}: {name} must return one array of its argument's shape {x.shape}, got {came}")
    if jnp.iscomplexobj(y) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{where}: {name} returns {y.dtype}, but the product is of {dtype}")
    return jnp.asarray(y)


def weights(b: Any, name: str, where: str = "gemm") -> list[jax.Array]:
    """Returns the matrices that multiply the first operand: one, or those of a tuple."""
    if not isinstance(b, tuple):
        return [matrix(b, name, where)]
    if len(b) not in (2, 3):
        raise ValueError(f"{where}: {name} is a tuple of {len(b)}: two or three matrices share a kernel")
    ys = [matrix(y, f"{name}[{i}]", where) for i, y in enumerate(b)]
    for i, y in enumerate(ys):
        if (y.shape, y.dtype) != (ys[0].shape, ys[0].dtype):
            raise ValueError(
                f"{where}: the matrices of a tuple have one shape and dtype: {name}[0] is "
                f"{ys[0].dtype}{list(ys[0].shape)}, {name}[{i}] is {y.dtype}{list(y.shape)}"
            )
    return ys


def integer(x: Any, name: str, where: str) -> int:
    """Returns the integer, of any type but bool; raises an error that says what came."""
    try:
        if not isinstance(x, bool):
            return operator.index(x)
    except TypeError:
        pass
    raise TypeError(f"{where}: {name} must be an int, got {type(x).__name__}")


def result_dtype(dtype: Any, where: str, name: str = "out_dtype") -> np.dtype:
    """Returns the dtype asked for; where jax_enable_x64 is off that of 32 bits, with the warning that jnp gives."""
    try:
        asked = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{where}: {name} must be a dtype, got {dtype!r}") from None
    found = np.dtype(jax.dtypes.canonicalize_dtype(asked))
    if asked != found and dtype not in (int, float, complex):  # Python's types stand for either size
        message = (
            f"{where}: Explicitly requested dtype {asked} is not available, and will be truncated to dtype {found}. "
        )
        frame, level = sys._getframe(), 1
        while frame.f_back and frame.f_code.co_filename.startswith(_PACKAGE):
            frame, level = frame.f_back, level + 1
        message += " To enable more dtypes, set the jax_enable_x64 configuration option."
        warnings.warn(message, stacklevel=level)
    return found


def promote(
    a: jax.Array,
    bs: Sequence[jax.Array],
    out_dtype: DTypeLike | None,
    where: str = "gemm",
    narrow: bool = False,
) -> tuple[Any, ...]:
    """Returns the operands as they are multiplied, the dtype of the result, ``jnp.matmul``'s, and True if it is weak.

    They are in one dtype, which holds the values of both. With ``narrow``, the bs stay in a dtype of 8 bits whose
    values are all in a's, float8 too.
    """
    b = bs[0]
    refuse_reduced(where, [jax.typeof(x) for x in (a, *bs)])
    if {a.dtype, b.dtype} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        raise TypeError(f"{where}: a is {a.dtype}, b is {b.dtype}: no 16-bit dtype holds both, cast one of them")
    stay = narrow and are_narrow(a.dtype, b.dtype) and not a.weak_type
    if out_dtype is not None:  # then jnp.matmul asks for no promotion
        out = result_of(out_dtype, where, a.dtype, b.dtype)
    elif stay:
        out = a.dtype
    else:
        out = jnp.result_type(a, b)
    weak = out_dtype is None and _weak(a, b)
    if not stay and not are_alike(a.dtype, b.dtype):
        dtype = jnp.result_type(a, b) if a.weak_type or b.weak_type else multiplied_in(a.dtype, b.dtype, out)
        a, *bs = (converted(x, dtype) for x in (a, *bs))
    return a, *bs, out, weak


def result_of(out_dtype: DTypeLike, where: str, *operands: np.dtype) -> np.dtype:
    """Returns the dtype asked for of a product of these, or raises where that has no meaning."""
    out = result_dtype(out_dtype, where)
    for operand in operands:
        if _rank(out) > _rank(operand):
            raise TypeError(f"{where}: a product of {operand} has no meaning as out_dtype {out}")
    return out


def travel_dtype(asked: DTypeLike | None, wide: np.dtype, where: str) -> np.dtype:
    """Returns the dtype in which parts of a sum travel."""
    if asked is None:
        return wide
    found = result_dtype(asked, where, "reduce_dtype")
    if accumulator(found) != wide or found.itemsize < 2:
        raise TypeError(f"{where}: reduce_dtype is {found}, but parts of the sum are {wide}: expected it, or 16 bits")
    return found


@functools.cache
def _rank(dtype: np.dtype) -> int:
    kinds = (jnp.complexfloating, jnp.floating, jnp.integer)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def _weak(a: jax.Array, b: jax.Array) -> bool:
    """True if ``jax.numpy`` promotes two arrays to a weak type: each that is strong is of a kind below the other's."""
    a_kind, b_kind = _kind(a.dtype), _kind(b.dtype)
    return (a.weak_type or a_kind < b_kind) and (b.weak_type or b_kind < a_kind)


@functools.cache
def _kind(dtype: np.dtype) -> int:
    """Returns the place of a dtype's kind among those that promotion orders."""
    return next(i for i, kind in enumerate((jnp.bool_, jnp.integer, jnp.inexact)) if jnp.issubdtype(dtype, kind))


def contracted(x: Any, last: bool) -> int:
    return x.shape[-1 if last else -2]


def check_shapes(a: jax.Array, b: jax.Array, layout: str, where: str, names: tuple[str, str] = ("a", "b")) -> None:
    """Raises if the contracting axes of two matrices differ, or their batch axes do not broadcast."""
    shapes = f"{names[0]} is {a.shape}, {names[1]} is {b.shape}"
    if contracted(a, layout[0] == "n") != contracted(b, layout[1] == "t"):
        raise ValueError(f"{where}: contracting dimensions differ: {shapes}, layout {layout!r}")
    check_batch(where, shapes, a.shape[:-2], b.shape[:-2])


def broadcasting(where: str, x: Any, name: str, shape: tuple[int, ...]) -> jax.Array:
    """Returns an argument of that name as an array; raises if it does not broadcast against a shape."""
    x = jnp.asarray(unwrapped(x))
    if x.ndim > len(shape) or any(n not in (1, size) for n, size in zip(x.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{where}: {name} is {x.shape}, which does not broadcast against {shape}")
    return x


def group_sizes_of(sizes: Any, where: str) -> jax.Array:
    """Returns the group sizes as int32."""
    sizes = unwrapped(sizes)
    if not isinstance(sizes, jax.Array | np.ndarray):
        raise TypeError(f"{where}: group_sizes must be an array of integers, got {type(sizes).__name__}")
    if not jnp.issubdtype(sizes.dtype, jnp.integer) or sizes.ndim < 1:
        raise TypeError(f"{where}: group_sizes must be integers [..., g], got {sizes.dtype}{list(sizes.shape)}")
    return to_int32(sizes)


def check_rows(rows: int, where: str, what: str = "rows") -> None:
    """Raises if there are more rows than the integers that say whose they are, int32, can count."""
    if not jax.export.is_symbolic_dim(rows) and rows >= 2**31:
        raise ValueError(f"{where}: {rows:,} {what} are more than int32 counts: expected 2^31 - 1 at most")


def local_sizes(sizes: jax.Array, offset: ArrayLike | None, groups: int, m: int, where: str) -> tuple[jax.Array, bool]:
    """Returns the sizes of ``groups`` groups from ``offset`` on, and True if the rows before them come first."""
    check_rows(m, where)
    check_rows(math.prod(sizes.shape) + 1, where, "groups")
    if offset is None:
        return sizes, False
    offset = unwrapped(offset)
    start = offset if isinstance(offset, jax.Array) else np.asarray(offset)
    if not jnp.issubdtype(start.dtype, jnp.integer) or start.shape not in ((), (1,)):
        raise TypeError(f"{where}: group_offset must be one integer, got {start.dtype}{list(start.shape)}")
    count = sizes.shape[-1]
    first = jnp.clip(to_int32(start.reshape(())), -groups, count)
    padded = jnp.pad(sizes, [(0, 0)] * (sizes.ndim - 1) + [(1, 1)])  # a group that is not there has no row
    mine = jnp.take(padded, jnp.clip(first + jnp.arange(1, groups + 1, dtype=jnp.int32), 0, count + 1), -1, mode="clip")
    ends = rows_of_groups(padded, m, False)[1]
    before = jnp.take(ends, jnp.maximum(first, 0), -1, mode="clip")
    return jnp.concatenate([before[..., None], mine], -1), True


def check_batch(where: str, shapes: str, *batches: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return lax.broadcast_shapes(*batches)
    except ValueError:
        raise ValueError(f"{where}: batch axes do not broadcast: {shapes}") from None


def to_int32(x: jax.Array | np.ndarray) -> jax.Array:
    """Returns integers of any dtype as int32; one that it does not hold as its largest or smallest."""
    held, wanted = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    x = x.clip(max(held.min, wanted.min), wanted.max) if held.max > wanted.max else x
    return jnp.asarray(x.astype(jnp.int32))
