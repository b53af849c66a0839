"""The values of rows of a head, of a chunk of tokens or of all: expressions of what its first product finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cutjax.fusion.heads.head import Head
from cutjax.fusion.heads.values import Label, Leaf, Value, evaluate
from cutjax.fusion.tail import wide
from cutjax.ops.arguments import to_int32
from cutjax.primitives.vocabulary import LOG2_E


class Stats(NamedTuple):
    """The sums of rows that the first product finds, and the powers that it keeps.

    Attributes:
      sums: of ``2^(l log2(e) - shift)``.
      most, totals: the largest of values over the vocabulary, and their sums.
      products: the product at each label's column.
      kept: the powers times phi, ``[rows, vocabulary]`` in the dtype of x, or None.
    """

    sums: jax.Array
    most: list[jax.Array]
    totals: list[jax.Array]
    products: list[jax.Array]
    kept: jax.Array | None


class Rows:
    """Values of so many rows.

    Attributes:
      known: leaves as arrays.
      shift, stats: of the first product; None before it.
    """

    def __init__(self, head: Head, known: Mapping[Leaf, Any], size: int, shift: Any = None, stats: Stats | None = None):
        self.head, self.known, self.size, self.shift, self.stats = head, dict(known), size, shift, stats
        self._memo: dict[int, Any] = {}
        self._columns: dict[Label, tuple[jax.Array, jax.Array]] = {}
        self._at: dict[Label, dict[int, Any]] = {}

    def whole(self, value: Value) -> jax.Array:
        """Returns a value as an array of an element for each row."""
        return jnp.broadcast_to(jnp.asarray(evaluate(value, self._read, self._memo)), (self.size,))

    def column(self, label: Label) -> tuple[jax.Array, jax.Array]:
        """Returns the columns of a label, -1 where there is none, and whether there is one."""
        if label not in self._columns:
            y, size = to_int32(self.whole(label.index)), self.head.dot.vocabulary
            y = y.clip(0, size - 1) if label.clipped else y
            known = (y >= 0) & (y < size)
            self._columns[label] = jnp.where(known, y, -1), known
        return self._columns[label]

    def _read(self, leaf: Leaf) -> Any:
        if leaf in self.known:
            return self.known[leaf]
        head, stats = self.head, self.stats
        if leaf.kind == "known":
            return self.column(leaf.of[0])[1]
        assert stats is not None, leaf.kind
        if leaf.kind == "largest":
            return stats.most[head.most.index(leaf.of[0])]
        if leaf.kind == "total":
            return stats.totals[head.totals.index(leaf.of[0])]
        if leaf.kind == "powers":
            return with_shift(stats.sums, self.shift, evaluate(leaf.of[1], self._read, self._memo))
        value, label = leaf.of
        at, _ = self.column(label)

        def read(inner: Leaf) -> Any:
            if inner.kind == "product":
                return stats.products[head.labels.index(label)]
            if inner.kind == "index":
                return at
            return wide(self.known[inner].reshape(-1)[at]) if inner.kind == "column" else self._read(inner)

        return evaluate(value, read, self._at.setdefault(label, {}))


def with_shift(x: Any, shift: Any, new: Any) -> Any:
    """Returns ``x * 2^(shift - new log2(e))``; in halves, so that nothing overflows that the result does not."""
    half = jnp.exp2((shift - new * LOG2_E) / 2)
    return (x * half) * half
