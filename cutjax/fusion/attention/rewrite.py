"""Attention of few query rows, as a step of decoding has it, put in the place of its equations.

What is computed of the scores element by element, before the softmax, is the kernel's expression: a scale, a bound, a
mask of positions or of arrays. Axes are followed by labels: a program may move those of scores as it likes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from cutjax.binding import lowering
from cutjax.binding.rules import any_divided, varying_axes
from cutjax.epilogue.jaxpr import any_equation, reverse_only
from cutjax.fusion.attention.labels import Escape
from cutjax.fusion.attention.program import Program
from cutjax.fusion.attention.search import Search, may_be_scores
from cutjax.fusion.build import Template, placed, replayed
from cutjax.fusion.contraction import is_product
from cutjax.fusion.flat import Flat
from cutjax.fusion.jaxprs import Graph, is_literal, opened, pointwise, with_equations
from cutjax.fusion.keys import Keys
from cutjax.fusion.price import GAIN
from cutjax.fusion.region import Region
from cutjax.fusion.report import Report
from cutjax.kernels import choose
from cutjax.kernels.device import device_of
from cutjax.primitives.attention import attention_p
from cutjax.primitives.derivative import outside

_LEAST_KEYS = 64  # with fewer there is nothing to gain
# What XLA takes beside the bytes of keys and values, at least, in the median of benchmarks' programs: three kernels or
# more, for the softmax passes over scores that lie in the cache.
_XLA_BESIDE_US = 8.0


@dataclasses.dataclass(frozen=True)
class Price:
    """The time of attention, in predicted microseconds; None where it is not known.

    Attributes:
      runs: "fused" or "XLA".
      xla_us: the least that XLA's products and its softmax take.
      fused_us: the kernel.
      why: why there is none.
    """

    runs: str
    xla_us: float | None = None
    fused_us: float | None = None
    why: str = ""

    def __str__(self) -> str:
        times = [("XLA at least", self.xla_us), ("fused", self.fused_us)]
        parts = [f"{name} {us:.1f} us" for name, us in times if us is not None]
        return ", ".join(["attention in one kernel", *parts, *filter(None, [self.why])])


def attended(
    jaxpr: Any, always: bool, keys: Keys, template: Callable[[Hashable, Any, Sequence[Any]], Template]
) -> tuple[Any, list[Report]]:
    """Returns a program with attention of few query rows as equations of their own, and a report of each product.

    Args:
      jaxpr: the program.
      always: whether it is replaced whatever that costs.
      keys, template: the rewriter's, which builds each equation once.
    """
    if not any(map(may_be_scores, opened(jaxpr).eqns)):
        return jaxpr, []
    graph, reports = Graph(opened(jaxpr)), []
    for region, function in _found(graph, 1 if always else _LEAST_KEYS):
        try:
            made = template(keys.region(graph, region), function, region.inputs)
        except NotImplementedError:
            continue
        cost = Price("fused") if always else _price(made)
        if cost.runs != "fused":
            continue
        products = [graph.eqns[i] for i in region.members if is_product(graph.eqns[i])]
        region.made, _ = placed(made, region.inputs, region.results, products[-1])
        graph.replace(region)
        reports += [Report(eqn, "fused", cost) for eqn in products]
    return (with_equations(jaxpr, graph.equations()) if reports else jaxpr), reports


def _price(made: Template) -> Price:
    """Returns the predicted times, told the equation that is built."""
    avals, params = [x.aval for x in made.product.invars], made.product.params
    choice = lowering.choosers[attention_p](*avals, target=lowering.target(), **params)
    if not choice.served or choice.time_us is None:
        return Price("XLA", why="; ".join(choice.reasons))
    xla_us = _XLA_BESIDE_US + device_of(lowering.target()).moving_us(choice.problem.bytes)
    runs = "fused" if choose.leads(choice.time_us, xla_us, GAIN) else "XLA"
    return Price(runs, xla_us, choice.time_us)


def _found(graph: Graph, least_keys: int) -> Iterator[tuple[Region, Callable[[], Callable[..., list[Any]]]]]:
    """Yields the regions of attention, each of which may have been replaced before the next, and their functions."""
    flat = Flat(graph)
    pairs = [(flat.name(x), x) for i in graph.live for x in (*graph.inputs[i], *graph.eqns[i].outvars)]
    names = {name: x for name, x in pairs if not is_literal(name)}
    for k, eqn in enumerate(flat.eqns):
        for side in (0, 1) if may_be_scores(eqn) and flat.tops[k] in graph.live else ():
            try:
                search = Search(flat, names, k, side, least_keys)
                region = _region(graph, names, search)
            except Escape:
                continue
            yield region, functools.partial(_function, graph, flat, region, Program.of(search))
            break


def _region(graph: Graph, names: Mapping[Any, Any], search: Search) -> Region:
    """Returns the region of what a search has found."""
    core, beside = ({search.flat.tops[k] for k in each} for each in (search.core, search.beside))
    members, (out,) = sorted(core | beside), graph.eqns[search.flat.tops[search.end]].outvars
    if any(i not in graph.live or graph.eqns[i].effects for i in members):
        raise Escape
    for x in (x for i in core for x in graph.eqns[i].outvars if x is not out):
        if x in graph.outvars or not core.issuperset(graph.consumers.get(x, ())):
            raise Escape  # scores, or what is made of them, in memory
    for x, _ in (search.k, search.v):
        if names.get(x) not in graph.outvars and _is_passing(search.flat.maker(x)):
            raise Escape
    made = {x for i in members for x in graph.eqns[i].outvars}
    read = [search.q[0], search.k[0], search.v[0], *(x for x, _ in search.leaves)]
    if any(x not in names or names[x] in made for x in read):
        raise Escape
    others = (x for i in members for x in graph.inputs[i] if x not in made)
    inputs = list(dict.fromkeys([*(names[x] for x in read), *others]))
    if any_divided(*(x.aval for x in inputs)) or len({varying_axes(x.aval) for x in inputs}) > 1:
        raise Escape
    if graph.reaches(inputs, [out]):
        raise Escape
    found: Any = ("attention",)
    return Region((min(core),), set(), found, (), members, inputs, [out], [])


def _is_passing(eqn: Any) -> bool:
    """True if XLA need not write what an equation makes to memory: it computes that where a product reads it."""
    return eqn is not None and (eqn.primitive.name in ("broadcast_in_dim", "slice") or pointwise(eqn))


def _function(graph: Graph, flat: Flat, region: Region, program: Program) -> Callable[..., list[Any]]:
    """Returns the function of attention, with the derivative of the equations that it takes the place of."""
    eqns, names, (out,) = [graph.eqns[i] for i in region.members], list(map(flat.name, region.inputs)), region.results

    def fused(*args: Any) -> list[Any]:
        return [program(dict(zip(names, args, strict=True)), out.aval)]

    as_it_was = replayed(eqns, region.inputs, region.results)
    return functools.partial(outside, any_equation(eqns, reverse_only), fused, as_it_was)
