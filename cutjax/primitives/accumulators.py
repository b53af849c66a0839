"""The dtypes in which products, and the products of cotangents, are added up."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@functools.cache
def accumulator(dtype: np.dtype, out_dtype: np.dtype | None = None) -> np.dtype:
    """Returns the dtype in which products of a dtype are added up: at least 32 bits, and as wide as the result."""
    if out_dtype is not None:
        if jnp.issubdtype(out_dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
            out_dtype = np.dtype(jnp.finfo(out_dtype).dtype)
        own, out = accumulator(dtype), accumulator(out_dtype)
        if jnp.issubdtype(own, jnp.integer) and jnp.issubdtype(out, jnp.integer):
            return max(out, own, key=lambda dtype: dtype.itemsize)  # of whatever sign: sums are exact, modulo 2^bits
        with jax.numpy_dtype_promotion("standard"):
            return jnp.promote_types(own, out)
    if dtype.itemsize < 4:
        if jnp.issubdtype(dtype, jnp.floating):
            return np.dtype(np.float32)
        if jnp.issubdtype(dtype, jnp.integer):
            return np.dtype(np.int32 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint32)
    return dtype


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


def cotangent_dtype(dtype: np.dtype, g: np.dtype) -> np.dtype:
    """Returns the dtype in which a cotangent in dtype ``g`` is multiplied by an operand in ``dtype``: the operand's.

    Where that has fewer than 16 bits, too few to hold a cotangent, one that holds the values of both.
    """
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 1:
        return dtype
    return np.dtype(jnp.bfloat16 if g.itemsize == 1 or g == jnp.bfloat16 else np.float32)


def with_cotangent(g: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a cotangent and the operand it is multiplied by, in one dtype."""
    dtype = cotangent_dtype(x.dtype, g.dtype)
    if jnp.issubdtype(g.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        g = lax.real(g)  # of a real product made complex
    return converted(g, dtype), converted(x, dtype)
