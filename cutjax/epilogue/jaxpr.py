"""Jaxprs read: calls and what they call, the equations that results need, and how to compute them one by one."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

HIGHER_PRIMITIVE = "call_hi_primitive"  # of jax 0.12: an operation that is made of others, such as ldexp
CALLS = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # of jax 0.12, in its place
    "core_call": "call_jaxpr",
    "composite": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    HIGHER_PRIMITIVE: "_prim",
}
IDENTITIES = frozenset(["copy", "copy_p", "pbroadcast", "pcast", "pvary"])
# Identities of the value alone, which mean something to a derivative, to jax.checkpoint or to XLA.
MEANING = frozenset(["device_put", "name", "optimization_barrier", "reshard", "sharding_constraint", "stop_gradient"])
UNIT_MOVES = ("reshape", "squeeze", "expand_dims")


def is_open(eqn: Any) -> bool:
    """True if an equation is a call that may be opened: it says nothing about where its results lie, or to XLA."""
    name, params = eqn.primitive.name, eqn.params
    if name not in ("jit", "pjit"):
        return name in CALLS
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    if any(type(x).__name__ != "UnspecifiedValue" for x in shardings) or any(x is not None for x in layouts):
        return False
    return not params["compiler_options_kvs"]


def reorders(eqn: Any) -> bool:
    """True if an equation is a reshape of axes in another order, which ``lax.reshape`` has too."""
    return eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None


def has_rule(eqn: Any) -> bool:
    """True if an equation has a derivative of its own, not that of what it computes."""
    return eqn.primitive.name.startswith("custom_") or eqn.primitive.name == HIGHER_PRIMITIVE


def callee(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the jaxpr of a call and its constants; they are one object or two, as jax has it."""
    jaxpr = eqn.params[CALLS[eqn.primitive.name]]
    if eqn.primitive.name == HIGHER_PRIMITIVE:
        expand, tree = jaxpr.expand, jaxpr.in_tree
        flat = jax.make_jaxpr(lambda *xs: jax.tree.leaves(expand(*jax.tree.unflatten(tree, xs))))
        jaxpr = flat(*(x.aval for x in eqn.invars))
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def needed_equations(jaxpr: Any) -> list[Any]:
    """Returns the equations that the results need, in order."""
    wanted = {id(x) for x in jaxpr.outvars}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if any(id(x) in wanted for x in eqn.outvars):
            wanted.update(map(id, eqn.invars))
            found.append(eqn)
    return found[::-1]


def bind_equation(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Computes an equation as JAX does."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def placed_anywhere(eqn: Any) -> Any:
    """Returns an equation that does not say how its results lie on explicit axes."""
    said = {name: None for name in ("sharding", "out_sharding") if eqn.params.get(name) is not None}
    return eqn.replace(params={**eqn.params, **said}) if said else eqn


def evaluate(
    jaxpr: Any, consts: Iterable[Any], args: Iterable[Any], step: Callable[..., list[Any]] = bind_equation
) -> list[Any]:
    """Computes a jaxpr, each equation by ``step(eqn, args)``."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(x: Any) -> Any:
        return np.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else env[x]

    for eqn in needed_equations(jaxpr):
        env.update(zip(eqn.outvars, step(eqn, [read(x) for x in eqn.invars]), strict=True))
    return [read(x) for x in jaxpr.outvars]


def reverse_only(eqn: Any) -> bool:
    """True if a derivative is known in reverse mode alone."""
    return eqn.primitive.name.startswith("custom_vjp")


def any_equation(eqns: Iterable[Any], found: Callable[[Any], bool]) -> bool:
    """True if something is found of one of some equations, or of those of what they call."""
    return any(
        found(eqn) or any(any_equation(inner.eqns, found) for inner in jaxprs_in_params(eqn.params)) for eqn in eqns
    )


def names_of_results(jaxpr: Any) -> tuple[list[list[str]], set[Any]]:
    """Returns the names that each result of a jaxpr bears, the first one first, and the variables that bear them.

    Those are ``checkpoint_name``'s, of what is a result and nothing else's argument.
    """
    readers = collections.Counter(x for eqn in jaxpr.eqns for x in eqn.invars if not hasattr(x, "val"))
    makers = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "name"}
    named: set[Any] = set()
    names: list[list[str]] = []
    for x in jaxpr.outvars:
        names.append([])
        most = 0
        while not hasattr(x, "val") and x in makers and readers[x] <= most:
            named.add(x)
            names[-1].insert(0, makers[x].params["name"])
            (x,), most = makers[x].invars, 1
    return names, named
