"""The reference in higher precision, and the distance from it that each dtype may have."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

# Rounding to the output is nearly all of the error. On Gaussian data, correctly rounded results have
# ||out - ref|| / ||ref|| = 1.66e-3 in bf16 and 2.08e-4 in f16; the bounds leave 8% and 15% for f32 accumulation, and a
# kernel that rounds twice (through f16, or by truncation) is outside. f32 results carry accumulation error alone, where
# the matrix unit truncates: about 3e-6 at k = 5000, growing with k.
RELATIVE = {"bfloat16": 1.8e-3, "float16": 2.4e-4, "float32": 1e-5}
# The same for one element: half a unit in the last place, plus accumulation of k products of unit variance. Sums grow
# as sqrt(k); past k = 16384 the matrix unit's truncation, always toward zero, adds up too (0.028 seen at k = 65536).
_HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
_ACCUMULATION = 1e-4
# With fewer elements than this the norm is too noisy to bound as above; the elementwise bound holds for any number.
_NORM_ELEMENTS = 4096


@dataclasses.dataclass(frozen=True)
class Error:
    """The distance of a result from its reference.

    Attributes:
      relative: ||out - ref|| / ||ref||.
      worst: the largest |out - ref| over what is allowed for that element; above 1 is wrong.
      tolerance: the bound on ``relative``.
    """

    relative: float
    worst: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Both bounds hold (NaN never passes)."""
        return self.relative <= self.tolerance and self.worst <= 1.0

    def __str__(self) -> str:
        return f"relative error {self.relative:.3g} (at most {self.tolerance:.3g}), worst element {self.worst:.3g} of 1"


def tolerance(dtype, k: int, elements: int) -> float:
    """The bound on the relative error of a result of that dtype."""
    name = np.dtype(dtype).name
    if elements < _NORM_ELEMENTS:
        return math.inf
    return RELATIVE[name] * (max(1.0, k / 8192) if name == "float32" else 1.0)


def compare(out, ref, k: int) -> Error:
    """Compares a result with its reference in higher precision, for inputs of zero mean and unit variance.

    Args:
      out: the result, a numpy or jax array.
      ref: the reference of the same shape, in f32 or f64.
      k: contraction length.
    """
    if out.size == 0:
        return Error(0.0, 0.0, math.inf)
    relative, worst = distances(out, ref, k)
    return Error(float(relative), float(worst), tolerance(out.dtype, k, out.size))


def distances(out, ref, k: int):
    """The fields ``relative`` and ``worst`` of ``compare``'s Error, as arrays."""
    xp = np if isinstance(out, np.ndarray) else jnp
    difference = xp.abs(out.astype(ref.dtype) - ref)
    accumulation = _ACCUMULATION * math.sqrt(max(k, 1)) * max(1.0, k / 16384)
    allowed = _HALF_ULP[np.dtype(out.dtype).name] * xp.abs(ref) + accumulation
    norm = xp.maximum(xp.sqrt(xp.sum(ref * ref)), 1e-30)
    return xp.sqrt(xp.sum(difference * difference)) / norm, xp.max(difference / allowed)


def reference(a, b, layout: str, dtype=jnp.float32, precision: jax.lax.Precision | None = jax.lax.Precision.HIGHEST):
    """``a @ b`` in XLA, as a user would write it: one ``dot_general``, no operand transposed.

    Args:
      a: ``[..., m, k]``, or ``[..., k, m]`` when the layout begins with "t".
      b: ``[..., k, n]``, or ``[..., n, k]`` when the layout ends with "t"; the same batch axes as ``a``.
      layout: one of "nn", "nt", "tn", "tt".
      dtype: dtype of the result.
      precision: of the product; the default makes f32 inputs exact to f32 rounding.

    Returns:
      ``[..., m, n]``.
    """
    batch = tuple(range(a.ndim - 2))
    contract = ((a.ndim - (1 if layout[0] == "n" else 2),), (b.ndim - (2 if layout[1] == "n" else 1),))
    return jax.lax.dot_general(
        a, b, (contract, (batch, batch)), precision=precision, preferred_element_type=jnp.dtype(dtype)
    )


def xla(layout: str, dtype):
    """The program of XLA for the same product: the baseline of every benchmark."""
    return lambda a, b: reference(a, b, layout, dtype, precision=None)


def exact(layout: str, dtype):
    """The reference with products that are exact, added up in float32 and rounded once."""
    return lambda a, b: reference(a.astype(jnp.float32), b.astype(jnp.float32), layout).astype(dtype)
