"""The canonical form of a dot_general: one product of matrices, found without moving data wherever memory allows.

    dot_general(lhs, rhs)  ==  plan.result(product(*plan.operands(lhs, rhs)))

The product is ``a[*batch, m, k] @ b[*batch, k, n]``. Each of its axes stands for neighbouring axes of an array, merged
by a reshape; axes that lie apart are batch axes of the product, those of one operand alone of size 1 in the other. A
batch axis may lie anywhere in memory but last: a logical transposition puts it first, and a memory order (``orders``)
tells the product where it is, so that XLA moves nothing. Only what has no such form is copied, the fewest bytes of it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax

from cutjax.kernels.prepared import along

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Move:
    """The steps from one array to another: a reshape, a transposition and a reshape.

    Attributes:
      split: shape of the first reshape.
      permutation: of the transposition.
      shape: that of the second reshape, and of what results.
      order: axes of the product's array from the slowest to the fastest in memory; () where it is row-major.
      copied: bytes that the transposition copies; 0 where the order makes it a change of names.
    """

    split: Axes
    permutation: Axes
    shape: Axes
    order: Axes
    copied: int

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the array moved."""
        x = x if x.shape == self.split else lax.reshape(x, self.split)
        x = x if self.permutation == tuple(range(x.ndim)) else lax.transpose(x, self.permutation)
        return x if x.shape == self.shape else lax.reshape(x, self.shape)

    def of_blocks(self, x: jax.Array, shape: Axes) -> jax.Array:
        """Returns an array that has an element for each block of one of a shape, moved as that is.

        Axes that are merged or split where that cuts blocks are repeated first.
        """
        x = _reshaped(x, shape, self.split)
        x = lax.transpose(x, self.permutation)
        return _reshaped(x, tuple(self.split[i] for i in self.permutation), self.shape)


def _reshaped(x: jax.Array, before: Axes, after: Axes) -> jax.Array:
    """Returns an array with an element for each block of one that is reshaped from a shape to another."""
    whole, counts = list(x.shape), []
    for of_before, of_after in alike(before, after):
        sizes, new = ([shape[i] for i in axes] for shape, axes in ((before, of_before), (after, of_after)))
        given = [x.shape[i] for i in of_before]
        last = max((i for i, count in enumerate(given) if count > 1), default=0)
        blocks = math.prod(sizes[:last]) * given[last] if max(given, default=1) > 1 else 1
        length, found, fits = math.prod(sizes) // blocks, [], True  # of a block: neighbours, all axes being one
        for size in reversed(new):
            step = math.gcd(length, size)
            fits = fits and step in (length, size)
            found.append(size // step)
            length //= step
        for i, size in zip(of_before, sizes, strict=True):
            if blocks > 1 and (not fits or i - of_before.start < last):
                whole[i] = size
        counts += found[::-1] if fits else new
    return lax.reshape(along(x, whole), counts)


def alike(before: Axes, after: Axes) -> Iterator[tuple[range, range]]:
    """Yields neighbouring axes of two shapes that have as many elements, the fewest there are."""
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        sizes = [1, 1]
        while True:
            if i < len(before) and (sizes[0] <= sizes[1] or j == len(after)):
                sizes[0] *= before[i]
                i += 1
            elif j < len(after):
                sizes[1] *= after[j]
                j += 1
            if sizes[0] == sizes[1] and (i, j) != (first, second):
                break
        yield range(first, i), range(second, j)


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The plan of a dot_general.

    Attributes:
      layout: of the product: "nn", "nt", "tn" or "tt".
      swapped: whether a is made of rhs and b of lhs, because the result ends in an axis of lhs.
      a, b: what makes the operands, ``[*batch, m, k]`` (or ``[k, m]``) and ``[*batch, k, n]`` (or ``[n, k]``).
      d: what makes the result, permuted as asked for, of ``[*batch, m, n]``.
      axes: for each axis of ``[*batch, m, n]`` the axes of dot_general's own result that it merges, in order. Axes of
        size 1 are in none.
      copies: of a, b and the result: a sentence that says that it is copied, its bytes and why; "" where it is not.
    """

    layout: str
    swapped: bool
    a: Move
    b: Move
    d: Move
    axes: tuple[Axes, ...]
    copies: tuple[str, str, str]

    @property
    def copied(self) -> int:
        """Bytes copied of all three arrays."""
        return self.a.copied + self.b.copied + self.d.copied

    @property
    def orders(self) -> tuple[Axes, Axes, Axes]:
        """Memory orders of a, b and the result."""
        return self.a.order, self.b.order, self.d.order

    @property
    def merges(self) -> bool:
        """True if an axis of rows, columns or the batch is several axes of the arrays, merged."""
        return any(len(axes) > 1 for axes in self.axes)

    def lies(self, spec: Sequence[Any], permutation: Axes | None) -> jax.P:
        """Returns the sharding of the product's result, which merges no axes, from that of dot_general's, permuted."""
        order = range(len(spec)) if permutation is None else permutation
        of = dict(zip(order, spec, strict=True))
        return jax.P(*(of[axes[0]] if axes else None for axes in self.axes))

    def operands(self, lhs: Any, rhs: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the product's operands."""
        return (self.a(rhs), self.b(lhs)) if self.swapped else (self.a(lhs), self.b(rhs))

    def result(self, d: jax.Array) -> jax.Array:
        """Returns dot_general's result, permuted as asked for, of the product's."""
        return self.d(d)


@functools.lru_cache(maxsize=4096)
def contraction(
    lhs: Axes,
    rhs: Axes,
    dimension_numbers: Any,
    permutation: Axes | None = None,
    *,
    itemsizes: tuple[int, int, int] = (2, 2, 2),
    apart: bool = False,
) -> Contraction:
    """Returns the plan of ``lax.transpose(lax.dot_general(lhs, rhs, dimension_numbers), permutation)``.

    A pure function of shapes: the first of `contractions`. Of plans without copies it is the one with the fewest
    matrices, hence the largest, then of the fewest memory orders that are not row-major.

    Args:
      lhs, rhs: shapes; no size is 0 or symbolic.
      dimension_numbers: as ``lax.dot_general`` takes them, valid and in nested tuples.
      permutation: of the result; None leaves it as it is.
      itemsizes: bytes of an element of lhs, rhs and the result.
      apart: whether rows are one axis alone, and further ones batch axes: where each may be divided over devices.
    """
    return contractions(lhs, rhs, dimension_numbers, permutation, itemsizes=itemsizes, apart=apart)[0]


@functools.lru_cache(maxsize=4096)
def contractions(
    lhs: Axes,
    rhs: Axes,
    dimension_numbers: Any,
    permutation: Axes | None = None,
    *,
    itemsizes: tuple[int, int, int] = (2, 2, 2),
    apart: bool = False,
) -> tuple[Contraction, ...]:
    """Returns the plans of a product, told as `contraction` is: each copies more than the last, for fewer matrices.

    Many small matrices read the same rows many times, which may take longer than to copy what lies apart.
    """
    (l_contract, r_contract), (l_batch, r_batch) = dimension_numbers
    l_free = [i for i in range(len(lhs)) if i not in (*l_contract, *l_batch)]
    r_free = [i for i in range(len(rhs)) if i not in (*r_contract, *r_batch)]
    # A label for each index of the product: the result's axes, then the contracted ones. Size 1 needs none.
    rank = len(l_batch) + len(l_free) + len(r_free)
    l_results = (*range(len(l_batch) + len(l_free)), *_from(rank, l_contract))
    l_axes = dict(zip((*l_batch, *l_free, *l_contract), l_results, strict=True))
    r_results = (*range(len(l_batch)), *range(len(l_batch) + len(l_free), rank), *_from(rank, r_contract))
    r_axes = dict(zip((*r_batch, *r_free, *r_contract), r_results, strict=True))
    sizes = {label: lhs[i] for i, label in l_axes.items()} | {label: rhs[i] for i, label in r_axes.items()}
    permutation = tuple(range(rank)) if permutation is None else permutation
    arrays = [[l_axes[i] for i in range(len(lhs))], [r_axes[i] for i in range(len(rhs))], permutation]
    seqs = [tuple(label for label in labels if sizes[label] != 1) for labels in arrays]
    final = tuple(sizes[label] for label in permutation)
    bytes_of = [math.prod(sizes[x] for x in seq) * size for seq, size in zip(seqs, itemsizes, strict=True)]

    subsets = [c for count in range(4) for c in itertools.combinations(range(3), count)]
    least = math.prod(sizes[x] for x in {*seqs[0]} & {*seqs[1]} & {*seqs[2]})  # matrices, of any plan
    found: list[tuple[Any, Contraction]] = []
    for copied in sorted(subsets, key=lambda c: sum(bytes_of[i] for i in c)):
        if found and sum(bytes_of[i] for i in copied) > found[-1][0][0] and found[-1][0][1] == least:
            break
        plans = _Search(seqs, sizes, copied, bytes_of, final, apart).plans()
        best = min(plans, key=lambda plan: plan[0], default=None)
        if best and found and best[0][0] == found[-1][0][0]:
            found[-1] = min(found[-1], best, key=lambda plan: plan[0])
        elif best and (not found or best[0][1] < found[-1][0][1]):
            found.append(best)
    assert found  # with all three copied there is always one
    return tuple(dataclasses.replace(plan, copies=_reasons(plan, seqs)) for _, plan in found)


class _Search:
    """The plans of a product in which some of the arrays (0 is lhs, 1 rhs, 2 the result) are copied."""

    def __init__(
        self, seqs: list[Axes], sizes: dict[int, int], copied: Axes, nbytes: list[int], final: Axes, apart: bool
    ):
        self.sizes, self.nbytes, self.final, self.apart = sizes, nbytes, final, apart
        lhs, rhs, out = seqs
        # The result ends in an axis of the columns, so of which operand decides which is b. Where it is copied
        # the larger operand is a.
        ends_in_lhs = bool(out) and out[-1] in lhs and out[-1] not in rhs
        self.swapped = nbytes[1] > nbytes[0] if 2 in copied else ends_in_lhs
        self.a, self.b = (1, 0) if self.swapped else (0, 1)
        self.seqs, self.copied = seqs, copied

    def plans(self) -> Iterator[tuple[Any, Contraction]]:
        a, b, out = self.seqs[self.a], self.seqs[self.b], self.seqs[2]
        contracted = [x for x in a if x not in out]
        m_free, n_free = ([x for x in seq if x in out and x not in other] for seq, other in ((a, b), (b, a)))
        # Depth: all contracted axes in one order. Rows and columns: neighbours; what is left of them is batch axes.
        for k in self._runs(contracted, (self.a, self.b), whole=True):
            for m in self._runs(m_free, (self.a, 2)):
                if self.apart and len(m) > 1:
                    continue
                for n in self._runs(n_free, (self.b, 2)):
                    found = self._plan(m, n, k)
                    if found is not None:
                        yield found

    def _runs(self, labels: Sequence[int], arrays: Axes, whole: bool = False) -> list[Axes]:
        """Returns the runs of labels that are neighbours, in one order, in each of the arrays that is not copied."""
        if not labels:
            return [()]
        seqs = [self.seqs[i] for i in arrays if i not in self.copied] or [tuple(labels)]
        places = [(i, j) for i in range(len(seqs[0])) for j in range(i + 1, len(seqs[0]) + 1)]
        runs = [seqs[0][i:j] for i, j in places if set(seqs[0][i:j]) <= set(labels)]
        return [run for run in runs if (not whole or len(run) == len(labels)) and all(_has(s, run) for s in seqs)]

    def _plan(self, m: Axes, n: Axes, k: Axes) -> tuple[Any, Contraction] | None:
        out, sizes = self.seqs[2], self.sizes
        first = next((self.seqs[i] for i in (2, self.a, self.b) if i not in self.copied), out)
        apart = [x for x in out if x not in (*m, *n)]
        batch = self._batch(sorted(apart, key=lambda x: first.index(x) if x in first else len(first)))
        a_batch, b_batch = ([g if g[0] in self.seqs[i] else () for g in batch] for i in (self.a, self.b))
        moves, layout = [], ""
        for i, groups, (row, col), letters in (
            (self.a, a_batch, (m, k), "nt"),
            (self.b, b_batch, (k, n), "tn"),
            (2, batch, (m, n), "n"),
        ):
            letter = self._letter(i, row, col, letters)
            if letter is None:
                return None
            matrix = (row, col) if letter == "n" else (col, row)
            moves.append(self._move(i, [*groups, *matrix]))
            layout += letter
        a, b, d = moves
        plan = Contraction(layout[:2], self.swapped, a, b, d, (*batch, m, n), ("", "", ""))
        matrices = math.prod(sizes[x] for g in batch for x in g)
        score = plan.copied, matrices, sum(map(bool, plan.orders)), len(batch)
        return score, plan

    def _letter(self, i: int, row: Axes, col: Axes, letters: str) -> str | None:
        """Returns "n" if columns, "t" if rows lie last in memory; a copy may be either."""
        seq = self.seqs[i]
        groups = {"n": col, "t": row}
        for letter in letters:
            last = groups[letter][-1:]
            if last == seq[-1:] if last else not seq or seq[-1] not in (*row, *col):
                return letter
        return next((x for x in letters if groups[x]), letters[0]) if i in self.copied else None

    def _batch(self, labels: Sequence[int]) -> tuple[Axes, ...]:
        """Returns batch axes, neighbours merged that are neighbours in every array which has them."""
        groups: list[Axes] = []
        for x in labels:
            last = groups[-1][-1] if groups else None
            homes = [[i for i in range(3) if y in self.seqs[i]] for y in (last, x)]
            near = (
                not self.apart
                and homes[0] == homes[1]
                and all(i in self.copied or _has(self.seqs[i], (last, x)) for i in homes[1])
            )
            groups[-1:] = [(*groups[-1], x)] if last is not None and near else [*groups[-1:], (x,)]
        return tuple(groups)

    def _move(self, i: int, groups: list[Axes]) -> Move:
        """Returns the reshape and transposition between an array and the product's, each of whose axes is a group."""
        seq, sizes = self.seqs[i], self.sizes
        shape = tuple(math.prod(sizes[x] for x in group) for group in groups)
        copied = i in self.copied
        pieces = [(x,) for group in groups for x in group] if copied else [group for group in groups if group]
        places = sorted(range(len(pieces)), key=lambda p: seq.index(pieces[p][0]))  # as they lie in memory
        in_memory = tuple(math.prod(sizes[x] for x in pieces[p]) for p in places)
        order: Axes = ()
        if not copied and places != sorted(places):
            axes = [j for j, group in enumerate(groups) if group]
            unit = [j for j, group in enumerate(groups) if not group]
            # An axis of size 1 lies anywhere: rows before columns, columns last, those of the batch first.
            rows, last = len(groups) - 2, len(groups) - 1
            outer = [j for j in unit if j < rows]
            inner = [axes[p] for p in places]
            at = len(inner) - (last not in unit)
            inner[at:at] = [rows] if rows in unit else []
            order = (*outer, *inner, *([last] if last in unit else []))
        if i == 2:
            split = tuple(math.prod(sizes[x] for x in piece) for piece in pieces)
            return Move(split, tuple(places), self.final, order, self.nbytes[i] if copied else 0)
        back = tuple(places.index(p) for p in range(len(places)))
        return Move(in_memory, back, shape, order, self.nbytes[i] if copied else 0)


def _reasons(plan: Contraction, seqs: list[Axes]) -> tuple[str, str, str]:
    """Returns, of a, b and the result, that it is copied and why."""
    lhs, rhs, out = seqs

    def operand(name: str, move: Move, seq: Axes, other: Axes) -> str:
        contracted = tuple(x for x in seq if x not in out)
        if not _has(seq, contracted):
            why = "its contracted axes are not neighbours"
        elif not _has(other, contracted):
            why = "its contracted axes do not lie as the other operand's"
        elif seq and seq[-1] in other and seq[-1] in out:
            why = "its last axis is a batch axis"
        else:
            why = "its axes do not lie as the result's"
        return f"{name} is copied ({move.copied:,} bytes): {why}" if move.copied else ""

    last = bool(out) and out[-1] in lhs and out[-1] in rhs
    why = "its last axis is a batch axis" if last else "its axes do not lie as the operands'"
    result = f"the result is copied ({plan.d.copied:,} bytes): {why}" if plan.d.copied else ""
    if plan.swapped:
        return operand("rhs", plan.a, rhs, lhs), operand("lhs", plan.b, lhs, rhs), result
    return operand("lhs", plan.a, lhs, rhs), operand("rhs", plan.b, rhs, lhs), result


def _has(seq: Axes, run: Sequence[Any]) -> bool:
    """True if the labels of a run are neighbours in a sequence, in that order."""
    run = tuple(run)
    return not run or any(seq[i : i + len(run)] == run for i in range(len(seq) - len(run) + 1))


def _from(first: int, axes: Sequence[int]) -> range:
    return range(first, first + len(axes))
