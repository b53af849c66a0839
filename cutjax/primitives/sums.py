"""A sum of products: ``d = epilogue(a0 @ b0 + a1 @ b1 + ..., operands)``, one accumulator and one kernel for all."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from cutjax.binding.placement import Labels, Placement
from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, identity, normal
from cutjax.kernels.device import Device
from cutjax.kernels.joined import Joined
from cutjax.kernels.problem import Problem
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Folded, Product, bind, multiply
from cutjax.primitives.product_rules import define_product
from cutjax.primitives.wrapped import Beside


@define_product("cutjax_sum")
@dataclasses.dataclass(frozen=True)
class Sum(Beside):
    """The sum of products alike, each of its own arrays, whose contractions may differ.

    The arrays are those of the first product, then the others' a, and then, for each b, the others' b.
    """

    further = True

    def _products(self, factors: Factors) -> list[Factors]:
        """Returns the factors of each product."""
        of_a, *of_bs = factors.scales
        others = zip(of_a, *of_bs, strict=True)
        return [factors.unscaled, *(Factors(a, bs, factors.context) for a, *bs in others)]

    def check(self, *avals: Any) -> None:
        super().check(*avals)
        for of in self._products(self._factors(avals)):
            self.product.check(*of.arrays)

    def aligned(self, factors: Factors) -> Factors:
        return self.matched(super().aligned(factors))

    def tile(self, a: Any, *rest: Any) -> Any:
        return self.product.tile(*self._factors((a, *rest)).unscaled.arrays)

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        """Returns the names of axes; contractions of different lengths are whole, as they have one name."""
        factors = self._factors((a, *rest))
        (own, tile), *others = (self.product.labels(*of.arrays) for of in self._products(factors))
        products = len(factors.bs)
        found = [*own, *(labels[0] for labels, _ in others)]
        found += [labels[1 + i] for i in range(products) for labels, _ in others]
        lengths: dict[str | None, set[int]] = {}
        for labels, x in zip(found, factors.arrays, strict=True):
            for label, size in zip(labels, x.shape, strict=True):
                lengths.setdefault(label, set()).add(size)
        whole = [label for label in self.summed if len(lengths.get(label, ())) > 1]
        return [tuple(None if label in whole else label for label in labels) for labels in found], tile

    def shard(self, placement: Placement, factors: Factors) -> tuple[Product, Factors]:
        product, found = self.product.shard(placement, factors.unscaled)
        return dataclasses.replace(self, product=product), dataclasses.replace(found, scales=factors.scales)

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        found = [
            self.product.problem(*of.arrays, out_dtype=out_dtype, device=device)
            for of in self._products(self._factors(avals))
        ]
        view = Joined(tuple(problem.k for problem in found))
        a, *bs = (dataclasses.replace(x, view=view) for x in (found[0].a, *found[0].bs))
        return dataclasses.replace(found[0], k=sum(view.ks), a=a, bs=tuple(bs))

    def fold(self, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array]) -> Folded | None:
        first, *others = self._products(factors)
        if any(other.a.shape[:-1] != first.a.shape[:-1] for other in others):
            return None
        plain = identity(epilogue.accumulator, epilogue.accumulator, epilogue.products)
        folded = self.product.fold(epilogue, first, operands)
        found = [self.product.fold(plain, other, ()) for other in others]
        if folded is None or None in found:
            return None
        more = [of.factors for of in found if of is not None]
        scales = (tuple(of.a for of in more), *zip(*(of.bs for of in more), strict=True))
        product, factors = dataclasses.replace(self, product=folded.product), folded.factors
        return folded._replace(product=product, factors=dataclasses.replace(factors, scales=scales))

    def composed(
        self, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array], *, on_cuda: bool, **params: Any
    ) -> Sequence[jax.Array]:
        """Computes the results by a kernel, or by XLA, for each product.

        Those of groups are added in the next one's epilogue, where XLA can add in no product. Of dense ones it can.
        """
        first, *others = self._products(factors)
        acc, short = epilogue.accumulator, epilogue.plain and on_cuda and len(others) == 1
        dtype = np.dtype(epilogue.outputs[0].dtype) if short else acc
        sums = [multiply(self.product, *arrays, out_dtype=dtype, **params) for arrays in first.each]
        if epilogue.plain and (self.product.groups(first.bs) is None or params["backend"] == "xla"):
            terms = [multiply(self.product, *arrays, out_dtype=dtype, **params) for of in others for arrays in of.each]
            return [functools.reduce(lax.add, [*sums, *terms]).astype(epilogue.outputs[0].dtype)]
        specs, plain = self.product.specs(first.a, sums), identity(dtype, acc, len(sums))
        for of in others[:-1]:
            sums = bind(self.product, with_terms(plain, specs), of, sums, **params)
        in_place = ((0, 0),) if epilogue.plain and dtype == epilogue.outputs[0].dtype else ()
        given = [*operands, *sums]
        return bind(self.product, with_terms(epilogue, specs), others[-1], given, in_place=in_place, **params)

    # Its derivatives: those of its products, and sums of such.

    def tangents(
        self, multiply: Callable[..., list[jax.Array]], factors: Factors, dots: Factors
    ) -> list[jax.Array | None]:
        found: list[jax.Array | None] = []
        of_dots = self._products(dots)
        for i in range(len(factors.bs)):
            terms = []
            for of, dot in zip(self._products(factors), of_dots, strict=True):
                terms += [] if dot.a is None else [(dot.a, of.bs[i])]
                terms += [] if dot.bs[i] is None else [(of.a, dot.bs[i])]
            if not terms:
                found.append(None)
                continue
            (a, b), *others = terms
            product = summed(self.product, len(terms))
            found += multiply(product, a, [b], *itertools.chain(*zip(*others, strict=True)))
        return found


def summed(product: Product, count: int) -> Product:
    """Returns the sum of so many products, or the product alone."""
    return product if count == 1 else Sum(product, (count - 1, count - 1))


def with_terms(epilogue: Epilogue, specs: Sequence[OperandSpec]) -> Epilogue:
    """Returns the epilogue of accumulators to which further operands are added: of each product one, and so on."""
    nodes, renamed, first = [], [], len(epilogue.operands)

    def append(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    for node in epilogue.nodes:
        value = append(dataclasses.replace(node, args=tuple(renamed[i] for i in node.args)))
        for i in range(node.params[0], len(specs), epilogue.products) if node.op == "acc" else ():
            term = append(Node("operand", (), specs[i].dtype, (first + i,)))
            if specs[i].dtype != node.dtype:
                term = append(Node("convert_element_type", (term,), node.dtype))
            value = append(Node("add", (value, term), node.dtype))
        renamed.append(value)
    outputs = [dataclasses.replace(out, node=renamed[out.node]) for out in epilogue.outputs]
    return normal(epilogue.products, (*epilogue.operands, *specs), nodes, outputs)
