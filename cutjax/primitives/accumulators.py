"""The dtypes in which products of cotangents are multiplied, and arrays converted to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.dot_precision import accumulator as accumulator
from cutjax.dtypes import are_narrow, holds, promoted


def is_half(dtype: np.dtype) -> bool:
    """True if a dtype is a float of 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


def converted(x: jax.Array, dtype: np.dtype, weak_type: bool | None = None) -> jax.Array:
    """Returns the array in a dtype, weak or not: as it is by default."""
    given = jax.typeof(x)  # not x's own: a cotangent may be numpy's
    weak_type = given.weak_type if weak_type is None else weak_type
    if (given.dtype, given.weak_type) == (dtype, weak_type):
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=weak_type, sharding=None)


def as_wide(b: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns b in a's dtype where it is narrower; of another dtype that a is multiplied by, as it is."""
    return converted(b, dtype) if are_narrow(dtype, b.dtype) else b


def cotangent_dtype(dtype: np.dtype, g: np.dtype) -> np.dtype:
    """Returns the dtype in which a cotangent in dtype ``g`` is multiplied by an operand in ``dtype``: the operand's.

    Where that has fewer than 16 bits, too few to hold a cotangent, one that holds the values of both; where it is of
    integers, which hold none, the cotangent's.
    """
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(g, jnp.inexact):
        return g if g.itemsize > 1 else np.dtype(jnp.bfloat16)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 1:
        return dtype
    return np.dtype(jnp.bfloat16 if g.itemsize == 1 or g == jnp.bfloat16 else np.float32)


def with_cotangent(g: jax.Array, x: jax.Array, of: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns a cotangent and the operand it is multiplied by, in one dtype, of a product of operands in dtype ``of``.

    An operand that was narrower in the product, stays it.
    """
    dtype = cotangent_dtype(of, g.dtype)
    if jnp.issubdtype(g.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        g = lax.real(g)  # of a real product made complex
    return converted(g, dtype), x if x.dtype != of and are_narrow(dtype, x.dtype) else converted(x, dtype)


def multiplied_in(a: np.dtype, b: np.dtype, out: np.dtype) -> np.dtype:
    """Returns the one dtype in which operands of two are multiplied: one that holds the values of both.

    The promoted one, if it does (that of float8 and an integer does not), else that in which ``out`` is added up.
    """
    try:
        candidates = [promoted(a, b)]
    except ValueError:  # there is none: jax.dtypes.TypePromotionError in later versions
        candidates = []
    return next((t for t in (*candidates, a, b) if holds(t, a) and holds(t, b)), accumulator(out))


def widened(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factors of a product, of which b alone may be narrower than the other."""
    return (converted(a, b.dtype), b) if are_narrow(b.dtype, a.dtype) else (a, b)
