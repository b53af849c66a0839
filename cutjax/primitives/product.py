"""Products as primitives. What one of them is, a ``Product`` says; every rule of its primitive is here, once for all.

    outputs = epilogue(product(a, b0), product(a, b1), ..., operands)

The epilogue is always there: that of a plain product is the identity, which is linear, so a plain product transposes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend import core

from cutjax import dot_precision
from cutjax.binding.define import define
from cutjax.binding.lowering import Target
from cutjax.binding.rules import (
    batch_axis,
    check_varying,
    is_linear,
    is_zero,
    match_varying,
    none_if_zero,
    with_rank,
    zero_tangent,
)
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, identity, normal
from cutjax.epilogue.trace import Traced, trace
from cutjax.kernels.choose import Choice, choose
from cutjax.kernels.device import Device
from cutjax.kernels.device import of as of_kind
from cutjax.kernels.problem import Problem
from cutjax.primitives import derivative
from cutjax.primitives.accumulators import accumulator, converted, with_cotangent


class Product:
    """What is multiplied: a and b, and what the product is told beside them, its context (the sizes of groups).

    Frozen and hashable: a parameter of its primitive. All arrays have equally many batch axes, each equal or 1, before
    their own ``axes``.

    Attributes:
      where: the operation, as errors name it.
      axes: how many axes of its own a has, b has, and each array of the context.
      primitive: the primitive that ``define_product`` made.
    """

    where: ClassVar[str]
    axes: ClassVar[tuple[int, ...]]
    primitive: ClassVar[core.Primitive]

    # What each product says.

    def tile(self, a: Any, *rest: Any) -> Any:
        """Returns the aval of the accumulators, in a's dtype, from those of a, the bs and the context."""
        raise NotImplementedError

    def reference(
        self, a: jax.Array, b: jax.Array, *context: jax.Array, out_dtype: np.dtype, precision: Canonical, on_cuda: bool
    ) -> jax.Array:
        """Computes the product in plain JAX."""
        raise NotImplementedError

    def problem(self, a: Any, b: Any, *context: Any, out_dtype: Any, device: Device) -> Problem:
        """Returns the problem of a kernel, from avals."""
        raise NotImplementedError

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Product, tuple[jax.Array, jax.Array], Canonical]:
        """Returns the product that is the cotangent of a (i = 0) or b (1): of ``g`` and the other of the two.

        And its precision. Layouts are permuted, data never.
        """
        raise NotImplementedError

    # What most products leave as it is.

    def check(self, *avals: Any) -> None:
        """Raises if arrays are divided over meshes as the product cannot have them."""
        check_varying(self.where, avals)

    def specs(self, a: jax.Array, operands: Sequence[jax.Array]) -> tuple[OperandSpec, ...]:
        """Returns along which of the result's axes each operand varies."""
        return tuple(
            OperandSpec(x.dtype.name, x.shape[-2] != 1, x.shape[-1] != 1, tuple(size != 1 for size in x.shape[:-2]))
            for x in operands
        )

    def fold(
        self, epilogue: Epilogue, a: jax.Array, bs: Sequence[jax.Array], operands: Sequence[jax.Array]
    ) -> Folded | None:
        """Returns the same product with batch axes merged into rows, None where there is none or that moves data."""
        return None

    def groups(self, bs: Sequence[Any]) -> int | None:
        """Returns how many groups the rows have, None where they have none."""
        return None

    def seen(self, x: jax.Array, context: Sequence[jax.Array], m: int, how: How) -> jax.Array:
        """Returns what the rows have of an operand."""
        return x

    def whole(self, x: jax.Array, context: Sequence[jax.Array], shape: tuple[int, ...], how: How) -> jax.Array:
        """Returns an operand's tangent as one whose transpose a kernel can add up."""
        return x

    def applied(self, epilogue: Epilogue, context: Sequence[jax.Array], how: How) -> derivative.Applied:
        """Returns the epilogue as a function of accumulators and operands."""
        return epilogue

    def finished(self, results: Any, acc: Any, context: Sequence[jax.Array], why: str) -> Any:
        """Returns the results of a function that ran on the accumulators in plain JAX, because of ``why``."""
        return results


class Folded(NamedTuple):
    """A product with batch axes merged into rows; ``unfold`` takes its results back."""

    epilogue: Epilogue
    a: jax.Array
    bs: list[jax.Array]
    operands: list[jax.Array]
    unfold: Callable[[jax.Array], jax.Array]


class How(NamedTuple):
    """What the rest of a product's derivatives is told: the dtype of its operands, and how they are multiplied."""

    dtype: np.dtype
    precision: Canonical
    backend: str


P = TypeVar("P", bound=type[Product])


def define_product(name: str) -> Callable[[P], P]:
    """Gives a class of products its primitive, with every rule."""

    def decorated(product: P) -> P:
        product.primitive = define(
            name,
            abstract=_abstract,
            reference=_reference,
            choose=_choose,
            batch=_batch,
            jvp=_jvp,
            transpose=_transpose,
            drop=_drop,
            multiple_results=True,
        )
        return product

    return decorated


# Binding one.


def aligned(product: Product, a: Any, bs: Sequence[Any], context: Sequence[Any]) -> list[jax.Array]:
    """Returns the arrays with as many batch axes each."""
    own = _axes(product, len(bs))
    args = (a, *bs, *context)
    rank = max(x.ndim - axes for x, axes in zip(args, own, strict=True))
    return [with_rank(x, rank + axes) for x, axes in zip(args, own, strict=True)]


def multiply(product: Product, a: Any, b: Any, *context: Any, out_dtype: np.dtype, **params: Any) -> jax.Array:
    """Binds the plain product, rounded to a dtype, of arrays whose batch axes broadcast."""
    a, b, *sizes = aligned(product, a, [b], context)
    epilogue = identity(out_dtype, accumulator(a.dtype, out_dtype))
    return bind(product, epilogue, a, [b], sizes, (), **params)[0]


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
    a, bs, context, operands = _split(match_varying(a, *bs, *context, *operands), product, epilogue)
    folded = product.fold(epilogue, a, bs, operands)
    if folded is None:
        return _bind(product, epilogue, a, bs, context, operands, **params)
    outs = _bind(product, folded.epilogue, folded.a, folded.bs, context, folded.operands, **params)
    return [folded.unfold(x) for x in outs]


def _bind(
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
    epilogue = dataclasses.replace(epilogue, operands=product.specs(a, operands))
    params = {"precision": precision, "backend": backend, "config": config, "save": save, "in_place": in_place}
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
    accs = [abstract_accumulator(a.dtype, product.tile(*avals), out_dtype)] * len(bs)
    traced = trace_with_dtype(product.where, fn, accs, operands, out_dtype, product.groups(bs))
    if traced.outside is None:
        return traced.finish(bind(product, traced.epilogue, a, bs, context, traced.operands, **params))
    outside, acc = traced.outside, accs[0]
    how = How(a.dtype, params["precision"], params["backend"])

    def fused(a: jax.Array, bs: Sequence[jax.Array], leaves: Sequence[Any]) -> Any:
        function = lambda *xs: outside.function(xs[:-1], xs[-1])  # noqa: E731
        groups = product.groups(bs)
        again = trace_with_dtype(product.where, function, accs, (tuple(leaves),), out_dtype, groups)
        return again.finish(bind(product, again.epilogue.primal, a, bs, context, again.operands, **params))

    def plain(a: jax.Array, bs: Sequence[jax.Array], leaves: Sequence[Any]) -> Any:
        found = [plain_product(product, a, b, context, acc.dtype, **params) for b in bs]
        seen = [
            product.seen(leaf, context, acc.shape[-2], how) if of_groups else leaf
            for leaf, of_groups in zip(leaves, outside.groups, strict=True)
        ]
        results = _with_result_dtype(outside.function(found, seen), acc, out_dtype)
        return product.finished(results, acc, context, outside.why)

    return derivative.outside(outside, fused, plain, a, bs)


def plain_product(
    product: Product, a: Any, b: Any, context: Sequence[Any], dtype: np.dtype, *, precision: Any, backend: str, **_: Any
) -> jax.Array:
    """Binds the plain product beside one with an epilogue, whose parameters are given."""
    return multiply(product, a, b, *context, out_dtype=dtype, precision=precision, backend=backend)


def abstract_accumulator(dtype: np.dtype, full: Any, out_dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns what an epilogue is traced with, of a product of ``dtype`` with the shape of an aval."""
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


# The rules.


def _axes(product: Product, bs: int) -> list[int]:
    """Returns how many axes of its own each of a, the bs and the context has."""
    of_a, of_b, *of_context = product.axes
    return [of_a, *([of_b] * bs), *of_context]


def _split(args: Sequence[Any], product: Product, epilogue: Epilogue) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """Returns a, the bs, the context and the operands."""
    bs = 1 + epilogue.products
    context = bs + len(product.axes) - 2
    return args[0], list(args[1:bs]), list(args[bs:context]), list(args[context:])


def _abstract(*avals: Any, product: Product, epilogue: Epilogue, **_: Any) -> list[Any]:
    a, bs, context, _operands = _split(avals, product, epilogue)
    product.check(*avals)
    full = product.tile(a, *bs, *context)
    results = []
    for out in epilogue.outputs:
        gone = [{"row": -2, "col": -1}[axis] + full.ndim for axis in out.axes]
        shape, spec = ([x for i, x in enumerate(y) if i not in gone] for y in (full.shape, full.sharding.spec))
        sharding = full.sharding.update(spec=jax.P(*spec))
        weak = full.weak_type and epilogue.plain
        aval = full.update(shape=tuple(shape), dtype=np.dtype(out.dtype), weak_type=weak, sharding=sharding)
        results.append(aval)
    return results


def _reference(
    *args: jax.Array, product: Product, epilogue: Epilogue, precision: Canonical, backend: str, on_cuda: bool, **_: Any
) -> Sequence[jax.Array]:
    a, bs, context, operands = _split(args, product, epilogue)
    epilogue = epilogue.primal
    dtype = np.dtype(epilogue.outputs[0].dtype) if epilogue.plain else epilogue.accumulator
    accs = [product.reference(a, b, *context, out_dtype=dtype, precision=precision, on_cuda=on_cuda) for b in bs]
    if epilogue.plain:
        return accs
    return product.applied(epilogue, context, How(a.dtype, precision, backend)).apply(accs, operands)


def _choose(
    *avals: Any,
    product: Product,
    epilogue: Epilogue,
    precision: Canonical,
    config: Any,
    in_place: tuple[tuple[int, int], ...],
    target: Target,
    **_: Any,
) -> Choice:
    a, bs, context, operands = _split(avals, product, epilogue)
    epilogue = epilogue.primal
    out_dtype = next((out.dtype for out in epilogue.outputs if out.reduce is None), a.dtype)
    problem = product.problem(
        a, bs[0], *context, out_dtype=out_dtype, device=of_kind(target.kind, target.arch, target.sms)
    )
    if len({b.shape for b in bs}) > 1:
        return Choice(problem, None, ("the matrices that share one differ in their batch axes",))
    if not epilogue.plain:
        full = product.tile(a, *bs, *context).shape  # one that is broadcast over the batch has other memory
        in_place = tuple((i, j) for i, j in in_place if operands[i].shape == full)
        problem = dataclasses.replace(problem, epilogue=epilogue, in_place=in_place)
    return choose(problem, config, precision=precision)


def _batch(
    args: Any, dims: Any, *, product: Product, epilogue: Epilogue, **params: Any
) -> tuple[list[jax.Array], list[int]]:
    a, bs, context, operands = _split(args, product, epilogue)
    a_dim, b_dims, context_dims, operand_dims = _split(dims, product, epilogue)
    shared = all(dim is None for dim in (*b_dims, *context_dims))
    if a_dim is not None and shared and a.ndim - product.axes[0] == 1 and a_dim < a.ndim - 1:
        # One matrix b for all of a: the batch may be more rows, wherever among the rows it lies.
        moved = [with_rank(b, b.ndim + 1) for b in bs], batch_axis(operands, operand_dims, a_dim)
        folded = product.fold(epilogue, a, *moved)
        if folded is not None:
            outs = _bind(product, folded.epilogue, folded.a, folded.bs, context, folded.operands, **params)
            return [folded.unfold(x) for x in outs], [a_dim] * len(outs)
    # A batch axis where one has it already, so that only an axis among the arrays' own must move. But batch positions
    # are counted from the rows outwards, so an epilogue that uses them wants a new axis outermost.
    rank = a.ndim - (a_dim is not None) - product.axes[0]
    places = (dim for dim in dims if dim is not None and dim <= rank)
    at = 0 if "batch" in epilogue.positions else next(places, 0)
    a, bs, context, operands = _split(batch_axis(args, dims, at), product, epilogue)
    if a_dim is not None or not shared:
        outs = _bind(product, epilogue, a, bs, context, operands, **params)
    else:  # only operands differ: one product serves them all
        accs = [plain_product(product, a, b, context, epilogue.accumulator, **params) for b in bs]
        how = How(a.dtype, params["precision"], params["backend"])
        outs = list(product.applied(epilogue, context, how).apply(accs, operands))
    return outs, [at] * len(outs)


def _jvp(primals: Any, tangents: Any, *, product: Product, epilogue: Epilogue, save: str, **params: Any) -> Any:
    a, bs, context, operands = _split(primals, product, epilogue)
    a_dot, b_dots, _, operand_dots = _split(none_if_zero(tangents), product, epilogue)
    if epilogue.plain:
        outs = _bind(product, epilogue, a, bs, context, operands, save=save, **params)

        def linear(a: Any, b: Any, dtype: np.dtype) -> jax.Array:
            return _bind(product, epilogue, a, [b], context, (), save=save, **params)[0]

        dots = derivative.product_dots(linear, a, bs, a_dot, b_dots, outs[0].dtype)
        return outs, [zero_tangent(out) if dot is None else dot for out, dot in zip(outs, dots, strict=True)]
    full = product.tile(*map(jax.typeof, (a, *bs, *context)))
    acc = abstract_accumulator(epilogue.accumulator, full)
    applied = product.applied(epilogue, context, How(a.dtype, params["precision"], params["backend"]))

    def rebind(epilogue: Epilogue, operands: Sequence[jax.Array]) -> list[jax.Array]:
        return _bind(product, epilogue, a, bs, context, operands, save=save, **params)

    return derivative.derivative(
        epilogue,
        (a, bs, operands),
        (a_dot, b_dots, operand_dots),
        acc,
        bind=rebind,
        multiply=lambda a, b, dtype: plain_product(product, a, b, context, dtype, **params),
        pushed=functools.partial(derivative.push, applied, acc.shape),
        groups=product.groups(bs),
        save=save,
    )


def _transpose(
    cotangents: Any,
    *args: Any,
    product: Product,
    epilogue: Epilogue,
    precision: Canonical,
    backend: str,
    **_: Any,
) -> list[Any]:
    if not epilogue.plain:
        raise NotImplementedError(f"{product.where}: the transpose of a product with an epilogue; use jax.vjp")
    (g,) = cotangents
    a, (b,), sizes, _operands = _split(args, product, epilogue)
    found: list[Any] = [None] * len(args)
    if is_zero(g):
        return found
    i, to, other = (0, a.aval, b) if is_linear(a) else (1, b.aval, a)
    g, other = with_cotangent(g, other)
    precision = dot_precision.of_cotangents(precision, g.dtype, product.where)
    back, factors, precision = product.cotangent(i, g, other, precision)
    # Terms narrower than 32 bits are added in f32, and rounded once. One of 8 bits is made of f32 that a kernel writes.
    full = back.tile(*map(jax.typeof, (*factors, *sizes)))
    dtype = to.dtype if full.shape == to.shape and to.dtype.itemsize > 1 else accumulator(to.dtype)
    # No config: a pinned kernel is for the product it was pinned to.
    d = multiply(back, *factors, *sizes, out_dtype=dtype, precision=precision, backend=backend)
    found[i] = sum_to(d, to)
    return found


def sum_to(d: jax.Array, to: Any) -> jax.Array:
    """Returns a cotangent added up over the batch axes that its operand broadcast over, in the operand's dtype."""
    axes = [i for i, (size, full) in enumerate(zip(to.shape, d.shape, strict=True)) if size == 1 != full]
    d = d.sum(axes, keepdims=True) if axes else d
    return d if d.dtype == to.dtype else converted(d, to.dtype, to.weak_type)


def _drop(
    used: Sequence[bool], *, product: Product, epilogue: Epilogue, in_place: tuple[tuple[int, int], ...], **params: Any
) -> tuple[list[bool], dict[str, Any]]:
    reading = [True] * (epilogue.products + len(product.axes) - 1)
    epilogue, kept = without(used, epilogue)
    in_place = tuple((sum(kept[:i]), sum(used[:j])) for i, j in in_place if kept[i] and used[j])
    return reading + kept, {"product": product, "epilogue": epilogue, "in_place": in_place, **params}


def without(used: Sequence[bool], epilogue: Epilogue) -> tuple[Epilogue, list[bool]]:
    """Returns the epilogue without the results that nothing uses, and without their operands; which operands are left.

    A kernel would write them all the same.
    """
    outputs = [out for out, use in zip(epilogue.outputs, used, strict=True) if use]
    epilogue = normal(epilogue.products, epilogue.operands, epilogue.nodes, outputs)
    kept = [Node("operand", (), spec.dtype, (i,)) in epilogue.nodes for i, spec in enumerate(epilogue.operands)]
    nodes = [
        dataclasses.replace(node, params=(sum(kept[: node.params[0]]),)) if node.op == "operand" else node
        for node in epilogue.nodes
    ]
    specs = [spec for spec, keep in zip(epilogue.operands, kept, strict=True) if keep]
    return normal(epilogue.products, specs, nodes, epilogue.outputs), kept
