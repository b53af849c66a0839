"""Products of weights that a program converts from 8 bits: made ours, of the weights as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from cutjax.dtypes import are_narrow
from cutjax.fusion.contraction import is_sharded
from cutjax.fusion.jaxprs import is_literal, opened, with_equations
from cutjax.ops.dot_general import permuted


def narrowed(jaxpr: Any) -> Any:
    """Returns a program whose products read narrow arrays as they are, where nothing else reads them converted."""
    inner = opened(jaxpr)
    sources = {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in inner.eqns
        if eqn.primitive is lax.convert_element_type_p
        and are_narrow(eqn.outvars[0].aval.dtype, eqn.invars[0].aval.dtype)
        and not is_literal(eqn.invars[0])
    }
    if not sources:
        return jaxpr
    readers = (eqn.invars for eqn in inner.eqns if eqn.primitive is not lax.dot_general_p)
    for x in itertools.chain(inner.outvars, *readers):
        if not is_literal(x):
            sources.pop(x, None)
    eqns: list[Any] = []
    for eqn in inner.eqns:
        made = _made(eqn, sources) if eqn.primitive is lax.dot_general_p else None
        eqns += [eqn] if made is None else made
    return with_equations(jaxpr, eqns)


def _made(eqn: Any, sources: dict[Any, Any]) -> list[Any] | None:
    """Returns the equations of our product in the place of one; None where it has no narrow operand."""
    if any(is_literal(x) or is_sharded(x.aval.sharding) for x in eqn.invars):
        return None
    left, right = eqn.invars
    if right in sources:
        invars = [left, sources[right]]
    elif left in sources:
        invars = [sources[left], right]
    else:
        return None
    return in_place_of(eqn, lambda *xs: permuted(*xs, **eqn.params), invars)


def in_place_of(eqn: Any, function: Callable[..., Any], invars: Sequence[Any]) -> list[Any] | None:
    """Returns the equations of a function of variables that take the place of another; None where it has constants."""
    made = jax.make_jaxpr(function)(*(x.aval for x in invars))
    body = opened(made)
    if made.consts:
        return None
    names = dict(zip(body.invars, invars, strict=True)) | dict(zip(body.outvars, eqn.outvars, strict=True))

    def renamed(x: Any) -> Any:
        return x if is_literal(x) else names.get(x, x)

    return [
        inner.replace(
            invars=[renamed(x) for x in inner.invars],
            outvars=[renamed(x) for x in inner.outvars],
            source_info=eqn.source_info,
        )
        for inner in body.eqns
    ]
