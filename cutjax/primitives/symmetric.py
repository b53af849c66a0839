"""The symmetric product, of a matrix and its own transpose: kernels multiply on and below the diagonal alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cutjax.binding.placement import Labels, Placement, batch_labels
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.device import Device
from cutjax.kernels.problem import Problem
from cutjax.primitives import dense
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Product
from cutjax.primitives.product_rules import define_product


@define_product("cutjax_syrk")
@dataclasses.dataclass(frozen=True)
class Symmetric(Product):
    """``a @ a^T`` of a [..., m, k] in the layout "n", ``a^T @ a`` of a [..., k, m] in the layout "t"."""

    layout: str

    where = "syrk"
    unary = True
    axes = (2,)
    gathered = ("m",)

    @property
    def full(self) -> dense.Dense:
        """The dense product of the same layout, of two matrices that may differ."""
        return dense.Dense("nt" if self.layout == "n" else "tn")

    def check_epilogue(self, epilogue: Epilogue) -> None:
        """Raises unless the epilogue treats (i, j) and (j, i) alike."""
        found = [
            f"operand {i} varies along {'rows' if spec.row else 'columns'} alone"
            for i, spec in enumerate(epilogue.operands)
            if spec.row != spec.col
        ]
        if positions := epilogue.positions & {"row", "col"}:
            found.append(f"it depends on the position along {' and '.join(sorted(positions))}")
        if found:
            raise NotImplementedError(
                f"{self.where}: the epilogue must treat (i, j) and (j, i) alike, but {'; '.join(found)}. "
                "Operands are scalars, one a matrix, or symmetric matrices"
            )

    def tile(self, a: Any, *rest: Any) -> Any:
        rows = a.sharding.spec[-2 if self.layout == "n" else -1]
        if rows is not None:
            raise NotImplementedError(
                f"{self.where}: a is {a.str_short()}: its rows are divided over the mesh axis {rows!r}, which cannot "
                "divide both axes of the result; jax.reshard it"
            )
        return self.full.tile(a, a)

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        batch = batch_labels(a.shape[:-2], a.shape)
        return [(*batch, *("mk" if self.layout == "n" else "km"))], (*batch, "m", "n")

    def shard(self, placement: Placement, factors: Factors) -> tuple[Product, Factors]:
        """Returns the product of two parts of the rows, where a device has not the whole result."""
        over_rows, over_columns = placement.axes.get("m", ()), placement.axes.get("n", ())
        if not over_rows and not over_columns:
            return self, factors
        a = factors.a
        at = a.ndim - (2 if self.layout == "n" else 1)

        def part(axes: Sequence[str]) -> jax.Array:
            size = a.shape[at] // placement.count(axes)
            return lax.dynamic_slice_in_dim(a, placement.index(axes) * size, size, at)

        return self.full, Factors(part(over_rows), [part(over_columns)])

    def reference(self, *arrays: jax.Array, **params: Any) -> jax.Array:
        return self.full.reference(*arrays, *arrays, **params)

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        problem = self.full.problem(*avals, *avals, out_dtype=out_dtype, device=device)
        return dataclasses.replace(problem, symmetric=True)

    def tangents(
        self, multiply: Callable[..., list[jax.Array]], factors: Factors, dots: Factors
    ) -> list[jax.Array | None]:
        """Returns a' a^T plus its transpose, so that the gradient is one product with g + g^T."""
        return [None] if dots.a is None else list(map(_symmetrized, multiply(self.full, dots.a, [factors.a])))


def _symmetrized(dot: jax.Array) -> jax.Array:
    """Returns the sum of matrices and their transposes, of 16 bits in float32, rounded once."""
    wide = accumulator(dot.dtype)
    return (dot.astype(wide) + jnp.swapaxes(dot, -1, -2).astype(wide)).astype(dot.dtype)
