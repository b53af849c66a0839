"""ragged_dot and ragged_dot_general: jax.lax's operations of these names on the grouped products of this package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, axes
from cutjax.dtypes import are_alike
from cutjax.ops.arguments import check_rows, group_sizes_of, local_sizes, result_dtype
from cutjax.ops.contraction import Move
from cutjax.ops.dot_general import moved, permuted
from cutjax.ops.grouped import depth_product, rows_product
from cutjax.ops.quantized import Quantized, Weights, as_quantized, is_quantized, values_of
from cutjax.primitives.accumulators import accumulator, converted, multiplied_in
from cutjax.primitives.arrays import unwrapped
from cutjax.primitives.groups import rows_of_groups
from cutjax.primitives.product import Product, multiply
from cutjax.primitives.ragged import Depth, Rows
from cutjax.runtime import backends

_MATRICES = lax.RaggedDotDimensionNumbers(  # of ragged_dot
    dot_dimension_numbers=(([1], [1]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
_NO_MESH = jax.sharding.AbstractMesh((), ())


def ragged_dot(
    lhs: Weights,
    rhs: Weights,
    group_sizes: ArrayLike,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.lax.ragged_dot``, to which it is equal to rounding: ``grouped_gemm`` in that function's signature.

    Differentiable to any order and batchable over any axes of any arguments. Symbolic sizes (``jax.export``), for which
    no kernel can be compiled, are left to ``jax.lax.ragged_dot``.

    Args:
      lhs: ``[m, k]``, rows sorted by group; or `cutjax.Quantized`, as rhs: see ``cutjax.grouped_gemm``.
      rhs: ``[g, k, n]``.
      group_sizes: integers ``[g]``, any: see ``cutjax.grouped_gemm``. With ``group_offset`` possibly more than g.
      precision: as in ``jax.lax.dot``; None is what ``jax.default_matmul_precision`` says. The kernels accumulate
        16-bit operands in float32; XLA runs any other algorithm.
      preferred_element_type: the result's dtype; that of lhs and rhs by default.
      group_offset: a scalar or ``[1]``: the group in ``group_sizes`` that ``rhs[0]`` is of.
      out_sharding: must be None; divide the product inside ``jax.shard_map``.

    Returns:
      ``[m, n]``.

    Raises:
      TypeError, ValueError: as ``jax.lax.ragged_dot``.
      NotImplementedError: with ``out_sharding``; with symbolic sizes where the backend is "cuda" or there is a
        ``group_offset``; and when compiled, as ``cutjax.grouped_gemm``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> x, w = jnp.ones((6, 8)), jnp.ones((3, 8, 4))
      >>> cutjax.ragged_dot(x, w, jnp.array([2, 0, 3]))[:, 0]
      Array([8., 8., 8., 8., 8., 0.], dtype=float32)
    """
    return ragged_dot_general(
        lhs, rhs, group_sizes, _MATRICES, precision, preferred_element_type, group_offset, out_sharding
    )


def _as_operands(lhs: Any, rhs: Any, ragged_dot_dimension_numbers: Any, **_: Any) -> Callable[[Any], list[Any]]:
    """Returns the sharding of the result: each dimension lies as the operand's that it comes from."""
    dims, lhs, rhs = ragged_dot_dimension_numbers, *values_of(as_quantized((lhs, rhs)))
    (l_contract, r_contract), (l_batch, r_batch) = dims.dot_dimension_numbers
    l_free = _others(lhs.ndim, l_contract, l_batch)
    r_free = _others(rhs.ndim, r_contract, r_batch, dims.rhs_group_dimensions)
    found = [axes(lhs, i - lhs.ndim) for i in (*l_batch, *l_free)] + [axes(rhs, i - rhs.ndim) for i in r_free]
    return lambda out: [None] * (out.ndim - len(found)) + found


@automatic(_as_operands)
def ragged_dot_general(
    lhs: Weights,
    rhs: Weights,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.lax.ragged_dot_general``, to which it is equal to rounding.

    The ragged dimension of lhs may be any that it has; that decides the mode:

    1. not contracted: ``[b, m, k], [g, b, k, n], [b, x, g] -> [b, m, n]``, a product of rows in groups;
    2. contracted: ``[b, m, k], [b, k, n], [b, x, g] -> [g, b, m, n]``, one product for each group;
    3. a batch dimension: ``[b, m, k], [b, k, n], [x, g] -> [b, m, n]``. As in jax the sizes then do not matter: this is
       ``jax.lax.dot_general``.

    Each letter is any number of dimensions, in any order; x are those before the ragged one. Nothing is transposed in
    memory if the order is one that ``cutjax.grouped_gemm`` and ``cutjax.grouped_outer`` take.

    Args:
      lhs: an array; or `cutjax.Quantized`, as rhs: the result's dtype is then that of ``cutjax.grouped_gemm``.
      rhs: an array.
      group_sizes: integers, as above or ``[g]``; any, see ``cutjax.grouped_gemm``.
      ragged_dot_dimension_numbers: a ``jax.lax.RaggedDotDimensionNumbers``.
      precision: as in ``jax.lax.dot``; None is what ``jax.default_matmul_precision`` says. The kernels accumulate
        16-bit operands in float32; XLA runs any other algorithm.
      preferred_element_type: the result's dtype; that of lhs and rhs by default.
      group_offset: a scalar or ``[1]``: the group in ``group_sizes`` that the first of rhs, or of the result, is of.
      out_sharding: must be None; divide the product inside ``jax.shard_map``.

    Returns:
      The array that ``jax.lax.ragged_dot_general`` returns.

    Raises:
      TypeError, ValueError: as ``jax.lax.ragged_dot_general``.
      NotImplementedError: with ``out_sharding``; with symbolic sizes where the backend is "cuda" or there is a
        ``group_offset``; and when compiled, as ``cutjax.grouped_gemm``.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, dy = jnp.ones((6, 8)), jnp.ones((6, 4))
      >>> contracted = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
      >>> cutjax.ragged_dot_general(x, dy, jnp.array([2, 0, 3]), contracted).shape
      (3, 8, 4)
    """
    where = "ragged_dot_general"
    if out_sharding is not None:
        raise NotImplementedError(f"{where}: out_sharding must be None, got {out_sharding}; use jax.shard_map")
    given = lhs, rhs, group_sizes, ragged_dot_dimension_numbers, precision, preferred_element_type, group_offset
    return in_groups(*given)


def in_groups(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    ragged_dot_dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    group_offset: Any,
    of: Callable[[Product, Any, Any], Product] = lambda product, *_: product,
) -> jax.Array:
    """Computes ragged_dot_general by the product that ``of`` makes of the one of rows in groups, told its factors."""
    where = "ragged_dot_general"
    lhs, rhs = (x if isinstance(x, Quantized) else jnp.asarray(unwrapped(x)) for x in map(as_quantized, (lhs, rhs)))
    quantized = is_quantized((lhs, rhs))
    sizes, dims = group_sizes_of(group_sizes, where), ragged_dot_dimension_numbers
    precision = dot_precision.canonical(precision, where)
    if preferred_element_type is not None:
        preferred_element_type = result_dtype(preferred_element_type, where, "preferred_element_type")
    x, w = (jax.ShapeDtypeStruct(x.shape, np.float32) if quantized else x for x in (lhs, rhs))
    out = _check(x, w, sizes, dims, precision, None if quantized else preferred_element_type, group_offset)
    backend = backends.resolve(None, where)
    if any(jax.export.is_symbolic_dim(size) for x in (lhs, rhs, sizes) for size in x.shape):
        if backend == "cuda" or quantized or group_offset is not None:
            what = "group_offset" if group_offset is not None else "a quantized operand"
            what = "backend 'cuda'" if backend == "cuda" else what
            raise NotImplementedError(f"{where}: {what} needs known sizes, got {lhs.shape}, {rhs.shape}, {sizes.shape}")
        return lax.ragged_dot_general(lhs, rhs, sizes, dims, precision, preferred_element_type)
    (l_contract, r_contract), (l_batch, r_batch) = dims.dot_dimension_numbers
    (ragged,) = dims.lhs_ragged_dimensions
    if ragged in l_batch:
        multiply_all = permuted if quantized else lax.dot_general
        return multiply_all(lhs, rhs, dims.dot_dimension_numbers, precision, preferred_element_type)

    params: dict[str, Any] = {"backend": backend, "precision": precision, "config": None}
    if not quantized:
        lhs, rhs = _alike(lhs, rhs, out.dtype)
    l_free = _others(lhs.ndim, l_contract, l_batch)
    r_free = _others(rhs.ndim, r_contract, r_batch, dims.rhs_group_dimensions)
    divided = l_contract if ragged in l_contract else l_free
    at = divided.index(ragged)
    # The dimensions before the ragged one are batch axes; each index of it is as many rows as those after it have.
    before, after = divided[:at], divided[at + 1 :]
    batch, outer = _shape(lhs, l_batch), _shape(lhs, before)
    sizes = sizes.reshape(*((1,) * (len(batch) + len(outer)) if sizes.ndim == 1 else sizes.shape[:-1]), -1)
    groups = rhs.shape[dims.rhs_group_dimensions[0]] if divided is l_free else sizes.shape[-1]
    sizes, leading = local_sizes(sizes, group_offset, groups, lhs.shape[ragged], where)
    if after:
        check_rows(lhs.shape[ragged] * math.prod(_shape(lhs, after)), where)
        starts, ends = rows_of_groups(sizes, lhs.shape[ragged], False)
        sizes = (ends - starts) * math.prod(_shape(lhs, after))

    def merged(x: Any, *parts: Sequence[int], keep: int, ones: int = 0) -> Any:
        """Returns an operand with its dimensions in the order of the parts, those from ``keep`` on merged into one.

        After those of the first part come so many of size 1.
        """
        first, *rest = ([x.shape[i] for i in part] for part in parts)
        shapes = [first, [1] * ones, *rest]
        shape = [i for sizes in shapes[: keep + 1] for i in sizes] + [math.prod(sizes) for sizes in shapes[keep + 1 :]]
        return moved(Move(x.shape, tuple(i for part in parts for i in part), tuple(shape), (), 0), x, where)

    if divided is l_free:
        order = sorted(range(len(r_contract)), key=lambda i: r_contract[i])  # rhs is the larger
        k_of_l, k_of_r = [l_contract[i] for i in order], [r_contract[i] for i in order]
        x = merged(lhs, l_batch, before, [ragged, *after], k_of_l, keep=2)
        matrix = [k_of_r, r_free] if not r_free or k_of_r[:1] < r_free[:1] else [r_free, k_of_r]
        w = merged(rhs, r_batch, dims.rhs_group_dimensions, *matrix, keep=2, ones=len(before))
        product = Rows(leading, "nn" if matrix[0] is k_of_r else "nt")
        if quantized:
            how = {"out_dtype": preferred_element_type, "names": ("lhs", "rhs"), **params}
            d = rows_product(product, x, w, sizes, where=where, **how)
        else:
            d = multiply(of(product, x, w), x, w, sizes, out_dtype=out.dtype, **params)
        return d.reshape(out.shape)

    others = [r_contract[l_contract.index(i)] for i in divided]
    a = merged(lhs, l_batch, before, [ragged, *after], l_free, keep=2)
    b = merged(rhs, r_batch, others[:at], others[at:], r_free, keep=2)
    if quantized:
        how = {"out_dtype": np.float32 if before else preferred_element_type, "names": ("lhs", "rhs"), **params}
        d = depth_product(Depth(leading), a, b, sizes, where=where, **how)
        dtype = preferred_element_type or d.dtype
    else:
        dtype = out.dtype
        wide = accumulator(lhs.dtype, dtype) if before else dtype
        d = multiply(of(Depth(leading), a, b), a, b, sizes, out_dtype=wide, **params)
    d = d.sum(range(len(batch), len(batch) + len(before)), dtype=d.dtype) if before else d
    return jnp.moveaxis(d, len(batch), 0).reshape(out.shape).astype(dtype)


def _check(lhs: Any, rhs: Any, sizes: jax.Array, dims: Any, precision: Any, dtype: Any, offset: Any) -> Any:
    """Returns shape and dtype of the result; jax says what is wrong with the arguments."""
    if offset is not None and len(dims.rhs_group_dimensions) == 1:  # which says that rhs may have fewer groups
        group = dims.rhs_group_dimensions[0]
        groups = rhs.shape[group] if 0 <= group < rhs.ndim else sizes.shape[-1]
    else:
        groups = sizes.shape[-1]
    shapes = lhs.shape, rhs.shape, (*sizes.shape[:-1], groups)
    avals = map(jax.ShapeDtypeStruct, shapes, (lhs.dtype, rhs.dtype, sizes.dtype))
    with jax.sharding.use_abstract_mesh(_NO_MESH):  # on an explicit one jax has no rule for it
        return jax.eval_shape(lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, dims, precision, dtype), *avals)


def _alike(lhs: jax.Array, rhs: jax.Array, out: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns the operands in one dtype, which holds both: jax multiplies mixed ones as they are, kernels some."""
    if are_alike(lhs.dtype, rhs.dtype):
        return lhs, rhs
    dtype = multiplied_in(lhs.dtype, rhs.dtype, out)
    return converted(lhs, dtype), converted(rhs, dtype)


def _others(rank: int, *parts: Sequence[int]) -> list[int]:
    gone = {i for part in parts for i in part}
    return [i for i in range(rank) if i not in gone]


def _shape(x: jax.Array, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(x.shape[i] for i in dims)
