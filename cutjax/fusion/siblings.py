"""Products that share an operand: which of them XLA merges into one, and what each then takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cutjax.fusion.contraction import Contraction
from cutjax.fusion.form import Form
from cutjax.fusion.jaxprs import Graph, byte_count, is_literal
from cutjax.fusion.price import Price

# XLA's default of xla_gpu_dot_merger_threshold_mb: of two products, one must have so many bytes at most, its operands
# and its result together.
_MERGED_BYTES = 32 << 20


def merged_by_xla(
    graph: Graph,
    found: Mapping[int, Form],
    prices: Mapping[int, Price],
    price: Callable[[Contraction, Any], Price],
) -> dict[int, Price]:
    """Returns the prices of the products that XLA merges with others: of the time of the one product, their shares."""
    shares: dict[int, Price] = {}
    for form, members in _merged(graph, found):
        times = [prices[i].xla_us for i in members]
        one = price(form, graph.eqns[members[0]]).xla_us
        known = [time for time in times if time is not None]
        if one is None or len(known) < len(times):
            continue
        part = min(1.0, one / math.fsum(known))
        for i in members:
            shares[i] = prices[i].of_xla(part, len(members))
    return shares


def _merged(graph: Graph, found: Mapping[int, Form]) -> Iterator[tuple[Contraction, list[int]]]:
    """Yields the products that XLA makes, in the form of a kernel, and the equations of which."""
    taken: set[int] = set()
    dense = {i: form for i, form in found.items() if isinstance(form, Contraction)}
    for side in (0, 1):
        groups: dict[Any, list[int]] = {}
        for i, form in dense.items():
            operands = graph.eqns[i].invars[:2]
            shared = operands[side != form.swapped]
            if graph.eqns[i].primitive.name != "dot_general" or form.plan is not None or is_literal(shared):
                continue
            rest = form.layout, form.a if side == 0 else form.b, form.shape[:-2], form.precision
            dtypes = tuple(x.aval.dtype for x in (*operands, *graph.eqns[i].outvars))
            groups.setdefault((graph.source(shared), rest, dtypes), []).append(i)
        for group in groups.values():
            left = [i for i in group if i not in taken]
            while len(left) > 1:
                members, nbytes, rest, mask = left[:1], _bytes(graph, left[0]), [], 1 << left[0]
                for i in left[1:]:
                    small = min(nbytes, _bytes(graph, i)) <= _MERGED_BYTES
                    if small and not graph.depends_on(graph.eqns[i].outvars[0], mask):  # later ones depend on earlier
                        members.append(i)
                        mask |= 1 << i
                        nbytes += _bytes(graph, i)
                    else:
                        rest.append(i)
                if len(members) > 1:
                    taken.update(members)
                    yield beside(side, [dense[i] for i in members]), members
                left = rest


def _bytes(graph: Graph, i: int) -> int:
    return sum(map(byte_count, (*graph.eqns[i].invars, *graph.eqns[i].outvars)))


def beside(side: int, forms: Sequence[Contraction]) -> Contraction:
    """Returns the product of a shared left operand (side 0), or right one, by all others beside each other."""
    first = forms[0]
    if side == 0:
        return first.of_columns(sum(form.shape[-1] for form in forms))
    (*batch, _, n) = first.shape
    m = sum(form.shape[-2] for form in forms)
    k = first.b[-2 if first.layout[1] == "n" else -1]
    a = (m, k) if first.layout[0] == "n" else (k, m)
    return dataclasses.replace(first, a=(*first.a[:-2], *a), shape=(*batch, m, n))
