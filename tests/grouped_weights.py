"""Products of quantized operands in groups, of small integers and powers of two: what they are is exact in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from cutjax import Quantized

RANGES = {"int8": (-128, 128), "uint8": (0, 256), "int4": (-8, 8), "uint4": (0, 16)}  # of others -4 to 4
REST = 3  # rows of no group, at the end


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights ``[groups, k, n]`` beside activations of 16 bits.

    Attributes:
      narrow, wide: dtypes of the values, and of the activations.
      scale: dtype of the scales; "" without.
      group: elements of k that share one.
      zeros: whether there are zero points, in the values' dtype.
      layout: "nn" or "nt".
    """

    narrow: str
    wide: str = "bfloat16"
    scale: str = ""
    group: int = 32
    zeros: bool = False
    layout: str = "nn"

    def drawn(self, rng: np.random.Generator, groups: int, k: int, n: int) -> tuple[Quantized | np.ndarray, np.ndarray]:
        """Returns an operand, and the matrices ``float64[groups, k, n]`` that it stands for."""

        def values(shape: tuple[int, ...]) -> np.ndarray:
            found = rng.integers(*RANGES.get(self.narrow, (-4, 5)), shape)
            return found.astype(np.float32).astype(jnp.dtype(self.narrow))

        w = values((groups, k, n))
        stored = w if self.layout == "nn" else np.ascontiguousarray(w.swapaxes(1, 2))
        wide = w.astype(np.float64)
        if not self.scale:
            return stored, wide
        shape = groups, k // self.group, n
        zero = values(shape) if self.zeros else None
        scale = (2.0 ** rng.integers(-2, 2, shape)).astype(jnp.dtype(self.scale))
        if zero is not None:
            wide = wide - np.repeat(zero.astype(np.float64), self.group, 1)
        return Quantized(stored, scale, zero), wide * np.repeat(scale.astype(np.float64), self.group, 1)


def scaled_rows(rng: np.random.Generator, count: int, k: int, block: int) -> tuple[Quantized, np.ndarray]:
    """Returns activations ``[count, k]`` in float8 with a scale for each row and so many of k, and in float64."""
    values, scale = rng.integers(-2, 3, (count, k)), 2.0 ** rng.integers(-2, 3, (count, k // block))
    of_values = values.astype(np.float32).astype(jnp.float8_e4m3fn)
    return Quantized(of_values, scale.astype(np.float32)), values * np.repeat(scale, block, 1)


def rows(rng: np.random.Generator, sizes: Sequence[int], k: int, dtype: str) -> np.ndarray:
    """Returns activations ``[sum(sizes) + REST, k]``."""
    return rng.integers(-2, 3, (sum(sizes) + REST, k)).astype(jnp.dtype(dtype))


def in_groups(x: np.ndarray, sizes: Sequence[int], wide: np.ndarray) -> np.ndarray:
    """Returns the product of each group's rows by its matrix, in float64; zeros of no group."""
    found, end = np.zeros((x.shape[0], wide.shape[2])), 0
    for size, matrix in zip(sizes, wide, strict=True):
        found[end : end + size] = x[end : end + size].astype(np.float64) @ matrix
        end += size
    return found


def depth(
    rng: np.random.Generator, sizes: Sequence[int], columns: int, dtype: str, scaled: bool
) -> tuple[Quantized | np.ndarray, np.ndarray]:
    """Returns an operand ``[rows, columns]`` of groups of k, with a scale for each 128 rows, and the same in float64.

    Rows of no group are NaN, or great integers.
    """
    size = -(-(sum(sizes) + REST) // 128) * 128
    wide = rng.integers(-2, 3, (size, columns)).astype(np.float64)
    values = wide.astype(np.float32).astype(jnp.dtype(dtype))
    values[sum(sizes) :] = np.nan if "float" in dtype else 99
    if not scaled:
        return values, wide
    scale = 2.0 ** rng.integers(-2, 3, (size // 128, columns))
    if size - sum(sizes) >= 128:
        scale[-1] = np.nan
    return Quantized(values, scale.astype(np.float32)), wide * np.repeat(np.nan_to_num(scale), 128, 0)


def outer(sizes: Sequence[int], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns ``float64[groups, m, n]``, the product of each group's rows."""
    ends = np.cumsum(sizes)
    return np.stack([a[end - size : end].T @ b[end - size : end] for size, end in zip(sizes, ends, strict=True)])
