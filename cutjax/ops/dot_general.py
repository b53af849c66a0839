"""dot_general: jax.lax's operation of this name on the dense product of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cutjax import dot_precision
from cutjax.binding.rules import any_divided, any_reduced, on_devices
from cutjax.dtypes import are_alike, are_narrow
from cutjax.ops.contraction import Contraction, Move, contraction, contractions
from cutjax.ops.contraction_price import fastest
from cutjax.ops.gemm import gemm
from cutjax.ops.quantized import Quantized, Weights, as_quantized, blocked, values_of
from cutjax.primitives.accumulators import converted, widened
from cutjax.primitives.arrays import is_array_like, unwrapped
from cutjax.primitives.dense import Dense
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import multiply
from cutjax.runtime import backends

# How many times as fast as XLA's a kernel must be. XLA computes a bias or a sum with its product, and multiplies
# one operand by several others at once; beside a kernel those are passes of their own, and nothing here sees them.
LEAD = 1.08


def dot_general(
    lhs: Weights,
    rhs: Weights,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.lax.dot_general``, to which it is equal to rounding: ``gemm`` in that function's signature.

    The operands become batches of matrices without copies where memory allows that, see ``docs/drop-ins.md``; what is
    copied, ``explain`` says. Differentiable to any order and batchable over any axes. What no kernel could ever
    multiply is left to ``jax.lax.dot_general``: symbolic sizes (``jax.export``), operands of two dtypes (but those of 8
    bits, which kernels read as they are beside floats of 16), and operands sharded explicitly along axes that would
    have to be merged.

    Args:
      lhs: an array; or `cutjax.Quantized`, as rhs: the product is then that of ``cutjax.gemm``.
      rhs: an array.
      dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
      precision: as in ``jax.lax.dot_general``; None is what ``jax.default_matmul_precision`` says. The kernels
        accumulate 16-bit operands in float32; XLA runs any other algorithm.
      preferred_element_type: the result's dtype; that of lhs and rhs by default.
      out_sharding: the result's sharding on an explicit mesh.

    Returns:
      The array that ``jax.lax.dot_general`` returns: batch axes, those of lhs, those of rhs.

    Raises:
      TypeError, ValueError: as ``jax.lax.dot_general``.
      NotImplementedError: where the backend is "cuda" and ``jax.lax.dot_general`` would run; and when compiled, as
        ``cutjax.gemm``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 6, 4, 16))  # [batch, position, head, channel]
      >>> cutjax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2)))).shape
      (2, 4, 8, 6)
    """
    return permuted(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)


def permuted(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    permutation: tuple[int, ...] | None = None,
) -> jax.Array:
    """Computes dot_general and a permutation of its result, which is planned with it: no second pass over memory."""
    lhs, rhs = unwrapped(as_quantized(lhs)), unwrapped(as_quantized(rhs))
    if isinstance(lhs, Quantized) or isinstance(rhs, Quantized):
        return quantized(lhs, rhs, dimension_numbers, precision, preferred_element_type, permutation)

    how = precision, preferred_element_type, out_sharding, permutation
    try:
        numbers = tuple(tuple(map(tuple, pair)) for pair in dimension_numbers)
        of_lax, traced = _of_lax(numbers, *how, repr((numbers, how)))
    except TypeError:  # not what they should be, or not hashable
        of_lax, traced = _of_lax.__wrapped__(dimension_numbers, *how, "")
    if not (is_array_like(lhs) and is_array_like(rhs)):
        return of_lax(lhs, rhs)  # says what is wrong
    # Says what is wrong with the rest. An aval says how the result lies, also where some mesh axes are not explicit.
    (out,) = traced.trace(lhs, rhs).jaxpr.out_avals
    backend = backends.resolve(None, "dot_general")
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if 0 in (*lhs.shape, *rhs.shape):  # zeros, or nothing at all
        return of_lax(lhs, rhs)
    reason = _left_to_lax(lhs, rhs, out)
    if reason is None:
        (contract, batch), itemsizes = dimension_numbers, tuple(x.dtype.itemsize for x in (lhs, rhs, out))
        dims = tuple(map(tuple, contract)), tuple(map(tuple, batch))
        divided = on_devices(lhs, rhs)
        plans = contractions(lhs.shape, rhs.shape, dims, permutation, itemsizes=itemsizes, apart=divided)
        plan, explicit = plans[0], any_divided(lhs, rhs, out)
        merges = plan.merges or sum(lhs.shape[i] != 1 for i in contract[0]) > 1
        if explicit and any_reduced(lhs, rhs, out):
            reason = "operands and results that are reduced, or not yet, over mesh axes are jax.lax's"
        elif explicit and merges:
            reason = "axes of operands on explicit mesh axes are not merged; use jax.shard_map"
    if reason is not None:
        if backend == "cuda":
            raise NotImplementedError(f"dot_general: backend 'cuda' has no kernel: {reason}")
        return of_lax(lhs, rhs)
    precision = dot_precision.canonical(precision, "dot_general")
    if not divided:
        found, backend = fastest(plans, lhs, rhs, out.dtype, precision, backend, LEAD)
        if found is None:
            return of_lax(lhs, rhs)
        plan = found
    (a, b), copies = plan.operands(lhs, rhs), plan.copies
    if are_narrow(b.dtype, a.dtype):
        why = f"{'rhs' if plan.swapped else 'lhs'} is converted to {b.dtype}: kernels read narrow columns, not rows"
        copies = "; ".join(filter(None, (copies[0], why))), *copies[1:]
    a, b = widened(a, b)
    lies = plan.lies(out.sharding.spec, permutation) if explicit else None
    product, hints = Dense(plan.layout, plan.orders, lies=lies), Hints(copies, LEAD)
    precision = dot_precision.swapped(precision) if plan.swapped else precision
    d = multiply(product, a, b, out_dtype=out.dtype, precision=precision, backend=backend, hints=hints)
    return converted(plan.result(d), out.dtype, out.weak_type)


def quantized(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any,
    dtype: Any,
    permutation: tuple[int, ...] | None,
    epilogue: Callable[[Contraction], dict[str, Any]] = lambda _: {},
) -> jax.Array:
    """Computes the product of operands of which one or both are quantized by ``gemm``.

    With the epilogue, and its operands, that a function of the plan returns as ``gemm`` takes them.
    """
    shapes = [np.shape(unwrapped(values_of(x))) for x in (lhs, rhs)]
    given = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    jax.eval_shape(lambda x, y: lax.dot_general(x, y, dimension_numbers), *given)  # says what is wrong
    (contract, batch), how = dimension_numbers, dot_precision.canonical(precision, "dot_general")
    dims = tuple(map(tuple, contract)), tuple(map(tuple, batch))
    plan = contraction(*shapes, dims, permutation)
    a, b = (rhs, lhs) if plan.swapped else (lhs, rhs)
    how = dot_precision.swapped(how) if plan.swapped else how
    given = {"layout": plan.layout, "out_dtype": dtype, "precision": how, **epilogue(plan)}
    return plan.result(gemm(moved(plan.a, a), moved(plan.b, b), **given))


def moved(move: Move, x: Any, where: str = "dot_general") -> Any:
    """Returns an operand as one of a product: values, scales and zero points moved alike."""
    if not isinstance(x, Quantized):
        return move(jnp.asarray(x))
    scale, zero = blocked(x, "an operand", where)
    values = jnp.asarray(unwrapped(x.values))
    found = [move.of_blocks(y, values.shape) for y in (scale, *zero)]
    return Quantized(move(values), *found)


@functools.lru_cache(maxsize=4096)
def _of_lax(
    dimension_numbers: Any, precision: Any, dtype: Any, out_sharding: Any, permutation: Any, shown: str
) -> tuple[Callable[..., jax.Array], Any]:
    """Returns jax.lax's function, and the same one jitted; the same objects for the same: jax traces them once.

    The arguments are ``shown`` too, since 1, 1.0 and True are equal, and not the same to jax.
    """

    def dot_general(lhs: Any, rhs: Any) -> jax.Array:
        d = lax.dot_general(lhs, rhs, dimension_numbers, precision, dtype, out_sharding=out_sharding)
        return d if permutation is None else lax.transpose(d, permutation)

    return dot_general, jax.jit(dot_general)


def _left_to_lax(lhs: jax.Array, rhs: jax.Array, out: Any) -> str | None:
    """Returns the reason against a kernel for the operands, whatever the plan; None where there is none."""
    if any(jax.export.is_symbolic_dim(size) for x in (lhs, rhs) for size in x.shape):
        return f"it needs known sizes, got {lhs.shape}, {rhs.shape}"
    narrow = are_narrow(lhs.dtype, rhs.dtype) or are_narrow(rhs.dtype, lhs.dtype)
    # Of a result that is float8 too, lax rounds gradients twice: to its dtype, and to the operand's.
    one = lhs.dtype == rhs.dtype or (are_alike(lhs.dtype, rhs.dtype) and out.dtype.itemsize > 1)
    if not one and not (narrow and jnp.issubdtype(out.dtype, jnp.floating)):
        return f"operands must have one dtype, got {lhs.dtype} and {rhs.dtype}"
    return None
