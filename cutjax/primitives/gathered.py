"""A product of rows of an array, gathered by a routing: the rows of tokens, one for each of their experts.

Its arrays are those of the other product, whose a has a row for each token, then the routing's permutation and inverse.
A kernel reads each row where the array has it; where none does, the rows are copied first, and the other product's
kernel multiplies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from cutjax.binding.explicit import batched
from cutjax.binding.placement import Labels, batch_labels
from cutjax.binding.rules import on_mesh
from cutjax.dot_precision import Canonical
from cutjax.kernels import operand
from cutjax.kernels.device import Device
from cutjax.kernels.problem import Problem
from cutjax.primitives.factors import Factors, summed_tangents
from cutjax.primitives.product import Arithmetic, Product
from cutjax.primitives.product_rules import define_product
from cutjax.primitives.routing import dispatched
from cutjax.primitives.wrapped import Wrapped


@define_product("cutjax_gathered")
@dataclasses.dataclass(frozen=True)
class Gathered(Wrapped):
    """Another product, of rows in groups, whose a is gathered.

    Attributes:
      backend: of the copy of the rows, where there is one.
    """

    backend: str

    remade = True

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the other product's arrays, and of the permutation and the inverse."""
        return (*self.product.axes, 1, 2)

    def own_axes(self, products: int) -> list[int]:
        return Product.own_axes(self, products)

    def _rows(self, a: Any, context: Sequence[Any]) -> Any:
        """Returns the aval of the gathered rows."""
        permutation = context[-2]
        batch: Any = lax.broadcast_shapes(a.shape[:-2], permutation.shape[:-1])
        spec = batched(2, a.sharding.spec[:-2], permutation.sharding.spec[:-1])
        sharding = on_mesh(a, permutation).update(spec=spec)
        return a.update(shape=(*batch, permutation.shape[-1], a.shape[-1]), sharding=sharding)

    def _copied(self, a: jax.Array, context: Sequence[jax.Array]) -> jax.Array:
        """Returns the gathered rows."""
        permutation, inverse = context[-2:]
        return dispatched(a, permutation, inverse, self.backend)

    def tile(self, a: Any, *rest: Any) -> Any:
        return self.product.tile(self._rows(a, rest), *rest[:-2])

    def reference(self, *arrays: jax.Array, **params: Any) -> jax.Array:
        a, *rest, permutation, inverse = arrays
        return self.product.reference(self._copied(a, (permutation, inverse)), *rest, **params)

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        a, *rest, _, inverse = avals
        problem = self.product.problem(self._rows(a, avals), *rest, out_dtype=out_dtype, device=device)
        view = operand.Gathered(*inverse.shape[-2:])
        return dataclasses.replace(problem, a=dataclasses.replace(problem.a, view=view))

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        """Returns the names of the axes. Neither rows nor groups are divided: a row may be any token's."""
        own, tile = self.product.labels(self._rows(a, rest), *rest[:-2])
        *own, tile = (tuple(None if label in ("m", "g") else label for label in labels) for labels in (*own, tile))
        full = self.tile(a, *rest).shape
        for x, axes in zip(rest[-2:], self.axes[-2:], strict=True):
            own.append((*batch_labels(x.shape[: x.ndim - axes], full), *(None,) * axes))
        return own, tile

    # Its context is the other's, and more.

    def _own(self, context: Sequence[Any]) -> Sequence[Any]:
        return context[: len(self.product.axes) - 2]

    def seen(self, x: jax.Array, context: Sequence[jax.Array], m: int, arithmetic: Arithmetic) -> jax.Array:
        return self.product.seen(x, self._own(context), m, arithmetic)

    def whole(
        self, x: jax.Array, context: Sequence[jax.Array], shape: tuple[int, ...], arithmetic: Arithmetic
    ) -> jax.Array:
        return self.product.whole(x, self._own(context), shape, arithmetic)

    def unmade(self, factors: Factors) -> tuple[Product, Factors]:
        rows = self._copied(factors.a, factors.context)
        return self.product, dataclasses.replace(factors, a=rows, context=self._own(factors.context))

    def as_given(self, i: int) -> bool:
        return i == 1

    # With a batch, which no kernel gathers, rows are copied.

    def matched(self, factors: Factors) -> Factors:
        return self.unmade(factors)[1]

    def batched(self, at: int, rank: int) -> Product:
        return self.product.batched(at, rank)

    # Its derivatives: the tangent of rows is that of the array, gathered, whose transpose is a sum.

    def tangents(
        self, multiply: Callable[..., list[jax.Array]], factors: Factors, dots: Factors
    ) -> list[jax.Array | None]:
        a_dot = None if dots.a is None else self._copied(dots.a, factors.context)
        of, rows = (self, factors) if self._gathers_back else self.unmade(factors)
        return summed_tangents(multiply, (self.product, a_dot), (of, rows.a), factors.bs, dots.bs)

    @property
    def _gathers_back(self) -> bool:
        """True if the cotangent of b has the rows for its first factor, which alone is gathered."""
        return getattr(self.product, "layout", "nn") == "nn"

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Product, tuple[jax.Array, jax.Array], Canonical]:
        back, factors, precision = self.product.cotangent(i, g, other, precision)
        return Gathered(back, self.backend), factors, precision
