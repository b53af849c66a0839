"""Products of a program that become float8 ones: which, and what their operands are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax import lax

from cutjax.binding.rules import symbolic
from cutjax.fusion.contraction import RAGGED, is_sharded, transposes
from cutjax.fusion.jaxprs import is_literal, is_marked, opened, with_equations
from cutjax.fusion.narrow import in_place_of
from cutjax.fusion.report import Report
from cutjax.ops.fp8 import Fp8DotGeneral, fp8_dot_general
from cutjax.ops.fp8_product import ACTIVATIONS, GRADIENTS, WEIGHTS, Float8, Roles, layout_of
from cutjax.ops.ragged_dot import in_groups
from cutjax.primitives.dense import Dense
from cutjax.primitives.product import Product
from cutjax.primitives.ragged import Depth, Rows
from cutjax.runtime import backends

_LAX = ("dot_general", RAGGED)
Recipes = str | Fp8DotGeneral | Callable[[Any, Any], Any] | None


def recipe_of(fp8: Recipes, lhs: Any, rhs: Any) -> Fp8DotGeneral | None:
    """Returns the function for a product of two arrays, or None.

    Raises:
      TypeError: if ``fp8`` is, or makes of the two, none of what ``cutjax.fuse`` takes.
    """
    if callable(fp8) and not isinstance(fp8, Fp8DotGeneral):
        fp8 = fp8(lhs, rhs)
    if fp8 is None or isinstance(fp8, Fp8DotGeneral):
        return fp8
    if not isinstance(fp8, str):
        raise TypeError(f"fuse: fp8 must be a recipe, cutjax.fp8_dot_general(...) or a function of both, got {fp8!r}")
    return fp8_dot_general(fp8)


def may_be_float8(eqn: Any) -> bool:
    """True if an equation is a product that may become one of float8: of lax, or ours with whatever epilogue."""
    return eqn.primitive.name in _LAX or isinstance(eqn.params.get("product"), Dense | Rows | Depth)


def quantized(jaxpr: Any, fp8: Recipes, scope: str) -> tuple[Any, list[Report], dict[Any, str]]:
    """Returns a program with float8 products in the place of some, a report of each, and why others are none.

    These are of two arrays of one dtype of 16 bits, dense or of rows in groups: batched ones, as attention's, have no
    weights, and what is computed in float32 is so for a reason. What one product has quantized costs another nothing:
    of those that are not worth it by themselves some are then.

    Args:
      jaxpr: the program.
      fp8: as ``cutjax.fuse`` has it.
      scope: the names of the scopes that the program is in.
    """
    made: set[Any] = set()
    found = _converted(jaxpr, fp8, scope, made)
    return _converted(jaxpr, fp8, scope, made) if made and found[2] else found


def _converted(jaxpr: Any, fp8: Recipes, scope: str, passes: set[Any]) -> tuple[Any, list[Report], dict[Any, str]]:
    """Does so, where the ``passes`` are already made, and adds those of its products."""

    def is_made(x: Any, shape: tuple[int, ...], role: str, last: bool) -> bool:
        return (_key(sources, x, shape, role), last) in passes

    eqns: list[Any] = []
    reports, wide = [], {}
    backward: set[Any] = set()  # what is made in backward passes
    sources = _sources(opened(jaxpr).eqns)
    read = {_source(sources, x) for x in opened(jaxpr).outvars if not is_literal(x)}  # by others, and late
    turns, done = _turns(opened(jaxpr)), set()
    for eqn in opened(jaxpr).eqns:
        if not done.isdisjoint(eqn.outvars):
            continue
        made = None
        is_backward = _is_backward(f"{scope}/{eqn.source_info.name_stack}")
        if may_be_float8(eqn) and not is_marked(eqn):
            turn = turns.get(eqn.outvars[0]) if is_backward else None
            made = _made(eqn, turn, fp8, is_backward, backward, is_made)
            if isinstance(made, str):
                wide[eqn.outvars[0]], made = made, None
            elif made is not None:
                made, why = made
                reports.append(Report(eqn, "float8", why))
                sources |= _sources(made)
                passes |= _passes(made, sources)
                if turn is not None:
                    done |= {*turn.outvars}
        if is_backward and made is None and eqn.primitive.name != "reshape":
            read |= {_source(sources, x) for x in eqn.invars if not is_literal(x)}
        if is_backward:
            backward |= {*eqn.outvars, *done}
        eqns += [eqn] if made is None else made
    if not reports:
        return jaxpr, reports, wide
    eqns = _in_both_orders(eqns, read)
    if not scope:
        eqns = _of_arguments(opened(jaxpr), eqns)
    return with_equations(jaxpr, eqns), reports, wide


def _of_arguments(jaxpr: Any, eqns: list[Any]) -> list[Any]:
    """Returns equations of products that read arguments of the program which it rounds for them alone as they are.

    What quantizes them rounds them, so that nobody writes them rounded. What a loop carries or slices has no such
    place in memory.
    """
    sources, given = _sources(eqns), set(jaxpr.invars)
    conversions = {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in eqns
        if eqn.primitive is lax.convert_element_type_p
        and not is_literal(eqn.invars[0])
        and eqn.invars[0] in given
        and _is_rounded(eqn)
    }
    for eqn in eqns:
        product = _float8(eqn)
        quantized_here = [] if product is None else [x for x, _, _ in _operands(eqn, product)]
        for x in eqn.invars:
            if eqn.primitive.name != "reshape" and not is_literal(x) and x not in quantized_here:
                conversions.pop(_source(sources, x), None)
    for x in jaxpr.outvars:
        if not is_literal(x):
            conversions.pop(_source(sources, x), None)

    def unrounded(eqn: Any) -> list[Any]:
        product = _float8(eqn)
        operands = [] if product is None else [x for x, _, _ in _operands(eqn, product)]
        found = [conversions.get(_source(sources, x)) for x in operands]
        if product is None or not any(found) or len(found) > 2:
            return [eqn]
        dtypes = [x.aval.dtype.name if y is not None else "" for x, y in zip(operands, found, strict=True)]
        params = {**eqn.params, "product": dataclasses.replace(product, rounded=tuple(dtypes))}
        taken = {x: y for x, y in zip(operands, found, strict=True) if y is not None}

        def run(*xs: Any) -> Any:
            return eqn.primitive.bind(
                *(lax.reshape(x, y.aval.shape) for x, y in zip(xs, eqn.invars, strict=True)), **params
            )

        return in_place_of(eqn, run, [taken.get(x, x) for x in eqn.invars]) or [eqn]

    return [made for eqn in eqns for made in unrounded(eqn)]


def _is_rounded(eqn: Any) -> bool:
    """True if a conversion makes 16 bits of float32, which the kernels round, on one device."""
    (x,), (y,) = eqn.invars, eqn.outvars
    dtypes = x.aval.dtype.name, y.aval.dtype.name
    return dtypes in (("float32", "bfloat16"), ("float32", "float16")) and not is_sharded(x.aval.sharding)


def _in_both_orders(eqns: list[Any], read: set[Any]) -> list[Any]:
    """Returns the equations of a program, products of one array along either axis told so: a pass quantizes for both.

    Activations only where nothing else has ``read`` them in the backward pass: what was quantized for that is then kept
    in the place of 16 bits.
    """
    sources = _sources(eqns)
    orders: dict[Any, set[bool]] = {}
    for eqn in eqns:
        if (product := _float8(eqn)) is not None:
            for x, role, last in _operands(eqn, product):
                orders.setdefault(_key(sources, x, x.aval.shape, role), set()).add(last)
    found = []
    for eqn in eqns:
        if (product := _float8(eqn)) is not None:
            keys = [_key(sources, x, x.aval.shape, role) for x, role, _ in _operands(eqn, product)]
            of_a, *of_bs = (len(orders[key]) > 1 and (key[2] != ACTIVATIONS or key[0] not in read) for key in keys)
            product = dataclasses.replace(product, both=(of_a, all(of_bs)))
            eqn = eqn.replace(params={**eqn.params, "product": product})
        found.append(eqn)
    return found


def _passes(eqns: list[Any], sources: dict[Any, Any]) -> set[Any]:
    """The keys of the arrays that products quantize, and whether along the last axis."""
    found = [(eqn, product) for eqn in eqns if (product := _float8(eqn)) is not None]
    return {
        (_key(sources, x, x.aval.shape, role), last)
        for eqn, product in found
        for x, role, last in _operands(eqn, product)
    }


def _float8(eqn: Any) -> Float8 | None:
    """Returns the product of an equation that is one in float8, contracted along an axis of both factors' matrices."""
    product = eqn.params.get("product")
    return product if isinstance(product, Float8) and isinstance(product.product, Dense | Rows) else None


def _operands(eqn: Any, product: Float8) -> list[tuple[Any, str, bool]]:
    """Returns the factors of a product, the role of each, and whether its contracted axis is the last."""
    factors, _ = product.unpack(eqn.invars, eqn.params["epilogue"])
    (of_a, of_b), layout = product.roles, layout_of(product.product)
    return [(factors.a, of_a, layout[0] == "n"), *((b, of_b, layout[1] == "t") for b in factors.bs)]


def _sources(eqns: list[Any]) -> dict[Any, Any]:
    """Returns for each array that is another in another shape that other."""
    return {eqn.outvars[0]: eqn.invars[0] for eqn in eqns if eqn.primitive.name == "reshape"}


def _source(sources: dict[Any, Any], x: Any) -> Any:
    """Returns the variable that one is, in whatever shape."""
    while x in sources:
        x = sources[x]
    return x


def _key(sources: dict[Any, Any], x: Any, shape: tuple[int, ...], role: str) -> tuple[Any, Any, str]:
    """Returns the array of an operand, as which matrix it is multiplied, and its role: by these it is quantized."""
    return _source(sources, x), shape[-2:], role


def _turns(jaxpr: Any) -> dict[Any, Any]:
    """Returns for each result of a product of lax's that is only transposed the equation that does it.

    JAX writes gradients of weights so. XLA lays out its own products as they are read, and not those of kernels.
    """
    readers: dict[Any, list[Any]] = {x: [None] for x in jaxpr.outvars if not is_literal(x)}
    for eqn in jaxpr.eqns:
        for x in eqn.invars:
            if not is_literal(x):
                readers.setdefault(x, []).append(eqn)
    found = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and eqn.params["out_sharding"] is None:
            (x,), ((contracted, _), (batch, _)) = eqn.outvars, eqn.params["dimension_numbers"]
            left, (turn, *others) = eqn.invars[0].aval.ndim - len(contracted), readers.get(x, [None])
            if turn is not None and not others and not batch and transposes(turn, x.aval.ndim, left):
                found[x] = turn
    return found


def _made(
    eqn: Any, turn: Any, fp8: Recipes, is_backward: bool, backward: set[Any], is_made: Callable[..., bool]
) -> tuple[list[Any], str] | str | None:
    """Returns the equations of a float8 product and its recipe, why it is none, or None of what is none of these.

    Where an equation transposes it, these are of what that makes. Another product has an array, of a shape, in a role,
    quantized along its last axis or not where it ``is_made``.
    """
    lhs, rhs = (x.aval for x in eqn.invars[:2])
    params = eqn.params
    if any(map(is_literal, eqn.invars)) or lhs.dtype != rhs.dtype or lhs.dtype.name not in ("bfloat16", "float16"):
        return None
    if min(lhs.ndim, rhs.ndim) < 2 or _is_batched(eqn, lhs, rhs):
        return None
    function = recipe_of(fp8, lhs, rhs)
    if function is None:
        return "kept out"
    name = eqn.primitive.name
    roles = _roles(eqn, backward) if is_backward else (ACTIVATIONS, WEIGHTS)
    if name == "dot_general":
        numbers, result, (x, y), of = params["dimension_numbers"], eqn, eqn.invars, roles
        if turn is not None:
            numbers, result, (x, y), of = tuple(pair[::-1] for pair in numbers), turn, (y, x), (of[1], of[0])
        precision = params["precision"]

        def already(i: int, *how: Any) -> bool:
            return is_made((x, y)[i], *how)

        if why := function.why_not(x.aval, y.aval, numbers, precision, result.outvars[0].aval, of, already):
            return why
        how = numbers, precision, params["preferred_element_type"], params["out_sharding"], of, already
        made = in_place_of(result, lambda x, y: function.of_roles(x, y, *how), [x, y])
    else:
        found: list[str] = []

        def made_of(product: Product, a: Any, b: Any, groups: int) -> Product:
            precision, backend = params["precision"], params.get("backend", backends.resolve(None, "fuse"))
            layout, axes = layout_of(product), zip(eqn.invars, (a, b), roles, strict=False)
            last = layout[0] == "n", layout[1] == "t"
            done = [is_made(x, y.shape, role, k) for (x, y, role), k in zip(axes, last, strict=True)]
            already = (done[0], done[1]) if isinstance(product, Rows) else (False, False)
            made = function.product(product, a, b, groups, precision, backend, roles, already)
            if isinstance(made, str):
                found.append(made)
                return product
            return made

        made = _of_lax(eqn, made_of) if name == RAGGED else _of_ours(eqn, made_of)
        if found:
            return found[0]
    recipe = function.recipe
    return None if made is None else (made, f"{recipe.name}, {' by '.join(roles)}, gradients {recipe.gradients}")


def _is_batched(eqn: Any, lhs: Any, rhs: Any) -> bool:
    """True if each of several matrices has another one: what has groups is of weights all the same."""
    if eqn.primitive.name == "dot_general":
        return bool(eqn.params["dimension_numbers"][1][0])
    product = eqn.params.get("product")
    return isinstance(product, Dense) and (math.prod(rhs.shape[:-2]) > 1 or bool(product.added))


def _of_ours(eqn: Any, of: Callable[..., Product]) -> list[Any] | None:
    """Returns the equation of one of our products made another."""
    params = eqn.params
    if params["config"] is not None or any(is_sharded(x.aval.sharding) for x in eqn.invars):
        return None
    factors, _ = params["product"].unpack(eqn.invars, params["epilogue"])
    groups = params["product"].groups([x.aval for x in factors.bs])
    if groups is None and factors.context:
        groups = factors.context[0].aval.shape[-1] - params["product"].leading
    product = of(params["product"], factors.a.aval, factors.bs[0].aval, groups or 0)
    params = {**params, "product": product, "in_place": ()}
    return [eqn.replace(primitive=product.primitive, params=params)]


def _of_lax(eqn: Any, of: Callable[..., Product]) -> list[Any] | None:
    """Returns the equations of the product of lax's of rows in groups, as one of ours made another."""
    if len(eqn.invars) != 3 or any(is_sharded(x.aval.sharding) for x in eqn.invars):
        return None
    lhs, rhs, sizes = (x.aval for x in eqn.invars)
    if any(symbolic(x) or 0 in x.shape for x in (lhs, rhs, sizes)):
        return None
    names = "ragged_dot_dimension_numbers", "precision", "preferred_element_type"
    how, groups = [eqn.params[name] for name in names], sizes.shape[-1]

    def function(*xs: Any) -> Any:
        lhs, rhs, sizes = xs
        numbers, precision, dtype = how
        return in_groups(lhs, rhs, sizes, numbers, precision, dtype, None, lambda *given: of(*given, groups))

    return in_place_of(eqn, function, eqn.invars)


def _is_backward(scope: str) -> bool:
    """True of a scope in which jax transposes a program."""
    return "transpose(jvp" in scope and "rematted_computation" not in scope


def _roles(eqn: Any, backward: set[Any]) -> Roles:
    """Returns the roles of a product's operands in a backward pass.

    In the transpose of a product of lax's jax puts the cotangent first. Of ours either comes first; that is the
    gradient which the backward pass has made. Where it is contracted over its rows, the other one is of activations,
    for the gradient of weights, else of weights.
    """
    params = eqn.params
    if eqn.primitive.name == "dot_general":
        ((contracted, _), _) = params["dimension_numbers"]
        return GRADIENTS, ACTIVATIONS if 0 in contracted else WEIGHTS
    if eqn.primitive.name == RAGGED:
        dims = params["ragged_dot_dimension_numbers"]
        of_weights = dims.lhs_ragged_dimensions[0] in dims.dot_dimension_numbers[0][0]
        return (ACTIVATIONS, GRADIENTS) if of_weights else (GRADIENTS, WEIGHTS)
    product = params["product"]
    a, b = eqn.invars[:2]
    first = a in backward or b not in backward
    if isinstance(product, Depth):
        first = a in backward and b not in backward
    layout = layout_of(product)
    other = ACTIVATIONS if (layout[0] == "t" if first else layout[1] == "n") else WEIGHTS
    return (GRADIENTS, other) if first else (other, GRADIENTS)
