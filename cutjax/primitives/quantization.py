"""Matrices quantized in blocks; and the primitive that does so to float8, in a pass or two where a kernel serves it.

Its operand is x [*B, r, c]. Its results, of those that are asked for: values [*B, r, c] and their scales, then values
[*B, c, r] and theirs; scales are of blocks of 1 x 128 values, 128 x 128, one row, or the whole matrix. Where it is
to be ``rounded`` first, that is the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cutjax.binding.define import define
from cutjax.binding.lowering import Target
from cutjax.binding.rules import batch_axis
from cutjax.dtypes import promoted
from cutjax.kernels import quantization
from cutjax.kernels.device import device_of
from cutjax.runtime.choice import Choice


def in_blocks(
    x: jax.Array, dtype: np.dtype, block: tuple[int, int], scale_dtype: DTypeLike, zero_point: bool = False
) -> tuple[jax.Array, ...]:
    """Returns values, scales and zero points, if any, of matrices in blocks that divide them: ``cutjax.quantize``."""
    (rows, columns), integers = block, jnp.issubdtype(dtype, jnp.integer)
    wide = x.astype(promoted(x.dtype, np.float32))
    apart = (*x.shape[:-2], x.shape[-2] // max(1, rows), rows, x.shape[-1] // max(1, columns), columns)
    wide = wide.reshape(apart)
    axes, most = (len(apart) - 3, len(apart) - 1), float(jnp.iinfo(dtype).max if integers else jnp.finfo(dtype).max)
    if not zero_point:
        scale = _rounded(_greatest(jnp.abs(wide), axes) / most, scale_dtype)
        values = wide / scale.astype(wide.dtype)
        values = jnp.clip(jnp.round(values) if integers else values, -most, most)
        return values.astype(dtype).reshape(x.shape), jnp.squeeze(scale, axes)
    least = float(jnp.iinfo(dtype).min)
    low, high = -_greatest(-wide, axes), _greatest(wide, axes)
    scale = _rounded((high - low) / (most - least), scale_dtype)
    of_scale = scale.astype(wide.dtype)
    zero = jnp.clip(jnp.round(least - low / of_scale), least, most)
    values = jnp.clip(jnp.round(wide / of_scale) + zero, least, most)
    scale, zero = (jnp.squeeze(y, axes) for y in (scale, zero.astype(dtype)))
    return values.astype(dtype).reshape(x.shape), scale, zero


def _greatest(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the greatest number of each block, zero among them; NaN where one is not finite."""
    return jnp.where(jnp.isfinite(x).all(axes, keepdims=True), jnp.max(x, axes, keepdims=True, initial=0), jnp.nan)


def _rounded(scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns scales in a dtype, those of zero as 1, others within its normal numbers, so that none becomes zero."""
    info, dtype = jnp.finfo(dtype), np.dtype(dtype)
    if dtype.name == "float8_e8m0fnu":
        mantissa, exponent = jnp.frexp(scale)  # the next greater power of two: nothing is cut off
        found = jnp.ldexp(jnp.ones_like(scale), jnp.where(mantissa == 0.5, exponent - 1, exponent))
        found = jnp.where(jnp.isnan(scale), scale, found)
    else:
        found = scale
    least = max(float(info.tiny), float(jnp.finfo(scale.dtype).tiny))
    return jnp.where(scale == 0, jnp.ones_like(scale), jnp.clip(found, least, float(info.max))).astype(dtype)


def _abstract(x: Any, *, dtype: Any, block: tuple[int, int], own: bool, turned: bool, **_: Any) -> list[Any]:
    *batch, rows, columns = x.shape
    sharding = x.sharding.update(spec=jax.P(*(None,) * len(x.shape)))
    found = []
    for sizes in [(rows, columns)] * own + [(columns, rows)] * turned:
        for shape, kind in ((sizes, dtype), (quantization.counts(sizes, block), np.dtype(np.float32))):
            found.append(x.update(shape=(*batch, *shape), dtype=kind, weak_type=False, sharding=sharding))
    return found


def _reference(
    x: jax.Array, *, dtype: np.dtype, block: tuple[int, int], own: bool, turned: bool, rounded: Any = None, **_: Any
) -> list[jax.Array]:
    """Quantizes as it lies, and transposes what is of 8 bits: the values of squares are the same either way."""
    found, x = [], x.astype(rounded or x.dtype)
    if own:
        found += in_blocks(x, dtype, _sizes(x.shape[-2:], block), np.float32)
    if turned:
        found += [y.mT for y in in_blocks(x, dtype, _sizes(x.shape[-2:], block[::-1]), np.float32)]
    return found


def _sizes(shape: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
    rows, columns = (size if step < 0 else step for size, step in zip(shape, block, strict=True))
    return rows, columns


def _choose(x: Any, *, backend: str, target: Target, **params: Any) -> Choice:
    return quantization.choose(quantization.Problem.of(x, device=device_of(target), **params), backend)


def _batch(args: Any, dims: Any, **params: Any) -> tuple[list[jax.Array], list[int]]:
    found = quantize_p.bind(*batch_axis(args, dims, 0), **params)
    return found, [0] * len(found)


quantize_p = define(
    "cutjax_quantize",
    abstract=_abstract,
    reference=_reference,
    batch=_batch,
    choose=_choose,
    required=False,
    multiple_results=True,
)
