"""The program of a head: its losses and gradients, chunk by chunk of the tokens, without logits in memory.

As of linear_cross_entropy (primitives/cross_entropy.py), the first product sums powers of the logits less a shift, and
keeps them; they are the gradient of the logits but for a factor of each row, and at the label, where one element of
each row is set. What is between, from sums to factors, is the program's own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.binding.rules import match_varying
from cutjax.epilogue.jaxpr import bind_equation
from cutjax.fusion.heads.gradient import Gradient
from cutjax.fusion.heads.head import Head, Operand
from cutjax.fusion.heads.rows import Rows, Stats
from cutjax.fusion.heads.values import Leaf, Value, evaluate, is_full, is_number, leaves
from cutjax.fusion.jaxprs import is_literal
from cutjax.fusion.tail import wide
from cutjax.primitives import vocabulary
from cutjax.primitives.dense import FLIP
from cutjax.primitives.vocabulary import LOG2_E, in_chunks, picked_at, with_shift

_TILES = ("column", "row", "scalar", "inside")  # leaves that an epilogue reads as arrays


@dataclasses.dataclass(frozen=True)
class Traced(vocabulary.Head):
    """A head of vocabulary.py whose logits are an expression of the product and of some leaves."""

    value: Value
    tiles: tuple[Leaf, ...]

    def logits(self, acc: jax.Array, b: Sequence[jax.Array]) -> jax.Array:
        return tile(self.value, acc, dict(zip(self.tiles, b, strict=True)), {})


def tile(value: Value, acc: jax.Array, given: Mapping[Leaf, jax.Array], memo: dict[int, Any]) -> jax.Array:
    """Computes a value of the product on accumulators, told its leaves as arrays that broadcast against these."""

    def read(leaf: Leaf) -> jax.Array:
        if leaf.kind == "product":
            return acc
        return lax.broadcasted_iota(jnp.int32, acc.shape, 1) if leaf.kind == "index" else wide(given[leaf])

    found = jnp.asarray(evaluate(value, read, memo))
    return jnp.broadcast_to(found.astype(acc.dtype), acc.shape)


class Program:
    """Computes the variables of a head, told those of the program."""

    def __init__(self, head: Head, makers: Mapping[Any, Any], given: Mapping[Any, jax.Array]):
        self.head, self._makers, self._env = head, makers, dict(given)
        of_terms = [basis[1] for basis in head.terms if basis[0] in ("logits", "powers")]
        values = [head.logits, head.phi, *head.most, *head.totals, *of_terms]
        self._tiles = tuple(x for x in leaves([x for x in values if is_full(x)]) if x.kind in _TILES)
        self._x = self.read(head.dot.x).reshape(head.dot.tokens, -1)
        self._w = self._matrix(head.w)
        layout = head.dot.layout if not head.w.turned else "n" + FLIP[head.dot.layout[1]]
        precision = dot_precision.canonical(head.dot.precision, "fuse")
        options = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "axis_name": None}
        tiles = {"value": head.logits, "tiles": self._tiles}
        self._traced = Traced(layout, **options, precision=precision, backend="auto", **tiles)
        self._numbers: dict[Leaf, Any] = {leaf: self._number(leaf) for leaf in head.scalars}
        self._numbers |= {leaf: self.read(leaf.of[0]).reshape(1, -1) for leaf in head.columns}
        self._rows = {leaf: self._lifted(leaf) for leaf in head.rows}
        self._gradient = Gradient(head, self._traced, [x and self._matrix(x) for x in head.others])
        self._run()

    def read(self, x: Any) -> Any:
        """Returns the value of a variable: given, found by products, or computed as the program does."""
        if is_literal(x):
            return np.asarray(x.val, x.aval.dtype)
        if x not in self._env:
            if x in self.head.made:
                self._env[x] = self._made(x)
            else:
                eqn = self._makers[x]
                found = bind_equation(eqn, [self.read(y) for y in eqn.invars])
                self._env.update(zip(eqn.outvars, found, strict=True))
        return self._env[x]

    def _matrix(self, operand: Operand) -> jax.Array:
        """Returns an operand's array as it lies in memory."""
        return jnp.asarray(self.read(operand.source)).astype(operand.dtype)

    def _made(self, x: Any) -> jax.Array:
        """Returns a variable of rows that products find."""
        made, aval = self.head.made[x], x.aval
        value = made.grid.lower(self._all.whole(made.value))
        if made.summed:
            value = value.reshape(made.shape).sum(made.summed)
        return value.astype(aval.dtype).reshape(aval.shape)

    def _number(self, leaf: Leaf) -> jax.Array:
        return wide(jnp.reshape(self.read(leaf.of[0]), ()))

    def _lifted(self, leaf: Leaf) -> jax.Array:
        """Returns a leaf of rows as an array of all tokens."""
        if leaf.kind == "inside":
            return jnp.asarray(leaf.of[0].inside())
        x, lies, tokens, grid = leaf.of
        array = jnp.broadcast_to(jnp.reshape(self.read(x), lies), tokens)
        return grid.lift(wide(array.reshape(grid.size)))

    def _run(self) -> None:
        head, gradient = self.head, self._gradient

        def step(sums: Any, chunk: Sequence[jax.Array]) -> tuple[Any, Any]:
            x, *arrays = chunk
            known = self._numbers | dict(zip(self._rows, arrays, strict=False))
            shift, stats = self._first(x, known)
            found = shift, stats._replace(kept=None)
            if not head.keeps:
                return None, (found, None)
            rows = Rows(head, known, x.shape[0], shift, stats)
            kept, scale, beside = gradient.of_powers(rows)
            by = [scale if factor is None else scale * factor for factor in gradient.factors(rows)]
            besides = [
                None if beside is None else beside if factor is None else beside * factor
                for factor in gradient.factors(rows)
            ]
            sums, of_rows = gradient.added(sums, kept, by, besides, x, arrays[len(self._rows) :])
            return sums, (found, of_rows)

        columns = gradient.columns if head.keeps else []
        sums, ((shift, stats), of_rows) = self._in_chunks(step, *self._rows.values(), *columns)
        self._all = Rows(head, self._numbers | self._rows, head.dot.tokens, shift, stats)
        if head.ends and not head.keeps:
            sums, of_rows = self._again()
        if head.ends:
            self._env.update(gradient.results(sums, of_rows))

    def _in_chunks(self, step: Callable[..., Any], *arrays: jax.Array) -> tuple[Any, Any]:
        return in_chunks(step, self._traced, self._w, self._x.dtype.itemsize, *match_varying(self._x, *arrays))

    def _operands(self, known: Mapping[Leaf, Any]) -> list[jax.Array]:
        """Returns the leaves of values of the product as arrays that broadcast against it."""
        return [known[x] if x.kind == "column" else known[x].reshape(-1, 1) for x in self._tiles]

    def _of(self, acc: jax.Array, b: Sequence[jax.Array]) -> Callable[[Value], jax.Array]:
        """Returns the function that computes values of the product in an epilogue, told its operands."""
        given: dict[Leaf, jax.Array] = dict(zip(self._tiles, b, strict=True))
        return functools.partial(tile, acc=acc, given=given, memo={})

    def _first(self, x: jax.Array, known: Mapping[Leaf, Any]) -> tuple[jax.Array, Stats]:
        """Returns the shift of a chunk's rows, and what the first product finds with it."""
        head, given = self.head, Rows(self.head, known, x.shape[0])
        labels, operands = [given.column(label)[0][:, None] for label in head.labels], self._operands(known)

        def multiplied(x: jax.Array, shift: jax.Array) -> Stats:
            def epilogue(acc: jax.Array, at: Sequence[jax.Array], shift: jax.Array, b: Sequence[jax.Array]) -> Stats:
                of = self._of(acc, b)
                powers = jnp.exp2(of(head.logits) * LOG2_E - shift)
                most, totals = [of(p).max(1) for p in head.most], [of(p).sum(1) for p in head.totals]
                kept = (powers * of(head.phi) if is_full(head.phi) else powers) if head.keeps else None
                return Stats(powers.sum(1), most, totals, [picked_at(acc, y) for y in at], kept)

            given = (labels, shift[:, None], operands)
            return self._traced.multiply(self._traced.layout, x, self._w, epilogue, given, x.dtype)

        return with_shift(self._traced, x, self._w, operands, multiplied)

    def _again(self) -> tuple[Any, Any]:
        """Returns the ends by logits that are made again, once the rows of all tokens are known."""
        head, rows = self.head, self._all
        for leaf in head.late:
            rows.known[leaf] = self._lifted(leaf) if leaf.kind == "row" else self._number(leaf)
        tiles = [leaf for leaf in self._rows if leaf in self._tiles]
        labels = [rows.column(basis[1])[0] for basis in head.terms if basis[0] == "label"]
        values = [x for basis, c in head.terms.items() for x in (c, *basis[2:])]
        ends = [end.form.factor for end in head.ends]
        factors = [rows.whole(x) for x in ends if not is_number(x, 1.0)]
        groups = [[self._rows[x] for x in tiles], labels, list(map(rows.whole, values)), factors]

        def step(sums: Any, chunk: Sequence[jax.Array]) -> tuple[Any, Any]:
            x, *arrays = chunk
            arrays = iter(arrays)
            of_tiles, at, given, factors = ([next(arrays) for _ in group] for group in groups)
            known, left = self._numbers | dict(zip(tiles, of_tiles, strict=True)), iter(factors)

            def epilogue(acc: jax.Array, at: Sequence[jax.Array], given: Sequence[jax.Array], b: Any) -> jax.Array:
                return self._gradient_of(self._of(acc, b), acc, iter(at), iter(given))

            operands = [[y[:, None] for y in ys] for ys in (at, given)]
            kept = self._traced.multiply(
                self._traced.layout, x, self._w, epilogue, (*operands, self._operands(known)), x.dtype
            )
            by = [None if is_number(x, 1.0) else next(left) for x in ends]
            return self._gradient.added(sums, kept, by, [None] * len(by), x, list(arrays))

        return self._in_chunks(step, *(x for group in groups for x in group), *self._gradient.columns)

    def _gradient_of(
        self, of: Callable[[Value], jax.Array], acc: jax.Array, at: Iterator[jax.Array], given: Iterator[jax.Array]
    ) -> jax.Array:
        """Returns the gradient of logits, told columns of labels, and coefficients and shifts of rows, in order."""
        found = jnp.zeros_like(acc)
        for basis in self.head.terms:
            coefficient = next(given)
            if basis[0] == "label":
                there = lax.broadcasted_iota(jnp.int32, acc.shape, 1) == next(at)
                found += jnp.where(there, coefficient, 0.0)
            elif basis[0] == "powers":
                found += coefficient * jnp.exp(of(basis[1]) - next(given))
            else:
                found += coefficient * (of(basis[1]) if basis[0] == "logits" else 1.0)
        return found * of(self.head.phi) if is_full(self.head.phi) else found
