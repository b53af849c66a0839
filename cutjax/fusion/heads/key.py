"""Keys of heads: equal where one function takes the place of both."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from cutjax.fusion.heads.grid import Grid
from cutjax.fusion.heads.head import Head, Operand
from cutjax.fusion.heads.parts import End
from cutjax.fusion.heads.values import Bound, Expr, Label, Leaf
from cutjax.fusion.jaxprs import is_literal
from cutjax.fusion.keys import Keys, argument


def key(head: Head, makers: Mapping[Any, Any], inputs: Sequence[Any], results: Sequence[Any], keys: Keys) -> Hashable:
    """Returns the key of a head's function.

    Args:
      head: the plan.
      makers: the equations that it computes as the program does.
      inputs, results: its variables.
      keys: those of equations.
    """
    writer = _Writer(makers, inputs, keys)
    made = [
        (writer.number(x), writer.number(v.value), writer.number(v.grid), v.shape, v.summed)
        for x, v in head.made.items()
    ]
    fields = (head.w, head.others, head.ends, head.logits, tuple(head.terms.items()), head.phi, head.keeps)
    lists = (head.rows, head.scalars, head.columns, head.late, head.most, head.totals, head.labels, tuple(results))
    dot = head.dot
    of_dot = (dot.layout, dot.axis, dot.precision, dot.out.aval, writer.number(dot.x))
    return (of_dot, tuple(made), *(writer.number(x) for x in (*fields, *lists)), tuple(writer.rows))


class _Writer:
    """Writes values as rows of numbers, each once: equal values of equal programs have equal numbers."""

    def __init__(self, makers: Mapping[Any, Any], inputs: Sequence[Any], keys: Keys):
        self.rows: list[Hashable] = []
        self._makers, self._keys = makers, keys
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # whose ids are numbered
        for x in inputs:
            self._add(x, ("input", x.aval))

    def _add(self, x: Any, row: Hashable) -> int:
        self.rows.append(row)
        self._kept.append(x)
        return self._numbers.setdefault(id(x), len(self.rows) - 1)

    def number(self, x: Any) -> Hashable:
        """Returns the number of a value, or what stands for it."""
        if isinstance(x, tuple | list):
            return tuple(map(self.number, x))
        if x is None or isinstance(x, bool | int | str):
            return x
        if is_literal(x):
            return argument(x)
        found = self._numbers.get(id(x))
        return self._add(x, self._row(x)) if found is None else found

    def _row(self, x: Any) -> Hashable:
        if isinstance(x, core.Var):
            eqn = self._makers.get(x)
            if eqn is None:  # an end, or what kernels find
                return "variable", x.aval
            place = [y is x for y in eqn.outvars].index(True)
            return "equation", eqn.primitive, self._keys.params(eqn), place, self.number(list(eqn.invars))
        if isinstance(x, Leaf):
            return "leaf", x.kind, x.made, self.number(x.of)
        if isinstance(x, Expr):
            op = x.op
            how = (
                (op.eqn.primitive, self._keys.params(op.eqn), *(y.aval for y in op.eqn.invars))
                if isinstance(op, Bound)
                else op
            )
            return "expression", how, self.number(x.args)
        if isinstance(x, Label):
            return "label", x.clipped, self.number(x.index)
        if isinstance(x, Grid):
            return "grid", x.size, self.number(x.within), x.shape, x.starts, x.strides, x.counts
        if isinstance(x, Operand):
            return "operand", self.number(x.source), x.turned, x.dtype
        if isinstance(x, End):
            kind = (x.kind, x.layout, x.first, x.precision, x.out.aval)
            return "end", kind, self.number(x.form.factor), self.number((x.out, x.other))
        value = np.asarray(x)
        return "number", str(value.dtype), value.shape, value.tobytes()
