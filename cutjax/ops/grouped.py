"""The operations grouped_gemm and grouped_outer: their arguments, checked, and the products that they become."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, axes, rows_by_columns
from cutjax.epilogue.captured import on_automatic_axes
from cutjax.kernels.families import AnyConfig
from cutjax.ops.arguments import (
    check_accumulate,
    check_batch,
    check_config,
    check_epilogue,
    contracted,
    group_sizes_of,
    integer,
    local_sizes,
    promote,
    weights,
)
from cutjax.ops.fp8 import Float8Recipe, in_float8
from cutjax.ops.prologue import check_prologue, multiplied
from cutjax.ops.quantized import Weights, as_quantized, is_quantized, values_of
from cutjax.ops.scales import promote_values, scales_of
from cutjax.ops.sums import pairs_of, sum_of
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Product
from cutjax.primitives.ragged import Depth, Rows
from cutjax.primitives.together import multiply_each
from cutjax.runtime import backends

LAYOUTS = ("nn", "nt")


@automatic(lambda x, w, layout="nn", **_: rows_by_columns(x, w, layout), on_automatic_axes)
def grouped_gemm(
    x: Weights | tuple[ArrayLike, ...],
    w: Weights | tuple[Weights, ...],
    group_sizes: ArrayLike,
    *,
    layout: str = "nn",
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    prologue: Callable[..., Any] | None = None,
    prologue_operands: Sequence[Any] = (),
    out_dtype: DTypeLike | tuple[DTypeLike | None, ...] | None = None,
    precision: lax.PrecisionLike = None,
    accumulate: str = "f32",
    fp8: Float8Recipe = None,
    group_offset: ArrayLike | None = None,
    backend: str | None = None,
    config: AnyConfig | None = None,
    save: str = "default",
) -> Any:
    """Multiplies each group of rows by its own matrix: ``d[rows of group i] = x[rows of group i] @ w[i]``.

    The rows are sorted by group: the first ``group_sizes[0]`` are those of group 0, and so on. Rows past the sum are of
    no group, and zero in the result. Sizes are data that the host never reads, and need no alignment. Any are served: a
    negative one counts as 0, and their sum stops at m.

    Differentiable to any order in x and w, and batchable over any axes of any argument. No weight is copied or
    transposed in memory, in the backward pass neither. Sums are accumulated as in ``cutjax.gemm``.

    With an epilogue the result is that of ``epilogue(acc, *operands)``, as in ``cutjax.gemm``; rows of no group are
    zero all the same, and are left out of its reductions. With a prologue it is of ``prologue(x, *prologue_operands)``,
    as there too; rows of no group reach no derivative of it.

    A tuple of x and one of as many w is a sum of products, as in ``cutjax.gemm``.

    Args:
      x: ``[..., m, k]``, or `cutjax.Quantized`. Batch axes broadcast and dtypes promote as in ``cutjax.gemm``. Or a
        tuple of arrays.
      w: ``[..., g, k, n]``, or ``[..., g, n, k]`` where layout is "nt", or `cutjax.Quantized`. With an epilogue also a
        tuple of two or three.
      group_sizes: ``[..., g]``, of any integer dtype.
      layout: "nn" or "nt".
      epilogue: a function ``(acc, *operands)``, as in ``cutjax.gemm``.
      operands: its further arguments: those of ``cutjax.gemm``, and with one axis more than the result those of which
        each group has its own, ``[..., g, 1, n]`` or ``[..., g, 1, 1]``. The function sees what the rows have of such a
        one: ``[..., m, n]`` or ``[..., m, 1]``.
      prologue: a function ``(x, *prologue_operands)``, as in ``cutjax.gemm``.
      prologue_operands: its further arguments, which broadcast against x; with one axis more those of which each group
        has its own, ``[..., g, 1, k]`` or ``[..., g, 1, 1]``.
      out_dtype: dtype of the result; as in ``cutjax.gemm``, with an epilogue and without.
      precision: as in ``cutjax.gemm``.
      accumulate: as in ``cutjax.gemm``.
      fp8: a recipe of ``cutjax.fp8_dot_general``, or what that returns: arrays are quantized to float8 and multiplied
        so, in the backward pass too, where that is predicted to be faster. A matrix of w has scales of its own. Along
        rows, as of x and for gradients of weights, scales are those of all groups: of all rows, or of 128 of them.
      group_offset: a scalar or ``[1]``, data too: the group that ``w[0]`` is of, where ``group_sizes`` has all groups
        and w some, as under expert parallelism. Rows of the other groups are zero.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      config: pins the kernel of this product. Its gradients choose their own.
      save: what the derivative of an epilogue keeps, "default" or "recompute", see ``cutjax.gemm``.

    Returns:
      ``[..., m, n]``, or what the epilogue returns.

    Raises:
      TypeError: if an operand is no array, the sizes are no integers, or the dtypes have no product.
      ValueError: if shapes do not fit, or the layout, the precision or the backend is unknown.
      NotImplementedError: if the epilogue is no elementwise function; and when compiled, if backend is "cuda" and no
        kernel serves the problem; lists every reason.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> x, w = jnp.ones((6, 8)), jnp.ones((3, 8, 4))
      >>> sizes, bias = jnp.array([2, 0, 3]), jnp.ones((3, 1, 4))
      >>> cutjax.grouped_gemm(x, w, sizes).shape
      (6, 4)
      >>> cutjax.grouped_gemm(x, w, sizes, epilogue=jnp.add, operands=(bias,))[:, 0]
      Array([9., 9., 9., 9., 9., 0.], dtype=float32)
    """
    where = "grouped_gemm"
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: unknown layout {layout!r}, expected one of {LAYOUTS}")
    backend = _resolve(backend, config, where)
    check_accumulate(accumulate, where)
    out_dtype = tuple(out_dtype) if isinstance(out_dtype, list) else out_dtype
    if isinstance(x, tuple):
        pairs = pairs_of(x, w, where, ("x", "w"), prologue=prologue, fp8=fp8)
    else:
        check_epilogue(w, epilogue, operands, out_dtype, save, where, "w")
        check_prologue(x, prologue, prologue_operands, where, "x")
        x, w = as_quantized(x), as_quantized(w)
        pairs = [(matrix(values_of(x), "x", where), weights(values_of(w), "w", where)[0])]
    given = group_sizes_of(group_sizes, where)
    (sizes, leading), *_ = (_sizes(where, *pair, given, layout, group_offset) for pair in pairs)
    params: dict[str, Any] = {"backend": backend, "config": config, "accumulate": accumulate}
    params["precision"] = dot_precision.canonical(precision, where)
    params |= {"epilogue": epilogue, "operands": operands, "save": save, "out_dtype": out_dtype}
    if isinstance(x, tuple):
        return sum_of(Rows(leading, layout), pairs, (sizes,), where=where, **params)
    params |= {"prologue": prologue, "prologue_operands": prologue_operands, "fp8": fp8}
    return rows_product(Rows(leading, layout), x, w, sizes, where=where, **params)


def _sizes(
    where: str, rows: jax.Array, w: jax.Array, sizes: jax.Array, layout: str, group_offset: ArrayLike | None
) -> tuple[jax.Array, bool]:
    """Returns the sizes of w's groups, as ``local_sizes`` does; raises unless rows and w fit them and each other."""
    if w.ndim < 3:
        raise ValueError(f"{where}: w must have rank 3 or more, got shape {w.shape}; [..., g, k, n] is expected")
    shapes = f"x is {rows.shape}, w is {w.shape}"
    if rows.shape[-1] != contracted(w, layout[1] == "t"):
        raise ValueError(f"{where}: contracting dimensions differ: {shapes}, layout {layout!r}")
    if group_offset is None and sizes.shape[-1] != w.shape[-3]:
        raise ValueError(
            f"{where}: the numbers of groups differ: group_sizes is {sizes.shape}, w is {w.shape}; "
            "group_offset= says which of them w has"
        )
    check_batch(where, f"{shapes}, group_sizes is {sizes.shape}", rows.shape[:-2], w.shape[:-3], sizes.shape[:-1])
    return local_sizes(sizes, group_offset, w.shape[-3], rows.shape[-2], where)


def rows_product(
    product: Rows,
    x: Any,
    w: Any,
    sizes: jax.Array,
    *,
    where: str,
    precision: Any,
    accumulate: str = "f32",
    fp8: Float8Recipe = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    prologue: Callable[..., Any] | None = None,
    prologue_operands: Sequence[Any] = (),
    save: str = "default",
    out_dtype: Any,
    names: tuple[str, str] = ("x", "w"),
    **params: Any,
) -> Any:
    """Returns the product of checked operands, quantized or not; w may be a tuple."""
    rows, ws = matrix(values_of(x), names[0], where), weights(values_of(w), names[1], where)
    several = isinstance(out_dtype, tuple)
    rank = max(rows.ndim, ws[0].ndim - 1, sizes.ndim + 1)
    scales = scales_of(x, w, product.layout, where, names, rank)
    given = rows
    rows, *ws, dtype, _ = promote_values((x, w), scales, rows, ws, None if several else out_dtype, where)
    params["precision"] = dot_precision.accumulated(precision, accumulate, rows.dtype, ws[0].dtype)
    if not is_quantized((x, w)):
        pairs, groups = [(rows, ws[0])], ws[0].shape[-3]
        product = in_float8(fp8, product, pairs, groups, params["precision"], params["backend"], where)  # pyright: ignore
    found, factors = scales.factored(product, rows, ws, (sizes,))
    out = out_dtype if several else dtype
    epilogue, operands, out = scales.before(epilogue, tuple(operands), found.multiplied(rows.dtype), out)
    operands = jax.tree.map(unwrapped, operands)

    def run(product: Product, factors: Factors) -> Any:
        if epilogue is None:
            return products.multiply(product, *factors.arrays, out_dtype=dtype, **params)
        return products.call(product, epilogue, factors, operands, out_dtype=out, save=save, **params)

    return multiplied(where, prologue, prologue_operands, given, found, factors, run, **params)


def _columns(x: Any, dy: Any, **_: Any) -> Callable[[Any], list[Any]]:
    """Returns the sharding of ``[..., g, k, n]``: columns of x by those of dy."""
    of = dy[0] if isinstance(dy, tuple) and not is_quantized(dy) else dy
    return lambda out: [*[None] * (out.ndim - 2), axes(x, -1), axes(of, -1)]


@automatic(_columns)
def grouped_outer(
    x: Weights,
    dy: Weights | tuple[ArrayLike, ...],
    group_sizes: ArrayLike,
    *,
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    accumulate: ArrayLike | tuple[ArrayLike, ...] | None = None,
    group_offset: ArrayLike | None = None,
    groups: int | None = None,
    backend: str | None = None,
    config: AnyConfig | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Multiplies each group's rows of x by those of dy: ``d[i] = x[rows of group i].T @ dy[rows of group i]``.

    The gradient of ``grouped_gemm`` in w, and like it in all that is said of sizes, derivatives and batch axes there.

    Args:
      x: ``[..., m, k]``, rows sorted by group; or `cutjax.Quantized`, as dy.
      dy: ``[..., m, n]``. Batch axes broadcast and dtypes promote as in ``cutjax.gemm``. Or a tuple of two or three
        arrays of one shape and dtype, of which the result is a tuple: one kernel reads x once for all, where there is
        one that is predicted to be faster.
      group_sizes: ``[..., g]``, of any integer dtype.
      out_dtype: dtype of the result; the dtype of x and dy by default.
      precision: as in ``cutjax.gemm``.
      accumulate: an array of the result's shape, often float32, to which the products are added. The result is the sum,
        rounded once to its dtype, and is written to its memory where that is not needed any more (a donated argument,
        the carry of a loop). Of several dy a tuple of as many.
      group_offset: a scalar or ``[1]``, data too: the group that the first matrix of the result is of.
      groups: with ``group_offset``, how many matrices the result has; as many as ``group_sizes`` by default.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      config: pins the kernel of this product.

    Returns:
      ``[..., groups, k, n]``, or a tuple of them; zeros where a group has no row.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``grouped_gemm``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> x, dy = jnp.ones((6, 8)), jnp.ones((6, 4))
      >>> cutjax.grouped_outer(x, dy, jnp.array([2, 0, 3]))[:, 0, 0]
      Array([2., 0., 3.], dtype=float32)
    """
    where = "grouped_outer"
    backend = _resolve(backend, config, where)
    tos = [] if accumulate is None else weights(accumulate, "accumulate", where)
    if tos and out_dtype is not None:
        raise ValueError(f"{where}: out_dtype and accumulate, whose dtype is the result's: leave out_dtype")
    out_dtype = tos[0].dtype if tos else out_dtype
    x, dy = as_quantized(x), as_quantized(dy)
    if (several := isinstance(dy, tuple)) and is_quantized((x, dy)):
        raise TypeError(f"{where}: a tuple of dy is of arrays, got cutjax.Quantized: dequantize them")
    a, bs = matrix(values_of(x), "x", where), weights(values_of(dy), "dy", where)
    if (tos and isinstance(accumulate, tuple) != several) or len(tos) not in (0, len(bs)):
        raise ValueError(f"{where}: accumulate must be as many arrays as dy, got {len(tos)} for {len(bs)}")
    b = bs[0]
    shapes = f"x is {a.shape}, dy is {b.shape}"
    if a.shape[-2] != b.shape[-2]:
        raise ValueError(f"{where}: the numbers of rows differ: {shapes}")
    sizes = group_sizes_of(group_sizes, where)
    if groups is None:
        groups = sizes.shape[-1]
    elif group_offset is None:
        raise ValueError(f"{where}: groups={groups} without group_offset, which says of which group the first is")
    elif (groups := integer(groups, "groups", where)) < 0:
        raise ValueError(f"{where}: groups must be an int of at least 0, got {groups}")
    shapes = f"{shapes}, group_sizes is {sizes.shape}"
    batch = check_batch(where, shapes, a.shape[:-2], b.shape[:-2], sizes.shape[:-1])
    sizes, leading = local_sizes(sizes, group_offset, groups, a.shape[-2], where)
    expected = (*batch, groups, a.shape[-1], b.shape[-1])
    if tos and tos[0].shape != expected:
        raise ValueError(f"{where}: accumulate must be {expected}, like the result, got {tos[0].shape}: {shapes}")
    precision = dot_precision.canonical(precision, where)
    how: dict[str, Any] = {"out_dtype": out_dtype, "precision": precision, "backend": backend, "config": config}
    if several:
        return _several(Depth(leading), a, bs, sizes, tos, where=where, **how)
    return depth_product(Depth(leading), x, dy, sizes, where=where, to=tos[0] if tos else None, **how)


def _several(
    product: Depth,
    a: jax.Array,
    bs: Sequence[jax.Array],
    sizes: jax.Array,
    tos: Sequence[jax.Array],
    *,
    where: str,
    out_dtype: Any,
    **params: Any,
) -> tuple[jax.Array, ...]:
    """Returns the products of a and each b, added to an array each or not."""
    a, *bs, dtype, _ = promote(a, bs, out_dtype, where)
    if not tos:
        return tuple(multiply_each(product, a, bs, sizes, out_dtype=dtype, **params))

    def add(*args: Any) -> tuple[jax.Array, ...]:
        *accs, tos = args
        return tuple(map(_added, accs, tos))

    in_place, dtypes = tuple((i, i) for i in range(len(bs))), tuple(to.dtype for to in tos)
    factors = Factors(a, bs, (sizes,))
    return products.call(product, add, factors, (tuple(tos),), out_dtype=dtypes, in_place=in_place, **params)


def depth_product(
    product: Depth,
    x: Any,
    dy: Any,
    sizes: jax.Array,
    *,
    where: str,
    to: jax.Array | None = None,
    out_dtype: Any,
    names: tuple[str, str] = ("x", "dy"),
    **params: Any,
) -> Any:
    """Returns the product of checked operands, quantized or not, added ``to`` an array or not."""
    a, b = matrix(values_of(x), names[0], where), matrix(values_of(dy), names[1], where)
    scales = scales_of(x, dy, "tn", where, names).of_results()
    a, b, dtype, _ = promote_values((x, dy), scales, a, [b], out_dtype, where, narrow=False, last=False)
    found, factors = scales.factored(product, a, [b], (sizes,))
    before = functools.partial(scales.before, values=found.multiplied(a.dtype))
    if to is None:
        epilogue, operands, out = before(None, (), out_dtype=dtype)
        if epilogue is None:
            return products.multiply(found, *factors.arrays, out_dtype=dtype, **params)
        return products.call(found, epilogue, factors, operands, out_dtype=out, **params)

    # Each tile of what is added to is read just before it is written.
    epilogue, operands, out = before(_added, (to,), out_dtype=to.dtype)
    assert epilogue is not None
    in_place = ((len(jax.tree.leaves(operands)) - 1, 0),)
    return products.call(found, epilogue, factors, operands, out_dtype=out, in_place=in_place, **params)


def _added(acc: jax.Array, to: jax.Array) -> jax.Array:
    wide = accumulator(to.dtype, acc.dtype)
    total = acc.astype(wide) + to.astype(wide)
    return total if wide == acc.dtype else total.astype(to.dtype)  # one in acc's dtype is rounded by out_dtype


def _resolve(backend: str | None, config: Any, where: str) -> str:
    check_config(config, where)
    return backends.resolve(backend, where)
