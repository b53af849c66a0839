"""dot, matmul, tensordot and einsum: jax.numpy's functions of these names on the dense product of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from opt_einsum import parser

from cutjax.epilogue.jaxpr import bind_equation, evaluate
from cutjax.ops.dot_general import permuted
from cutjax.ops.gemm import gemm
from cutjax.ops.quantized import Weights, as_quantized, is_quantized, values_of
from cutjax.primitives.arrays import is_array_like, unwrapped

Axes = tuple[int, ...]
Dimensions = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


def dot(
    a: Weights,
    b: Weights,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.numpy.dot``, to which it is equal to rounding, on ``cutjax.dot_general``.

    Args:
      a: an array or a scalar.
      b: an array or a scalar; its axis before the last is contracted, or its only one.
      precision: as in ``cutjax.dot_general``.
      preferred_element_type: the result's dtype; that of the promoted operands by default.
      out_sharding: the result's sharding on an explicit mesh.

    Returns:
      The array that ``jax.numpy.dot`` returns.

    Raises:
      TypeError, ValueError: as ``jax.numpy.dot``.
      NotImplementedError: as ``cutjax.dot_general``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> cutjax.dot(jnp.arange(3.0), jnp.ones((3, 2)))
      Array([3., 3.], dtype=float32)
    """
    how = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    return _run(jnp.dot, how, a, b)


def matmul(
    a: Weights,
    b: Weights,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.numpy.matmul``, to which it is equal to rounding, on ``cutjax.dot_general``.

    Args:
      a: an array, ``[..., m, k]`` or ``[k]``.
      b: an array, ``[..., k, n]`` or ``[k]``; batch axes broadcast.
      precision: as in ``cutjax.dot_general``.
      preferred_element_type: the result's dtype; that of the promoted operands by default.
      out_sharding: the result's sharding on an explicit mesh.

    Returns:
      The array that ``jax.numpy.matmul`` returns.

    Raises:
      TypeError, ValueError: as ``jax.numpy.matmul``.
      NotImplementedError: as ``cutjax.dot_general``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> cutjax.matmul(jnp.ones((5, 1, 2, 3)), jnp.ones((4, 3, 2))).shape
      (5, 4, 2, 2)
    """
    how = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    return _run(jnp.matmul, how, a, b)


def tensordot(
    a: Weights,
    b: Weights,
    axes: int | Sequence[int] | Sequence[Sequence[int]] = 2,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.numpy.tensordot``, to which it is equal to rounding, on ``cutjax.dot_general``.

    Args:
      a: an array.
      b: an array.
      axes: how many axes, or which, are contracted, as ``jax.numpy.tensordot`` takes it.
      precision: as in ``cutjax.dot_general``.
      preferred_element_type: the result's dtype; that of the promoted operands by default.
      out_sharding: the result's sharding on an explicit mesh.

    Returns:
      The array that ``jax.numpy.tensordot`` returns.

    Raises:
      TypeError, ValueError: as ``jax.numpy.tensordot``.
      NotImplementedError: as ``cutjax.dot_general``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> cutjax.tensordot(jnp.ones((2, 3, 4)), jnp.ones((3, 4, 5))).shape
      (2, 5)
    """
    how = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    return _run(jnp.tensordot, {"axes": axes, **how}, a, b)


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: str | bool | list[tuple[int, ...]] = "auto",
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    _dot_general: Callable[..., jax.Array] = lax.dot_general,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.numpy.einsum``, to which it is equal to rounding, on ``cutjax.dot_general``.

    Each contraction of two operands is one product, and where einsum permutes its result the product writes it in that
    order. The order of contractions is that of ``jax.numpy.einsum``, from opt_einsum.

    Args:
      subscripts: the equation; or the first operand, followed by the list of its axes, and so on.
      *operands: arrays.
      out: must be None.
      optimize: how the order of contractions is found, or the order, as ``jax.numpy.einsum`` takes it.
      precision: as in ``cutjax.dot_general``.
      preferred_element_type: the result's dtype; that of the promoted operands by default.
      _dot_general: as in ``jax.numpy.einsum``; another function than ``jax.lax``'s makes the products.
      out_sharding: the result's sharding on an explicit mesh.

    Returns:
      The array that ``jax.numpy.einsum`` returns.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``jax.numpy.einsum``, and as ``cutjax.dot_general``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> p, v = jnp.ones((2, 4, 8, 6)), jnp.ones((2, 6, 4, 16))  # of attention
      >>> cutjax.einsum("bhqk,bkhd->bqhd", p, v).shape
      (2, 8, 4, 16)
    """
    how = {
        "out": out,
        "optimize": optimize,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    if _dot_general is not lax.dot_general:
        return jnp.einsum(subscripts, *operands, _dot_general=_dot_general, **how)
    return _run(jnp.einsum, how, subscripts, *operands)


def _run(fn: Callable[..., jax.Array], how: dict[str, Any], *args: Any) -> jax.Array:
    """Computes a function of jax.numpy: what it is made of, with our product in place of each dot_general."""
    args = tuple(unwrapped(as_quantized(x)) for x in args)
    if is_quantized(args):
        return _quantized(fn, how, *args)
    arrays = [x for x in args if is_array_like(x)]
    others = tuple((i, x) for i, x in enumerate(args) if not is_array_like(x))
    try:
        of_arrays = _of_arrays(fn, tuple(how.items()), others, repr((how, others)))
    except TypeError:  # not hashable
        of_arrays = _of_arrays.__wrapped__(fn, how.items(), others, "")
    traced = of_arrays.trace(*arrays).jaxpr
    jaxpr = traced.jaxpr
    permutations, done = _permutations(jaxpr)

    def step(eqn: Any, xs: Sequence[Any]) -> list[Any]:
        if eqn.primitive is lax.dot_general_p:
            return [permuted(*xs, **eqn.params, permutation=permutations.get(id(eqn)))]
        return list(xs) if id(eqn) in done else bind_equation(eqn, xs)

    return evaluate(jaxpr, traced.consts, [jnp.asarray(x) for x in arrays], step)[0]


@functools.lru_cache(maxsize=4096)
def _of_arrays(fn: Callable[..., jax.Array], how: Any, others: tuple[tuple[int, Any], ...], shown: str) -> Any:
    """Returns a jitted function of the arrays; one object for the same other arguments: jax traces it once.

    They are ``shown`` too, since 1, 1.0 and True are equal, and not the same to jax.
    """

    def of_arrays(*xs: Any) -> jax.Array:
        args = list(xs)
        for i, x in others:
            args.insert(i, x)
        return fn(*args, **dict(how))

    return jax.jit(of_arrays)


def _permutations(jaxpr: Any) -> tuple[dict[int, tuple[int, ...]], set[int]]:
    """Returns the permutations of products' results that have no other use, and the equations that permute."""
    products = {id(eqn.outvars[0]): eqn for eqn in jaxpr.eqns if eqn.primitive is lax.dot_general_p}
    uses = [id(x) for eqn in jaxpr.eqns for x in eqn.invars] + [id(x) for x in jaxpr.outvars]
    found: dict[int, tuple[int, ...]] = {}
    done: set[int] = set()
    for eqn in jaxpr.eqns:
        of = id(eqn.invars[0]) if eqn.invars else 0
        if eqn.primitive is lax.transpose_p and of in products and uses.count(of) == 1:
            found[id(products[of])] = tuple(eqn.params["permutation"])
            done.add(id(eqn))
    return found, done


def _quantized(fn: Callable[..., jax.Array], how: dict[str, Any], *args: Any) -> jax.Array:
    """Computes one product of two operands of which one or both are quantized."""
    where, given = fn.__name__, {name: how[name] for name in ("precision", "preferred_element_type")}
    operands = [x for x in args if not isinstance(x, str)]
    ranks = [np.ndim(unwrapped(values_of(x))) for x in operands]
    if len(operands) == 2 and min(ranks) > 1 and how.get("out_sharding") is None:
        a, b = operands
        if fn is jnp.matmul:
            return gemm(a, b, precision=given["precision"], out_dtype=given["preferred_element_type"])
        if fn is jnp.dot:
            return permuted(a, b, (((ranks[0] - 1,), (ranks[1] - 2,)), ((), ())), **given)
        if fn is jnp.tensordot:
            axes = how["axes"]
            pair = (range(ranks[0] - axes, ranks[0]), range(axes)) if isinstance(axes, int) else axes
            pair = tuple(tuple(i % n for i in np.atleast_1d(np.asarray(of))) for of, n in zip(pair, ranks, strict=True))
            return permuted(a, b, (pair, ((), ())), **given)
        found = product_of(args[0], *(unwrapped(values_of(x)) for x in operands)) if isinstance(args[0], str) else None
        if found is not None:
            return permuted(a, b, found[0], **given, permutation=found[1])
    raise ValueError(
        f"{where}: quantized operands are those of one product of two matrices or batches of them, on no explicit mesh "
        "axes; dequantize them"
    )


def letters_of(equation: str, x: Any, kernel: Any) -> tuple[str, str, str]:
    """Returns the letters of two operands' axes and of the result's."""
    operands, result, _ = parser.parse_einsum_input((equation, x, kernel))
    of_x, of_kernel = operands.split(",")
    return of_x, of_kernel, result


def product_of(equation: str, x: Any, kernel: Any) -> tuple[Dimensions, Axes] | None:
    """Returns the dimension numbers of the dot_general that an equation is, and the permutation after it."""
    of_x, of_kernel, result = letters_of(equation, x, kernel)
    if any(len(set(letters)) < len(letters) for letters in (of_x, of_kernel, result)):
        return None
    if not set(of_x) ^ set(of_kernel) <= set(result):
        return None
    if any(x.shape[of_x.index(c)] != kernel.shape[of_kernel.index(c)] for c in of_x if c in of_kernel):
        return None
    batch = [c for c in of_x if c in of_kernel and c in result]
    contracted = [c for c in of_x if c in of_kernel and c not in result]
    both = (*batch, *contracted)
    order = [*batch, *(c for c in of_x if c not in both), *(c for c in of_kernel if c not in both)]
    numbers = tuple(tuple(tuple(map(of.index, group)) for of in (of_x, of_kernel)) for group in (contracted, batch))
    return numbers, tuple(map(order.index, result))  # pyright: ignore[reportReturnType]
