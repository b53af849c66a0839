"""Transpositions that undo each other around casts, as of the gradient of a weight that is stored transposed."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend import core

from cutjax.fusion.jaxprs import is_literal, opened, renamed, with_equations

_KINDS = (lax.transpose_p, lax.convert_element_type_p)


def cancelled(jaxpr: Any) -> Any:
    """Returns a program in which what was transposed, cast and transposed back is only cast."""
    inner = opened(jaxpr)
    makers: dict[Any, Any] = {}
    names: dict[Any, Any] = {}
    eqns: list[Any] = []

    for eqn in inner.eqns:
        eqn = renamed(eqn, names) if names else eqn
        if eqn.primitive in _KINDS:
            makers[eqn.outvars[0]] = eqn
        found = _undone(eqn, makers) if eqn.primitive is lax.transpose_p else None
        if found is None:
            eqns.append(eqn)
            continue
        x, casts = found
        for cast in casts:
            out = core.Var(x.aval.update(dtype=cast.outvars[0].aval.dtype, weak_type=False))
            eqns.append(cast.replace(invars=[x], outvars=[out]))
            x = out
        names[eqn.outvars[0]] = x
    outvars = [x if is_literal(x) else names.get(x, x) for x in inner.outvars]
    return with_equations(jaxpr, eqns, outvars) if names else jaxpr


def _undone(eqn: Any, makers: dict[Any, Any]) -> tuple[Any, list[Any]] | None:
    """Returns the array that a transposition restores by undoing another, and the casts in between; else None."""
    casts: list[Any] = []
    maker = makers.get(eqn.invars[0])
    while maker is not None and maker.primitive is lax.convert_element_type_p and not is_literal(maker.invars[0]):
        casts.append(maker)
        maker = makers.get(maker.invars[0])
    if maker is None or maker.primitive is not lax.transpose_p:
        return None
    first, second = maker.params["permutation"], eqn.params["permutation"]
    return (maker.invars[0], casts[::-1]) if all(first[j] == i for i, j in enumerate(second)) else None
