"""The records of a head: its product, values of its logits' size and of rows, and the products of the gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from cutjax.fusion.contraction import are_divided
from cutjax.fusion.heads.forms import Form
from cutjax.fusion.heads.grid import Grid
from cutjax.fusion.heads.values import Leaf, Value
from cutjax.fusion.jaxprs import is_literal, is_marked

PRODUCT = Leaf("product")
INDEX = Leaf("index")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Dot:
    """The product of a head: ``[tokens, d] x [d, vocabulary]``.

    Attributes:
      at: its place among the equations of the program.
      out: the variable of the logits.
      x, w: those of its operands.
      layout: "nn", or "nt" where w is ``[vocabulary, d]``.
      axis: the logits' axis of the vocabulary.
      precision: as the equation's, of x and w.
    """

    at: int
    out: Any
    x: Any
    w: Any
    layout: str
    axis: int
    precision: Any

    @property
    def vocabulary(self) -> int:
        """The number of columns."""
        return self.out.aval.shape[self.axis]

    @property
    def tokens(self) -> int:
        """The number of rows."""
        return self.out.aval.size // max(self.vocabulary, 1)


def dots(eqn: Any, at: int) -> list[Dot]:
    """Returns the heads' products that an equation may be: either operand may have the tokens."""
    if eqn.primitive.name != "dot_general" or is_marked(eqn) or any(map(is_literal, eqn.invars)):
        return []
    ((lc, rc), (batch, _)), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    (left, right), out = eqn.invars, eqn.outvars[0]
    dtypes = {left.aval.dtype.name, right.aval.dtype.name}
    if batch or len(lc) != 1 or len(dtypes) > 1 or not dtypes.issubset(_DTYPES):
        return []
    if out.aval.dtype not in (left.aval.dtype, jnp.float32) or 0 in (*left.aval.shape, *right.aval.shape):
        return []
    if are_divided(left.aval, right.aval):
        return []
    found = []
    for x, w, mine, theirs, axis in ((left, right, lc, rc, out.aval.ndim - 1), (right, left, rc, lc, 0)):
        if w.aval.ndim == 2 and x.aval.ndim > 1 and mine[0] == x.aval.ndim - 1:
            swapped = precision[::-1] if isinstance(precision, tuple) and axis == 0 else precision
            found.append(Dot(at, out, x, w, "nn" if theirs[0] == 0 else "nt", axis, swapped))
    return found


class Full(NamedTuple):
    """A value of the logits' size.

    Attributes:
      value: it, as a sum of terms, or as an expression of the product.
      axis: its axis of the vocabulary; all others are tokens.
      grid: the tokens.
    """

    value: Value | Form
    axis: int
    grid: Grid


class Row(NamedTuple):
    """A value of rows that is made of the logits.

    Attributes:
      value: it, as an expression; None where it is none, row by row.
      grid: the tokens; None of a scalar.
    """

    value: Value | None
    grid: Grid | None


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """A value of rows that a kernel finds: a sum over the vocabulary, for instance.

    Attributes:
      value: it, as an expression of rows.
      grid: the tokens.
      shape: that of the tokens, where it is summed over some of their axes.
      summed: these axes.
    """

    value: Value
    grid: Grid
    shape: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class End:
    """A product with the gradient of the logits, or its sum over tokens.

    Attributes:
      out: the variable.
      form: the gradient.
      other: the variable of the other operand; None of a sum.
      kind: "rows" of ``gradient @ other``, "columns" of ``gradient^T @ other``, "sum".
      layout: of rows, that of gradient and other: "nn" or "nt".
      first: whether the gradient's own axis comes before the other's in the result.
      precision: as the equation's, of gradient and other.
    """

    out: Any
    form: Form
    other: Any
    kind: str
    layout: str = "nn"
    first: bool = True
    precision: Any = None
