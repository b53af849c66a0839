"""Every rule of a product's primitive, once for all products."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from cutjax import dot_precision
from cutjax.binding.define import define
from cutjax.binding.lowering import Target
from cutjax.binding.rules import batch_axis, none_if_zero, with_rank, zero_tangent
from cutjax.dot_precision import Canonical
from cutjax.dtypes import decodes
from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, Output, identity, normal
from cutjax.epilogue.merge import merged
from cutjax.kernels.choose import Choice, choose, in_parts, in_precision, unless_copied
from cutjax.kernels.device import device_of
from cutjax.primitives import derivative, partition
from cutjax.primitives.cotangents import transpose
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import Arithmetic, Product, bind_as_is, multiply, plain_products
from cutjax.primitives.together import multiply_each
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
            apart=None if composed else _apart,
            choose=None if composed else _choose,
            required=not product.remade,
            batch=_batch,
            jvp=_jvp,
            transpose=transpose,
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
    hints: Hints,
    **_: Any,
) -> Sequence[jax.Array]:
    factors, operands = product.unpack(args, epilogue)
    epilogue = epilogue.primal
    shared: dict[str, Any] = {"precision": precision, "backend": backend, "hints": hints}
    if apart := _apart(*map(jax.typeof, args), product=product, epilogue=epilogue):
        if product.remade:
            made, factors = product.unmade(factors)
            return bind_as_is(made, epilogue, factors, operands, **shared)
        if product.further:
            return product.composed(epilogue, factors, operands, on_cuda=on_cuda, **shared)
    if apart and epilogue.identities:
        full = product.tile(*map(jax.typeof, factors.arrays)).shape  # of each, whatever batch its own b has
        dtypes = (np.dtype(out.dtype) for out in epilogue.outputs)
        of_each = zip(factors.each, dtypes, strict=True)
        found = (multiply(product, *arrays, out_dtype=dtype, **shared) for arrays, dtype in of_each)
        return [x if x.shape == full else jnp.broadcast_to(x, full) for x in found]
    if epilogue.plain:
        dtype = np.dtype(epilogue.outputs[0].dtype)
    else:
        dtype = product.written(epilogue.accumulator, product.multiplied(factors.a.dtype), on_cuda)
    if apart:
        accs = [multiply(product, *arrays, out_dtype=dtype, **shared) for arrays in factors.each]
    else:
        alone = functools.partial(product.reference, out_dtype=dtype, precision=precision, on_cuda=on_cuda)
        accs = [alone(*arrays) for arrays in factors.each]
    if epilogue.plain:
        return accs
    arithmetic = Arithmetic(product.multiplied(factors.a.dtype), precision, backend)
    return product.applied(epilogue, factors.context, arithmetic).apply(accs, operands)


def _apart(*avals: Any, product: Product, epilogue: Epilogue, **_: Any) -> bool:
    """True of what is other products where no kernel computes it: a sum, several of them, and gathered rows."""
    several = epilogue.products > 1 and (_several(product, epilogue) or _decodes(product, epilogue, avals))
    return product.remade or product.further or several


def _several(product: Product, epilogue: Epilogue) -> bool:
    """True of several products as they are."""
    return epilogue.products > 1 and epilogue.identities and product.sum_of(2) is not None


def _decodes(product: Product, epilogue: Epilogue, avals: Sequence[Any]) -> bool:
    """True of products of weights that kernels decode, as ``kernels.sums.alone`` has them."""
    factors, dtype = product.unpack(avals, epilogue)[0], product.multiplied(avals[0].dtype)
    (b, *_), sums = factors.bs, product.tile(*factors.arrays)
    return decodes(dtype, b.dtype) and sums.size * epilogue.accumulator.itemsize <= b.size * dtype.itemsize


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

        def alike(of: Product, a: Any, bs: Any, *scales: Any) -> list[jax.Array]:
            config = params["config"] if of is product else None  # a pinned kernel is for the product it was pinned to
            beside = (*factors.context, *scales)
            return multiply_each(of, a, bs, *beside, out_dtype=outs[0].dtype, config=config, **shared)

        found = product.tangents(alike, factors, dots)
        return outs, [zero_tangent(out) if dot is None else dot for out, dot in zip(outs, found, strict=True)]
    acc = abstract_accumulator(epilogue.accumulator, product.tile(*map(jax.typeof, factors.arrays)))
    applied = product.applied(epilogue, factors.context, Arithmetic.of(product, factors, params))

    def rebind(like: Epilogue, operands: Sequence[jax.Array]) -> list[jax.Array]:
        # Where it saves more, its operands are needed afterwards, and numbered anew.
        in_place = params["in_place"] if like is epilogue else ()
        return bind_as_is(valued, like, values, operands, **{**params, "save": save, "in_place": in_place})

    def dots_in(dtype: np.dtype) -> list[jax.Array | None]:
        def plain(of: Product, a: Any, bs: Any, *scales: Any) -> list[jax.Array]:
            return multiply_each(of, a, bs, *factors.context, *scales, out_dtype=dtype, **shared)

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


def _dce(
    used: Sequence[bool], *, product: Product, epilogue: Epilogue, in_place: tuple[tuple[int, int], ...], **params: Any
) -> tuple[list[bool], dict[str, Any]]:
    reading = [True] * len(product.own_axes(epilogue.products))
    if _several(product, epilogue):  # of several products, those that nothing uses
        reading[1 : 1 + epilogue.products] = used
        outs = [np.dtype(out.dtype) for out, use in zip(epilogue.outputs, used, strict=True) if use]
        outputs = tuple(Output(i, dtype.name) for i, dtype in enumerate(outs))
        alone = identity(outs[0], epilogue.accumulator, len(outs))
        epilogue = dataclasses.replace(alone, outputs=outputs)
        return reading, {"product": product, "epilogue": epilogue, "in_place": in_place, **params}
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
