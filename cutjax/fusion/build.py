"""The equation that takes the place of a region: a call of the product with the tail for its epilogue."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding import rules
from cutjax.binding.rules import explicit_axes
from cutjax.epilogue.jaxpr import any_equation, bind_equation, has_rule, placed_anywhere, reverse_only
from cutjax.fusion.contraction import RAGGED
from cutjax.fusion.jaxprs import Graph, bodies, is_literal, opened, variables, with_bodies, with_equations
from cutjax.fusion.region import Region
from cutjax.fusion.tail import Tail, Tile
from cutjax.ops.ragged_dot import ragged_dot_general
from cutjax.primitives import product as products
from cutjax.primitives.derivative import outside

NAME = "cutjax_fused"  # of the call, as the profiler and jaxprs show it


_MOST_KEPT = 4096


class Template(NamedTuple):
    """The equation of a call, which of the inputs it reads, and the equation of the product within."""

    eqn: Any
    reads: list[int]
    product: Any


# Functions, by what makes two of them equal: jax keeps what it traced of each, in whatever context.
_functions: dict[Hashable, Any] = {}
_templates: weakref.WeakKeyDictionary[Any, Template] = weakref.WeakKeyDictionary()


def template(key: Hashable, make: Callable[[], Any], inputs: Sequence[Any]) -> Template:
    """Returns the equation of a call of a function; traced anew where none of the same key was.

    Args:
      key: what functions share of which the equations are equal.
      make: makes the function.
      inputs: variables like its arguments.

    Raises:
      NotImplementedError, TypeError, ValueError: if the function is of a tail that no epilogue can have.
    """
    if key not in _functions:
        if len(_functions) >= _MOST_KEPT:
            _functions.clear()
        call = make()
        call.__name__ = NAME
        _functions[key] = jax.jit(call)
    jitted, avals = _functions[key], [x.aval for x in inputs]
    body = jitted.trace(*avals).jaxpr
    if body not in _templates:
        traced = opened(jax.make_jaxpr(jitted)(*avals))
        (eqn,) = traced.eqns
        order = {x: i for i, x in enumerate(traced.invars)}
        live = with_equations(body, rules.live(opened(body)).eqns)
        eqn = eqn.replace(params={**eqn.params, "jaxpr": live})
        _templates[body] = Template(eqn, [order[x] for x in eqn.invars], product_of(eqn))
    return _templates[body]


def placed(made: Template, inputs: Sequence[Any], outvars: Sequence[Any], site: Any) -> tuple[Any, Any]:
    """Returns an equation with a program's variables, at the place of another; and that of the product within."""
    invars = [inputs[i] for i in made.reads]
    return made.eqn.replace(invars=invars, outvars=list(outvars), source_info=site.source_info), made.product


def function(graph: Graph, region: Region) -> Callable[..., list[Any]]:
    """Returns the function of a region. It keeps equations alive, not the program."""
    members = [graph.eqns[i] for i in region.members]
    eqns = [placed_anywhere(graph.eqns[i]) for i in region.tail]
    makers = [graph.eqns[graph.producer[x]] for x in region.results]
    arrays_of = [graph.product(i).invars for i in region.products]
    inputs, results, accumulators = region.inputs, region.results, region.accumulators
    form = region.found

    def call(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))

        def read(x: Any) -> Any:
            return jnp.asarray(x.val, x.aval.dtype) if is_literal(x) else env[x]

        factors = form.factors([[read(x) for x in arrays] for arrays in arrays_of])

        def epilogue(*accs: Any) -> list[Any]:
            tail, values = Tail(form.shape, form.rows), dict(env)
            values |= {x: Tile(acc) for x, acc in zip(accumulators, accs, strict=True)}
            tail.evaluate(eqns, values)
            found = []
            for x in results:
                value = values[x]
                if isinstance(value, Tile):
                    value = jnp.broadcast_to(value.array, form.shape).astype(x.aval.dtype)
                found.append(value)
            return found

        params: dict[str, Any] = {"precision": form.precision, "backend": "auto", "config": None}
        params |= {"out_dtype": (None,) * len(results), "save": "default", "hints": form.hints}
        outs = products.call(form.product, epilogue, factors, (), **params)
        outs = [lax.reshape(y, x.aval.shape) for y, x in zip(outs, results, strict=True)]
        return [
            maker.primitive.bind(y, **maker.params) if maker.primitive.name == "name" else y
            for y, maker in zip(outs, makers, strict=True)
        ]

    fused = _automatic(call, [x.aval for x in results])
    if not _names_inside(eqns, results):
        return fused

    # What has the names that policies of jax.checkpoint know, saves and computes again what it did.
    as_it_was = replayed(members, inputs, results)
    return functools.partial(outside, any_equation(members, reverse_only), fused, as_it_was)


def replayed(eqns: Sequence[Any], inputs: Sequence[Any], results: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns the function that some equations are, of variables that they read and make."""

    def as_it_was(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))
        for eqn in eqns:
            given = [np.asarray(x.val, x.aval.dtype) if is_literal(x) else env[x] for x in eqn.invars]
            env.update(zip(eqn.outvars, bind_equation(eqn, given), strict=True))
        return [env[x] for x in results]

    return as_it_was


def _names_inside(eqns: Sequence[Any], results: Sequence[Any]) -> bool:
    """True if equations of a tail name what is not a result alone."""
    read = {x for eqn in eqns for x in variables(eqn)}

    def names(eqn: Any) -> bool:
        return eqn.primitive.name == "name" and (eqn.outvars[0] in read or eqn.outvars[0] not in results)

    return any_equation(eqns, names)


def plain_function(eqn: Any, found: Any) -> Callable[..., list[Any]]:
    """Returns the function of a product alone."""
    out = eqn.outvars[0].aval

    def call(*args: Any) -> list[Any]:
        given = iter(args)
        factors = [jnp.asarray(x.val, x.aval.dtype) if is_literal(x) else next(given) for x in eqn.invars]
        if eqn.primitive.name == RAGGED:
            lhs, rhs, sizes = factors
            names = "ragged_dot_dimension_numbers", "precision", "preferred_element_type"
            return [ragged_dot_general(lhs, rhs, sizes, *(eqn.params[name] for name in names))]
        a, b = found.operands(*factors)
        params: dict[str, Any] = {"precision": found.precision, "backend": "auto", "hints": found.hints}
        d = products.multiply(found.product, a, b, out_dtype=out.dtype, **params)
        return [found.result(d, out.shape)]

    return _automatic(call, [out])


def _automatic(call: Callable[..., list[Any]], outs: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns a function as on automatic axes of a mesh, whose results lie as ``outs`` where axes are explicit."""

    def automatic(*args: Any) -> list[Any]:
        meshes = (x.sharding.mesh for x in (*map(jax.typeof, args), *outs))
        mesh = next(filter(explicit_axes, meshes), None)
        if mesh is None:
            return call(*args)
        lie = [jax.NamedSharding(mesh, x.sharding.spec) for x in outs]
        with jax.sharding.use_abstract_mesh(mesh):
            placed: Any = jax.sharding.auto_axes(call, axes=explicit_axes(mesh), out_sharding=lie)
            return placed(*args)

    return automatic


def product_of(eqn: Any) -> Any:
    """Returns the equation of our product, or of our sums, within an equation."""
    for body in bodies(eqn):
        for inner in opened(body).eqns:
            if {"product", "epilogue"} <= inner.params.keys() or "expression" in inner.params:
                return inner
            if (found := product_of(inner)) is not None:
                return found
    return None


def program_of(eqn: Any) -> Any:
    """Returns the program that the product of a call is in: the call's, or that of the rule that is all of it."""
    body = opened(eqn.params["jaxpr"])
    (first, *others) = body.eqns
    alike = (list(first.invars), list(first.outvars)) == (list(body.invars), list(body.outvars))
    return bodies(first)[0] if has_rule(first) and alike and not others else eqn.params["jaxpr"]


def with_product(jaxpr: Any, old: Any, new: Any, donated: Sequence[bool] = ()) -> Any:
    """Returns a program with another equation in the place of one, that of a rule within too."""

    def put(eqn: Any) -> Any:
        if has_rule(eqn):
            return with_bodies(eqn, functools.partial(with_product, old=old, new=new))
        return new if eqn is old else eqn

    return with_equations(jaxpr, [put(eqn) for eqn in opened(jaxpr).eqns])
