"""A product and its binding with an epilogue. The rules of its primitive: product_rules.py.

    outputs = epilogue(product(a, b0), product(a, b1), ..., operands)

The epilogue is always there: that of a plain product is the identity, which is linear, so a plain product transposes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core

from cutjax.binding.partition import mark_of
from cutjax.binding.placement import Labels, Placement
from cutjax.binding.rules import check_varying, match_varying, with_rank
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue, OperandSpec, identity
from cutjax.epilogue.trace import Traced, trace
from cutjax.kernels.choose import LEAD
from cutjax.kernels.device import Device
from cutjax.kernels.problem import Problem
from cutjax.primitives import derivative
from cutjax.primitives.accumulators import accumulator, converted


class Product:
    """One shape of product: of a and b, and of what it is told beside them, its context (the sizes of groups).

    Frozen and hashable: a parameter of its primitive. All arrays have equally many batch axes, each equal or 1, before
    their own ``axes``.

    Attributes:
      where: the operation, as errors name it.
      unary: whether the product is of a alone, and there is no b.
      axes: how many axes of its own a has, b has unless the product is unary, and each array of the context.
      primitive: the primitive that ``define_product`` made.
      lead: how many times as fast as XLA's product a kernel must be to run under "auto".
    """

    where: ClassVar[str]
    unary: ClassVar[bool] = False
    axes: ClassVar[tuple[int, ...]]
    primitive: ClassVar[core.Primitive]
    lead = LEAD

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

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Product, tuple[jax.Array, jax.Array], Canonical]:
        """Returns the product that is the cotangent of a (i = 0) or b (1): of ``g`` and the other of the two.

        And its precision. Layouts are permuted, data never.
        """
        raise NotImplementedError

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        """Returns the names of the axes of a, the bs and the context, and those of the accumulators.

        Axes of one name are divided over devices alike; an axis without a name is whole on each.
        """
        raise NotImplementedError

    # What most products leave as it is.

    @property
    def summed(self) -> tuple[str, ...]:
        """The names of the axes over which the product sums."""
        return ("k",)

    late: ClassVar[tuple[str, ...]] = ()  # those of them of which each result has one term alone
    gathered: ClassVar[tuple[str, ...]] = ()  # names of axes whose every part meets every other

    def shard(
        self, placement: Placement, a: Any, bs: Sequence[Any], context: Sequence[Any]
    ) -> tuple[Product, Any, Sequence[Any], Sequence[Any]]:
        """Returns the product that a device computes of its shards, from those."""
        return self, a, bs, context

    def after(self, placement: Placement, a: Any, context: Sequence[Any]) -> tuple[Product, Sequence[Any]]:
        """Returns the product and the context for an epilogue that runs after the sums over devices."""
        return self, context

    def operand_labels(self, x: Any, tile: Labels) -> Labels:
        """Returns the names of the axes of an epilogue's operand; one that broadcasts is whole."""
        return tuple(label if size != 1 else None for label, size in zip(tile, x.shape, strict=True))

    def tangents(
        self, multiply: Callable[..., jax.Array], a: Any, bs: Sequence[Any], a_dot: Any, b_dots: Sequence[Any]
    ) -> list[jax.Array | None]:
        """Returns tangents of the products; None is zero, here as among the arguments.

        Args:
          multiply: ``(product, a, b) -> d``, with the context of this one.
          a, bs, a_dot, b_dots: the factors and their tangents.
        """
        dots = []
        for b, b_dot in zip(bs, b_dots, strict=True):
            terms = [] if a_dot is None else [multiply(self, a_dot, b)]
            terms += [] if b_dot is None else [multiply(self, a, b_dot)]
            dots.append(functools.reduce(lax.add, terms) if terms else None)
        return dots

    def check(self, *avals: Any) -> None:
        """Raises if arrays are divided over meshes as the product cannot have them."""
        check_varying(self.where, avals)

    def check_epilogue(self, epilogue: Epilogue) -> None:
        """Raises if the product cannot have an epilogue, on any platform."""

    def specs(self, a: jax.Array, operands: Sequence[jax.Array]) -> tuple[OperandSpec, ...]:
        """Returns a spec for each operand: the axes of the result that it varies along, and its dtype."""
        return tuple(
            OperandSpec(x.dtype.name, x.shape[-2] != 1, x.shape[-1] != 1, tuple(size != 1 for size in x.shape[:-2]))
            for x in operands
        )

    def fold(
        self, epilogue: Epilogue, a: jax.Array, bs: Sequence[jax.Array], operands: Sequence[jax.Array]
    ) -> Folded | None:
        """Returns the same product with batch axes merged into rows, None where there is none or that moves data."""
        return None

    def adding(self, to: Sequence[int], *avals: Any) -> Product:
        """Returns the product of two operands whose result is to be added up to a shape: itself, or one that adds."""
        return self

    def laid(self, like: Any, *avals: Any) -> Product:
        """Returns the product of two operands whose result, added up, lies on explicit mesh axes as an array does."""
        return self

    def batched(self, at: int, rank: int) -> Product:
        """Returns the product of arrays with one more batch axis, at that place before or among so many."""
        return self

    def why_not(self) -> str:
        """Returns the reason against any kernel for the product, "" where there is none."""
        return ""

    def notes(self) -> tuple[str, ...]:
        """Returns further notes for explain, beside the reason of the choice."""
        return ()

    def in_order(self, problem: Problem) -> Problem:
        """Returns the problem, epilogue included, of arrays that lie in memory as the product says."""
        return problem

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


class Folded(NamedTuple):
    """A product with batch axes merged into rows, or into the contracted axis; ``unfold`` takes its results back."""

    product: Product
    epilogue: Epilogue
    a: jax.Array
    bs: list[jax.Array]
    operands: list[jax.Array]
    unfold: Callable[[jax.Array], jax.Array]


class Arithmetic(NamedTuple):
    """The dtype of a product's operands, its precision and its backend, as the rest of its derivatives takes them."""

    dtype: np.dtype
    precision: Canonical
    backend: str


# Binding one.


def aligned(product: Product, a: Any, bs: Sequence[Any], context: Sequence[Any]) -> list[jax.Array]:
    """Returns the arrays with as many batch axes each."""
    own = own_axes(product, len(bs))
    args = (a, *bs, *context)
    ranks = {x.ndim - axes for x, axes in zip(args, own, strict=True)}
    if len(ranks) == 1:
        return list(args)
    rank = max(ranks)
    return [with_rank(x, rank + axes) for x, axes in zip(args, own, strict=True)]


def multiply(product: Product, *arrays: Any, out_dtype: np.dtype, **params: Any) -> jax.Array:
    """Binds the plain product of a, b and the context, rounded to a dtype; batch axes broadcast."""
    epilogue = identity(out_dtype, accumulator(arrays[0].dtype, out_dtype))
    a, bs, context, _ = split(arrays, product, epilogue)
    a, bs, context, _ = split(aligned(product, a, bs, context), product, epilogue)
    return bind(product, epilogue, a, bs, context, (), **params)[0]


def bind(
    product: Product,
    epilogue: Epilogue,
    a: jax.Array,
    bs: Sequence[jax.Array],
    context: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    **params: Any,
) -> list[jax.Array]:
    """Binds a product with an epilogue; where the bs have no batch of their own, its batch axes become rows."""
    a, bs, context, operands = split(match_varying(a, *bs, *context, *operands), product, epilogue)
    folded = product.fold(epilogue, a, bs, operands)
    if folded is None:
        return bind_as_is(product, epilogue, a, bs, context, operands, **params)
    outs = bind_as_is(folded.product, folded.epilogue, folded.a, folded.bs, context, folded.operands, **params)
    return [folded.unfold(x) for x in outs]


def bind_as_is(
    product: Product,
    epilogue: Epilogue,
    a: Any,
    bs: Sequence[Any],
    context: Sequence[Any],
    operands: Sequence[Any],
    *,
    precision: Canonical,
    backend: str,
    config: Any = None,
    save: str = "default",
    in_place: tuple[tuple[int, int], ...] = (),
) -> list[jax.Array]:
    """Binds the primitive. ``in_place`` says which operands may share their memory with which results."""
    specs = product.specs(a, operands)
    if specs != epilogue.operands:  # the identity stays one object, whose hash is known
        epilogue = dataclasses.replace(epilogue, operands=specs)
    params = {"precision": precision, "backend": backend, "config": config, "save": save, "in_place": in_place}
    params["mark"] = mark_of(backend)
    return product.primitive.bind(*(a, *bs, *context, *operands), product=product, epilogue=epilogue, **params)


def call(
    product: Product,
    fn: Callable[..., Any],
    a: jax.Array,
    bs: Sequence[jax.Array],
    context: Sequence[jax.Array],
    operands: Sequence[Any],
    *,
    out_dtype: Any,
    **params: Any,
) -> Any:
    """Traces a function and binds the product with it; returns what the function returns."""
    a, *rest = match_varying(*aligned(product, a, bs, context))
    bs, context = rest[: len(bs)], rest[len(bs) :]
    avals = [jax.typeof(x) for x in (a, *rest)]
    product.check(*avals)
    accs = [abstract_accumulator(a.dtype, product.tile(*avals), out_dtype)] * len(factors_of(product, a, bs))
    traced = trace_with_dtype(product.where, fn, accs, operands, out_dtype, product.groups(bs))
    if traced.outside is None:
        return traced.finish(bind(product, traced.epilogue, a, bs, context, traced.operands, **params))
    outside, acc = traced.outside, accs[0]
    arithmetic = Arithmetic(a.dtype, params["precision"], params["backend"])

    def fused(a: jax.Array, bs: Sequence[jax.Array], leaves: Sequence[Any]) -> Any:
        function = lambda *xs: outside.function(xs[:-1], xs[-1])  # noqa: E731
        groups = product.groups(bs)
        again = trace_with_dtype(product.where, function, accs, (tuple(leaves),), out_dtype, groups)
        return again.finish(bind(product, again.epilogue.primal, a, bs, context, again.operands, **params))

    def plain(a: jax.Array, bs: Sequence[jax.Array], leaves: Sequence[Any]) -> Any:
        found = plain_products(product, a, bs, context, acc.dtype, **params)
        seen = [
            product.seen(leaf, context, acc.shape[-2], arithmetic) if of_groups else leaf
            for leaf, of_groups in zip(leaves, outside.groups, strict=True)
        ]
        results = _with_result_dtype(outside.function(found, seen), acc, out_dtype)
        return product.finished(results, acc, context, outside.why)

    return derivative.outside(outside.reverse_only, fused, plain, a, tuple(bs), outside.leaves)


def plain_products(
    product: Product,
    a: Any,
    bs: Sequence[Any],
    context: Sequence[Any],
    dtype: np.dtype,
    *,
    precision: Any,
    backend: str,
    **_: Any,
) -> list[jax.Array]:
    """Binds the plain products beside one with an epilogue, whose parameters are given."""
    params: dict[str, Any] = {"out_dtype": dtype, "precision": precision, "backend": backend}
    return [multiply(product, *factors, *context, **params) for factors in factors_of(product, a, bs)]


def abstract_accumulator(dtype: np.dtype, full: Any, out_dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns the accumulator that an epilogue is traced with: of a product of ``dtype``, with the shape of an aval."""
    acc = accumulator(dtype, None if isinstance(out_dtype, tuple) else out_dtype)
    return jax.ShapeDtypeStruct(full.shape, acc, sharding=full.sharding, manual_axis_type=full.mat)


def trace_with_dtype(
    where: str,
    fn: Callable[..., Any],
    accs: Sequence[Any],
    operands: Sequence[Any],
    out_dtype: Any,
    groups: int | None = None,
) -> Traced:
    """Traces a function; its results in the accumulators' dtype are in ``out_dtype``, or each in that of a tuple."""
    if isinstance(out_dtype, tuple):
        fn, out_dtype = _casting(where, fn, out_dtype), None
    traced = trace(fn, accs, operands, groups)
    return traced._replace(epilogue=derivative.rounded_once(traced.epilogue, out_dtype))


def _with_result_dtype(results: Any, acc: Any, out_dtype: Any) -> Any:
    """Returns results with those of full size and the accumulators' dtype in ``out_dtype``, as a kernel has them."""
    if out_dtype is None or isinstance(out_dtype, tuple):
        return results
    return jax.tree.map(lambda x: x.astype(out_dtype) if (x.shape, x.dtype) == (acc.shape, acc.dtype) else x, results)


def _casting(where: str, fn: Callable[..., Any], dtypes: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns the function with each of its results in the dtype asked for."""

    @functools.wraps(fn)
    def casting(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(fn(*args))
        if len(leaves) != len(dtypes):
            raise ValueError(f"{where}: out_dtype has {len(dtypes)} entries, the epilogue returns {len(leaves)} arrays")
        return tree.unflatten(x if t is None else x.astype(t) for x, t in zip(leaves, dtypes, strict=True))

    return casting


# The arrays of a product.


def own_axes(product: Product, bs: int) -> list[int]:
    """Returns the number of axes that a, the bs and the context have each beside the batch."""
    if product.unary:
        return list(product.axes)
    of_a, of_b, *of_context = product.axes
    return [of_a, *([of_b] * bs), *of_context]


def factors_of(product: Product, a: Any, bs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns the factors of each of the products that an epilogue takes."""
    return [(a,)] if product.unary else [(a, b) for b in bs]


def batch_axes(a: Any, b: Any) -> tuple[int, ...]:
    """Returns the batch axes of a product that are both operands'."""
    batches = zip(*(x.shape[: a.ndim - 2] for x in (a, b)), strict=True)
    return tuple(i for i, (p, q) in enumerate(batches) if p != 1 != q)


def split(args: Sequence[Any], product: Product, epilogue: Epilogue) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """Returns a, the bs, the context and the operands."""
    bs = 1 if product.unary else 1 + epilogue.products
    context = bs + len(product.axes) - (1 if product.unary else 2)
    return args[0], list(args[1:bs]), list(args[bs:context]), list(args[context:])


def sum_to(d: jax.Array, to: Any) -> jax.Array:
    """Returns a cotangent added up over the batch axes that its operand broadcast over, in the operand's dtype."""
    axes = [i for i, (size, full) in enumerate(zip(to.shape, d.shape, strict=True)) if size == 1 != full]
    d = d.sum(axes, keepdims=True) if axes else d
    return d if d.dtype == to.dtype else converted(d, to.dtype, to.weak_type)
