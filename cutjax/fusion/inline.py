"""Calls of jitted functions in a program, opened where they are called once or are small; and what asks for nothing."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from jax.extend import core
from jax.sharding import AxisType

from cutjax.binding.rules import any_reduced
from cutjax.epilogue.jaxpr import is_open
from cutjax.fusion.jaxprs import (
    BODIES,
    bodies,
    is_literal,
    is_marked,
    new_var,
    opened,
    pointwise,
    renamed,
    with_bodies,
    with_equations,
)

_MOST_REPEATED = 64  # equations of a function that is opened wherever it is called


def inlined(jaxpr: Any, wanted: Callable[[Any], bool]) -> Any:
    """Returns a jaxpr with the equations of jitted functions in the place of some calls, and of those in them."""
    top = opened(jaxpr)
    calls = [eqn for eqn in top.eqns if eqn.primitive.name in BODIES]
    counts = collections.Counter(id(body) for eqn in calls for body in bodies(eqn))
    if not any(_inlines(eqn, counts, wanted) for eqn in calls):
        return jaxpr
    eqns: list[Any] = []

    def append(inner: Any, names: dict[Any, Any], scope: Any = None) -> list[Any]:
        """Appends equations, with other variables for theirs, in the named scope of a call; returns their results."""
        for eqn in inner.eqns:
            eqn = renamed(eqn, names) if names else eqn
            old = eqn.outvars
            if inner is not top:
                outvars = [names[x] if x in names else new_var(x) for x in old]
                eqn = eqn.replace(outvars=outvars, source_info=_within(scope, eqn.source_info))
                names.update(zip(old, eqn.outvars, strict=True))
            if not _inlines(eqn, counts, wanted):
                eqns.append(eqn)
                continue
            body = opened(eqn.params["jaxpr"])
            counts.update(id(x) for e in body.eqns for x in bodies(e))
            inside = dict(zip(body.invars, eqn.invars, strict=True))
            for x, out in zip(body.outvars, eqn.outvars, strict=True):
                if not is_literal(x) and type(out) is core.Var:  # what the body makes is the call's result by itself
                    inside.setdefault(x, out)
            inner_scope = eqn.source_info.name_stack.extend(f"jit({eqn.params['name']})")
            outs = zip(old, eqn.outvars, append(body, inside, inner_scope), strict=True)
            names.update((x, made) for x, out, made in outs if made is not out)
        return [x if is_literal(x) else names.get(x, x) for x in inner.outvars]

    outvars = append(top, {})
    return with_equations(jaxpr, eqns, outvars)


def without_idle(jaxpr: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Returns a program, and those in it, without reshards that ask for nothing; ``done`` keeps what was seen.

    Jax puts such around the constants of its derivatives where arrays lie on a mesh, whose axes may all be automatic.
    """
    if id(jaxpr) not in done:
        names: dict[Any, Any] = {}
        eqns: list[Any] = []
        changed = False
        for eqn in opened(jaxpr).eqns:
            if _is_idle(eqn):
                ((x,), (out,)) = eqn.invars, eqn.outvars
                names[out] = x if is_literal(x) else names.get(x, x)
                continue
            new = renamed(eqn, names) if names else eqn
            found = [without_idle(body, done) for body in bodies(eqn)]
            if any(x is not body for x, body in zip(found, bodies(eqn), strict=True)):
                new = with_bodies(new, lambda body, donated: without_idle(body, done))
            changed |= new is not eqn
            eqns.append(new)
        outvars = [x if is_literal(x) else names.get(x, x) for x in opened(jaxpr).outvars]
        done[id(jaxpr)] = jaxpr, with_equations(jaxpr, eqns, outvars) if names or changed else jaxpr
    return done[id(jaxpr)][1]


def _is_idle(eqn: Any) -> bool:
    """True if an equation is a reshard of a scalar on a mesh whose axes are all automatic, and of nothing unreduced."""
    if eqn.primitive.name != "reshard" or eqn.outvars[0].aval.shape:
        return False
    to = eqn.params["dst_sharding"]
    automatic = all(kind == AxisType.Auto for kind in to.mesh.axis_types)
    return automatic and not any_reduced(to) and to.memory_kind is None


def _within(scope: Any, source_info: Any) -> Any:
    """Returns the source of an equation, its named scopes within those of the call that it is of."""
    return source_info.replace(name_stack=scope + source_info.name_stack)


def _inlines(eqn: Any, counts: collections.Counter[int], wanted: Callable[[Any], bool]) -> bool:
    """True if a call is of a jitted function that is wanted, and says nothing about where it runs.

    And that is called once, or is small: one that is called often is rewritten, and lowered, once.
    """
    if eqn.primitive.name not in ("jit", "pjit") or is_marked(eqn):
        return False
    body = eqn.params["jaxpr"]
    if not is_open(eqn) or opened(body).constvars or any(eqn.params["donated_invars"]):
        return False
    if _is_several(eqn):
        return True
    return (counts[id(body)] == 1 or _size(body) <= _MOST_REPEATED) and wanted(body)


def _is_several(eqn: Any) -> bool:
    """True if a call computes several arrays, each element by element, as of a tree of parameters."""
    return len(eqn.outvars) > 1 and all(
        pointwise(inner) or inner.primitive.name == "broadcast_in_dim" for inner in opened(eqn.params["jaxpr"]).eqns
    )


def _size(jaxpr: Any) -> int:
    """Returns the number of equations, with those of all programs inside."""
    return sum(1 + sum(map(_size, bodies(eqn))) for eqn in opened(jaxpr).eqns)
