"""Products that are another one but for what becomes of their factors, or what is beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
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

    def whole_operands(self, factors: Factors, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return self.product.whole_operands(factors, operands)

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


@dataclasses.dataclass(frozen=True)
class Beside(Wrapped):
    """Another product whose factors have arrays beside them: all of its arrays, then those of a, and those of each b.

    Attributes:
      counts: of the arrays beside a, and beside each b.
    """

    counts: tuple[int, int]

    def own_axes(self, products: int) -> list[int]:
        own, (of_a, of_b) = self.product.own_axes(products), self.counts
        return [*own, *own[:1] * of_a, *own[1:2] * (products * of_b)]

    def unpack(self, args: Sequence[Any], epilogue: Epilogue) -> tuple[Factors, tuple[Any, ...]]:
        return self._unpack(args, epilogue.products)

    def _unpack(self, args: Sequence[Any], products: int) -> tuple[Factors, tuple[Any, ...]]:
        of_a, of_b = self.counts
        own, it = len(self.product.own_axes(products)), iter(args)
        a, *rest = (next(it) for _ in range(own))
        scales = [tuple(next(it) for _ in range(count)) for count in (of_a, *[of_b] * products)]
        return Factors(a, tuple(rest[:products]), tuple(rest[products:]), tuple(scales)), tuple(it)

    def _factors(self, arrays: Sequence[Any]) -> Factors:
        """Returns the factors of all arrays in order."""
        context, (of_a, of_b) = len(self.product.axes) - 2, self.counts
        return self._unpack(arrays, (len(arrays) - 1 - context - of_a) // (1 + of_b))[0]

    def matched(self, factors: Factors) -> Factors:
        """Returns factors of as many matrices as what is beside them."""
        values, scales = [], []
        for x, of in zip((factors.a, *factors.bs), factors.scales, strict=True):
            batch = jax.lax.broadcast_shapes(*(y.shape[:-2] for y in (x, *of)))
            x, *of = (jnp.broadcast_to(y, (*batch, *y.shape[-2:])) for y in (x, *of))
            values.append(x)
            scales.append(tuple(of))
        return dataclasses.replace(factors, a=values[0], bs=tuple(values[1:]), scales=tuple(scales))
