"""The way an operation is divided over a mesh: the names of its arrays' axes, and what moves the fewest bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Labels = tuple[str | None, ...]  # of each axis of an array; None of one that is whole on every device


@dataclasses.dataclass(frozen=True)
class Rule:
    """The names of the axes of an operation's arrays.

    Attributes:
      operands, results: of each array.
      factors: how many of the first operands say how the operation is divided; the others follow.
      summed: names of axes over which the operation sums. They are divided where all the factors that have them are
        divided alike.
      late: those of them over which finished results are added, not the partial sums.
      gathered: names of axes that are whole in every shard of an operand, and may be divided in the results.
      following: how many of the last factors say nothing, and lie as the others ask: scales, with one element for
        several.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    factors: int
    summed: tuple[str, ...]
    late: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    following: int = 0

    def early(self, placement: Placement) -> bool:
        """True if partial sums are added over devices, before anything else is computed of them."""
        return any(placement.axes.get(label) for label in self.summed if label not in self.late)

    def without(self, lost: Sequence[int]) -> Rule:
        """Returns the rule of operands that have lost so many of their first axes."""
        return dataclasses.replace(self, operands=tuple(x[n:] for x, n in zip(self.operands, lost, strict=True)))

    def shardy(self, lost: Sequence[int]) -> tuple[str, dict[str, tuple[str, ...]]]:
        """Returns the rule as Shardy reads it: axes that are whole have names of their own.

        The operands have lost so many of their first axes there.

        So have summed axes of weights that a batch shares, of which an axis of size 1 was put in front. XLA may choose
        how such lie, though the argument that they are lies as it lies: it would divide them as the rows' summed axis
        is, and then add up sums, where to gather the rows is less.
        """
        whole: list[str] = []

        def names(labels: Labels, follows: bool = False, gone: int = 0) -> str:
            found = []
            shared = labels[:1] == (None,)
            for label in labels[gone:]:
                if label is None:
                    whole.append(f"whole{len(whole)}")
                alone = follows or (label in self.summed and shared)
                found.append(f"{label}_{'blocks' if follows else 'shared'}" if label and alone else label or whole[-1])
            return " ".join(found)

        places = range(self.factors - self.following, self.factors)
        each = enumerate(zip(self.operands, lost, strict=True))
        operands = ", ".join(names(labels, i in places, n) for i, (labels, n) in each)
        results = ", ".join(map(names, self.results))
        order = dict.fromkeys(operands.replace(",", "").split())  # Shardy's order of names
        summed = tuple(name for name in order if name.split("_")[0] in self.summed)
        return f"{operands} -> {results}", {"need_replication_factors": tuple(whole), "reduction_factors": summed}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The division of an operation.

    Attributes:
      mesh: the sizes of the mesh axes by name.
      axes: by name of an axis of the factors, the mesh axes it is divided over.
      scattered: by name of an axis of the results, the further mesh axes over which sums are divided there. Each is
        one that an axis in ``Rule.summed`` is divided over.
      exact: whether a summed axis is divided as one operand alone is, by choice. A program that gathers that operand
        rounds once, and so partial sums have the accumulators' dtype here.
    """

    mesh: Mapping[str, int]
    axes: Mapping[str, tuple[str, ...]]
    scattered: Mapping[str, tuple[str, ...]]
    exact: bool = False

    def over(self, label: str | None) -> tuple[str, ...]:
        """Returns the mesh axes over which an axis of the results is divided."""
        return self.axes.get(label or "", ()) + self.scattered.get(label or "", ())

    def count(self, axes: Sequence[str]) -> int:
        """Returns the number of parts that some mesh axes divide an array into."""
        return math.prod(self.mesh[axis] for axis in axes)

    def index(self, axes: Sequence[str]) -> jax.Array:
        """Returns the number of this device's part, of those that some mesh axes divide an array into."""
        return lax.axis_index(tuple(axes)) if axes else jnp.zeros((), jnp.int32)

    def spec(self, labels: Labels, scattered: bool = False) -> jax.P:
        """Returns the sharding of an array whose axes have these names."""
        of = self.over if scattered else lambda label: self.axes.get(label or "", ())
        return jax.P(*(of(label) or None for label in labels))


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of an operation that is to be divided, as XLA places them.

    Attributes:
      rule: the names of the axes.
      mesh: the sizes of the mesh axes by name.
      shapes: of the operands and the results.
      operands, results: the mesh axes of each axis of each array, tuples; no results where nothing is known of them.
      itemsize: bytes of an element of an operand.
    """

    rule: Rule
    mesh: Mapping[str, int]
    shapes: Sequence[Sequence[int]]
    operands: Sequence[Any]
    results: Sequence[Any]
    itemsize: int = 4

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis that has a name; of several sizes, what divides all."""
        named = zip((*self.rule.operands, *self.rule.results), self.shapes, strict=True)
        found: dict[str, int] = {}
        for labels, shape in named:
            for label, size in zip(labels, shape, strict=True):
                if label:
                    found[label] = math.gcd(found.get(label, 0), size)
        return found

    @functools.cached_property
    def wanted(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes over which each axis of a result is to be divided, the first result's that are any."""
        wanted: dict[str, tuple[str, ...]] = {}
        for labels, spec in zip(self.rule.results, self.results, strict=False):
            for label, over in zip(labels, spec, strict=True):
                if label and over:
                    wanted.setdefault(label, over)
        return wanted

    def asked(self, factors: Sequence[int]) -> dict[str, list[tuple[str, ...]]]:
        """Returns the mesh axes over which factors, in an order, divide each axis."""
        asked: dict[str, list[tuple[str, ...]]] = {}
        for i in factors:
            for label, over in zip(self.rule.operands[i], self.operands[i], strict=True):
                if label:
                    asked.setdefault(label, []).append(over)
        return asked


def place(arrays: Arrays) -> Placement:
    """Returns the placement of an operation that moves the fewest bytes.

    Where operands want one mesh axis for different axes, either goes first, and summed axes that they divide
    differently are divided as far as they agree, or whole: of these the one that moves the fewest bytes.
    """
    factors = tuple(range(arrays.rule.factors - arrays.rule.following))
    first = _placed(arrays, factors, "agreed")
    if all(have == need for have, need in _needs(arrays, first)) and not arrays.rule.early(first):
        return first  # nothing moves
    others = [(order, sums) for order in (factors, factors[::-1]) for sums in SUMS]
    return min((first, *(_placed(arrays, *x) for x in others)), key=lambda placement: _moved(placement, arrays))


SUMS = ("agreed", "whole", "first")  # divided as far as operands agree, not at all, as in the first of them


def _needs(arrays: Arrays, placement: Placement) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """Returns the mesh axes that divide each axis of each factor, as it lies and as it is needed."""
    rule = arrays.rule
    for labels, have in zip(rule.operands[: rule.factors], arrays.operands, strict=False):
        whole = (None, *rule.gathered)
        yield have, [() if label in whole else placement.axes.get(label or "", ()) for label in labels]


def _moved(placement: Placement, arrays: Arrays) -> int:
    """Returns the bytes that a device is sent: of operands, of sums, and of results that are wanted elsewhere."""
    rule, mesh, shapes, itemsize = arrays.rule, arrays.mesh, arrays.shapes, arrays.itemsize

    def moved(shape: Sequence[int], have: Sequence[Any], need: Sequence[Any]) -> int:
        before, after = ({axis: i for i, over in enumerate(spec) for axis in over} for spec in (have, need))
        kept = [axis for axis in before if axis in after]
        if len(kept) < len(before) or any(before[axis] != after[axis] for axis in kept):
            return math.prod(shape) // math.prod(mesh[axis] for axis in kept)
        return 0

    total = 0
    for (have, need), shape in zip(_needs(arrays, placement), shapes, strict=False):
        total += itemsize * moved(shape, have, need)
    late = rule.early(placement)
    for labels, shape, wanted in zip(rule.results, shapes[len(rule.operands) :], arrays.results, strict=False):
        have = [placement.over(label) for label in labels]
        total += itemsize * moved(shape, have, wanted)
        passes = 1 if any(placement.scattered.values()) else 2
        own = math.prod(placement.count(placement.axes.get(label or "", ())) for label in labels)
        total += passes * (4 if placement.exact else itemsize) * (math.prod(shape) // own) if late else 0
    return total


def _placed(arrays: Arrays, factors: Sequence[int], sums: str) -> Placement:
    """Returns the placement of an operation where the first factor in that order counts most.

    ``sums`` says it of a summed axis that not all operands divide alike: one of ``SUMS``.
    """
    rule, mesh, sizes, wanted, asked = arrays.rule, arrays.mesh, arrays.sizes, arrays.wanted, arrays.asked(factors)
    axes: dict[str, tuple[str, ...]] = {}
    scattered: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    exact = False

    def extend(label: str, more: Sequence[str]) -> None:
        """Divides by further mesh axes, as far as they are free and divide evenly: no shard is padded."""
        for axis in more:
            size = mesh[axis] * math.prod(mesh[x] for x in axes.get(label, ()))
            if axis in taken or sizes.get(label, 0) % size:
                return
            axes[label] = (*axes.get(label, ()), axis)
            taken.add(axis)

    for label in rule.summed:
        specs = asked.get(label, [()])
        agreed = len({*specs}) == 1
        if sums == "whole" and not agreed:
            continue
        if sums == "first" and not agreed:
            extend(label, specs[0])
            exact = exact or bool(specs[0])
        elif found := functools.reduce(_common, specs):
            extend(label, found)
        elif found := _one_side(arrays, factors, label):
            extend(label, found)
            exact = True
    summed = set(taken)
    proposed = {label: next(filter(None, found), ()) for label, found in asked.items() if label not in rule.summed}
    for label, found in proposed.items():  # what operands and results agree on goes first
        extend(label, _common(found, wanted.get(label, ())))
    for label, found in proposed.items():
        if found[: len(axes.get(label, ()))] == axes.get(label, ()):
            extend(label, found[len(axes.get(label, ())) :])
    for label, found in wanted.items():
        have = axes.get(label, ())
        if found[: len(have)] != have or label in rule.summed:
            continue
        free = next((i for i in range(len(have), len(found)) if found[i] in taken), len(found))
        extend(label, found[len(have) : free])
        if axes.get(label, ()) == found[:free]:
            more: list[str] = []
            for axis in found[free:]:
                size = math.prod(mesh[x] for x in (*found[:free], *more, axis))
                if axis not in summed or sizes.get(label, 0) % size:
                    break
                more.append(axis)
                summed.remove(axis)
            if more:
                scattered[label] = tuple(more)
    return Placement(dict(mesh), axes, scattered, exact)


def _one_side(arrays: Arrays, factors: Sequence[int], label: str) -> tuple[str, ...]:
    """Returns the mesh axes over which one operand alone divides a summed axis, if sums move less than the operand.

    The others are whole there, so that each device has its part of them; or another axis of theirs is divided alike,
    and an all-to-all moves them.
    """
    rule, mesh, sizes, wanted, asked = arrays.rule, arrays.mesh, arrays.sizes, arrays.wanted, arrays.asked(factors)
    found = [axes for axes in asked.get(label, ()) if axes]
    if len(found) != 1:
        return ()
    (summed,) = found

    def elements(labels: Labels, gone: Sequence[str] = ()) -> int:
        """Returns the elements of a device's part of an array whose summed axis is whole, undivided over axes gone."""
        over = {x for name in labels if name and name != label for x in next(filter(None, asked.get(name, ())), ())}
        over |= {x for name in labels if name not in asked for x in wanted.get(name or "", ())}
        whole = math.prod(sizes[name] for name in labels if name)
        return whole // math.prod(mesh[x] for x in over - {*gone})

    holders = [rule.operands[i] for i in factors if label in rule.operands[i]]
    operand = holders.pop(asked[label].index(summed))
    elsewhere = {
        name: specs for name, specs in asked.items() if name != label and {*summed} & {x for y in specs for x in y}
    }
    if any({*specs} - {(), summed} for specs in elsewhere.values()):
        return ()  # what moves between such divisions is more than an all-to-all
    moving = [labels for labels in holders if elsewhere.keys() & {*labels}]
    # What adds up in f32 passes twice over each link, once where the result keeps its part; what gathers passes once.
    passes = 1 if any({*summed} <= {*wanted.get(name or "", ())} for name in rule.results[0]) else 2
    sums = passes * 4 * elements(rule.results[0], summed) + sum(arrays.itemsize * elements(x) for x in moving)
    return summed if sums <= arrays.itemsize * elements(operand, summed) else ()


def _common(p: tuple[str, ...], q: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the mesh axes with which both begin."""
    n = next((i for i, (x, y) in enumerate(zip(p, q, strict=False)) if x != y), min(len(p), len(q)))
    return p[:n]


def batch_labels(shape: Sequence[int], full: Sequence[int]) -> Labels:
    """Returns the names of batch axes, which count them from the last; one that broadcasts is whole."""
    last = len(shape) - 1
    return tuple(f"b{last - i}" if size != 1 or full[i] == 1 else None for i, size in enumerate(shape))
