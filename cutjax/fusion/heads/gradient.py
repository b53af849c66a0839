"""The products with the gradient of a head's logits, chunk by chunk: it is the powers that are kept, by factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cutjax import dot_precision
from cutjax.fusion.heads.forms import ONE, Form, at_label
from cutjax.fusion.heads.head import Head
from cutjax.fusion.heads.parts import End
from cutjax.fusion.heads.rows import Rows, with_shift
from cutjax.fusion.heads.values import is_number
from cutjax.primitives import vocabulary
from cutjax.primitives.cross_entropy import LEAST
from cutjax.primitives.dense import FLIP

Factor = jax.Array | None  # of each row; None of 1


class Gradient:
    """The ends of a head.

    Attributes:
      columns: arrays of all tokens that are multiplied from the left, beside x.
    """

    def __init__(self, head: Head, of: vocabulary.Head, others: Sequence[jax.Array | None]):
        self.head, self._of, self._others = head, of, list(others)
        tokens = head.dot.tokens
        self._rows = [i for i, end in enumerate(head.ends) if end.kind == "rows"]
        self._apart = [i for i, end in enumerate(head.ends) if end.kind == "columns" and end.other is not head.dot.x]
        self.columns = [lax.reshape(x, (tokens, x.size // tokens)) for i in self._apart if (x := others[i]) is not None]
        for i in self._rows:
            other, first = self._others[i], head.ends[i].layout == "nn"
            assert other is not None
            size = head.dot.vocabulary
            shape = (size, other.size // size)
            self._others[i] = lax.reshape(other, shape if first ^ head.others[i].turned else shape[::-1])  # pyright: ignore
        self._sums = [x if x is None else self._sum(i) for i, x in enumerate(self._others)]

    def _sum(self, i: int) -> jax.Array | None:
        """Returns the sum over the vocabulary of the other operand, where a multiple of it is in each row."""
        if i not in self._rows or not self.head.keeps or ONE not in self.head.terms:
            return None
        return self._others[i].astype(jnp.float32).sum(0 if self._layout(i) == "nn" else 1)  # pyright: ignore

    def _layout(self, i: int) -> str:
        operand, layout = self.head.others[i], self.head.ends[i].layout
        return "n" + FLIP[layout[1]] if operand is not None and operand.turned else layout

    def of_powers(self, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns powers that are the gradient but for a factor of each row, that factor, and what is added by row.

        The factor is never so small that the element at the label, which is divided by it, overflows.
        """
        head, stats = self.head, rows.stats
        assert stats is not None
        assert stats.kept is not None
        scale: Any = 0.0
        for basis, c in head.terms.items():
            if basis[0] == "powers":
                scale = scale + with_shift(rows.whole(c), rows.shift, rows.whole(basis[2]))
        beside = rows.whole(head.terms[ONE]) if ONE in head.terms else None
        labels = [basis for basis in head.terms if basis[0] == "label"]
        if not labels:
            return stats.kept, scale, beside
        (basis,) = labels
        least = LEAST * jnp.abs(rows.whole(head.terms[basis])) / stats.sums
        scale = lax.optimization_barrier(jnp.where(jnp.abs(scale) < least, least, scale))
        terms = {other: c for other, c in head.terms.items() if other != ONE}
        value = rows.whole(at_label(Form(terms, 1.0, head.phi), basis[1]))
        value = (value / jnp.where(scale == 0, 1.0, scale)).astype(stats.kept.dtype)
        at, known = rows.column(basis[1])
        where = jnp.arange(rows.size, dtype=jnp.int32), jnp.where(known, at, head.dot.vocabulary)
        options: dict[str, Any] = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
        return stats.kept.at[where].set(value, **options), scale, beside

    def factors(self, rows: Rows) -> list[Factor]:
        """Returns the factor of each end."""
        found = (end.form.factor for end in self.head.ends)
        return [None if is_number(x, 1.0) else rows.whole(x) for x in found]

    def added(
        self,
        sums: Any,
        kept: jax.Array,
        factors: Sequence[Factor],
        besides: Sequence[Factor],
        x: jax.Array,
        columns: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the ends' sums over tokens with those of a chunk, and what the chunk's rows have.

        Args:
          sums: those of the chunks before; None where there is none.
          kept: the gradient of the chunk's logits, but for factors and what is added by row.
          factors, besides: these, of each end.
          x, columns: the chunk's rows of x, and of ``self.columns``.
        """
        apart, before = iter(columns), iter(sums or ())
        found: list[jax.Array] = []
        of_rows: list[jax.Array] = []
        for i, (end, factor, beside) in enumerate(zip(self.head.ends, factors, besides, strict=True)):
            if end.kind == "rows":
                of_rows.append(self._of_rows(i, kept, factor, beside))
                continue
            old = next(before, None)
            if end.kind == "sum":
                wide = kept.astype(jnp.float32)
                new = (wide if factor is None else wide * factor[:, None]).sum(0)
                new = new if beside is None else new + beside.sum()
                found.append(new if old is None else old + new)
            else:
                u = next(apart) if i in self._apart else x
                found.append(self._of_columns(end, kept, factor, beside, u, old))
        return found, of_rows

    def _of_rows(self, i: int, kept: jax.Array, factor: Factor, beside: Factor) -> jax.Array:
        operands = {"factor": factor if factor is None else factor[:, None]}
        if beside is not None:
            total = self._sums[i]
            assert total is not None
            operands |= {"beside": beside[:, None], "total": total[None]}

        def epilogue(acc: jax.Array, given: dict[str, Any]) -> jax.Array:
            acc = acc if given["factor"] is None else acc * given["factor"]
            return acc + given["beside"] * given["total"] if "beside" in given else acc

        return self._multiply(self.head.ends[i], self._layout(i), kept, self._others[i], epilogue, (operands,))

    def _of_columns(
        self, end: End, kept: jax.Array, factor: Factor, beside: Factor, u: jax.Array, old: jax.Array | None
    ) -> jax.Array:
        wide = u.astype(jnp.float32)
        scaled = u if factor is None else (wide * factor[:, None]).astype(u.dtype)
        operands = [] if old is None else [old]
        if beside is not None:
            total = (wide * beside[:, None]).sum(0)
            operands.append(total[None] if end.first else total[:, None])

        def epilogue(acc: jax.Array, *operands: jax.Array) -> jax.Array:
            for x in operands:
                acc = acc + x.astype(acc.dtype)
            return acc

        pair = (kept, scaled) if end.first else (scaled, kept)
        in_place = () if old is None else ((0, 0),)
        return self._multiply(end, "tn", *pair, epilogue, operands, in_place=in_place)

    def _multiply(
        self, end: End, layout: str, a: Any, b: Any, epilogue: Any, operands: Any, **params: Any
    ) -> jax.Array:
        head = dataclasses.replace(self._of, precision=dot_precision.canonical(end.precision, "fuse"))
        return head.multiply(layout, a, b, epilogue, operands, end.out.aval.dtype, **params)

    def results(self, sums: Iterable[jax.Array], of_rows: Iterable[jax.Array]) -> dict[Any, jax.Array]:
        """Returns the variables of the ends."""
        sums, of_rows, found = iter(sums), iter(of_rows), {}
        for end in self.head.ends:
            array = next(of_rows if end.kind == "rows" else sums)
            array = array.T if end.kind == "rows" and not end.first else array
            found[end.out] = array.astype(end.out.aval.dtype).reshape(end.out.aval.shape)
        return found
