"""The dtypes, one row each: their names in text, in C++ and in tensor maps."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Dtype(NamedTuple):
    """The names of a dtype in the parts of the library; "" or None where one has no name for it.

    Attributes:
      name: numpy's.
      short: the field's.
      stored: the enumerator of Dtype in device text: kernels load and store it; those of 64 bits and more not all.
      carrier: the C++ type in which an epilogue computes with a value, which holds it exactly.
      integer: the C++ type of an integer of its width.
      tma: CUtensorMapDataType.
    """

    name: str
    short: str
    stored: str = ""
    carrier: str = ""
    integer: str = ""
    tma: int | None = None


_ROWS = (
    Dtype("bfloat16", "bf16", "bf16", "float", tma=9),
    Dtype("float16", "f16", "f16", "float", tma=6),
    Dtype("float32", "f32", "f32", "float", tma=7),
    Dtype("float8_e4m3fn", "f8_e4m3fn", "e4m3", "float", tma=0),
    Dtype("float8_e5m2", "f8_e5m2", "e5m2", "float", tma=0),
    Dtype("float8_e8m0fnu", "f8_e8m0fnu", tma=0),
    Dtype("float4_e2m1fn", "f4_e2m1fn"),
    Dtype("int4", "s4"),
    Dtype("uint4", "u4"),
    Dtype("int8", "s8", "s8", "int", "signed char", 0),
    Dtype("uint8", "u8", "u8", "u32", "unsigned char", 0),
    Dtype("int16", "s16", "s16", "int", "short", 1),
    Dtype("uint16", "u16", "u16", "u32", "u16", 1),
    Dtype("int32", "s32", "s32", "int", "int", 3),
    Dtype("uint32", "u32", "u32", "u32", "u32", 2),
    Dtype("bool", "bool", "boolean", "bool", tma=0),
    Dtype("int64", "s64", "s64", "i64", "i64", 5),
    Dtype("uint64", "u64", "u64", "u64", "u64", 4),
    Dtype("float64", "f64", "f64", "double", tma=8),
    Dtype("complex64", "c64", "c64", "Complex<float>"),
    Dtype("complex128", "c128", "c128", "Complex<double>"),
)
DTYPES = {row.name: row for row in _ROWS}


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")
EIGHT_BITS = ("int8", "uint8", *FLOAT8)
NARROW = EIGHT_BITS + FOUR_BITS  # every value is one of bfloat16, and of float16


def bits_of(dtype: Any) -> int:
    """Returns the bits of an element in the memory of a device."""
    return 4 if dtype.name in FOUR_BITS else 8 * dtype.itemsize


@functools.cache
def are_narrow(a: Any, b: Any) -> bool:
    """True if elements in b have 8 bits or 4 and each is one of those of 16 in a: kernels multiply them as these."""
    return a.name in ("bfloat16", "float16") and b.name in NARROW


def decodes(a: Any, b: Any) -> bool:
    """True if kernels may decode elements in b in front of multiplying them by those in a, which have more bits."""
    return are_narrow(a, b) or (a.name in FLOAT8 and bits_of(b) == 4)


@functools.cache
def are_alike(a: Any, b: Any) -> bool:
    """True if kernels multiply elements of two dtypes as they are: of one, or of both kinds of float8."""
    return a == b or {a.name, b.name} <= {*FLOAT8}


def promoted(a: Any, b: Any) -> np.dtype:
    """Returns the dtype of JAX's standard promotion, whatever ``jax_numpy_dtype_promotion`` says of users' own.

    Raises:
      TypePromotionError: there is none, of dtypes of 8 bits or fewer.
    """
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(a, b))


@functools.cache
def holds(dtype: Any, other: Any) -> bool:
    """True if each value of another dtype is one of this one."""
    if dtype == other:
        return True
    if dtype.name in ("bool", "float8_e8m0fnu"):  # which has neither zero nor sign
        return False
    if other.name == "bool":
        return True
    if jnp.issubdtype(other, jnp.integer):
        signed = jnp.iinfo(other).min < 0
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.iinfo(dtype).min <= jnp.iinfo(other).min and jnp.iinfo(dtype).max >= jnp.iinfo(other).max
        return jnp.iinfo(other).bits - signed <= jnp.finfo(dtype).nmant + 1
    real = not jnp.issubdtype(other, jnp.complexfloating)
    if not jnp.issubdtype(dtype, jnp.inexact if real else jnp.complexfloating):
        return False
    own, its = jnp.finfo(dtype), jnp.finfo(other)
    least = float(own.smallest_subnormal) <= float(its.smallest_subnormal)
    return own.nmant >= its.nmant and own.maxexp >= its.maxexp and least


def short(name: str) -> str:
    """Returns the field's short name of a dtype: ``bf16`` for bfloat16."""
    return DTYPES[name].short if name in DTYPES else name
