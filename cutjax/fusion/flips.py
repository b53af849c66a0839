"""Weights that a program flips for a convolution, as JAX's gradients do: a kernel reads them as they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cutjax.fusion.jaxprs import Graph, is_literal

CONVOLUTION = "conv_general_dilated"
FLIPPED = "flipped"  # the parameter of an equation that is in no program
_MOST = 8  # equations that flip weights, and move their axes
# A part of an axis of the weights as they lie: that axis, the step along it and the size.
_Part = tuple[int, int, int]


class Flip(NamedTuple):
    """A convolution of weights that are flipped before it.

    Attributes:
      eqn: its equation, but of the weights as they lie, as ``planned`` takes flipped ones.
      members: the equations that make the weights that it reads.
    """

    eqn: Any
    members: list[int]


def flip(graph: Graph, i: int) -> Flip | None:
    """Returns the convolution of the weights as they lie; None where an equation is no such."""
    eqn = graph.eqns[i]
    x, members = eqn.invars[1], []
    while eqn.primitive.name == CONVOLUTION and not is_literal(x) and x not in graph.definition:
        maker = graph.producer.get(x, -1)
        if (
            maker < 0
            or len(members) == _MOST
            or graph.eqns[maker].primitive.name not in ("rev", "transpose", "reshape")
        ):
            break
        members.insert(0, maker)
        (x,) = graph.eqns[maker].invars
        spec = None if is_literal(x) else _lies(x.aval.shape, [graph.eqns[j] for j in members], eqn.params)
        if spec is not None:
            numbers = eqn.params["dimension_numbers"]._replace(rhs_spec=spec)
            params = {**eqn.params, "dimension_numbers": numbers, FLIPPED: True}
            return Flip(eqn.replace(invars=[eqn.invars[0], x], params=params), members)
    return None


def _lies(shape: Sequence[int], eqns: Sequence[Any], params: Any) -> tuple[int, ...] | None:
    """Returns the axes of weights that become lax's "I", "O" and taps, flipped; None where equations do else.

    Where there are groups, "O" becomes the groups of the one axis, which has "I" of all groups, and all of the other.
    """
    if all(eqn.primitive.name != "rev" for eqn in eqns):
        return None
    axes, flipped = [_parts(i, size) for i, size in enumerate(shape)], set[int]()
    for eqn in eqns:
        order = eqn.params.get("permutation", eqn.params.get("dimensions"))
        if eqn.primitive.name == "rev":
            flipped ^= {part[0] for axis in order for part in axes[axis]}
            continue
        axes = axes if order is None else [axes[axis] for axis in order]
        if eqn.primitive.name == "reshape" and (axes := _reshaped(axes, eqn.params["new_sizes"])) is None:
            return None
    if len(axes) != len(shape):
        return None
    groups = params["feature_group_count"]
    of_o, of_i, *taps = (axes[axis] for axis in params["dimension_numbers"].rhs_spec)
    if groups > 1:
        (first, step, size), *of_o = of_o
        if size != groups or shape[first] != groups * step or of_i != _parts(first, step):
            return None
        of_i = _parts(first, shape[first])
    roles = [of_o, of_i, *taps]
    found = [parts[0][0] if parts else -1 for parts in roles]
    if any(parts != _parts(axis, shape[axis]) for axis, parts in zip(found, roles, strict=True) if parts):
        return None
    if flipped != {axis for axis in found[2:] if axis >= 0}:
        return None
    rest = iter(axis for axis in range(len(shape)) if axis not in found)  # of size 1, so each may be any
    o, i, *of_taps = (next(rest) if axis < 0 else axis for axis in found)
    return i, o, *of_taps


def _parts(axis: int, size: int) -> list[_Part]:
    return [(axis, 1, size)] if size > 1 else []


def _reshaped(axes: Sequence[list[_Part]], sizes: Sequence[int]) -> list[list[_Part]] | None:
    """Returns the parts of the axes of an array that is reshaped; None where axes of several are cut in another way."""
    parts = [part for axis in axes for part in axis]
    found: list[list[_Part]] = []
    for size in sizes:
        own: list[_Part] = []
        while (left := size // math.prod(part[2] for part in own)) > 1:
            axis, step, count = parts.pop(0)
            if count > left:
                parts.insert(0, (axis, step, count // left))
                step, rest, count = step * (count // left), count % left, left
            else:
                rest = left % count
            if rest:
                return None
            if own and own[-1][0] == axis and own[-1][1] == step * count:
                _, _, before = own.pop()
                count *= before
            own.append((axis, step, count))
        found.append(own)
    return found
