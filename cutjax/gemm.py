"""The operation gemm: what it accepts, and which primitive it becomes."""

from __future__ import annotations

import operator
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import _backend, _derivative, _dot_precision, _fused
from cutjax._config import Config
from cutjax._problem import LAYOUTS
from cutjax._product import converted, multiply, with_rank


def gemm(
    a: ArrayLike,
    b: ArrayLike | tuple[ArrayLike, ...],
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    layout: str = "nn",
    out_dtype: DTypeLike | tuple[DTypeLike | None, ...] | None = None,
    precision: lax.PrecisionLike = None,
    backend: str | None = None,
    config: Config | None = None,
    save: str = "default",
) -> Any:
    """Multiplies matrices: ``d[..., m, n] = sum_k a[..., m, k] * b[..., k, n]``, accumulated in float32.

    Differentiable and batchable like any JAX function. No operand is ever transposed in memory, in the backward pass
    neither; there the cotangent is first rounded to the operands' dtype, so that the same kernels serve it. (float64
    accumulates in float64, integers in at least int32.)

    With an epilogue the result is that of ``epilogue(acc, *operands)``, computed on the accumulators before they leave
    the kernel. It is written in JAX: elementwise functions of the accumulator ``acc[..., m, n]``, float32, of operands
    that broadcast against it and of arrays it captures; and as further results sums, maxima and minima over rows,
    columns or both.

    Args:
      a: ``[..., m, k]``, or ``[..., k, m]`` where ``layout[0]`` is "t".
      b: ``[..., k, n]``, or ``[..., n, k]`` where ``layout[1]`` is "t". Batch axes broadcast and dtypes promote as in
        ``jnp.matmul``, but bfloat16 with float16 is refused. With an epilogue also a tuple of two or three of equal
        shape and dtype; the epilogue then takes as many accumulators.
      epilogue: a function ``(acc, *operands)`` that returns an array or a pytree of them.
      operands: its further arguments: scalars, ``[n]``, ``[m, 1]``, ``[m, n]``, batched or not.
      layout: "nn", "nt", "tn" or "tt".
      out_dtype: dtype of the result; the dtype of a and b by default. With an epilogue: that of every ``[..., m, n]``
        result which the function returns in float32, the accumulator's dtype. Results in another dtype keep it, and so
        do reductions. A tuple says it for each result, None there keeps the function's.
      precision: as in ``jax.lax.dot``; None is what ``jax.default_matmul_precision`` says. The kernels accumulate
        16-bit operands in float32; XLA runs any other algorithm.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      config: pins the kernel of this product. Its gradients choose their own.
      save: what the derivative of an epilogue keeps of the accumulators it needs. "default": their values, in the dtype
        of a and b (float32 if a result is), written by the same kernel and named "cutjax_preactivation" for
        ``jax.checkpoint`` policies. "recompute": nothing, they are multiplied again. A linear epilogue needs none.

    Returns:
      The product, ``[..., m, n]``, or what the epilogue returns.

    Raises:
      TypeError: if an operand is no array, or the dtypes have no product.
      ValueError: if shapes do not fit, or the layout, the precision or the backend is unknown.
      NotImplementedError: if the epilogue is no elementwise function; and when compiled, if backend is "cuda" and no
        kernel serves the problem; lists every reason.

    Example:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w = jnp.ones((2, 8, 16), jnp.bfloat16), jnp.ones((32, 16), jnp.bfloat16)
      >>> cutjax.gemm(x, w, layout="nt").shape
      (2, 8, 32)
      >>> bias = jnp.ones(32)
      >>> cutjax.gemm(x, w, layout="nt", epilogue=lambda acc, b: jax.nn.gelu(acc + b), operands=(bias,)).dtype
      dtype(bfloat16)
    """
    if layout not in LAYOUTS:
        raise ValueError(f"gemm: unknown layout {layout!r}, expected one of {LAYOUTS}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"gemm: config must be a cutjax.Config, got {type(config).__name__}")
    backend = _backend.resolve(backend, "gemm")
    out_dtype = tuple(out_dtype) if isinstance(out_dtype, list) else out_dtype
    how: dict[str, Any] = {"layout": layout, "backend": backend, "config": config}
    how["precision"] = _dot_precision.canonical(precision, "gemm")
    check_epilogue(b, epilogue, operands, out_dtype, save)
    x, ys = matrix(a, "a"), weights(b, "b")
    several = isinstance(out_dtype, tuple)
    x, *ys, dtype, weak = promote(x, ys, None if several else out_dtype)
    y = ys[0]
    if contracted(x, layout[0] == "n") != contracted(y, layout[1] == "t"):
        raise ValueError(f"gemm: contracting dimensions differ: a is {x.shape}, b is {y.shape}, layout {layout!r}")
    try:
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except ValueError:
        raise ValueError(f"gemm: batch axes do not broadcast: a is {x.shape}, b is {y.shape}") from None

    if epilogue is not None:
        x, *ys = (with_rank(v, len(batch) + 2) for v in (x, *ys))
        out, operands = out_dtype if several else dtype, jax.tree.map(unwrapped, tuple(operands))
        return _fused.call(epilogue, x, ys, operands, out_dtype=out, save=save, **how)
    return converted(multiply(x, y, out_dtype=dtype, **how), dtype, weak)


def check_epilogue(
    b: Any, epilogue: Any, operands: Any, out_dtype: Any, save: str, where: str = "gemm", name: str = "b"
) -> None:
    """Raises where an epilogue and what belongs to it do not fit; ``name`` is that of the argument b."""
    if save not in _derivative.SAVE:
        raise ValueError(f"{where}: unknown save {save!r}, expected one of {_derivative.SAVE}")
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


def weights(b: Any, name: str, where: str = "gemm") -> list[jax.Array]:
    """The matrices that multiply the first operand: one, or those of a tuple."""
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


def unwrapped(x: Any) -> Any:
    """The array of an object that stands for one, such as a parameter of a library; all else as it is."""
    return x.__jax_array__() if hasattr(x, "__jax_array__") and not isinstance(x, jax.Array) else x


def integer(x: Any, name: str, where: str) -> int:
    """The integer, of any type but bool, or an error that says what came."""
    try:
        if not isinstance(x, bool):
            return operator.index(x)
    except TypeError:
        pass
    raise TypeError(f"{where}: {name} must be an int, got {type(x).__name__}")


def result_dtype(dtype: Any, where: str, name: str = "out_dtype") -> np.dtype:
    """The dtype asked for; where jax_enable_x64 is off that of 32 bits, with the warning that jnp gives."""
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
        while frame.f_back and os.path.dirname(frame.f_code.co_filename) == os.path.dirname(__file__):
            frame, level = frame.f_back, level + 1
        message += " To enable more dtypes, set the jax_enable_x64 configuration option."
        warnings.warn(message, stacklevel=level)
    return found


def matrix(x: Any, name: str, where: str = "gemm") -> jax.Array:
    """The operand as a JAX array of rank 2 or more, or an error that says what came."""
    x = unwrapped(x)
    if isinstance(x, bool | int | float | complex | np.generic):
        raise ValueError(f"{where}: {name} must have rank 2 or more, got the scalar {x!r}")
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{where}: {name} must be an array, got {type(x).__name__}")
    if x.ndim < 2:
        raise ValueError(f"{where}: {name} must have rank 2 or more, got shape {x.shape}; add an axis to a vector")
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        raise TypeError(f"{where}: {name} must be an array of numbers, got dtype {x.dtype}")
    if any(jax.export.is_symbolic_dim(size) for size in x.shape):
        raise NotImplementedError(
            f"{where}: {name} has a symbolic shape {x.shape}, but kernels are compiled for known sizes"
        )
    return jnp.asarray(x)


def promote(a: jax.Array, bs: Sequence[jax.Array], out_dtype: DTypeLike | None, where: str = "gemm") -> tuple[Any, ...]:
    """The operands in the dtype ``jnp.matmul`` would promote them to; the result's dtype, and whether that is weak."""
    b = bs[0]
    if {a.dtype, b.dtype} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        raise TypeError(f"{where}: a is {a.dtype}, b is {b.dtype}: no 16-bit dtype holds both, cast one of them")
    operand = jnp.result_type(a, b)
    xs = [converted(x, operand) for x in (a, *bs)]
    if out_dtype is None:
        return *xs, operand, _weak(a, b)
    out = result_dtype(out_dtype, where)
    kinds = (jnp.complexfloating, jnp.floating, jnp.integer)
    rank_out, rank_in = (
        next((i for i, kind in enumerate(kinds) if jnp.issubdtype(t, kind)), 3) for t in (out, operand)
    )
    if rank_out > rank_in:
        raise TypeError(f"{where}: a product of {operand} has no meaning as out_dtype {out}")
    return *xs, out, False


def _weak(a: jax.Array, b: jax.Array) -> bool:
    """True if ``jax.numpy`` promotes two arrays to a weak type: each that is strong is of a kind below the other's."""
    kinds = (jnp.bool_, jnp.integer, jnp.inexact)
    a_kind, b_kind = (next(i for i, kind in enumerate(kinds) if jnp.issubdtype(x.dtype, kind)) for x in (a, b))
    return (a.weak_type or a_kind < b_kind) and (b.weak_type or b_kind < a_kind)


def contracted(x: Any, last: bool) -> int:
    return x.shape[-1 if last else -2]
