"""A product of factors in blocks with scales: any other product, of matrices ``(values - zero) * scale``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutjax import dot_precision
from cutjax.binding.placement import Labels, Placement
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.device import Device
from cutjax.kernels.operand import Operand, Scale
from cutjax.kernels.prepared import dequantized
from cutjax.kernels.problem import Problem
from cutjax.primitives.accumulators import converted, cotangent_dtype
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Folded, Product
from cutjax.primitives.product_rules import define_product
from cutjax.primitives.wrapped import Wrapped


def scaled(
    product: Product, factors: Factors, scales: Sequence[Sequence[jax.Array]], dtype: np.dtype
) -> tuple[Product, Factors]:
    """Returns the product of factors with scales of blocks, multiplied in a dtype; as it is where none has any."""
    if not any(scales):
        return product, factors
    return Scaled(product, (len(scales[0]), len(scales[1])), dtype), dataclasses.replace(factors, scales=tuple(scales))


@define_product("cutjax_scaled")
@dataclasses.dataclass(frozen=True)
class Scaled(Wrapped):
    """Another product, of which a, or each b, has a scale for each of its blocks.

    The arrays are those of the other product, then the scales and the zero points of a, and those of each b.

    Attributes:
      counts: of the arrays that a has beside its values, and that each b has: 0, a scale, or a scale and zero points.
      dtype: in which factors are multiplied. ``(values - zero) * scale`` is rounded to it, where a kernel does not
        multiply the sums of each block by scales instead, which rounds less.
    """

    counts: tuple[int, int]
    dtype: np.dtype

    # What scales add.

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

    def multiplied(self, a: np.dtype) -> np.dtype:
        return self.dtype

    def tile(self, a: Any, *rest: Any) -> Any:
        found = self.product.tile(*self._factors((a, *rest)).unscaled.arrays)
        return found.update(dtype=self.dtype, weak_type=False)

    def reference(self, *arrays: jax.Array, precision: Canonical = None, **params: Any) -> jax.Array:
        factors = self._factors(arrays)
        params["precision"] = dot_precision.of_wider(precision)
        of_a, of_b = factors.scales
        a, b = dequantized(factors.a, of_a, self.dtype), dequantized(factors.bs[0], of_b, self.dtype)
        return self.product.reference(a, b, *factors.context, **params)

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        factors = self._factors(avals)
        (b,), (of_a, of_b) = factors.bs, factors.scales
        wide = (factors.a.update(dtype=self.dtype), b.update(dtype=self.dtype), *factors.context)
        problem = self.product.problem(*wide, out_dtype=out_dtype, device=device)
        a, of = _operand(problem.a, factors.a, of_a), _operand(problem.bs[0], b, of_b)
        return dataclasses.replace(problem, a=a, bs=(of,) * problem.products)

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        factors = self._factors((a, *rest))
        own, tile = self.product.labels(*factors.unscaled.arrays)
        values = zip(own, factors.arrays, factors.scales, strict=False)
        blocks = [_of_blocks(labels, x, of) for labels, x, scales in values for of in scales]
        return [*own, *blocks], tile

    def shard(self, placement: Placement, factors: Factors) -> tuple[Product, Factors]:
        product, found = self.product.shard(placement, factors.unscaled)
        return self._of(product), dataclasses.replace(found, scales=factors.scales)

    def matched(self, factors: Factors) -> Factors:
        """Returns factors of as many matrices of values as of scales."""
        values, scales = [], []
        for x, of in zip((factors.a, *factors.bs), factors.scales, strict=True):
            batch = jax.lax.broadcast_shapes(*(y.shape[:-2] for y in (x, *of)))
            x, *of = (jnp.broadcast_to(y, (*batch, *y.shape[-2:])) for y in (x, *of))
            values.append(x)
            scales.append(tuple(of))
        return dataclasses.replace(factors, a=values[0], bs=tuple(values[1:]), scales=tuple(scales))

    def fold(self, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array]) -> Folded | None:
        of_a, *of_bs = factors.scales
        if of_a:
            return None
        folded = self.product.fold(epilogue, factors.unscaled, operands)
        if folded is None:
            return None
        axes = self.product.axes[1]  # weights are for all: their batch axes are of size 1
        merged = [tuple(x.reshape(x.shape[x.ndim - axes :]) for x in of) for of in of_bs]
        found = dataclasses.replace(folded.factors, scales=((), *merged))
        return folded._replace(product=self._of(folded.product), factors=found)

    def _of(self, product: Product, *counts: int) -> Product:
        """Returns another product of factors with these scales, or with some of them."""
        found = counts or self.counts
        return dataclasses.replace(self, product=product, counts=found)

    # Its derivatives: in scales, and in values and zero points of floats, they are those of ``dequantized``.

    def tangents(self, multiply: Callable[..., jax.Array], factors: Factors, dots: Factors) -> list[jax.Array | None]:
        (own, *of_bs), (own_dots, *of_dots), (of_a, of_b) = factors.scales, dots.scales, self.counts
        a_dot = self._dot(factors.a, own, dots.a, own_dots)
        found = []
        for b, scales, dot, scale_dots in zip(factors.bs, of_bs, dots.bs, of_dots, strict=True):
            terms = []
            if a_dot is not None:
                terms.append(multiply(self._of(self.product, 0, of_b), a_dot, b, *scales))
            if (b_dot := self._dot(b, scales, dot, scale_dots)) is not None:
                terms.append(multiply(self._of(self.product, of_a, 0), factors.a, b_dot, *own))
            found.append(functools.reduce(jax.lax.add, terms) if terms else None)
        return found

    def _dot(self, values: Any, arrays: Sequence[Any], dot: Any, dots: Sequence[Any]) -> jax.Array | None:
        """Returns the tangent of a dequantized factor, in the dtype that is multiplied; None is zero."""
        given, moved = (values, *arrays), (dot, *dots)
        places = [i for i, x in enumerate(moved) if x is not None]
        if not arrays or not places:
            return dot

        def function(*moving: jax.Array) -> jax.Array:
            full = list(given)
            for i, x in zip(places, moving, strict=True):
                full[i] = x
            return dequantized(full[0], full[1:], self.dtype)

        return jax.jvp(function, tuple(given[i] for i in places), tuple(moved[i] for i in places))[1]

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Product, tuple[jax.Array, jax.Array], Canonical]:
        back, factors, precision = self.product.cotangent(i, g, other, precision)
        count = self.counts[1 - i]
        counts = (0, count) if factors[0] is g else (count, 0)
        return Scaled(back, counts, g.dtype), factors, precision

    def with_cotangent(self, g: jax.Array, other: jax.Array, of: np.dtype) -> tuple[jax.Array, jax.Array]:
        return converted(g, cotangent_dtype(of, g.dtype)), other

    def widened(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return a, b


def _operand(like: Operand, values: Any, arrays: Sequence[Any]) -> Operand:
    """Returns the operand of a kernel's problem that is like another, of values with scales."""
    scale = None
    if arrays:
        sizes = [size // max(1, count) for size, count in zip(values.shape[-2:], arrays[0].shape[-2:], strict=True)]
        mn, k = sizes if like.contiguous == "k" else sizes[::-1]
        scale = Scale(arrays[0].dtype, mn, k, arrays[1].dtype if len(arrays) > 1 else None)
    return dataclasses.replace(like, dtype=values.dtype, bits=0, scale=scale)


def _of_blocks(labels: Labels, values: Any, blocks: Any) -> Labels:
    """Returns the names of the axes of scales; one that is for the whole axis of the values is whole."""
    sizes = zip(labels, values.shape, blocks.shape, strict=True)
    return tuple(None if count == 1 != size else label for label, size, count in sizes)
