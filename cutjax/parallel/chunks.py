"""Chunks of a ring and the whole: linear, and each the transpose of the other.

JAX's own transpose of slices adds up arrays of the whole's size, one for each. The device's index is an operand, so
that none of it depends on where it is lowered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from cutjax.binding.define import define
from cutjax.binding.rules import is_zero, match_varying, zero_tangent


def _places(index: jax.Array, size: int, shifts: Sequence[int]) -> list[jax.Array]:
    return [(index + s) % len(shifts) * size for s in shifts]


def _assemble(index: jax.Array, *chunks: jax.Array, shifts: tuple[int, ...], axis: int) -> jax.Array:
    x, at = chunks[0], chunks[0].ndim + axis
    whole, *_ = match_varying(lax.empty((*x.shape[:at], len(shifts) * x.shape[at], *x.shape[at + 1 :]), x.dtype), x)
    for place, chunk in zip(_places(index, x.shape[at], shifts), chunks, strict=True):
        whole = lax.dynamic_update_slice_in_dim(whole, chunk, place, at)
    return whole


def _divide(index: jax.Array, x: jax.Array, *, shifts: tuple[int, ...], axis: int) -> list[jax.Array]:
    at = x.ndim + axis
    size = x.shape[at] // len(shifts)
    return [lax.dynamic_slice_in_dim(x, place, size, at) for place in _places(index, size, shifts)]


def _resized(x: Any, axis: int, size: int) -> Any:
    shape = list(x.shape)
    shape[axis] = size
    return x.update(shape=tuple(shape), weak_type=False)


def _abstract_assembled(index: Any, *chunks: Any, shifts: tuple[int, ...], axis: int) -> Any:
    return _resized(chunks[0], axis, len(shifts) * chunks[0].shape[axis])


def _abstract_divided(index: Any, x: Any, *, shifts: tuple[int, ...], axis: int) -> list[Any]:
    return [_resized(x, axis, x.shape[axis] // len(shifts)) for _ in shifts]


def _define(name: str, apply: Callable[..., Any], abstract: Callable[..., Any], transposed: Callable[..., Any]) -> Any:
    several = apply is _divide

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
        index, *rest = args
        if dims[0] is not None:  # never of a ring's own
            return jax.vmap(functools.partial(apply, **params), dims)(*args), [0] * len(params["shifts"])
        rest = [
            jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(rest, dims[1:], strict=True)
        ]
        outs = primitive.bind(index, *rest, **params)
        return outs, [0] * len(outs) if several else 0

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        index, *arrays = primals
        outs = primitive.bind(*primals, **params)
        dots = tangents[1:]
        if all(is_zero(dot) for dot in dots):
            return outs, [zero_tangent(x) for x in outs] if several else zero_tangent(outs)
        filled = [jnp.zeros_like(x) if is_zero(dot) else dot for x, dot in zip(arrays, dots, strict=True)]
        return outs, primitive.bind(index, *filled, **params)

    def transpose(g: Any, index: jax.Array, *arrays: Any, **params: Any) -> list[Any]:
        return [None, *transposed(g, index, arrays, params)]

    primitive: Primitive = define(
        name,
        abstract=abstract,
        reference=apply,
        batch=batch,
        jvp=jvp,
        transpose=transpose,
        multiple_results=several,
    )
    return primitive


def _to_chunks(g: Any, index: jax.Array, arrays: Sequence[Any], params: Any) -> Sequence[Any]:
    return [None] * len(arrays) if is_zero(g) else divide_p.bind(index, g, **params)


def _to_whole(gs: Any, index: jax.Array, arrays: Sequence[Any], params: Any) -> Sequence[Any]:
    if all(is_zero(g) for g in gs):
        return [None]
    known = next(g for g in gs if not is_zero(g))
    return [assemble_p.bind(index, *(jnp.zeros_like(known) if is_zero(g) else g for g in gs), **params)]


assemble_p = _define("cutjax_assemble", _assemble, _abstract_assembled, _to_chunks)
divide_p = _define("cutjax_divide", _divide, _abstract_divided, _to_whole)
