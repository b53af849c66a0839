"""The tokens of a value: all of a head's, or a slice of them, as one axis in the order of memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Tokens of which values have rows.

    Attributes:
      size: their number.
      within: those that they are a slice of; None of all tokens.
      shape: the axes of those, where they are a slice.
      starts, strides: of the slice, along these axes.
      counts: the axes of the slice.
    """

    size: int
    within: Grid | None = None
    shape: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    def sliced(
        self, shape: Sequence[int], starts: Sequence[int], strides: Sequence[int], counts: Sequence[int]
    ) -> Grid:
        """Returns a slice of these tokens, whose axes are ``shape``."""
        return Grid(math.prod(counts), self, tuple(shape), tuple(starts), tuple(strides), tuple(counts))

    def lies_as(self, other: Grid) -> bool:
        """True if another slice has the same tokens; of one token, strides say nothing."""
        sides = [
            (g.shape, g.starts, g.counts, [s for s, n in zip(g.strides, g.counts, strict=True) if n > 1])
            for g in (self, other)
        ]
        return sides[0] == sides[1]

    def lift(self, x: jax.Array) -> jax.Array:
        """Returns an array of these tokens as one of all tokens, zeros elsewhere."""
        if self.within is None:
            return x
        x = lax.reshape(x, self.counts)
        config = []
        for n, start, stride, count in zip(self.shape, self.starts, self.strides, self.counts, strict=True):
            last = start + (count - 1) * stride
            config.append((start, n - 1 - last, stride - 1))
        padded = lax.pad(x, jnp.zeros_like(x, shape=()), config)
        return self.within.lift(lax.reshape(padded, (self.within.size,)))

    def lower(self, x: jax.Array) -> jax.Array:
        """Returns the rows of an array of all tokens that these have."""
        if self.within is None:
            return x
        x = lax.reshape(self.within.lower(x), self.shape)
        limits = [s + (n - 1) * k + 1 for s, n, k in zip(self.starts, self.counts, self.strides, strict=True)]
        return lax.reshape(lax.slice(x, self.starts, limits, self.strides), (self.size,))

    def inside(self) -> np.ndarray:
        """Returns for each of all tokens whether these have it."""
        with jax.ensure_compile_time_eval():
            return np.asarray(self.lift(jnp.ones(self.size, bool)))


def axis_after_reshape(shape: Sequence[int], axis: int, new: Sequence[int]) -> int | None:
    """Returns the place of an axis that a reshape leaves as it is; None where it does not."""
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    for i, size in enumerate(new):
        if size == shape[axis] and math.prod(new[:i]) == before and math.prod(new[i + 1 :]) == after:
            return i
    return None


def real(shape: Sequence[int], axes: Any = None) -> list[int]:
    """Returns the axes, of some or all, that have more than one element."""
    return [i for i in (range(len(shape)) if axes is None else axes) if shape[i] != 1]
