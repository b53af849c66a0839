"""The search for heads: a product by a vocabulary, the losses of its rows, and the products of their gradient.

It follows the logits through a program, each value of their size as a sum of terms (`forms`), and each value of
rows as an expression, where it is one. What reads the logits otherwise needs them in memory: then there is no head.
"""

from __future__ import annotations

import math
from typing import Any

from cutjax.epilogue.flatten import REDUCTIONS
from cutjax.epilogue.jaxpr import reorders
from cutjax.fusion.flat import Flat
from cutjax.fusion.heads.forms import Form, at_label, form_of, largest, total
from cutjax.fusion.heads.grid import Grid, axis_after_reshape, real
from cutjax.fusion.heads.labels import gathered
from cutjax.fusion.heads.operands import ADDS, MOVES, Operands, in_order
from cutjax.fusion.heads.parts import Dot, End, Full, Made, Row
from cutjax.fusion.heads.values import ELEMENTWISE, PASSING, Escape, Leaf, Value, bound, number, where
from cutjax.fusion.jaxprs import is_literal, is_marked


class Search(Operands):
    """Follows the logits of one product through a program.

    Attributes:
      made: of variables of rows, what kernels find.
      ends: where the gradient of the logits is used.

    Raises:
      Escape: if something needs the logits in memory.
    """

    def __init__(self, flat: Flat, dot: Dot):
        super().__init__(flat, dot)
        self.made: dict[Any, Made] = {}
        self.ends: list[End] = []
        for i in range(flat.producer[dot.out] + 1, len(flat.eqns)):
            eqn = flat.eqns[i]
            given = [self.values[x] for x in eqn.invars if not is_literal(x) and x in self.values]
            full = [x for x in given if isinstance(x, Full)]
            if full:
                self.taken.add(i)
                self._full(eqn, full)
            elif given:
                self._rows(eqn)

    # Equations that read values of the logits' size.

    def _full(self, eqn: Any, given: list[Full]) -> None:
        name, first = eqn.primitive.name, given[0]
        if eqn.effects or is_marked(eqn) or len(eqn.outvars) != 1:
            raise Escape(f"{name}, which is to run as it is")
        (out,) = eqn.outvars
        if any((x.axis, x.grid) != (first.axis, first.grid) for x in given):
            raise Escape(f"{name} of values that lie otherwise")
        if name == "dot_general":
            self._end(eqn)
        elif name in ("reduce_sum", "reduce_max"):
            self._reduced(eqn, first)
        elif name == "gather":
            label = self.label(gathered(self.flat, eqn, first.axis), first.grid)
            fill = eqn.params["fill_value"]
            fill = math.nan if fill is None else float(fill)
            value = at_label(form_of(first.value), label)
            value = value if label.clipped else where(Leaf("known", (label,)), value, fill)
            self._make(out, Made(value, first.grid))
        elif name == "slice":
            self.values[out] = self._sliced(eqn, first)
        elif name == "pad":
            self.values[out] = self._padded(eqn, first)
        elif name in (*MOVES, "transpose"):
            self.values[out] = self._moved(eqn, first)
        elif name in ADDS or name in ELEMENTWISE or name in PASSING:
            value = self.combined(eqn, first.axis, first.grid, tuple(out.aval.shape))
            self.values[out] = Full(value, first.axis, first.grid)
        else:
            raise Escape(name)

    def _moved(self, eqn: Any, x: Full) -> Full:
        """Returns the value of an equation that moves elements."""
        name, params, at = eqn.primitive.name, eqn.params, None
        shape, new, axis = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, x.axis
        if name == "transpose":
            order = params["permutation"]
            at = order.index(axis) if in_order(order, shape, axis) else None
        elif name == "broadcast_in_dim":
            at = params["broadcast_dimensions"][axis] if math.prod(shape) == math.prod(new) else None
        elif not reorders(eqn):
            at = axis_after_reshape(shape, axis, new)
        if at is None:
            raise Escape(f"{name}, which mixes the vocabulary with tokens")
        return Full(x.value, at, x.grid)

    def _sliced(self, eqn: Any, x: Full) -> Full:
        """Returns the value of an equation that leaves some tokens out."""
        shape, params = eqn.invars[0].aval.shape, eqn.params
        new, strides = eqn.outvars[0].aval.shape, params["strides"] or (1,) * len(shape)
        if new[x.axis] != shape[x.axis]:
            raise Escape("slice of the vocabulary")
        tokens = [i for i in range(len(shape)) if i != x.axis]
        sides = (shape, params["start_indices"], strides, new)
        return Full(x.value, x.axis, x.grid.sliced(*([side[i] for i in tokens] for side in sides)))

    def _padded(self, eqn: Any, x: Full) -> Full:
        """Returns the value of an equation that puts zeros where a slice left tokens out."""
        grid, config, zero = x.grid, eqn.params["padding_config"], self.flat.known(eqn.invars[1])
        tokens = [i for i in range(len(config)) if i != x.axis]
        sides = (eqn.outvars[0].aval.shape, [c[0] for c in config], [c[2] + 1 for c in config])
        lies = x.grid.sliced(*([side[i] for i in tokens] for side in (*sides, eqn.invars[0].aval.shape)))
        if grid.within is None or not grid.lies_as(lies) or zero is None or zero.any():
            raise Escape("pad")
        form, inside = form_of(x.value), self.leaf("inside", (grid,))
        terms = {basis: where(inside, c, 0.0) for basis, c in form.terms.items()}
        return Full(Form(terms, form.factor, form.phi), x.axis, grid.within)

    def _reduced(self, eqn: Any, x: Full) -> None:
        """Notes a sum or a maximum over the vocabulary, or a sum over all tokens."""
        name, out, axes = eqn.primitive.name, eqn.outvars[0], set(eqn.params["axes"])
        shape, form = eqn.invars[0].aval.shape, form_of(x.value)
        tokens = [i for i in range(len(shape)) if i != x.axis]
        if x.axis not in axes:
            if name != "reduce_sum" or not axes.issuperset(real(shape, tokens)):
                raise Escape(f"{name} over some of the tokens")
            self._end_with(End(out, form, None, "sum"), x)
            return
        summed = tuple(i for i, axis in enumerate(tokens) if axis in axes)
        if not real(shape, axes - {x.axis}):
            found = largest(form) if name == "reduce_max" else total(form, self.dot.vocabulary)
            self._make(out, Made(found, x.grid))
        elif name == "reduce_sum":
            made = total(form, self.dot.vocabulary)
            self._make(out, Made(made, x.grid, tuple(shape[i] for i in tokens), summed))
        else:
            raise Escape("the largest of all tokens")

    def _make(self, out: Any, made: Made) -> None:
        self.made[out] = made
        self.values[out] = Row(None, None) if made.summed else Row(made.value, made.grid)

    def _end(self, eqn: Any) -> None:
        """Notes a product with the gradient of the logits."""
        (contracted, (batch, _)), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
        i = next(i for i, x in enumerate(eqn.invars) if isinstance(self.values.get(x), Full))
        x, other = self.values[eqn.invars[i]], eqn.invars[1 - i]
        assert isinstance(x, Full)
        if batch or is_literal(other) or other in self.values:
            raise Escape("a product with what is made of the logits")
        mine, its = map(list, (contracted[i], contracted[1 - i]))
        precision = precision[::-1] if isinstance(precision, tuple) and i else precision
        tokens = [j for j in range(eqn.invars[i].aval.ndim) if j != x.axis]
        rank, layout, kind = other.aval.ndim, "nn", "rows"
        if mine == [x.axis] and its[0] in (0, rank - 1):
            layout = "nn" if its[0] == 0 else "nt"
        elif sorted(mine) == tokens and [its[mine.index(j)] for j in tokens] == list(range(len(its))):
            kind = "columns"
        else:
            raise Escape("a product over some of the tokens")
        if len(its) == rank or 0 in other.aval.shape:
            raise Escape("a product with a vector")
        self._end_with(End(eqn.outvars[0], form_of(x.value), other, kind, layout, i == 0, precision), x)

    def _end_with(self, end: End, x: Full) -> None:
        if x.grid.within is not None:
            raise Escape("a gradient of a slice of the tokens")
        self.ends.append(end)

    # Equations of rows.

    def _rows(self, eqn: Any) -> None:
        """Notes the results of an equation that reads values of rows alone."""
        for out in eqn.outvars:
            self.values[out] = Row(None, None)
        if len(eqn.outvars) != 1 or eqn.effects or is_marked(eqn):
            return
        try:
            found = self._of_rows(eqn)
        except Escape:
            return
        if found is not None:
            self.values[eqn.outvars[0]] = found

    def _of_rows(self, eqn: Any) -> Row | None:
        """Returns the value of an equation of rows; None where it is none of each row by itself."""
        name, params, out, first = eqn.primitive.name, eqn.params, eqn.outvars[0].aval, eqn.invars[0]
        if name == "reduce_sum" and first.aval.size == self.dot.tokens * self.dot.vocabulary:
            value = self.sum_beside(eqn, self.whole)
            if value is not None:
                self._make(eqn.outvars[0], Made(value, self.whole))
                return Row(value, self.whole)
        found = [self.values.get(x) for x in eqn.invars if not is_literal(x)]
        rows = [x for x in found if isinstance(x, Row)]
        grid = next((x.grid for x in rows if x.grid is not None), None)
        if any(x.value is None or x.grid not in (None, grid) for x in rows):
            return None
        size = 1 if grid is None else grid.size
        if name in ELEMENTWISE or name in PASSING:
            if out.size != size:
                return None
            values = [self._token(x, grid, tuple(out.shape)) for x in eqn.invars]
            return Row(values[-1] if name in PASSING else bound(eqn, values), grid)
        count, alike = first.aval.size, not is_literal(first) and first in self.values
        if name in ADDS:  # to the one element of an axis of zeros, as the derivative of take does
            zeros, update = self.flat.maker(first), eqn.invars[2]
            empty = zeros is not None and zeros.primitive.name == "broadcast_in_dim" and self._is_zero(zeros.invars[0])
            same = empty and out.size == size and update.aval.size == size and self._is_zero(eqn.invars[1])
        elif not alike:
            return None
        elif name in MOVES:
            same = not reorders(eqn) and count in (1, out.size)
        elif name == "transpose":
            same = in_order(params["permutation"], first.aval.shape)
        elif name in REDUCTIONS:
            same = not real(first.aval.shape, params["axes"])
        else:
            whole = name == "gather" and tuple(params["slice_sizes"]) == tuple(first.aval.shape)
            same = whole and out.size == size and self._is_zero(eqn.invars[1])
        return rows[0] if same else None

    def _token(self, x: Any, grid: Grid | None, shape: tuple[int, ...]) -> Value:
        """Returns an operand of an equation of rows, whose result has a shape."""
        if is_literal(x):
            return number(x)
        if not real(x.aval.shape):
            return self.scalar(x)
        if grid is None:
            raise Escape("values of tokens beside a scalar")
        return self.row(x, grid) if x.aval.size == grid.size else self.along(x, grid, tuple(x.aval.shape), shape)

    def _is_zero(self, x: Any) -> bool:
        known = self.flat.known(x)
        return known is not None and not known.any()
