"""A product of factors that are made of arrays: any other product, of what scales or a prologue make of values.

In blocks with scales a factor is ``(values - zero) * scale``. A prologue is any elementwise function of an array and of
operands, which take the place of scales.
"""

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
from cutjax.primitives import derivative, partition
from cutjax.primitives.accumulators import converted, cotangent_dtype
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Folded, Product
from cutjax.primitives.product_rules import define_product
from cutjax.primitives.prologues import in_dtype, into_rows, operand_with, specs_of
from cutjax.primitives.tracing import abstract
from cutjax.primitives.wrapped import Beside


def scaled(
    product: Product, factors: Factors, scales: Sequence[Sequence[jax.Array]], dtype: np.dtype
) -> tuple[Product, Factors]:
    """Returns the product of factors with scales of blocks, multiplied in a dtype; as it is where none has any."""
    if not any(scales):
        return product, factors
    return Scaled(product, (len(scales[0]), len(scales[1])), dtype), dataclasses.replace(factors, scales=tuple(scales))


def with_prologue(
    product: Product, factors: Factors, prologue: Epilogue, operands: Sequence[jax.Array]
) -> tuple[Product, Factors]:
    """Returns the product of what a prologue makes of a, in the dtype of its result; a may have any dtype."""
    dtype = np.dtype(prologue.outputs[0].dtype)
    if prologue.plain and factors.a.dtype == dtype:
        return product, factors
    of_bs = factors.scales[1:] or ((),) * len(factors.bs)
    inner, count = (product.product, product.counts[1]) if isinstance(product, Scaled) else (product, 0)
    found = Scaled(inner, (len(operands), count), dtype, (prologue, None))
    return found, dataclasses.replace(factors, scales=(tuple(operands), *of_bs))


@define_product("cutjax_scaled")
@dataclasses.dataclass(frozen=True)
class Scaled(Beside):
    """Another product, of which a, or each b, has a scale for each of its blocks.

    The arrays are those of the other product, then the scales and the zero points of a, and those of each b.

    Or a prologue makes it of values and operands, in place of scales.

    Attributes:
      counts: of the arrays that a has beside its values, and that each b has: 0, a scale, or a scale and zero points; a
        prologue's operands.
      dtype: in which factors are multiplied. ``(values - zero) * scale`` is rounded to it, where a kernel does not
        multiply the sums of each block by scales instead, which rounds less.
    """

    dtype: np.dtype
    prologues: tuple[Epilogue | None, Epilogue | None] = (None, None)

    # What scales and prologues add.

    @property
    def primal(self) -> Product:
        prologues = tuple(prologue and prologue.primal for prologue in self.prologues)
        return dataclasses.replace(self, prologues=prologues)

    @property
    def positions(self) -> frozenset[str]:
        return frozenset().union(*(prologue.positions for prologue in self.prologues if prologue))

    def _factor(self, i: int, values: jax.Array, arrays: Sequence[jax.Array], context: Sequence[Any]) -> jax.Array:
        """Returns a (i = 0) or b (1) as it is multiplied."""
        if (prologue := self.prologues[i]) is None:
            return dequantized(values, arrays, self.dtype)
        return self.product.made(prologue, i, values, arrays, context)

    def as_given(self, i: int) -> bool:
        return not self.counts[i] and self.prologues[i] is None

    def unmade(self, factors: Factors) -> tuple[Product, Factors]:
        of_a, *of_bs = factors.scales
        a = self._factor(0, factors.a, of_a, factors.context)
        bs = [self._factor(1, b, of_b, factors.context) for b, of_b in zip(factors.bs, of_bs, strict=True)]
        return self.product, Factors(a, bs, factors.context)

    def beside(self, factors: Factors, dots: Factors) -> tuple[Product, Factors]:
        prologues, counts, scales = [*self.prologues], [*self.counts], [*factors.scales]
        for i, (x, dot) in enumerate(((factors.a, dots.a), *zip(factors.bs[:1], dots.bs[:1], strict=True))):
            prologue, moves = prologues[i], ((dot is not None,), derivative.moving(dots.scales[i]))
            if prologue is None or not prologue.rules:
                continue
            traced = derivative.differentiated(prologue, abstract(jax.typeof(x)), scales[i], *moves)
            prologues[i], counts[i], scales[i] = traced.epilogue, len(traced.operands), traced.operands
        product = dataclasses.replace(self, prologues=tuple(prologues), counts=tuple(counts))
        return product, dataclasses.replace(factors, scales=tuple(scales))

    def located(
        self, placement: Placement, whole: Factors, labels: Factors, factors: Factors
    ) -> tuple[Product, Factors]:
        prologues, counts, scales = [*self.prologues], [*self.counts], [*factors.scales]
        for i, (x, of) in enumerate(((whole.a, labels.a), *zip(whole.bs[:1], labels.bs[:1], strict=True))):
            if (prologue := prologues[i]) is None:
                continue
            prologue = dataclasses.replace(prologue, operands=specs_of(whole.scales[i]))
            known = dataclasses.replace(placement, scattered={})
            prologues[i], more = partition.located(prologue, x.shape, of, known)
            scales[i] = (*scales[i], *more)
            counts[i] += len(more)
        product = dataclasses.replace(self, prologues=tuple(prologues), counts=tuple(counts))
        return product, dataclasses.replace(factors, scales=tuple(scales))

    def multiplied(self, a: np.dtype) -> np.dtype:
        return self.dtype

    def tile(self, a: Any, *rest: Any) -> Any:
        found = self.product.tile(*self._factors((a, *rest)).unscaled.arrays)
        return found.update(dtype=self.dtype, weak_type=False)

    def reference(self, *arrays: jax.Array, precision: Canonical = None, **params: Any) -> jax.Array:
        factors = self._factors(arrays)
        blocks = any(count for count, prologue in zip(self.counts, self.prologues, strict=True) if prologue is None)
        params["precision"] = dot_precision.of_wider(precision) if blocks else precision
        primal: Any = self.primal
        product, factors = primal.unmade(factors)
        return product.reference(*factors.arrays, **params)

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        factors = self._factors(avals)
        (b,), (of_a, of_b) = factors.bs, factors.scales
        wide = (factors.a.update(dtype=self.dtype), b.update(dtype=self.dtype), *factors.context)
        problem = self.product.problem(*wide, out_dtype=out_dtype, device=device)
        a, of = (
            _operand(like, x, arrays) if prologue is None else operand_with(like, x, arrays, prologue)
            for like, x, arrays, prologue in (
                (problem.a, factors.a, of_a, self.prologues[0]),
                (problem.bs[0], b, of_b, self.prologues[1]),
            )
        )
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

    def fold(self, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array]) -> Folded | None:
        of_a, *of_bs = factors.scales
        if of_a and self.prologues[0] is None:
            return None
        folded = self.product.fold(epilogue, factors.unscaled, operands)
        if folded is None:
            return None
        axes = self.product.axes[1]  # weights are for all: their batch axes are of size 1
        scales: list[Any] = [(), *(tuple(x.reshape(x.shape[x.ndim - axes :]) for x in of) for of in of_bs)]
        prologues = [*self.prologues]
        folding = zip(
            (factors.a, factors.bs[0]), (folded.factors.a, folded.factors.bs[0]), factors.scales, strict=False
        )
        for i, (x, into, arrays) in enumerate(folding):
            if (prologue := prologues[i]) is not None:
                found = into_rows(prologue, x, into, arrays)
                if found is None:
                    return None
                prologues[i], scales[i] = found
        product = dataclasses.replace(self, product=folded.product, prologues=tuple(prologues))
        return folded._replace(product=product, factors=dataclasses.replace(folded.factors, scales=tuple(scales)))

    def _of(self, product: Product, a: bool = True, b: bool = True) -> Product:
        """Returns another product of factors made as these are, or of one of them."""
        (of_a, of_b), (first, second) = self.counts, self.prologues
        counts, prologues = (of_a * a, of_b * b), (first if a else None, second if b else None)
        if not any(counts) and prologues == (None, None):
            return product
        return dataclasses.replace(self, product=product, counts=counts, prologues=prologues)

    # Its derivatives: in scales, and in values and zero points of floats, they are those of ``dequantized``; in what a
    # prologue takes, its own. Kept for them are the arrays, not what is made of them.

    def tangents(
        self, multiply: Callable[..., list[jax.Array]], factors: Factors, dots: Factors
    ) -> list[jax.Array | None]:
        (own, *of_bs), (own_dots, *of_dots), context = factors.scales, dots.scales, factors.context
        a_dot = self._dot(0, factors.a, own, dots.a, own_dots, context)
        product, values = self.beside(factors, dots)
        assert isinstance(product, Scaled)
        (beside_a, *beside_bs), found = values.scales, []
        for b, scales, dot, scale_dots, beside in zip(factors.bs, of_bs, dots.bs, of_dots, beside_bs, strict=True):
            terms = []
            if a_dot is not None:
                terms += multiply(product._of(self.product, a=False), a_dot, [b], *beside)
            if (b_dot := self._dot(1, b, scales, dot, scale_dots, context)) is not None:
                terms += multiply(product._of(self.product, b=False), factors.a, [b_dot], *beside_a)
            found.append(functools.reduce(jax.lax.add, terms) if terms else None)
        return found

    def _dot(
        self, i: int, values: Any, arrays: Sequence[Any], dot: Any, dots: Sequence[Any], context: Sequence[Any]
    ) -> jax.Array | None:
        """Returns the tangent of a (i = 0) or b (1) as it is multiplied, in that dtype; None is zero."""
        if not jnp.issubdtype(self.dtype, jnp.inexact):  # of integers, whatever they are made of
            return None
        given, moved = (values, *arrays), (dot, *dots)
        places = [i for i, x in enumerate(moved) if x is not None]
        if not places or (not arrays and self.prologues[i] is None):
            return dot

        def tangent(given: Sequence[jax.Array], moved: Sequence[jax.Array]) -> jax.Array:
            def function(*moving: jax.Array) -> jax.Array:
                full = list(given)
                for at, x in zip(places, moving, strict=True):
                    full[at] = x
                return self._factor(i, full[0], full[1:], context)

            return jax.jvp(function, tuple(given[at] for at in places), tuple(moved))[1]

        tangent = tangent if self.prologues[i] is None else jax.checkpoint(tangent, prevent_cse=False)
        return tangent(given, [moved[at] for at in places])

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Product, tuple[jax.Array, jax.Array], Canonical]:
        back, factors, precision = self.product.cotangent(i, g, other, precision)
        count, prologue = self.counts[1 - i], self.prologues[1 - i]
        if prologue is not None:
            prologue = in_dtype(prologue, g.dtype)
        second = factors[0] is g
        counts = (0, count) if second else (count, 0)
        return Scaled(back, counts, g.dtype, (None, prologue) if second else (prologue, None)), factors, precision

    def with_cotangent(self, g: jax.Array, other: jax.Array, of: np.dtype) -> tuple[jax.Array, jax.Array]:
        return converted(g, cotangent_dtype(of, g.dtype)), other

    def widened(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return a, b


def _operand(like: Operand, values: Any, arrays: Sequence[Any]) -> Operand:
    """Returns the operand of a kernel's problem that is like another, of values with scales."""
    scale = None
    if arrays:
        sizes = [max(1, size // max(1, n)) for size, n in zip(values.shape[-2:], arrays[0].shape[-2:], strict=True)]
        mn, k = sizes if like.contiguous == "k" else sizes[::-1]
        scale = Scale(arrays[0].dtype, mn, k, arrays[1].dtype if len(arrays) > 1 else None)
    return dataclasses.replace(like, dtype=values.dtype, bits=0, scale=scale)


def _of_blocks(labels: Labels, values: Any, blocks: Any) -> Labels:
    """Returns the names of the axes of scales; one that is for the whole axis of the values is whole."""
    sizes = zip(labels, values.shape, blocks.shape, strict=True)
    return tuple(None if count == 1 != size else label for label, size, count in sizes)
