"""A product whose cotangent of x leaves the kernel as wide as it was added up: parts of a sum over devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.binding.define import define
from cutjax.binding.rules import is_linear, is_zero, match_varying, with_rank, zero_tangent
from cutjax.primitives.accumulators import accumulator, with_cotangent
from cutjax.primitives.factors import Factors, sum_to
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import Product, multiply


def wide(product: Product, x: jax.Array, w: jax.Array, **params: Any) -> Any:
    """Computes ``x @ w`` of an x in the accumulator's dtype, which is rounded to that of w; told what multiply is."""
    if x.dtype == w.dtype:
        return multiply(product, x, w, **params)
    return wide_p.bind(*match_varying(*product.aligned(Factors(x, [w])).arrays), product=product, **params)


def _wide(x: jax.Array, w: jax.Array, *, product: Product, **params: Any) -> jax.Array:
    return multiply(product, x.astype(w.dtype), w, **params)


def _wide_abstract(x: Any, w: Any, *, product: Product, out_dtype: np.dtype, **_: Any) -> Any:
    return product.tile(x.update(dtype=w.dtype), w).update(dtype=out_dtype, weak_type=False)


def _wide_batch(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
    rank = max(x.ndim - (dim is not None) for x, dim in zip(args, dims, strict=True))
    moved = [
        x if dim is None else lax.expand_dims(jnp.moveaxis(x, dim, 0), range(1, 2 + rank - x.ndim))
        for x, dim in zip(args, dims, strict=True)
    ]
    return wide_p.bind(*(with_rank(x, rank + 1) for x in moved), **params), 0


def _wide_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, Any]:
    (x, w), (x_dot, w_dot) = primals, tangents
    terms = [] if is_zero(x_dot) else [wide_p.bind(x_dot, w, **params)]
    terms += [] if is_zero(w_dot) else [wide_p.bind(x, w_dot, **params)]
    out = wide_p.bind(x, w, **params)
    return out, functools.reduce(lax.add, terms) if terms else zero_tangent(out)


def _wide_transpose(
    g: Any, x: Any, w: Any, *, product: Product, precision: Any, backend: str, hints: Hints, **_: Any
) -> list[Any]:
    if is_zero(g):
        return [None, None]
    i, to, other = (0, x.aval, w) if is_linear(x) else (1, w.aval, x.astype(w.aval.dtype))
    wide = accumulator(other.dtype)
    g, other = with_cotangent(g, other, other.dtype)
    precision = dot_precision.of_cotangents(precision, g.dtype, product.where)
    back, factors, precision = product.cotangent(i, g, other, precision)
    params: dict[str, Any] = {"out_dtype": wide, "precision": precision, "backend": backend}
    d = sum_to(multiply(back, *factors, hints=hints.of_cotangent(i, factors[0] is g), **params), to)
    return [None if j != i else d for j in range(2)]


wide_p = define(
    "cutjax_wide",
    abstract=_wide_abstract,
    reference=_wide,
    batch=_wide_batch,
    jvp=_wide_jvp,
    transpose=_wide_transpose,
)
