"""The equations of a program as one list, with those of jitted functions and of custom rules in the calls' places."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from cutjax.epilogue.expression import OPS
from cutjax.epilogue.jaxpr import IDENTITIES, UNIT_MOVES, any_equation, bind_equation, callee, is_open, needed_equations
from cutjax.fusion.contraction import is_product
from cutjax.fusion.jaxprs import Graph, is_literal, is_marked, new_var, renamed

_OPENED = frozenset(["jit", "pjit", "closed_call", "eval_jaxpr", "core_call"])
_OPENED |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_FOLDED = OPS | {"broadcast_in_dim", *UNIT_MOVES}
_MOST_FOLDED = 16  # elements of an array that is known while a program is traced


class Flat:
    """The equations that results need, those of calls in the calls' places.

    Attributes:
      eqns: the equations.
      tops: of each, the equation of the program that it is, or that calls it.
      producer: of each variable that is made, the equation.
    """

    def __init__(self, graph: Graph):
        self.eqns: list[Any] = []
        self.tops: list[int] = []
        self.producer: dict[Any, int] = {}
        self._names: dict[Any, Any] = {}  # of what a call makes, the variable in it
        self._known: dict[Any, np.ndarray | None] = {}
        for i in sorted(graph.live):
            self._add(graph.eqns[i], i)
        needed = {self.name(x) for x in graph.outvars}
        kept = []
        for i in reversed(range(len(self.eqns))):
            eqn = self.eqns[i]
            if eqn.effects or not needed.isdisjoint(eqn.outvars):
                needed.update(x for x in eqn.invars if not is_literal(x))
                kept.append(i)
        self.eqns = [self.eqns[i] for i in reversed(kept)]
        self.tops = [self.tops[i] for i in reversed(kept)]
        self.producer = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.outvars}

    def name(self, x: Any) -> Any:
        """Returns the variable, or number, that a variable of the program is here."""
        while not is_literal(x) and x in self._names:
            x = self._names[x]
        return x

    def maker(self, x: Any) -> Any:
        """Returns the equation that makes a variable; None of an argument and a number."""
        i = -1 if is_literal(x) else self.producer.get(x, -1)
        return None if i < 0 else self.eqns[i]

    def known(self, x: Any) -> np.ndarray | None:
        """Returns the value of what is made of numbers alone; None of all else."""
        if is_literal(x):
            return np.asarray(x.val, x.aval.dtype)
        if x not in self._known:
            eqn, found = self.maker(x), None
            name = eqn.primitive.name if eqn is not None and x.aval.size <= _MOST_FOLDED else ""
            if eqn is not None and (name in IDENTITIES or name in _FOLDED):
                args = list(map(self.known, eqn.invars))
                if name in IDENTITIES:
                    found = args[0]
                elif all(arg is not None for arg in args):
                    with jax.ensure_compile_time_eval():
                        found = np.asarray(bind_equation(eqn, args)[list(eqn.outvars).index(x)])
            self._known[x] = found
        return self._known[x]

    def _add(self, eqn: Any, top: int) -> None:
        eqn = renamed(eqn, self._names)
        body = _body(eqn)
        if body is None:
            self.eqns.append(eqn)
            self.tops.append(top)
            return
        names = dict(zip(body.invars, eqn.invars, strict=True))
        for inner in needed_equations(body):
            inner = renamed(inner, names)
            outvars = [new_var(x) for x in inner.outvars]
            names.update(zip(inner.outvars, outvars, strict=True))
            self._add(inner.replace(outvars=outvars), top)
        for out, x in zip(eqn.outvars, body.outvars, strict=True):
            self._names[out] = self.name(x if is_literal(x) else names[x])


def _body(eqn: Any) -> Any:
    """Returns the program of a call that is opened; None of all else, and of one with a product."""
    if eqn.primitive.name not in _OPENED or not is_open(eqn) or is_marked(eqn) or eqn.effects:
        return None
    body, consts = callee(eqn)
    return None if len(consts) or body.constvars or any_equation(body.eqns, is_product) else body
