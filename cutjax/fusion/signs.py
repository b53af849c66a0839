"""The masks of a ReLU: made of its result, which programs keep, where what it is of would take more reading."""

from __future__ import annotations

from typing import Any

from jax import lax

from cutjax.epilogue.jaxpr import CALLS, callee
from cutjax.fusion.jaxprs import Graph, full_size, is_literal, opened, with_equations


def of_results(jaxpr: Any) -> Any:
    """Returns a program that compares ``relu(x)`` with zero for ``x > 0``, where x is made of several arrays.

    The result is the same. XLA computes x anew where it reads the mask; a kernel would read each of those arrays.
    """
    eqns, results = list(opened(jaxpr).eqns), {}
    masks: list[tuple[int, Any]] = []  # that follow their ReLU, with its result
    for i, eqn in enumerate(eqns):
        if _is_relu(eqn):
            results[eqn.invars[0]] = eqn.outvars[0]
        elif eqn.primitive is lax.gt_p and _is_zero(eqn.invars[1]) and eqn.invars[0] in results:
            masks.append((i, results[eqn.invars[0]]))
    graph = Graph(opened(jaxpr)) if masks else None
    masks = [(i, result) for i, result in masks if graph and _sources(graph, eqns[i].invars[0]) > 1]
    for i, result in masks:
        eqns[i] = eqns[i].replace(invars=[result, eqns[i].invars[1]])
    return with_equations(jaxpr, eqns) if masks else jaxpr


def _is_zero(x: Any) -> bool:
    return is_literal(x) and x.aval.ndim == 0 and x.val == 0


def _is_relu(eqn: Any) -> bool:
    """True of ``max(x, 0)``, called as it may be."""
    if not eqn.invars or is_literal(eqn.invars[0]):
        return False
    if eqn.primitive.name in CALLS:
        inner = callee(eqn)[0]
        same = len(inner.eqns) == 1 and len(inner.invars) == 1 and inner.outvars == inner.eqns[0].outvars
        return same and inner.eqns[0].invars[0] is inner.invars[0] and _is_relu(inner.eqns[0])
    return eqn.primitive is lax.max_p and _is_zero(eqn.invars[1])


def _sources(graph: Graph, x: Any) -> int:
    """Returns the number of arrays as large as a variable that it is made of element by element."""
    size, found, seen, stack = full_size(x.aval), 0, set(), [x]
    while stack:
        x = stack.pop()
        if x in seen or full_size(x.aval) != size:
            continue
        seen.add(x)
        i = graph.producer.get(x, -1)
        if i >= 0 and graph.is_pointwise(i):
            stack += graph.inputs[i]
        else:
            found += 1
    return found
