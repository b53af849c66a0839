"""The form of a product as a kernel has it: what its arrays become, and the rows and columns of its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding.rules import any_reduced
from cutjax.dtypes import FLOAT8, are_alike, are_narrow
from cutjax.ops.arguments import group_sizes_of
from cutjax.primitives.factors import Factors
from cutjax.primitives.hints import NO_HINTS, Hints
from cutjax.primitives.product import Product


@dataclasses.dataclass(frozen=True)
class Form:
    """A product of an equation, in the form of a kernel.

    Attributes:
      a, b: the shapes of the operands.
      shape: that of the result, ``(*batch, *rows, n)``, to which the equation's is reshaped.
      precision: as ``dot_general`` has it, of a and b.
      swapped: whether a is the equation's right operand, as where the result is transposed.
      hints: what policy and explain were told of it.
      moved: bytes of arrays that XLA transposes around the kernel.
      tailless: why it has no tail; "" where it may have one.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    shape: tuple[int, ...]
    precision: Any
    _: dataclasses.KW_ONLY
    swapped: bool = False
    hints: Hints = NO_HINTS
    moved: int = 0
    tailless: str = ""
    grouped: ClassVar[bool] = False

    @property
    def product(self) -> Product:
        """The product that is bound."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """The number of axes before the last of the shape that are rows."""
        return self.product.rows

    def operands(self, left: Any, right: Any) -> tuple[jax.Array, jax.Array]:
        """Returns a and b of the left operand and the right one."""
        raise NotImplementedError

    def result(self, d: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Returns the equation's result, of that shape, of the product's."""
        return lax.reshape(d, shape)

    def factors(self, arrays: Sequence[Sequence[jax.Array]]) -> Factors:
        """Returns the factors of products that share a, told the arrays of each: left, right, and sizes of groups."""
        pairs = [self.operands(left, right) for left, right, *_ in arrays]
        return Factors(pairs[0][0], [b for _, b in pairs], [group_sizes_of(x, "fuse") for x in arrays[0][2:]])

    def avals(self, left: Any, right: Any) -> Sequence[Any]:
        """Returns the avals of a and b, told the dtypes of the operands; and of what lies beside them."""
        return jax.ShapeDtypeStruct(self.a, left), jax.ShapeDtypeStruct(self.b, right)


def unfit_dtypes(left: Any, right: Any, out: Any) -> str:
    """Returns the reason against a kernel for operands and a result of these dtypes, and sums that lie so, or ""."""
    of_8_bits = left.dtype.name in FLOAT8 and are_alike(left.dtype, right.dtype)  # as Flax's own layers multiply
    alike = left.dtype == right.dtype or are_narrow(left.dtype, right.dtype) or of_8_bits
    if not alike or not jnp.issubdtype(left.dtype, jnp.floating):
        return f"operands {left.dtype} and {right.dtype}: of one floating dtype they would have a kernel"
    if out.dtype not in (left.dtype, np.dtype(np.float32)) and not (of_8_bits and out.dtype.itemsize == 2):
        return f"a result in {out.dtype} of operands in {left.dtype}"
    if of_8_bits and out.dtype == left.dtype:
        return f"a result in {out.dtype}: what follows reads it rounded, and sums in kernels are not"
    return "an array is a sum that no device has" if any_reduced(left, right, out) else ""


def axes_of(shape: Sequence[int], form: Sequence[int]) -> list[list[int]] | None:
    """Returns the axes of a shape that each axis of another merges, in their order; None where that is not so."""
    found: list[list[int]] = []
    at = 0
    for size in form:
        axes: list[int] = []
        product = 1
        while product < size and at < len(shape):
            axes.append(at)
            product *= shape[at]
            at += 1
        if product != size:
            return None
        found.append(axes)
    if any(size != 1 for size in shape[at:]):
        return None
    found[-1] += range(at, len(shape))
    return found
