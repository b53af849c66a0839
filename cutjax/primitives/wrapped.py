"""A product that is another one but for what becomes of its factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cutjax.binding.placement import Labels, Placement
from cutjax.epilogue.expression import Epilogue, OperandSpec
from cutjax.primitives import derivative
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Arithmetic, Product


@dataclasses.dataclass(frozen=True)
class Wrapped(Product):
    """Another product, all of which it has but for what its own class says.

    Attributes:
      product: the other one.
    """

    product: Product

    @property
    def where(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The operation."""
        return self.product.where

    @property
    def axes(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The axes of the other product's arrays."""
        return self.product.axes

    @property
    def rows(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The axes of the accumulators' rows."""
        return self.product.rows

    @property
    def summed(self) -> tuple[str, ...]:
        return self.product.summed

    @property
    def late(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The axes of which each result has one term."""
        return self.product.late

    @property
    def gathered(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The axes whose every part meets every other."""
        return self.product.gathered

    def check_epilogue(self, epilogue: Epilogue) -> None:
        self.product.check_epilogue(epilogue)

    def why_not(self) -> str:
        return self.product.why_not()

    def operand_labels(self, x: Any, tile: Labels) -> Labels:
        return self.product.operand_labels(x, tile)

    def specs(self, a: jax.Array, operands: Sequence[jax.Array]) -> tuple[OperandSpec, ...]:
        return self.product.specs(a, operands)

    def along_rows(self, a: jax.Array, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return self.product.along_rows(a, operands)

    def groups(self, bs: Sequence[Any]) -> int | None:
        return self.product.groups(bs)

    def seen(self, x: jax.Array, context: Sequence[jax.Array], m: int, arithmetic: Arithmetic) -> jax.Array:
        return self.product.seen(x, context, m, arithmetic)

    def whole(
        self, x: jax.Array, context: Sequence[jax.Array], shape: tuple[int, ...], arithmetic: Arithmetic
    ) -> jax.Array:
        return self.product.whole(x, context, shape, arithmetic)

    def applied(self, epilogue: Epilogue, context: Sequence[jax.Array], arithmetic: Arithmetic) -> derivative.Applied:
        return self.product.applied(epilogue, context, arithmetic)

    def finished(self, results: Any, acc: Any, context: Sequence[jax.Array], why: str) -> Any:
        return self.product.finished(results, acc, context, why)

    def written(self, accumulator: np.dtype, dtype: np.dtype, on_cuda: bool) -> np.dtype:
        return self.product.written(accumulator, dtype, on_cuda)

    def after(self, placement: Placement, factors: Factors) -> tuple[Product, Sequence[Any]]:
        return self.product.after(placement, factors.unscaled)

    def restored(self, i: int, d: jax.Array) -> jax.Array:
        return self.product.restored(i, d)

    def own_axes(self, products: int) -> list[int]:
        return self.product.own_axes(products)

    def tile(self, a: Any, *rest: Any) -> Any:
        return self.product.tile(a, *rest)

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        return self.product.labels(a, *rest)

    def batched(self, at: int, rank: int) -> Product:
        return dataclasses.replace(self, product=self.product.batched(at, rank))

    def laid(self, like: Any, *avals: Any) -> Product:
        return dataclasses.replace(self, product=self.product.laid(like, *avals))
