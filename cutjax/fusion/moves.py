"""Transpositions around a product, taken into it: a kernel walks memory in other orders, and XLA moves nothing."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from cutjax.fusion.form import Form
from cutjax.fusion.jaxprs import Graph, is_literal


class Moved(NamedTuple):
    """A product with transpositions around it: the equation of a dot_general, of whose result axes are permuted.

    Attributes:
      eqn: the dot_general, of what is transposed to make operands, and with the variable that is its result transposed.
      permutation: of its result.
      members: the equations that it stands for: the product, and transpositions of its result.
    """

    eqn: Any
    permutation: tuple[int, ...]
    members: list[int]


def moved(graph: Graph, i: int) -> Iterator[Moved]:
    """Yields a dot_general with the transpositions around it, then with fewer; never with none."""
    eqn = graph.eqns[i]
    sources = [_source(graph, x) for x in eqn.invars]
    out, members = eqn.outvars[0], [i]
    order = tuple(range(out.aval.ndim))
    while (move := _only_reader(graph, out)) is not None:
        members.append(move)
        order = tuple(order[axis] for axis in graph.eqns[move].params["permutation"])
        out = graph.eqns[move].outvars[0]
    found = [source is not x for (source, _), x in zip(sources, eqn.invars, strict=True)] + [members != [i]]
    if not any(found):
        return
    for *taken, result in _choices(*found):
        pairs = [pair if take else _as_it_is(x) for pair, take, x in zip(sources, taken, eqn.invars, strict=True)]
        dims = tuple(tuple(map(tuple, pair)) for pair in eqn.params["dimension_numbers"])
        dims, permutation = _renamed(dims, tuple(order for _, order in pairs))
        outvars = [out] if result else list(eqn.outvars)
        params = {**eqn.params, "dimension_numbers": dims}
        new = eqn.replace(invars=[x for x, _ in pairs], outvars=outvars, params=params)
        permutation = tuple(permutation[axis] for axis in order) if result else permutation
        yield Moved(new, permutation, members if result else [i])


@functools.cache
def _choices(*found: bool) -> list[tuple[bool, ...]]:
    """Returns the ways to take some of what was found, most of it first."""
    choices = itertools.product(*([True, False] if some else [False] for some in found))
    return list(filter(any, sorted(choices, key=sum, reverse=True)))


@functools.lru_cache(maxsize=4096)
def _renamed(dims: Any, orders: tuple[tuple[int, ...], ...]) -> tuple[Any, tuple[int, ...]]:
    """Returns dimension numbers of operands whose axes are elsewhere, and where the axes of the result are then."""
    contracted, batch = dims
    results = list(range(len(batch[0])))
    for order, *some in zip(orders, contracted, batch, strict=True):
        taken = {axis for axes in some for axis in axes}
        free = [order[axis] for axis in range(len(order)) if axis not in taken]
        results += [len(results) + sorted(free).index(axis) for axis in free]
    dims = (
        tuple(tuple(o[i] for i in axes) for o, axes in zip(orders, pair, strict=True)) for pair in (contracted, batch)
    )
    return tuple(dims), tuple(results)


def _as_it_is(x: Any) -> tuple[Any, tuple[int, ...]]:
    return x, tuple(range(x.aval.ndim))


def _source(graph: Graph, x: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns the variable that is transposed to make another, and where each axis of that comes from."""
    x, order = _as_it_is(x)
    while not is_literal(x) and x in graph.producer and x not in graph.definition:
        eqn = graph.eqns[graph.producer[x]]
        if eqn.primitive.name != "transpose" or is_literal(eqn.invars[0]):
            break
        order = tuple(eqn.params["permutation"][axis] for axis in order)
        x = eqn.invars[0]
    return x, order


def _only_reader(graph: Graph, x: Any) -> int | None:
    """Returns the transposition that alone reads a variable."""
    readers = list(graph.consumers.get(x, ()))
    if x in graph.outvars or x in graph.definition or len(readers) != 1 or readers[0] >= len(graph.eqns):
        return None
    eqn = graph.eqns[readers[0]]
    return readers[0] if eqn.primitive.name == "transpose" and eqn.outvars[0] not in graph.definition else None


def matrices(form: Form) -> int:
    """Returns the number of products of matrices that a form is a batch of."""
    return math.prod(map(max, zip(form.a[:-2], form.b[:-2], strict=True)))
