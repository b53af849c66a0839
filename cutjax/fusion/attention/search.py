"""The search for attention: a product of scores, a softmax over keys, and the product of its weights with values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from cutjax import dot_precision
from cutjax.binding.rules import any_divided
from cutjax.fusion.attention.labels import MOVES, SAME, SIZE, VALUE, Escape, Labels, divided, given, moved
from cutjax.fusion.flat import Flat
from cutjax.fusion.jaxprs import is_literal, is_marked, pointwise
from cutjax.kernels.attention import DTYPES, MOST_ROWS

_FLOATS = (*DTYPES, "float32")
# What equations make of values of some kinds, each of the same scores; "" is none of them.
_MADE: dict[tuple[str, ...], str] = {
    ("reduce_max", "score"): "most",
    ("sub", "score", "most"): "shifted",
    ("exp", "shifted"): "power",
    ("reduce_sum", "power"): "total",
    ("div", "power", "total"): "weight",
}


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that is made of the scores.

    Attributes:
      kind: "score", "most", "shifted", "power", "total" or "weight".
      labels: of its axes.
      root: the scores that it is made of, before they were moved or cast.
    """

    kind: str
    labels: Labels
    root: Any


def may_be_scores(eqn: Any) -> bool:
    """True of a product that may be one of scores: over one axis, and with few rows on one side."""
    if eqn.primitive.name != "dot_general" or is_marked(eqn) or not is_exact(eqn):
        return False
    (contracted, (batch, _)), (left, right) = eqn.params["dimension_numbers"], (x.aval for x in eqn.invars)
    if len(contracted[0]) != 1 or any_divided(left, right):
        return False
    whole = math.prod(left.shape[axis] for axis in batch) * left.shape[contracted[0][0]]
    return bool(whole) and min(left.size, right.size) // whole <= MOST_ROWS


def is_exact(eqn: Any) -> bool:
    """True of a product of 16 bits that is added up in float32."""
    dtype, *others = (x.aval.dtype for x in eqn.invars)
    if dtype.name not in DTYPES or others != [dtype]:
        return False
    return dot_precision.math(eqn.params["precision"], dtype, np.dtype(np.float32)) == ""


class Search:
    """Follows the scores of a product through a program, up to the product with the values.

    Attributes:
      sizes: of each label.
      parts: of a label of heads, where a program repeats keys for several: that of heads of keys, and of heads of each.
      key: the label of the keys.
      q, k, v: the variables that are read, with the labels of their axes.
      out: the labels of the result.
      scores, root: the variable of the product, and that of which the softmax is.
      core, beside: the equations from the scores to the result, and those that the kernel computes beside them.
      leaves: the variables that these read, with their labels.
      end: the product with the values.

    Raises:
      Escape: if something else is made of the scores.
    """

    def __init__(self, flat: Flat, names: Container[Any], at: int, side: int, least_keys: int):
        self.flat, self._names = flat, names
        self.sizes: dict[Any, int] = {}
        self.parts: dict[Any, Labels] = {}
        self.leaves: list[tuple[Any, Labels]] = []
        self.core, self.beside = {at}, set[int]()
        self._positional: dict[Any, bool] = {}
        self._begin(flat.eqns[at], side, least_keys)
        for i in range(at + 1, len(flat.eqns)):
            if any(not is_literal(x) and x in self.values for x in flat.eqns[i].invars):
                self.core.add(i)
                if self._step(flat.eqns[i]):
                    self.end = i
                    break
        else:
            raise Escape
        later = {x for eqn in flat.eqns[self.end + 1 :] for x in eqn.invars if not is_literal(x)}
        if not later.isdisjoint(self.values):
            raise Escape
        self._arrange()
        self._find_leaves(self.root, self.labels, set())

    @property
    def labels(self) -> Labels:
        """The labels of what the softmax is of."""
        return self.values[self.root].labels

    def size(self, axis: Sequence[Any]) -> int:
        """Returns the size of an axis of the kernel, a list of labels."""
        return math.prod(self.sizes[label] for label in axis)

    def _begin(self, eqn: Any, side: int, least_keys: int) -> None:
        """Gives the axes of the scores labels; those of keys are on one side of the product."""
        contracted, batches = eqn.params["dimension_numbers"]
        sides: list[list[Any]] = []
        own: list[Any] = []
        for i, (x, (axis,), batch) in enumerate(zip(eqn.invars, contracted, batches, strict=True)):
            labels: list[Any] = [("batch", batch.index(j)) if j in batch else (i, j) for j in range(x.aval.ndim)]
            labels[axis] = SIZE
            self.sizes |= zip(labels, x.aval.shape, strict=True)
            free = [label for j, label in enumerate(labels) if j != axis and j not in batch]
            own += free
            sides.append(labels)
            if i == side:
                long = [label for label in free if self.sizes[label] != 1]
                if len(long) != 1 or self.sizes[long[0]] < least_keys:
                    raise Escape
                (self.key,) = long
        self.q, self.k = ((eqn.invars[i], self._real(sides[i])) for i in (1 - side, side))
        (self.scores,) = eqn.outvars
        out = self._real([*(("batch", i) for i in range(len(batches[0]))), *own])
        self.values = {self.scores: Value("score", out, self.scores)}

    def _real(self, labels: Sequence[Any]) -> Labels:
        return tuple(None if self.sizes[label] == 1 else label for label in labels)

    def _step(self, eqn: Any) -> bool:
        """True of the product with the values; notes what another equation makes of the scores."""
        if eqn.effects or is_marked(eqn) or len(eqn.outvars) != 1:
            raise Escape
        if eqn.primitive.name == "dot_general":
            self._mix(eqn)
            return True
        (out,) = eqn.outvars
        if out.aval.dtype.name not in _FLOATS:
            raise Escape
        self.values[out] = self._made(eqn, out)
        return False

    def _made(self, eqn: Any, out: Any) -> Value:
        """Returns the value that an equation makes."""
        name = eqn.primitive.name
        found = [None if is_literal(x) else self.values.get(x) for x in eqn.invars]
        given, kinds = [x for x in found if x is not None], ["" if x is None else x.kind for x in found]
        first, labels = given[0], given[0].labels
        if name in MOVES:
            return dataclasses.replace(first, labels=moved(eqn, labels, first.kind in ("most", "total")))
        if name in SAME or name == "convert_element_type":
            return first
        if name == "max" and sorted(kinds) == ["", "most"]:
            known = self.flat.known(eqn.invars[kinds.index("")])
            if known is None or not np.isneginf(known.astype(np.float32)).all():
                raise Escape
            return first
        kind = _MADE.get((name, *kinds))
        if kind is not None:
            if any(x.root is not first.root for x in given):
                raise Escape
            if name.startswith("reduce"):
                gone = eqn.params["axes"]
                if [labels[i] for i in gone if labels[i] is not None] != [self.key]:
                    raise Escape
                labels = tuple(label for i, label in enumerate(labels) if i not in gone)
            elif any(its not in (None, mine) for x in given for mine, its in zip(labels, x.labels, strict=True)):
                raise Escape
            return Value(kind, labels, first.root)
        alike = all(x.kind == "score" and x.labels == labels for x in given)
        whole = all(x.aval.shape == out.aval.shape for x in eqn.invars if not is_literal(x) and x in self.values)
        if not (alike and whole and pointwise(eqn)):  # lax repeats axes of size 1 too
            raise Escape
        return Value("score", labels, out)

    def _mix(self, eqn: Any) -> None:
        """Notes the product with the values."""
        contracted, batches = eqn.params["dimension_numbers"]
        side = next(i for i, x in enumerate(eqn.invars) if not is_literal(x) and x in self.values)
        weight, other = self.values[eqn.invars[side]], eqn.invars[1 - side]
        if weight.kind != "weight" or is_literal(other) or other in self.values or len(contracted[0]) != 1:
            raise Escape
        if not is_exact(eqn) or other.aval.dtype != self.k[0].aval.dtype:
            raise Escape
        labels: list[Any] = [None] * other.aval.ndim
        mine, its = ([*batches[i], *contracted[i]] for i in (side, 1 - side))
        for i, j in zip(mine, its, strict=True):
            labels[j] = weight.labels[i]
        free = [j for j in range(other.aval.ndim) if j not in its]
        if labels[its[-1]] != self.key or len(free) != 1:
            raise Escape
        labels[free[0]], self.sizes[VALUE] = VALUE, other.aval.shape[free[0]]
        self.v, self.root = (other, tuple(labels)), weight.root
        own = [label for i, label in enumerate(weight.labels) if i not in mine], [VALUE]
        self.out: Labels = (*(weight.labels[i] for i in batches[side]), *own[side], *own[1 - side])

    def _arrange(self) -> None:
        """Finds the axes of the kernel, each a list of labels. Keys and values lie as they are read."""
        self.k, self.v = (self._source(*x) for x in (self.k, self.v))
        found = []
        for labels, last in ((self.k[1], SIZE), (self.v[1], VALUE)):
            real = [label for label in labels if label is not None]
            if real[-1:] != [last] or self.key not in real:
                raise Escape
            at = real.index(self.key)
            found.append((real[:at], real[at + 1 : -1]))
        self.keys_first = tuple(bool(after) for _, after in found)
        batch, heads = next((each for each in found if each[1]), (found[0][0][:-1], found[0][0][-1:]))
        if any(each not in ((batch, heads), ([*batch, *heads], [])) for each in found):
            raise Escape  # of which one is repeated alone, too
        rows = [label for label in divided(self.q[1], self.parts) if label not in (SIZE, *batch, *heads)]
        if len(rows) > 2 or {*batch, *heads, *rows, self.key} != {*divided(self.labels, self.parts)}:
            raise Escape
        self.axes = [batch, heads, *([label] for label in rows), *[[]] * (2 - len(rows)), [self.key]]
        self.shape = tuple(map(self.size, self.axes))

    def _source(self, x: Any, labels: Labels) -> tuple[Any, Labels]:
        """Returns the variable that is transposed, or whose heads are repeated: the kernel reads it as it lies."""
        while (eqn := self.flat.maker(x)) is not None:
            if eqn.primitive.name == "transpose":
                (labels,), makers = given(eqn, labels), [eqn]
            elif (repeated := self._repeated(eqn)) is not None:
                inner, axis = repeated
                whole, heads = labels[axis], inner.invars[0].aval.shape[axis]
                if whole in (None, self.key, SIZE, VALUE):
                    break
                of, each = self.parts.setdefault(whole, (("of", whole), ("each", whole)))
                if self.sizes.setdefault(of, heads) != heads:
                    raise Escape
                self.sizes[each] = self.sizes[whole] // heads
                labels, makers, eqn = tuple(of if i == axis else x for i, x in enumerate(labels)), [eqn, inner], inner
            else:
                break
            self.beside |= {self.flat.producer[made.outvars[0]] for made in makers}
            x = eqn.invars[0]
        return x, labels

    def _repeated(self, eqn: Any) -> tuple[Any, int] | None:
        """Returns the equation that repeats what a reshape merges, and the axis; None of all else."""
        inner = self.flat.maker(eqn.invars[0]) if eqn.primitive.name == "reshape" else None
        if inner is None or inner.primitive.name != "broadcast_in_dim" or is_literal(inner.invars[0]):
            return None
        shape, new, out = inner.invars[0].aval.shape, inner.outvars[0].aval.shape, eqn.outvars[0].aval.shape
        for axis in range(len(shape)):
            at = (*range(axis + 1), *range(axis + 2, len(new)))
            each = tuple(inner.params["broadcast_dimensions"]) == at and tuple(new[i] for i in at) == shape
            if each and out == (*shape[:axis], shape[axis] * new[axis + 1], *shape[axis + 1 :]):
                return inner, axis
        return None

    # The expression of the scores.

    def _find_leaves(self, x: Any, labels: Labels, seen: set[Any]) -> None:
        """Finds what the kernel reads to compute a value, and the equations."""
        if is_literal(x) or x is self.scores or (x, labels) in seen:
            return
        seen.add((x, labels))
        eqn = self.flat.maker(x)
        if self._is_leaf(x):
            if eqn is not None and eqn.primitive.name == "random_bits":
                raise Escape
            self.leaves.append((x, labels))
            return
        if not _is_inside(eqn):
            raise Escape
        self.beside.add(self.flat.producer[x])
        for y, its in zip(eqn.invars, given(eqn, labels), strict=False):
            self._find_leaves(y, its, seen)

    def _is_leaf(self, x: Any) -> bool:
        """True of what the kernel reads: what no equation makes, or is smaller than what it is made of."""
        eqn = self.flat.maker(x)
        if x in self.values or (eqn is not None and x not in self._names):
            return False
        if eqn is None or not _is_inside(eqn):
            return True
        return x.aval.size < math.prod(self.shape) and (x.aval.size == 1 or not self._is_positional(x))

    def _is_positional(self, x: Any) -> bool:
        """True of what is made of indices and of single numbers."""
        if is_literal(x) or x.aval.size == 1:
            return True
        if x not in self._positional:
            eqn = self.flat.maker(x)
            inside = eqn if eqn is not None and _is_inside(eqn) else None
            self._positional[x] = inside is not None and all(map(self._is_positional, inside.invars))
        return self._positional[x]


def _is_inside(eqn: Any) -> bool:
    """True if the kernel may compute an equation; that of a reshape which merges axes is what it reads."""
    name = eqn.primitive.name
    if name == "reshape":
        sizes = [[n for n in x.aval.shape if n != 1] for x in (eqn.invars[0], eqn.outvars[0])]
        return sizes[0] == sizes[1]
    return name == "iota" or name in MOVES or name in SAME or pointwise(eqn)
