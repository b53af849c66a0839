"""The plan of a head: which products compute it, and what each of them finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.fusion.flat import Flat
from cutjax.fusion.heads.forms import Basis
from cutjax.fusion.heads.parts import Dot, End, Made
from cutjax.fusion.heads.search import Search
from cutjax.fusion.heads.values import Escape, Expr, Label, Leaf, Value, is_full, leaves
from cutjax.fusion.jaxprs import is_literal

_KEPT = ("bfloat16", "float32")  # dtypes whose exponents hold the powers of any row


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """A matrix that a product reads.

    Attributes:
      source: the variable that it is made of.
      turned: whether that is transposed.
      dtype: its own.
    """

    source: Any
    turned: bool
    dtype: np.dtype

    @classmethod
    def of(cls, flat: Flat, x: Any) -> Operand:
        """Returns the operand of a variable, which may be transposed, and cast then, of another."""
        turn, source = flat.maker(x), x
        if turn is not None and turn.primitive.name == "convert_element_type":
            turn = flat.maker(turn.invars[0])
        if turn is not None and turn.primitive.name == "transpose" and x.aval.ndim == 2:
            (source,) = turn.invars
        turned = source is not x and not is_literal(source) and jnp.issubdtype(source.aval.dtype, jnp.floating)
        return cls(source if turned else x, turned, np.dtype(x.aval.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """A head as it is computed.

    Attributes:
      dot, made, ends: as the search has them.
      w, others: the operands of the products; None of an end that is a sum.
      logits: of which powers are summed.
      terms, phi: of the gradient of the logits, before factors of rows.
      keeps: whether it is made of the powers that the first product keeps; else logits are made again.
      rows, scalars, columns: leaves that are arrays of the program, or made of these.
      late: those of them that are made of the logits by what is not computed row by row.
      most, totals, labels: what the product finds beside sums: the largest, the sums of values, and values at labels.
    """

    dot: Dot
    made: dict[Any, Made]
    ends: tuple[End, ...]
    w: Operand
    others: tuple[Operand | None, ...]
    logits: Value
    terms: dict[Basis, Value]
    phi: Value
    keeps: bool
    rows: tuple[Leaf, ...]
    scalars: tuple[Leaf, ...]
    columns: tuple[Leaf, ...]
    late: tuple[Leaf, ...]
    most: tuple[Value, ...]
    totals: tuple[Value, ...]
    labels: tuple[Label, ...]

    @property
    def products(self) -> int:
        """The number of products of its size that it takes."""
        count = 1 + sum(end.other is not None for end in self.ends)
        return count + bool(self.ends and not self.keeps)


def planned(flat: Flat, found: Search) -> Head:
    """Returns the plan of a head that was found.

    Raises:
      Escape: if no kernels compute it.
    """
    dot, ends = found.dot, tuple(found.ends)
    terms: dict[Basis, Value] = dict(ends[0].form.terms) if ends else {}
    phi = ends[0].form.phi if ends else 1.0
    if any(end.form.terms is not ends[0].form.terms or end.form.phi is not phi for end in ends):
        raise Escape("gradients that differ by more than factors of rows")
    for end in ends:
        _check(dot, end)
    needed = [
        *(made.value for made in found.made.values()),
        *(x for basis in terms for x in basis[1:]),
        *terms.values(),
        phi,
        *(end.form.factor for end in ends),
    ]
    given = leaves(needed)
    powers = [x.of[0] for x in given if x.kind == "powers"]
    if not powers:
        raise Escape("no sum of powers")
    powers += [basis[1] for basis in terms if basis[0] == "powers"]
    if not all(_alike(p, powers[0]) for p in powers):
        raise Escape("powers of several logits")
    late = tuple(x for x in given if x.kind in ("row", "scalar") and x.made)
    labels = [basis[1] for basis in terms if basis[0] == "label"]
    slopes = is_full(phi) and ("one",) in terms
    kinds = [basis[0] for basis in terms]
    known = "powers" in kinds and "logits" not in kinds and len(labels) < 2
    arrays = tuple(x for x in given if x.kind in ("row", "inside") and x not in late)
    return Head(
        dot,
        found.made,
        ends,
        Operand.of(flat, dot.w),
        tuple(None if end.other is None else Operand.of(flat, end.other) for end in ends),
        powers[0],
        terms,
        phi,
        known and not slopes and not late and dot.x.aval.dtype.name in _KEPT,
        arrays,
        tuple(x for x in given if x.kind == "scalar" and x not in late),
        tuple(x for x in given if x.kind == "column"),
        late,
        _distinct([x.of[0] for x in given if x.kind == "largest"]),
        _distinct([x.of[0] for x in given if x.kind == "total"]),
        _distinct([x.of[-1] for x in given if x.kind in ("picked", "known")] + labels),
    )


def _check(dot: Dot, end: End) -> None:
    """Raises if a kernel would round more than a program says."""
    if end.other is None:
        return
    if end.other.aval.dtype != dot.x.aval.dtype or end.out.aval.dtype not in (dot.x.aval.dtype, np.float32):
        raise Escape("a gradient by an operand of another dtype")
    given = dot_precision.canonical(end.precision, "fuse")
    if given not in (None, (lax.Precision.DEFAULT, lax.Precision.DEFAULT)) and dot.x.aval.dtype != np.float32:
        raise Escape("a gradient that is to be multiplied in a higher precision")


def _alike(x: Value, y: Value) -> bool:
    """True if two values are the same operations on the same leaves."""
    if isinstance(x, Expr) and isinstance(y, Expr):
        return x is y or (x.op is y.op and len(x.args) == len(y.args) and all(map(_alike, x.args, y.args)))
    return x is y or (isinstance(x, float) and isinstance(y, float) and x == y)


def _distinct(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
