"""The equation that takes the place of a region: a call of the product with the tail for its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cutjax.binding import rules
from cutjax.fusion.contraction import RAGGED
from cutjax.fusion.jaxprs import Graph, bodies, is_literal, opened, with_equations
from cutjax.fusion.region import Region
from cutjax.fusion.tail import Tail, Tile
from cutjax.ops.arguments import group_sizes_of
from cutjax.ops.ragged_dot import ragged_dot_general
from cutjax.primitives import product as products

NAME = "cutjax_fused"  # of the call, as the profiler and jaxprs show it


def build(graph: Graph, region: Region) -> tuple[Any, Any]:
    """Returns the equation of a region, and that of the product within.

    Raises:
      NotImplementedError, TypeError, ValueError: if the tail is one that no epilogue can have.
    """
    eqns = [graph.eqns[i] for i in region.tail]
    makers = [graph.eqns[graph.producer[x]] for x in region.results]

    def call(*args: Any) -> list[Any]:
        env = dict(zip(region.inputs, args, strict=True))

        def read(x: Any) -> Any:
            return jnp.asarray(x.val, x.aval.dtype) if is_literal(x) else env[x]

        pairs = [[read(x) for x in graph.eqns[i].invars] for i in region.products]
        factors = [region.found.operands(*pair[:2]) for pair in pairs]  # several are never swapped: they share a
        context = [group_sizes_of(sizes, NAME) for sizes in pairs[0][2:]]
        a, bs = factors[0][0], [b for _, b in factors]

        def epilogue(*accs: Any) -> list[Any]:
            tail, values = Tail(region.found.shape), dict(env)
            values |= {x: Tile(acc) for x, acc in zip(region.accumulators, accs, strict=True)}
            tail.evaluate(eqns, values)
            found = []
            for x in region.results:
                value = values[x]
                if isinstance(value, Tile):
                    value = jnp.broadcast_to(value.array, region.found.shape).astype(x.aval.dtype)
                found.append(value)
            return found

        params: dict[str, Any] = {"precision": region.found.precision, "backend": "auto", "config": None}
        params |= {"out_dtype": (None,) * len(region.results), "save": "default"}
        outs = products.call(region.found.product, epilogue, a, bs, context, (), **params)
        outs = [lax.reshape(y, x.aval.shape) for y, x in zip(outs, region.results, strict=True)]
        return [
            maker.primitive.bind(y, **maker.params) if maker.primitive.name == "name" else y
            for y, maker in zip(outs, makers, strict=True)
        ]

    return equation(call, region.inputs, region.results, graph.eqns[region.members[-1]])


def build_plain(eqn: Any, found: Any) -> tuple[Any, Any]:
    """Returns the equation of a product alone, and that of the product within."""
    out = eqn.outvars[0].aval

    def call(*args: Any) -> list[Any]:
        given = iter(args)
        factors = [jnp.asarray(x.val, x.aval.dtype) if is_literal(x) else next(given) for x in eqn.invars]
        if eqn.primitive.name == RAGGED:
            lhs, rhs, sizes = factors
            names = "ragged_dot_dimension_numbers", "precision", "preferred_element_type"
            return [ragged_dot_general(lhs, rhs, sizes, *(eqn.params[name] for name in names))]
        a, b = found.operands(*factors)
        d = products.multiply(found.product, a, b, out_dtype=out.dtype, precision=found.precision, backend="auto")
        return [lax.reshape(d, out.shape)]

    return equation(call, [x for x in eqn.invars if not is_literal(x)], eqn.outvars, eqn)


def equation(call: Any, inputs: Sequence[Any], outvars: Sequence[Any], site: Any) -> tuple[Any, Any]:
    """Returns the equation of a call of a function, at the place of another equation; and the product within."""
    call.__name__ = NAME
    traced = opened(jax.make_jaxpr(jax.jit(call))(*(x.aval for x in inputs)))
    (eqn,) = traced.eqns
    body = eqn.params["jaxpr"]
    eqn = eqn.replace(params={**eqn.params, "jaxpr": with_equations(body, rules.live(opened(body)).eqns)})
    order = dict(zip(traced.invars, inputs, strict=True))
    invars = [order[x] for x in eqn.invars]
    return eqn.replace(invars=invars, outvars=list(outvars), source_info=site.source_info), product_of(eqn)


def product_of(eqn: Any) -> Any:
    """Returns the equation of our product within an equation."""
    for body in bodies(eqn):
        for inner in opened(body).eqns:
            if "product" in inner.params and "epilogue" in inner.params:
                return inner
            if (found := product_of(inner)) is not None:
                return found
    return None
