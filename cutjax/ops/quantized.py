"""Quantized weights: narrow values, and a scale for each column that multiplies the sums of their products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cutjax.binding.rules import with_rank
from cutjax.dtypes import promoted
from cutjax.primitives.arrays import matrix, unwrapped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Weights ``values * scale``: what ``gemm``, ``grouped_gemm``, ``mlp``, ``grouped_mlp`` and ``moe`` take as one.

    A kernel reads the values as they are, of 8 bits, and multiplies them, exactly, in the dtype of the other operand.
    The scale multiplies the sums in its epilogue, before they are rounded. A pytree: gradients are those of both
    arrays, of integer values float0.

    Attributes:
      values: the weights' matrices, of int8, uint8, float8_e4m3fn or float8_e5m2.
      scale: what broadcasts to the values, of size 1 along the contracted axis.

    Example:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w = jnp.ones((4, 64), jnp.bfloat16), jax.random.normal(jax.random.key(0), (64, 32))
      >>> q = cutjax.Quantized.of(w)
      >>> q.values.dtype, q.scale.shape
      (dtype('int8'), (1, 32))
      >>> cutjax.gemm(x, q).dtype
      dtype(bfloat16)
    """

    values: Any
    scale: Any

    @classmethod
    def of(cls, w: ArrayLike, dtype: DTypeLike = jnp.int8, *, layout: str = "n") -> Quantized:
        """Quantizes symmetrically: the largest magnitude of each column becomes the dtype's largest.

        Args:
          w: ``[..., k, n]``, or ``[..., n, k]`` where layout is "t".
          dtype: int8, float8_e4m3fn or float8_e5m2.
          layout: "n" or "t"; the second letter of that of the product.

        Raises:
          TypeError: if w is no array, or the dtype is none of these.
          ValueError: if the layout is neither, or w no matrix.
        """
        w, dtype = matrix(w, "w", "Quantized.of"), np.dtype(dtype)
        if dtype.name not in ("int8", "float8_e4m3fn", "float8_e5m2"):
            raise TypeError(f"Quantized.of: dtype must be int8, float8_e4m3fn or float8_e5m2, got {dtype}")
        if not jnp.issubdtype(w.dtype, jnp.floating):
            raise TypeError(f"Quantized.of: w must be floating-point numbers, got {w.dtype}")
        if layout not in ("n", "t"):
            raise ValueError(f"Quantized.of: unknown layout {layout!r}, expected 'n' or 't'")
        integers = jnp.issubdtype(dtype, jnp.integer)
        most = float(jnp.iinfo(dtype).max if integers else jnp.finfo(dtype).max)
        wide = w.astype(promoted(w.dtype, jnp.float32))
        scale = jnp.max(jnp.abs(wide), axis=-2 if layout == "n" else -1, keepdims=True) / most
        scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
        values = wide / scale
        return cls((jnp.round(values) if integers else jnp.clip(values, -most, most)).astype(dtype), scale)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Returns ``values * scale``, rounded once to a dtype."""
        wide = promoted(dtype, jnp.float32)
        return (jnp.asarray(self.values).astype(wide) * jnp.asarray(self.scale).astype(wide)).astype(dtype)


Weights = ArrayLike | Quantized  # what operations take as weights, of one product or each of several


def is_quantized(w: Any) -> bool:
    """True of quantized weights, and of a tuple with some."""
    return any(isinstance(x, Quantized) for x in (w if isinstance(w, tuple) else (w,)))


def values_of(w: Any) -> Any:
    """Returns the values of quantized weights, or of each of a tuple's; all else as it is."""
    if isinstance(w, tuple):
        return tuple(values_of(x) for x in w)
    return w.values if isinstance(w, Quantized) else w


def scales_of(w: Any, layout: str, name: str, where: str, rank: int = 0) -> list[jax.Array | None]:
    """Returns the scale of each of the weights as the accumulators have it, ``[..., 1, n or 1]``; None without one.

    Args:
      w: what a caller gave: an array, quantized weights, or a tuple of these.
      layout: "n" or "t", how the matrices lie.
      name, where: the argument and the operation, as errors name them.
      rank: of the result where rows have groups: a scale then has one axis more, with all groups before its last two.
    """
    found = []
    for i, x in enumerate(w if isinstance(w, tuple) else (w,)):
        if not isinstance(x, Quantized):
            found.append(None)
            continue
        of, scale = f"{name}[{i}]" if isinstance(w, tuple) else name, unwrapped(x.scale)
        shape = np.shape(unwrapped(x.values))
        if not isinstance(scale, jax.Array | np.ndarray | np.generic | float) or not jnp.issubdtype(
            jnp.result_type(scale), jnp.floating
        ):
            raise TypeError(f"{where}: the scale of {of} must be an array of floating-point numbers, got {scale!r}")
        scale = jnp.asarray(scale)
        fits = scale.ndim <= len(shape) and all(
            n in (1, size) for n, size in zip(scale.shape[::-1], shape[::-1], strict=False)
        )
        scale = with_rank(scale, len(shape)) if fits else scale
        if not fits or scale.shape[-2 if layout == "n" else -1] != 1:
            raise ValueError(
                f"{where}: the scale of {of} is {scale.shape}, but its values are {shape}: expected one a column, of "
                f"size 1 along k, which is axis {-2 if layout == 'n' else -1}"
            )
        scale = scale if layout == "n" else jnp.matrix_transpose(scale)
        if rank:
            scale = with_rank(jnp.broadcast_to(scale, (*scale.shape[:-3], shape[-3], *scale.shape[-2:])), rank + 1)
        found.append(scale)
    return found


def scaled(
    epilogue: Callable[..., Any] | None, operands: Sequence[Any], scales: Sequence[jax.Array | None]
) -> tuple[Callable[..., Any] | None, Sequence[Any]]:
    """Returns the epilogue of accumulators that are scaled first, and its operands; both as they are without scales."""
    if all(scale is None for scale in scales):
        return epilogue, operands

    def of_scaled(*args: Any) -> Any:
        count = len(scales)
        accs = [times(acc, scale) for acc, scale in zip(args[:count], args[count], strict=True)]
        return accs[0] if epilogue is None else epilogue(*accs, *args[count + 1 :])

    return of_scaled, (list(scales), *operands)


def times(acc: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns accumulators times a scale, in their own dtype."""
    return acc if scale is None else acc * scale.astype(acc.dtype)
