"""A product and its binding with an epilogue. The rules of its primitive: product_rules.py.

    outputs = epilogue(product(a, b0), product(a, b1), ..., operands)

The epilogue is always there: that of a plain product is the identity, which is linear, so a plain product transposes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.extend import core

from cutjax.binding.partition import mark_of
from cutjax.binding.placement import Labels, Placement
from cutjax.binding.rules import check_varying, match_varying, with_rank
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue, OperandSpec, identity
from cutjax.kernels.device import Device
from cutjax.kernels.problem import Problem
from cutjax.primitives import derivative
from cutjax.primitives.accumulators import accumulator, widened, with_cotangent
from cutjax.primitives.factors import Factors, summed_tangents
from cutjax.primitives.factors import Folded as Folded
from cutjax.primitives.hints import NO_HINTS, Hints
from cutjax.primitives.tracing import abstract_accumulator, trace_with_dtype, with_result_dtype


class Product:
    """One shape of product: of a and b, and of what it is told beside them, its context (the sizes of groups).

    Frozen and hashable: a parameter of its primitive. All arrays have equally many batch axes, each equal or 1, before
    their own ``axes``. What takes ``*rest`` or ``*arrays`` is told all arrays in the primitive's order: a, the bs, the
    context; what multiplies, one b.

    Attributes:
      where: the operation, as errors name it.
      unary: whether the product is of a alone, and there is no b.
      remade: whether, where no kernel serves it, it is computed as ``unmade`` has it, by products that have kernels.
      axes: how many axes of its own a has, b has unless the product is unary, and each array of the context.
      rows: how many axes before the last of the accumulators are their rows; the outer ones are batch axes to an
        epilogue, but that it may reduce over them. A kernel has them as one.
      further: whether what lies beside factors are further ones, whose products are added up.
      primitive: the primitive that ``define_product`` made.
    """

    where: Any
    unary: ClassVar[bool] = False
    remade: ClassVar[bool] = False
    axes: Any
    rows: Any = 1
    further: ClassVar[bool] = False
    primitive: ClassVar[core.Primitive]

    # What each product says.

    def tile(self, a: Any, *rest: Any) -> Any:
        """Returns the aval of the accumulators, in a's dtype, from those of a, the bs and the context."""
        raise NotImplementedError

    def reference(self, *arrays: jax.Array, out_dtype: np.dtype, precision: Canonical, on_cuda: bool) -> jax.Array:
        """Computes the product of a, b and the context in plain JAX."""
        raise NotImplementedError

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        """Returns the problem of a kernel, from the avals of a, b and the context."""
        raise NotImplementedError

    def composed(self, epilogue: Epilogue, factors: Factors, operands: Any, **params: Any) -> Sequence[jax.Array]:
        """Computes the results by other products, those of one that is composed of others."""
        raise NotImplementedError

    def multiplied(self, a: np.dtype) -> np.dtype:
        """Returns the dtype in which factors are multiplied, told a's: that of the wider one."""
        return a

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Product, tuple[jax.Array, jax.Array], Canonical]:
        """Returns the product that is the cotangent of a (i = 0) or b (1): of ``g`` and the other of the two.

        And its precision. Layouts are permuted, data never. A unary product has ``tangents`` instead.
        """
        raise NotImplementedError

    def with_cotangent(self, g: jax.Array, other: jax.Array, of: np.dtype) -> tuple[jax.Array, jax.Array]:
        """Returns a cotangent and the factor beside it as they are multiplied, of a product in dtype ``of``."""
        return with_cotangent(g, other, of)

    def widened(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a and b, one of which may be narrow, as the product takes them."""
        return widened(a, b)

    def restored(self, i: int, d: jax.Array) -> jax.Array:
        """Returns the cotangent of a (i = 0) or b (1), of the product that ``cotangent`` returns."""
        return d

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        """Returns the names of the axes of a, the bs and the context, and those of the accumulators.

        Axes of one name are divided over devices alike; an axis without a name is whole on each.
        """
        raise NotImplementedError

    # What it refuses.

    def check(self, *avals: Any) -> None:
        """Raises if arrays are divided over meshes as the product cannot have them."""
        check_varying(self.where, avals)

    def check_epilogue(self, epilogue: Epilogue) -> None:
        """Raises if the product cannot have an epilogue, on any platform."""

    def why_not(self) -> str:
        """Returns the reason against any kernel for the product, "" where there is none."""
        return ""

    # Its derivatives.

    def tangents(
        self, multiply: Callable[..., list[jax.Array]], factors: Factors, dots: Factors
    ) -> list[jax.Array | None]:
        """Returns tangents of the products; None is zero, here as among those of the factors.

        ``multiply`` is ``(product, a, bs, *scales) -> ds``, with the context of this one.
        """
        return summed_tangents(multiply, (self, dots.a), (self, factors.a), factors.bs, dots.bs)

    def sum_of(self, count: int) -> Product | None:
        """Returns the sum of so many products like it, of which several b may be multiplied as one; None of none."""
        return None

    def adding(self, to: Sequence[int], *avals: Any) -> Product:
        """Returns the product of two operands whose result is to be added up to a shape: itself, or one that adds."""
        return self

    @property
    def primal(self) -> Product:
        """The product as it is computed, without what only derivatives need."""
        return self

    def made(
        self, prologue: Epilogue, i: int, x: jax.Array, operands: Sequence[jax.Array], context: Sequence[Any]
    ) -> jax.Array:
        """Returns a (i = 0) or b (1) that a prologue makes of an array and of its operands."""
        return prologue.apply([x], operands)[0]

    def as_given(self, i: int) -> bool:
        """True if a (i = 0) or b (1) is multiplied as it is."""
        return True

    def unmade(self, factors: Factors) -> tuple[Product, Factors]:
        """Returns the product of factors as they are multiplied, which scales and prologues make in plain JAX."""
        return self, factors

    def beside(self, factors: Factors, dots: Factors) -> tuple[Product, Factors]:
        """Returns the product with the values that JAX computes beside a derivative: a rule in a prologue says them."""
        return self, factors

    # Its batch axes.

    @property
    def positions(self) -> frozenset[str]:
        """The axes whose index a prologue uses, as ``Epilogue.positions``."""
        return frozenset()

    def batched(self, at: int, rank: int) -> Product:
        """Returns the product of arrays with one more batch axis, at that place before or among so many."""
        return self

    def matched(self, factors: Factors) -> Factors:
        """Returns the factors of which some have one more batch axis, as the product takes them."""
        return factors

    def written(self, accumulator: np.dtype, dtype: np.dtype, on_cuda: bool) -> np.dtype:
        """Returns the dtype in which XLA writes the accumulators of operands in ``dtype``, for an epilogue to read."""
        return accumulator

    def fold(self, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array]) -> Folded | None:
        """Returns the same product with batch axes merged into rows, None where there is none or that moves data."""
        return None

    def in_order(self, problem: Problem) -> Problem:
        """Returns the problem, epilogue included, of arrays that lie in memory as the product says."""
        return problem

    # Its division over devices.

    @property
    def summed(self) -> tuple[str, ...]:
        """The names of the axes over which the product sums."""
        return ("k",)

    late: Any = ()  # those of them of which each result has one term alone
    gathered: Any = ()  # names of axes whose every part meets every other

    def shard(self, placement: Placement, factors: Factors) -> tuple[Product, Factors]:
        """Returns the product that a device computes of its shards, from those."""
        return self, factors

    def located(
        self, placement: Placement, whole: Factors, labels: Factors, factors: Factors
    ) -> tuple[Product, Factors]:
        """Returns the product of shards whose prologues know where in the whole they are, and its factors."""
        return self, factors

    def after(self, placement: Placement, factors: Factors) -> tuple[Product, Sequence[Any]]:
        """Returns the product and the context for an epilogue that runs after the sums over devices."""
        return self, factors.context

    def operand_labels(self, x: Any, tile: Labels) -> Labels:
        """Returns the names of the axes of an epilogue's operand; one that broadcasts is whole."""
        return tuple(label if size != 1 else None for label, size in zip(tile, x.shape, strict=True))

    def laid(self, like: Any, *avals: Any) -> Product:
        """Returns the product of two operands whose result, added up, lies on explicit mesh axes as an array does."""
        return self

    # Its epilogue, and groups of rows.

    def specs(self, a: jax.Array, operands: Sequence[jax.Array]) -> tuple[OperandSpec, ...]:
        """Returns a spec for each operand: the axes of the result that it varies along, and its dtype."""
        return tuple(
            OperandSpec(x.dtype.name, x.shape[-2] != 1, x.shape[-1] != 1, tuple(size != 1 for size in x.shape[:-2]))
            for x in operands
        )

    def whole_operands(self, factors: Factors, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Returns an epilogue's operands, broadcast along axes of which kernels read them all or none."""
        return operands

    def groups(self, bs: Sequence[Any]) -> int | None:
        """Returns the number of groups that the rows have, None where they have none."""
        return None

    def seen(self, x: jax.Array, context: Sequence[jax.Array], m: int, arithmetic: Arithmetic) -> jax.Array:
        """Returns an epilogue's operand for each row: one with a value for each group is spread to the groups' rows."""
        return x

    def whole(
        self, x: jax.Array, context: Sequence[jax.Array], shape: tuple[int, ...], arithmetic: Arithmetic
    ) -> jax.Array:
        """Returns an operand's tangent in the shape whose transposition, a sum, a kernel can compute."""
        return x

    def applied(self, epilogue: Epilogue, context: Sequence[jax.Array], arithmetic: Arithmetic) -> derivative.Applied:
        """Returns the epilogue as a function of accumulators and operands."""
        return epilogue

    def finished(self, results: Any, acc: Any, context: Sequence[jax.Array], why: str) -> Any:
        """Returns the results of a function that ran on the accumulators in plain JAX, because of ``why``."""
        return results

    # Its arrays, the same way for all.

    def own_axes(self, products: int) -> list[int]:
        """Returns the number of axes that a, the bs of so many products and the context have each beside the batch."""
        of_a, *rest = self.axes
        return [of_a, *rest] if self.unary else [of_a, *rest[:1] * products, *rest[1:]]

    def unpack(self, args: Sequence[Any], epilogue: Epilogue) -> tuple[Factors, tuple[Any, ...]]:
        """Returns the factors and the epilogue's operands, of the primitive's arguments or of what stands for each."""
        count = len(self.own_axes(epilogue.products))
        bs = 1 if self.unary else 1 + epilogue.products
        return Factors(args[0], tuple(args[1:bs]), tuple(args[bs:count])), tuple(args[count:])

    def aligned(self, factors: Factors) -> Factors:
        """Returns the arrays with as many batch axes each."""
        own = self.own_axes(len(factors.bs))
        ranks = [x.ndim - axes for x, axes in zip(factors.arrays, own, strict=True)]
        if len({*ranks}) == 1:
            return factors
        return factors.like([with_rank(x, max(ranks) + n) for x, n in zip(factors.arrays, own, strict=True)])


class Arithmetic(NamedTuple):
    """The dtype of a product's operands, its precision and its backend, as the rest of its derivatives takes them."""

    dtype: np.dtype
    precision: Canonical
    backend: str

    @classmethod
    def of(cls, product: Product, factors: Factors, params: Mapping[str, Any]) -> Arithmetic:
        """Returns that of a product, of its factors and of its primitive's parameters."""
        return cls(product.multiplied(factors.a.dtype), params["precision"], params["backend"])


# Binding one.


def multiply(product: Product, *arrays: Any, out_dtype: np.dtype, **params: Any) -> jax.Array:
    """Binds the plain product of a, b and the context, or a longer one, rounded to a dtype; batch axes broadcast."""
    epilogue = identity(out_dtype, accumulator(product.multiplied(arrays[0].dtype), out_dtype))
    factors, _ = product.unpack(arrays, epilogue)
    return bind(product, epilogue, product.aligned(factors), (), **params)[0]


def bind(
    product: Product, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array], **params: Any
) -> list[jax.Array]:
    """Binds a product with an epilogue; where the bs have no batch of their own, its batch axes become rows."""
    factors, operands = match_varying(factors, operands)
    operands = product.whole_operands(factors, operands)
    folded = product.fold(epilogue, factors, operands)
    if folded is None:
        return bind_as_is(product, epilogue, factors, operands, **params)
    outs = bind_as_is(folded.product, folded.epilogue, folded.factors, folded.operands, **params)
    return [folded.unfold(x) for x in outs]


def bind_as_is(
    product: Product,
    epilogue: Epilogue,
    factors: Factors,
    operands: Sequence[Any],
    *,
    precision: Canonical,
    backend: str,
    hints: Hints = NO_HINTS,
    config: Any = None,
    save: str = "default",
    in_place: tuple[tuple[int, int], ...] = (),
) -> list[jax.Array]:
    """Binds the primitive. ``in_place`` says which operands may share their memory with which results."""
    specs = product.specs(factors.a, operands)
    if specs != epilogue.operands:  # the identity stays one object, whose hash is known
        epilogue = dataclasses.replace(epilogue, operands=specs)
    params = {"precision": precision, "backend": backend, "config": config, "save": save, "in_place": in_place}
    params |= {"hints": hints, "mark": mark_of(backend)}
    return product.primitive.bind(*factors.arrays, *operands, product=product, epilogue=epilogue, **params)


def call(
    product: Product,
    fn: Callable[..., Any],
    factors: Factors,
    operands: Sequence[Any],
    *,
    out_dtype: Any,
    **params: Any,
) -> Any:
    """Traces a function and binds the product with it; returns what the function returns."""
    (factors,) = match_varying(product.aligned(factors))
    avals = [jax.typeof(x) for x in factors.arrays]
    product.check(*avals)
    dtype = product.multiplied(factors.a.dtype)
    accs = [abstract_accumulator(dtype, product.tile(*avals), out_dtype)] * len(factors.each)
    groups = product.groups(factors.bs)
    traced = trace_with_dtype(product.where, fn, accs, operands, out_dtype, groups, product.rows)
    if traced.outside is None:
        return traced.finish(bind(product, traced.epilogue, factors, traced.operands, **params))
    outside, acc = traced.outside, accs[0]
    arithmetic = Arithmetic.of(product, factors, params)

    def fused(factors: Factors, leaves: Sequence[Any]) -> Any:
        function = lambda *xs: outside.function(xs[:-1], xs[-1])  # noqa: E731
        again = trace_with_dtype(product.where, function, accs, (tuple(leaves),), out_dtype, groups, product.rows)
        return again.finish(bind(product, again.epilogue.primal, factors, again.operands, **params))

    def plain(factors: Factors, leaves: Sequence[Any]) -> Any:
        found = plain_products(product, factors, acc.dtype, **params)
        seen = [
            product.seen(leaf, factors.context, acc.shape[-2], arithmetic) if of_groups else leaf
            for leaf, of_groups in zip(leaves, outside.groups, strict=True)
        ]
        results = with_result_dtype(outside.function(found, seen), acc, out_dtype)
        return product.finished(results, acc, factors.context, outside.why)

    return derivative.outside(outside.reverse_only, fused, plain, factors, outside.leaves)


def plain_products(
    product: Product,
    factors: Factors,
    dtype: np.dtype,
    *,
    precision: Any,
    backend: str,
    hints: Hints = NO_HINTS,
    **_: Any,
) -> list[jax.Array]:
    """Binds the plain products beside one with an epilogue, whose parameters are given."""
    params: dict[str, Any] = {"out_dtype": dtype, "precision": precision, "backend": backend, "hints": hints}
    return [multiply(product, *arrays, **params) for arrays in factors.each]
