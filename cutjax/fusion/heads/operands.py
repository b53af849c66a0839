"""The operands of values of the logits' size: rows, columns, numbers, and what is made of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from cutjax.epilogue.jaxpr import reorders
from cutjax.fusion.flat import Flat
from cutjax.fusion.heads.forms import Form, applied, form_of, total
from cutjax.fusion.heads.grid import Grid, axis_after_reshape, real
from cutjax.fusion.heads.labels import Columns, scattered, source
from cutjax.fusion.heads.parts import INDEX, PRODUCT, Dot, Full, Row
from cutjax.fusion.heads.values import ELEMENTWISE, PASSING, Escape, Expr, Label, Leaf, Value, is_made, number, plus
from cutjax.fusion.jaxprs import is_literal, is_marked

MOVES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
ADDS = ("scatter-add", "scatter_add")


class Operands:
    """The values of variables beside the logits of a product.

    Attributes:
      flat, dot: the program, and the product.
      values: of variables that are made of the logits.
      taken: the places of the equations that have values of the logits' size.
      beside: those of them that are not made of the logits, such as labels as rows of zeros and ones.
    """

    def __init__(self, flat: Flat, dot: Dot):
        self.flat, self.dot = flat, dot
        self.whole = Grid(dot.tokens)
        self.values: dict[Any, Full | Row] = {dot.out: Full(PRODUCT, dot.axis, self.whole)}
        self.taken: set[int] = {flat.producer[dot.out]}
        self.beside: set[int] = set()
        self._leaves: dict[Any, Leaf] = {}
        self._others: dict[Any, Value | Form] = {}

    def operand(self, x: Any, axis: int, grid: Grid, shape: tuple[int, ...], lies: Any = None) -> Value | Form:
        """Returns the value of an operand of an operation.

        Args:
          x: its variable.
          axis, grid, shape: those of the result, which has the logits' size.
          lies: the operand's own shape, of the result's rank.
        """
        if is_literal(x):
            return number(x)
        found, lies = self.values.get(x), tuple(x.aval.shape if lies is None else lies)
        if isinstance(found, Full):
            if (found.axis, found.grid) != (axis, grid):
                raise Escape("an operation on values that lie otherwise")
            return found.value
        along = real(lies)
        if not along:
            return self.scalar(x)
        if axis not in along:
            lies, tokens = (tuple(n for i, n in enumerate(of) if i != axis) for of in (lies, shape))
            return self.row(x, grid) if math.prod(lies) == grid.size else self.along(x, grid, lies, tokens)
        key = x, axis, grid, shape, lies
        if key not in self._others:
            self._others[key] = self._column(x) if along == [axis] else self._other(x, axis, grid, shape)
        return self._others[key]

    def combined(self, eqn: Any, axis: int, grid: Grid, shape: tuple[int, ...]) -> Value | Form:
        """Returns the value of an elementwise equation, or one that adds at labels; its result has the logits' size."""
        if eqn.primitive.name not in ADDS:
            return applied(eqn, [self.operand(x, axis, grid, shape) for x in eqn.invars])
        label = self.label(scattered(self.flat, eqn, axis), grid)
        terms = {**form_of(self.operand(eqn.invars[0], axis, grid, shape)).whole}
        terms["label", label] = plus(terms.get(("label", label), 0.0), self.row(eqn.invars[2], grid))
        return Form(terms)

    def label(self, columns: Columns, grid: Grid) -> Label:
        """Returns the label that a gather or a scatter has."""
        index = self.row(columns.index, grid)
        if not isinstance(index, Leaf | Expr) or is_made(index):
            raise Escape("labels that are made of the logits")
        return Label(index, columns.clipped)

    def scalar(self, x: Any) -> Value:
        """Returns the value of a variable with one element."""
        found = self.values.get(x)
        if isinstance(found, Row):
            return self.leaf("scalar", (x,), made=True) if found.value is None else found.value
        known = self.flat.known(x)
        if known is not None and jnp.issubdtype(known.dtype, jnp.floating):
            return float(known.reshape(()))
        return self.leaf("scalar", (x,))

    def row(self, x: Any, grid: Grid) -> Value:
        """Returns the value of a variable with an element for each token, in their order."""
        if is_literal(x):
            return number(x)
        if not real(x.aval.shape):
            return self.scalar(x)
        x = source(self.flat, x)
        if x.aval.size != grid.size:
            raise Escape("values of other tokens")
        found = self.values.get(x)
        if isinstance(found, Row) and found.value is not None and found.grid in (None, grid):
            return found.value
        if isinstance(found, Full):
            raise Escape("a reshape of the logits to rows")
        eqn = self.flat.maker(x) if found is None else None
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim" and not real(eqn.invars[0].aval.shape):
            return number(eqn.invars[0]) if is_literal(eqn.invars[0]) else self.scalar(eqn.invars[0])
        if eqn is not None and (summed := self.sum_beside(eqn, grid)) is not None:
            return summed
        return self.along(x, grid, (grid.size,), (grid.size,))

    def along(self, x: Any, grid: Grid, lies: tuple[int, ...], tokens: tuple[int, ...]) -> Value:
        """Returns the value of a variable that lies along tokens, or some axes of these, as an array of its own."""
        return self.leaf("row", (x, lies, tokens, grid), made=x in self.values)

    def sum_beside(self, eqn: Any, grid: Grid) -> Value | None:
        """Returns a sum over the vocabulary that is a sum of terms; None of all else."""
        if eqn.primitive.name != "reduce_sum" or len(eqn.params["axes"]) != 1:
            return None
        (axis,), shape = eqn.params["axes"], eqn.invars[0].aval.shape
        if shape[axis] != self.dot.vocabulary or math.prod(shape) != grid.size * shape[axis]:
            return None
        before = set(self.taken), set(self.beside)
        try:
            return total(form_of(self.operand(eqn.invars[0], axis, grid, shape)), shape[axis])
        except Escape:
            self.taken, self.beside = before
            return None

    def leaf(self, kind: str, of: tuple[Any, ...], made: bool = False) -> Leaf:
        """Returns a leaf, one object for equal ones."""
        return self._leaves.setdefault((kind, of), Leaf(kind, of, made))

    def _column(self, x: Any) -> Value:
        """Returns a value along the vocabulary."""
        if x in self.values:
            raise Escape("values of columns that are made of the logits")
        x = source(self.flat, x)
        eqn = self.flat.maker(x)
        if eqn is not None and eqn.primitive.name == "iota" and real(x.aval.shape) == [eqn.params["dimension"]]:
            return INDEX
        return self.leaf("column", (x,))

    def _other(self, x: Any, axis: int, grid: Grid, shape: tuple[int, ...]) -> Value | Form:
        """Returns a value of the logits' size that the search has not come by: that of the equation that makes it."""
        eqn = self.flat.maker(x)
        if eqn is None or math.prod(shape) != x.aval.size or eqn.effects or is_marked(eqn):
            raise Escape("an array of the logits' size")
        name, params = eqn.primitive.name, eqn.params
        self.taken.add(i := self.flat.producer[x])
        if not any(y in self.values for y in eqn.invars if not is_literal(y)):
            self.beside.add(i)
        y: Any = eqn.invars[0] if eqn.invars else None
        if name == "iota" and params["dimension"] == axis:
            return INDEX
        if name == "broadcast_in_dim":
            lies = [1] * len(shape)
            for n, at in zip(y.aval.shape, params["broadcast_dimensions"], strict=True):
                lies[at] = n
            return self.operand(y, axis, grid, shape, lies)
        at = None
        if name == "transpose":
            order = params["permutation"]
            at = order[axis] if in_order(order, y.aval.shape, order[axis]) else None
        elif name in MOVES and not reorders(eqn):
            at = axis_after_reshape(shape, axis, y.aval.shape)
        if at is not None:
            return self.operand(y, at, grid, y.aval.shape)
        if name in ADDS or name in ELEMENTWISE or name in PASSING:
            return self.combined(eqn, axis, grid, shape)
        raise Escape(f"an array of the logits' size by {name}")


def in_order(order: Sequence[int], shape: Sequence[int], axis: int | None = None) -> bool:
    """True if a transposition leaves all axes but one in their order, and those of one element."""
    kept = [i for i in order if shape[i] != 1 and i != axis]
    return kept == sorted(kept)
