"""The equations of a program that are a head, and the function that takes their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from cutjax.epilogue.jaxpr import any_equation, reverse_only
from cutjax.fusion.build import replayed
from cutjax.fusion.contraction import is_product
from cutjax.fusion.flat import Flat
from cutjax.fusion.heads.head import Head, planned
from cutjax.fusion.heads.key import key
from cutjax.fusion.heads.parts import Dot, Full, dots
from cutjax.fusion.heads.program import Program
from cutjax.fusion.heads.search import Search
from cutjax.fusion.heads.values import Escape
from cutjax.fusion.jaxprs import Graph, is_literal
from cutjax.fusion.keys import Keys
from cutjax.fusion.region import Region
from cutjax.primitives import vocabulary
from cutjax.primitives.derivative import outside


class Found(NamedTuple):
    """A head of a program.

    Attributes:
      region: its equations.
      head: how it is computed.
      function: makes the function that takes their place, of the region's inputs.
      key: equal where functions are, told keys of equations.
    """

    region: Region
    head: Head
    function: Callable[[], Callable[..., list[Any]]]
    key: Callable[[Keys], Hashable]


def found(graph: Graph, wanted: Callable[[Dot], bool]) -> Iterator[Found]:
    """Yields the heads of a program, whose products are wanted; each may have been replaced before the next."""
    places = [i for i in sorted(graph.live) if any(map(wanted, dots(graph.eqns[i], i)))]
    if not places:
        return
    flat = Flat(graph)
    at = {top: k for k, top in enumerate(flat.tops)}
    for i in places:
        for dot in dots(flat.eqns[at[i]], i) if i in graph.live else ():
            try:
                search = Search(flat, dot)
                yield _found(graph, flat, search, planned(flat, search))
            except Escape:
                continue
            break


def _found(graph: Graph, flat: Flat, search: Search, head: Head) -> Found:
    beside = {flat.tops[k] for k in search.beside}
    core = {flat.tops[k] for k in search.taken - search.beside}
    core |= {flat.tops[flat.producer[x]] for x in (*head.made, *(end.out for end in head.ends))}
    core |= _between(graph, core)
    members = sorted(core | beside)
    if any(graph.eqns[i].effects or i not in graph.live for i in members):
        raise Escape("an operation with side effects between losses and gradients")
    products = {head.dot.at, *(flat.tops[flat.producer[end.out]] for end in head.ends if end.other is not None)}
    if any_equation((graph.eqns[i] for i in members if i not in products), is_product):
        raise Escape("a product between losses and gradients")
    inside, made = set(members), {x for i in members for x in graph.eqns[i].outvars}
    results = [
        x
        for i in sorted(core)
        for x in graph.eqns[i].outvars
        if x in graph.outvars or not inside.issuperset(graph.consumers.get(x, ()))
    ]
    if any(isinstance(search.values.get(flat.name(x)), Full) for x in results):
        raise Escape("logits that are used elsewhere")
    makers, needed = _makers(graph, flat, head, made, results)
    read = [x for i in members for x in graph.inputs[i] if x not in made]
    inputs = list(dict.fromkeys([*needed, *read]))
    if graph.reaches(inputs, results):
        raise Escape("what it reads depends on what it makes")
    found: Any = ("head", head.dot.axis, vocabulary.CHUNK_BYTES)
    region = Region((head.dot.at,), set(), found, (), members, inputs, results, [])
    names = [flat.name(x) for x in inputs], [flat.name(x) for x in results]
    eqns = [graph.eqns[i] for i in members]
    function = functools.partial(_function, head, makers, names, eqns, inputs, results)
    return Found(region, head, function, functools.partial(key, head, makers, *names))


def _between(graph: Graph, core: set[int]) -> set[int]:
    """Returns the equations that read what some make, and make what these read."""
    mask, above = sum(1 << i for i in core), 0
    for i in core:
        for x in graph.inputs[i]:
            above |= graph.above.get(x, 0)
    return {
        i
        for i in graph.live
        if above >> i & 1 and i not in core and any(graph.depends_on(x, mask) for x in graph.inputs[i])
    }


def _makers(
    graph: Graph, flat: Flat, head: Head, made: set[Any], results: Sequence[Any]
) -> tuple[dict[Any, Any], list[Any]]:
    """Returns the equations, by variable, that a head computes as the program does, and the variables that it reads."""
    outside = {flat.name(x): x for i in graph.live for x in graph.eqns[i].outvars if x not in made}
    operands = [x.source for x in (head.w, *head.others) if x is not None]
    stack = [head.dot.x, *operands, *(flat.name(x) for x in results)]
    stack += [x.of[0] for x in (*head.rows, *head.scalars, *head.columns, *head.late) if x.kind != "inside"]
    ends, makers, needed, seen = {end.out for end in head.ends}, {}, {}, set()
    while stack:
        x = stack.pop()
        if is_literal(x) or x in seen or x in ends or x in head.made:
            continue
        seen.add(x)
        eqn = flat.maker(x)
        if x in outside or eqn is None:
            needed[outside.get(x, x)] = None
        else:
            makers[x] = eqn
            stack += eqn.invars
    return makers, list(needed)


def _function(
    head: Head,
    makers: dict[Any, Any],
    names: tuple[Sequence[Any], Sequence[Any]],
    eqns: Sequence[Any],
    inputs: Sequence[Any],
    results: Sequence[Any],
) -> Callable[..., list[Any]]:
    """Returns the function of a head, with the derivative of the equations that it takes the place of."""

    def fused(*args: Any) -> list[Any]:
        program = Program(head, makers, dict(zip(names[0], args, strict=True)))
        return [program.read(x) for x in names[1]]

    return functools.partial(outside, any_equation(eqns, reverse_only), fused, replayed(eqns, inputs, results))
