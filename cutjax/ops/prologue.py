"""Prologues: functions of the first operand before it is multiplied, checked, and the products that have them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.binding.rules import any_divided, lying_as, with_rank
from cutjax.epilogue.trace import Traced, trace
from cutjax.ops.arguments import elementwise_of
from cutjax.ops.quantized import is_quantized
from cutjax.primitives.arrays import unwrapped
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Arithmetic, Product
from cutjax.primitives.scaled import Scaled, with_prologue
from cutjax.primitives.tracing import abstract
from cutjax.primitives.wrapped import Wrapped

Run = Callable[[Product, Factors], Any]


def check_prologue(a: Any, prologue: Any, operands: Any, where: str, name: str = "a") -> None:
    """Raises where a prologue, its operands and the array it is of, an argument of that name, do not fit."""
    if not isinstance(operands, tuple | list):
        got = type(operands).__name__
        raise TypeError(f"{where}: prologue_operands must be a tuple, got {got}; write prologue_operands=(r,) for one")
    if prologue is None:
        if len(operands):
            raise ValueError(f"{where}: {len(operands)} prologue_operands, but no prologue that would take them")
        return
    if not callable(prologue):
        raise TypeError(f"{where}: prologue must be a function, got {type(prologue).__name__}")
    if is_quantized(a):
        raise TypeError(
            f"{where}: {name} is a cutjax.Quantized, but a prologue is of an array: give it the values, and the scale "
            "as one of prologue_operands"
        )


def multiplied(
    where: str,
    prologue: Callable[..., Any] | None,
    operands: Sequence[Any],
    x: jax.Array,
    product: Product,
    factors: Factors,
    run: Run,
    **params: Any,
) -> Any:
    """Returns the product of what a prologue makes of an array.

    Args:
      where: the operation, as errors name it.
      prologue: the function; None where there is none.
      operands: its further arguments.
      x: the array, in its own dtype.
      product: the product without a prologue.
      factors: what it multiplies, x among them.
      run: multiplies the factors of a product.
      params: the precision and the backend.
    """
    if prologue is None:
        return run(product, factors)
    dtype = product.multiplied(factors.a.dtype)
    operands = jax.tree.map(unwrapped, tuple(operands))
    if factors.context:
        operands = _of_rows(product, dataclasses.replace(factors, a=x), operands, params)
    x = with_rank(x, factors.a.ndim)
    function = _returning(where, prologue, dtype)
    if any_divided(
        x, *(y for y in jax.tree.leaves(operands) if isinstance(y, jax.Array))
    ):  # what it makes may be divided further than x
        x = lying_as(x, jax.eval_shape(function, x, *operands))
    traced = _traced(where, function, x, operands)
    composed = isinstance(product, Wrapped) and not isinstance(product, Scaled)  # in float8: quantized as it is
    if composed or traced.outside is not None or traced.names:  # the others are for JAX to differentiate
        return run(product, dataclasses.replace(factors, a=function(x, *operands)))
    return run(*with_prologue(product, dataclasses.replace(factors, a=x), traced.epilogue, traced.operands))


def applied(
    where: str, prologue: Callable[..., Any] | None, operands: Sequence[Any], x: jax.Array, dtype: np.dtype
) -> jax.Array:
    """Returns the result of a prologue in plain JAX, in a dtype; the array as it is without one."""
    operands = jax.tree.map(unwrapped, tuple(operands))
    return x if prologue is None else _returning(where, prologue, dtype)(x, *operands)


def _returning(where: str, fn: Callable[..., Any], dtype: np.dtype) -> Callable[..., jax.Array]:
    """Returns the function with its result in a dtype; raises if that is not one array of its argument's shape."""

    @functools.wraps(fn)
    def returning(a: jax.Array, *operands: Any) -> jax.Array:
        return elementwise_of(a, fn(a, *operands), dtype, where, "prologue").astype(dtype)

    return returning


def _traced(where: str, function: Callable[..., jax.Array], x: jax.Array, operands: Sequence[Any]) -> Traced:
    try:
        traced = trace(function, [abstract(jax.typeof(x))], operands, what="prologue")
        if any(out.reduce for out in traced.epilogue.outputs):
            raise NotImplementedError("epilogue: it reduces its argument")
    except (NotImplementedError, TypeError, ValueError) as error:
        message = str(error)
        if not message.startswith("epilogue: "):
            raise
        told = message.removeprefix("epilogue: ").split("; ")[0].replace("an accumulator", "its argument")
        if isinstance(error, NotImplementedError):
            told = f"no elementwise function: {told}; compute that before the product, and give it as an operand"
        raise type(error)(f"{where}: prologue: {told}") from None
    return traced


def _of_rows(product: Product, factors: Factors, operands: Any, params: dict[str, Any]) -> Any:
    """Returns the operands, those with a value for each group spread to the groups' rows."""
    (sizes,), x = factors.context, factors.a
    groups = product.groups(factors.bs)
    sizes = with_rank(sizes, max(sizes.ndim, x.ndim - 1))
    arithmetic = Arithmetic.of(product, factors, params)

    def spread(operand: Any) -> Any:
        if np.ndim(operand) != x.ndim + 1:
            return operand
        operand = jnp.asarray(operand)
        if operand.shape[-3:-1] != (groups, 1):
            raise ValueError(
                f"{product.where}: an operand of the prologue is {operand.shape}, one axis more than x {x.shape}, so "
                f"it is one of groups: expected [..., {groups}, 1, {x.shape[-1]} or 1]"
            )
        return product.seen(operand, (sizes,), x.shape[-2], arithmetic)

    return jax.tree.map(spread, operands)
