"""Every rule of a product's primitive, once for all products."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from cutjax import dot_precision
from cutjax.binding.define import define
from cutjax.binding.lowering import Target
from cutjax.binding.rules import batch_axis, is_linear, is_zero, none_if_zero, with_rank, zero_tangent
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, normal
from cutjax.epilogue.merge import merged
from cutjax.kernels.choose import Choice, choose, in_parts, in_precision, unless_copied
from cutjax.kernels.device import device_of
from cutjax.primitives import derivative, partition
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.factors import sum_to
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import Arithmetic, Product, bind_as_is, multiply, plain_products
from cutjax.primitives.tracing import abstract_accumulator
from cutjax.runtime.backends import highest

P = TypeVar("P", bound=type[Product])


def define_product(name: str, *, composed: bool = False) -> Callable[[P], P]:
    """Gives a class of products its primitive, with every rule; of one ``composed`` of others, that has no kernel.

    One that is ``remade`` where no kernel serves it is no error there.
    """

    def decorated(product: P) -> P:
        product.primitive = define(
            name,
            abstract=_abstract,
            reference=_composed if composed else _reference,
            choose=None if composed else _choose,
            required=not product.remade,
            remade=product.remade,
            batch=_batch,
            jvp=_jvp,
            transpose=_transpose,
            dce=_dce,
            divided=None if composed else partition.RULES,
            evaluated=_evaluated,
            multiple_results=True,
        )
        return product

    return decorated


def _evaluated(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters without the rules of functions and what explain prints: no rule asks for them any more."""
    product, epilogue = params["product"].primal, params["epilogue"].primal
    return {**params, "product": product, "epilogue": epilogue, "hints": params["hints"].silent}


def _abstract(*avals: Any, product: Product, epilogue: Epilogue, **_: Any) -> list[Any]:
    factors = product.unpack(avals, epilogue)[0]
    product.check(*avals)
    product.check_epilogue(epilogue)
    full = product.tile(*factors.arrays)
    results = []
    for out in epilogue.outputs:
        gone = out.places(full.ndim)
        shape, spec = ([x for i, x in enumerate(y) if i not in gone] for y in (full.shape, full.sharding.spec))
        sharding = full.sharding.update(spec=jax.P(*spec))
        weak = full.weak_type and epilogue.plain
        aval = full.update(shape=tuple(shape), dtype=np.dtype(out.dtype), weak_type=weak, sharding=sharding)
        results.append(aval)
    return results


def _reference(
    *args: jax.Array,
    product: Product,
    epilogue: Epilogue,
    precision: Canonical,
    backend: str,
    on_cuda: bool,
    **params: Any,
) -> Sequence[jax.Array]:
    factors, operands = product.unpack(args, epilogue)
    epilogue = epilogue.primal
    if product.remade:
        made, factors = product.unmade(factors)
        return bind_as_is(
            made, epilogue, factors, operands, precision=precision, backend=backend, hints=params["hints"]
        )
    if epilogue.plain:
        dtype = np.dtype(epilogue.outputs[0].dtype)
    else:
        dtype = product.written(epilogue.accumulator, product.multiplied(factors.a.dtype), on_cuda)
    accs = [
        product.reference(*arrays, out_dtype=dtype, precision=precision, on_cuda=on_cuda) for arrays in factors.each
    ]
    if epilogue.plain:
        return accs
    arithmetic = Arithmetic(product.multiplied(factors.a.dtype), precision, backend)
    return product.applied(epilogue, factors.context, arithmetic).apply(accs, operands)


def _composed(*args: jax.Array, product: Product, epilogue: Epilogue, **params: Any) -> Sequence[jax.Array]:
    factors, operands = product.unpack(args, epilogue)
    return product.composed(epilogue.primal, factors, operands, **params)


def _choose(
    *avals: Any,
    product: Product,
    epilogue: Epilogue,
    precision: Canonical,
    hints: Hints,
    config: Any,
    in_place: tuple[tuple[int, int], ...],
    backend: str,
    target: Target,
    **_: Any,
) -> Choice:
    factors, operands = product.unpack(avals, epilogue)
    epilogue = epilogue.primal
    dtype = product.multiplied(factors.a.dtype)
    out_dtype = next((out.dtype for out in epilogue.outputs if out.reduce is None), dtype)
    problem = product.problem(*factors.each[0], out_dtype=out_dtype, device=hints.device(device_of(target)))
    if why := product.why_not():
        return Choice(problem, (why,))
    if len({b.shape for b in factors.bs}) > 1:
        return Choice(problem, ("the matrices that share one differ in their batch axes",))
    if not epilogue.plain:
        full = product.tile(*factors.arrays).shape  # one that is broadcast over the batch has other memory
        in_place = tuple((i, j) for i, j in in_place if operands[i].shape == full)
        of_rows = merged(epilogue, product.rows - 1)
        if of_rows is None or any(_partial(spec, product.rows) for spec in epilogue.operands):
            return Choice(problem, ("its epilogue depends on single axes of the rows, which a kernel has as one",))
        problem = problem.fused(of_rows, in_place)
    problem = in_precision(product.in_order(problem), precision)
    if isinstance(problem, Choice):
        choice = problem
    else:
        choice = choose(problem, config, backend=backend, lead=hints.lead, moved=hints.moved)
        if (way := highest()) != "ieee" and dot_precision.highest(precision):
            choice = in_parts(choice, way, config, backend, hints.lead, hints.moved)
        choice = unless_copied(choice) if config is None and backend != "cuda" else choice
    if product.remade and not choice.served:
        choice = dataclasses.replace(choice, reasons=(*choice.reasons, "its rows are copied first"))
    choice = dataclasses.replace(choice, of_matrices=True) if product.rows > 1 else choice
    return dataclasses.replace(choice, reasons=(*choice.reasons, *hints.notes)) if hints.notes else choice


def _partial(spec: OperandSpec, rows: int) -> bool:
    """True if an operand varies along some of so many axes of rows, and not along others."""
    return len({spec.row, *(spec.batch[1 - rows :] if rows > 1 else ())}) > 1


def _batch(
    args: Any, dims: Any, *, product: Product, epilogue: Epilogue, **params: Any
) -> tuple[list[jax.Array], list[int]]:
    factors, operands = product.unpack(args, epilogue)
    of, of_operands = product.unpack(dims, epilogue)
    of_a, *of_bs = factors.scales or ((),)
    own, *beside = of.scales or ((),)
    a, shared = factors.a, all(dim is None for dim in (*of.bs, *of.context, *(x for dims in beside for x in dims)))
    if of.a is not None and shared and a.ndim - product.axes[0] == 1 and of.a < 2:
        # One matrix b for all of a: the batch may be more rows, wherever among the rows it lies.
        bs, of_bs = jax.tree.map(lambda x: with_rank(x, x.ndim + 1), (list(factors.bs), of_bs))
        of_a = tuple(batch_axis(of_a, own, of.a))
        moved = dataclasses.replace(factors, bs=bs, scales=[of_a, *of_bs] if of_bs else ())
        folded = product.fold(epilogue, moved, batch_axis(operands, of_operands, of.a))
        if folded is not None:
            outs = bind_as_is(folded.product, folded.epilogue, folded.factors, folded.operands, **params)
            return [folded.unfold(x) for x in outs], [of.a] * len(outs)
    # A batch axis where one has it already, so that only an axis among the arrays' own must move. But batch positions
    # are counted from the rows outwards, so an epilogue that uses them wants a new axis outermost.
    rank = a.ndim - (of.a is not None) - product.axes[0]
    places = (dim for dim in dims if dim is not None and dim <= rank)
    at = 0 if "batch" in epilogue.positions | product.positions else next(places, 0)
    factors, operands = product.unpack(batch_axis(args, dims, at), epilogue)
    factors, product = product.matched(factors), product.batched(at, rank)
    if any(dim is not None for dim in of.arrays):
        outs = bind_as_is(product, epilogue, factors, operands, **params)
    else:  # only operands differ: one product serves them all
        accs = plain_products(product, factors, epilogue.accumulator, **params)
        applied = product.applied(epilogue, factors.context, Arithmetic.of(product, factors, params))
        outs = list(applied.apply(accs, operands))
    return outs, [at] * len(outs)


def _jvp(primals: Any, tangents: Any, *, product: Product, epilogue: Epilogue, save: str, **params: Any) -> Any:
    factors, operands = product.unpack(primals, epilogue)
    dots, operand_dots = product.unpack(none_if_zero(tangents), epilogue)
    shared = _shared(params)
    valued, values = product.beside(factors, dots)
    if epilogue.plain:
        outs = bind_as_is(valued, epilogue, values, operands, save=save, **params)

        def alike(of: Product, a: Any, b: Any, *scales: Any) -> jax.Array:
            config = params["config"] if of is product else None  # a pinned kernel is for the product it was pinned to
            return multiply(of, a, b, *factors.context, *scales, out_dtype=outs[0].dtype, config=config, **shared)

        found = product.tangents(alike, factors, dots)
        return outs, [zero_tangent(out) if dot is None else dot for out, dot in zip(outs, found, strict=True)]
    acc = abstract_accumulator(epilogue.accumulator, product.tile(*map(jax.typeof, factors.arrays)))
    applied = product.applied(epilogue, factors.context, Arithmetic.of(product, factors, params))

    def rebind(like: Epilogue, operands: Sequence[jax.Array]) -> list[jax.Array]:
        # Where it saves more, its operands are needed afterwards, and numbered anew.
        in_place = params["in_place"] if like is epilogue else ()
        return bind_as_is(valued, like, values, operands, **{**params, "save": save, "in_place": in_place})

    def dots_in(dtype: np.dtype) -> list[jax.Array | None]:
        def plain(of: Product, a: Any, b: Any, *scales: Any) -> jax.Array:
            return multiply(of, a, b, *factors.context, *scales, out_dtype=dtype, **shared)

        return product.tangents(plain, factors, dots)

    return derivative.derivative(
        epilogue,
        values,
        operands,
        operand_dots,
        acc,
        bind=rebind,
        tangents=dots_in,
        multiply=lambda factors, dtype: plain_products(valued, factors, dtype, **shared),
        pushed=functools.partial(derivative.push, applied, acc.shape),
        dtype=derivative.saved_dtype(epilogue, product.multiplied(factors.a.dtype)),
        groups=product.groups(factors.bs),
        rows=product.rows,
        save=save,
    )


def _shared(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a product that the others of its derivatives have too."""
    return {name: params[name] for name in ("precision", "backend", "hints")}


def _transpose(cotangents: Any, *args: Any, product: Product, epilogue: Epilogue, **params: Any) -> list[Any]:
    places = [i for i, x in enumerate(args) if is_linear(x) and x.aval.dtype != jax.dtypes.float0]
    found: list[Any] = [None] * len(args)
    if not places or all(map(is_zero, cotangents)):
        return found
    shared = _shared(params)
    if epilogue.plain and places in ([0], [1]) and not product.unary and product.as_given(places[0]):
        found[places[0]] = _cotangent(cotangents[0], args, places[0], product, **shared)
        return found
    # What is linear in products and operands, in plain JAX: of that a product alone is transposed as above.
    outputs = [out for out, g in zip(epilogue.outputs, cotangents, strict=True) if not is_zero(g)]
    live = normal(epilogue.products, epilogue.operands, epilogue.nodes, outputs)

    def function(*linear: jax.Array) -> list[jax.Array]:
        given = iter(linear)
        full = [next(given) if is_linear(x) else x for x in args]
        factors, operands = product.unpack(full, epilogue)
        plain, factors = product.unmade(factors)
        accs = plain_products(plain, factors, epilogue.accumulator, **shared)
        applied = product.applied(live, factors.context, Arithmetic.of(product, factors, shared))
        return list(applied.apply(accs, operands))

    try:
        made = not all(map(product.as_given, range(2)))
        if (epilogue.plain and not made) or (product.unary and 0 in places):
            raise NotImplementedError("a product of two of them is not linear")
        transpose = jax.linear_transpose(function, *(_struct(args[i].aval) for i in places))
        linear = transpose([g for g in cotangents if not is_zero(g)])
    except (NotImplementedError, AssertionError) as error:
        names = ", ".join(f"argument {i}" for i in places)
        raise NotImplementedError(
            f"{product.where}: no transpose, for it is not linear in {names}: {epilogue}; use jax.vjp"
        ) from error
    for i, g in zip(places, linear, strict=True):
        found[i] = g
    return found


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, weak_type=aval.weak_type, manual_axis_type=aval.mat
    )


def _cotangent(
    g: Any, args: Sequence[Any], i: int, product: Product, *, precision: Canonical, backend: str, hints: Hints
) -> jax.Array:
    """Computes the cotangent of a (i = 0) or b (1) of a plain product."""
    a, b, *rest = args  # the context, and the scales of the other factor: what is linear has none
    to, other = (a.aval, b) if i == 0 else (b.aval, a)
    g, other = product.with_cotangent(g, other, product.multiplied(to.dtype if i == 0 else other.dtype))
    precision = dot_precision.of_cotangents(precision, g.dtype, product.where)
    back, factors, precision = product.cotangent(i, g, other, precision)
    hints = hints.of_cotangent(i, factors[0] is g)
    factors = back.widened(*factors)
    back = back.adding(to.shape, *factors).laid(to, *map(jax.typeof, factors))
    # Terms narrower than 32 bits are added in f32, and rounded once. One of 8 bits is made of f32 that a kernel writes.
    full = back.tile(*map(jax.typeof, (*factors, *rest)))
    alone = math.prod(full.shape) == math.prod(to.shape)
    dtype = to.dtype if alone and to.dtype.itemsize > 1 else accumulator(to.dtype)
    # No config: a pinned kernel is for the product it was pinned to.
    d = multiply(back, *factors, *rest, out_dtype=dtype, precision=precision, backend=backend, hints=hints)
    return sum_to(product.restored(i, d), to)


def _dce(
    used: Sequence[bool], *, product: Product, epilogue: Epilogue, in_place: tuple[tuple[int, int], ...], **params: Any
) -> tuple[list[bool], dict[str, Any]]:
    reading = [True] * len(product.own_axes(epilogue.products))
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
