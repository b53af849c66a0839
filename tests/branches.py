"""A walk over a jaxpr for collectives that some devices wait for in a branch, or a loop, that others do not take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

Axes = frozenset[str]
ALIKE = {"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}  # on all devices
APART = {"all_to_all", "ragged_all_to_all", "ppermute", "reduce_scatter", "psum_scatter"}


def waits(closed: ClosedJaxpr) -> list[str]:
    """The collectives that stand in a branch, or a loop, whose predicate varies over an axis of theirs.

    Which axes of a shard_map a value varies over follows from its specs and from collectives, so it is known with
    ``check_vma=False`` too.
    """
    found: list[str] = []
    _walk(closed.jaxpr, [frozenset()] * len(closed.jaxpr.invars), frozenset(), found)
    return found


def _axes(params: Any) -> Axes:
    named = params.get("axes", params.get("axis_name", ()))
    return frozenset(x for x in (named if isinstance(named, (tuple, list)) else (named,)) if isinstance(x, str))


def jaxprs(params: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, (Jaxpr, ClosedJaxpr)):
                yield getattr(x, "jaxpr", x)


def _walk(jaxpr: Jaxpr, given: Sequence[Axes], under: Axes, found: list[str]) -> list[Axes]:
    """Returns the axes over which the results vary, where branches above are taken by devices along ``under``."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    left: dict[Any, tuple[Any, Axes]] = {}  # what a shard_map keeps for its gradient: its spec, and over what it varies

    def of(x: Any) -> Axes:
        return frozenset() if isinstance(x, Literal) else known.get(x, frozenset())

    for eqn in jaxpr.eqns:
        name, ins = eqn.primitive.name, [of(x) for x in eqn.invars]
        every = frozenset().union(*ins)
        if name in ALIKE | APART:
            if over := _axes(eqn.params) & under:
                found.append(f"{name} over {sorted(over)}: {eqn.outvars[0].aval.str_short()}")
            over = _axes(eqn.params)
            outs = [every - over if name in ALIKE else every | over] * len(eqn.outvars)
        elif name == "axis_index":
            outs = [_axes(eqn.params)]
        elif name == "cond":
            choice, *rest = ins
            each = [_walk(branch.jaxpr, rest, under | choice, found) for branch in eqn.params["branches"]]
            outs = [choice.union(*same) for same in zip(*each, strict=True)]
        elif name == "while":
            outs = _loop(eqn.params, ins, under, found)
        elif name == "scan":
            outs = _scan(eqn, ins, under, found)
        elif name == "shard_map":
            inner = eqn.params["jaxpr"]
            entering = []
            for x, over, spec in zip(eqn.invars, ins, eqn.params["in_specs"], strict=True):
                before, varied = (None, frozenset()) if isinstance(x, Literal) else left.get(x, (None, frozenset()))
                entering.append(over | (varied if before == spec else frozenset(_names(spec))))
            outs = _walk(inner, entering, under, found)
            left |= dict(zip(eqn.outvars, zip(eqn.params["out_specs"], outs, strict=True), strict=True))
            outs = [x - frozenset(eqn.params["mesh"].axis_names) for x in outs]
        else:
            outs = [every] * len(eqn.outvars)
            for inner in jaxprs(eqn.params):
                alike = ins if len(inner.invars) == len(ins) else [every] * len(inner.invars)
                results = _walk(inner, alike, under, found)
                if len(results) == len(outs):
                    outs = results
        known |= dict(zip(eqn.outvars, outs, strict=True))
    return [of(x) for x in jaxpr.outvars]


def _names(spec: Any) -> Iterator[str]:
    for axes in spec:
        yield from (axes,) if isinstance(axes, str) else axes or ()


def _loop(params: Any, ins: Sequence[Axes], under: Axes, found: list[str]) -> list[Axes]:
    of_cond, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    to_cond, to_body, carry = ins[:of_cond], ins[of_cond:of_body], list(ins[of_body:])
    while True:
        (choice,) = _walk(params["cond_jaxpr"].jaxpr, [*to_cond, *carry], under, [])
        after = _walk(params["body_jaxpr"].jaxpr, [*to_body, *carry], under, [])
        wider = [x | y | choice for x, y in zip(carry, after, strict=True)]
        if wider == carry:
            break
        carry = wider
    for inner, args in ((params["cond_jaxpr"], to_cond), (params["body_jaxpr"], to_body)):
        _walk(inner.jaxpr, [*args, *carry], under | choice, found)
    return carry


def _scan(eqn: Any, ins: Sequence[Axes], under: Axes, found: list[str]) -> list[Axes]:
    body = eqn.params["jaxpr"].jaxpr
    # Versions of jax count constants and carries otherwise in parameters. What is scanned has an axis more outside.
    carried = sum(x.aval.ndim == y.aval.ndim for x, y in zip(eqn.outvars, body.outvars, strict=True))
    scanned = sum(x.aval.ndim != y.aval.ndim for x, y in zip(eqn.invars, body.invars, strict=True))
    consts = len(ins) - carried - scanned
    carry = list(ins[consts : consts + carried])
    while True:
        outs = _walk(body, [*ins[:consts], *carry, *ins[consts + carried :]], under, [])
        wider = [x | y for x, y in zip(carry, outs, strict=False)]
        if wider == carry:
            break
        carry = wider
    return _walk(body, [*ins[:consts], *carry, *ins[consts + carried :]], under, found)
