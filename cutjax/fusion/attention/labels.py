"""The axes of arrays by labels: which axis of the first product each is, wherever a program moves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Labels = tuple[Any, ...]  # of each axis of an array; None of one of size 1, or along which a value does not vary
SIZE, VALUE = "size", "value"  # what the first product adds up, and what the second one makes
MOVES = frozenset(["transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim"])
SAME = frozenset(["copy", "copy_p", "name", "stop_gradient"])  # what changes no value


class Escape(Exception):
    """No kernel has this."""


def divided(labels: Labels, parts: Mapping[Any, Labels]) -> list[Any]:
    """Returns the labels of axes longer than 1, some of them as their parts."""
    return [part for label in labels if label is not None for part in parts.get(label, (label,))]


def around_ones(shape: Sequence[int], new: Sequence[int], labels: Labels) -> Labels:
    """Returns the labels after a reshape that puts axes of size 1 somewhere, or takes them away."""
    if [n for n in shape if n != 1] != [n for n in new if n != 1]:
        raise Escape
    left = iter([label for n, label in zip(shape, labels, strict=True) if n != 1])
    return tuple(None if n == 1 else next(left) for n in new)


def given(eqn: Any, labels: Labels) -> list[Labels]:
    """Returns the labels of what an elementwise equation reads, or one that moves axes, told those of what it makes."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "iota":
        return []
    x = eqn.invars[0].aval
    if name == "transpose":
        order = eqn.params["permutation"]
        return [tuple(labels[order.index(i)] for i in range(len(order)))]
    if name == "broadcast_in_dim":
        at = eqn.params["broadcast_dimensions"]
        return [tuple(labels[i] if x.shape[j] == out.shape[i] else None for j, i in enumerate(at))]
    if name in MOVES:
        return [around_ones(out.shape, x.shape, labels)]
    return [
        tuple(None if n == 1 else label for n, label in zip(y.aval.shape, labels, strict=True)) if y.aval.ndim else ()
        for y in eqn.invars
    ]


def moved(eqn: Any, labels: Labels, broadcasts: bool) -> Labels:
    """Returns the labels of what an equation that moves axes makes, told those of what it reads.

    Args:
      eqn: the equation.
      labels: those of its operand.
      broadcasts: whether it may repeat elements.
    """
    name, x, out = eqn.primitive.name, eqn.invars[0].aval, eqn.outvars[0].aval
    if name == "transpose":
        return tuple(labels[i] for i in eqn.params["permutation"])
    if name != "broadcast_in_dim":
        return around_ones(x.shape, out.shape, labels)
    if not broadcasts and x.size != out.size:
        raise Escape
    found: list[Any] = [None] * out.ndim
    for i, axis in enumerate(eqn.params["broadcast_dimensions"]):
        found[axis] = labels[i] if x.shape[i] == out.shape[axis] else None
    return tuple(found)
