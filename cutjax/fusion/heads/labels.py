"""Elements that a program takes from, or adds to, one column of each row: what gathers and scatters say of labels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax.lax import GatherScatterMode

from cutjax.fusion.flat import Flat
from cutjax.fusion.heads.grid import real
from cutjax.fusion.heads.values import Escape
from cutjax.fusion.jaxprs import is_literal

_MOVES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy")


class Columns(NamedTuple):
    """One column in each row.

    Attributes:
      index: the variable of the columns' numbers, one for each token, in their order.
      clipped: whether a number outside of the vocabulary stands for the nearest column.
    """

    index: Any
    clipped: bool


def gathered(flat: Flat, eqn: Any, axis: int) -> Columns:
    """Returns the column that a gather takes in each row, told the axis of the vocabulary.

    Raises:
      Escape: if it takes anything else.
    """
    dims, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    sizes = eqn.params["slice_sizes"]
    if any(sizes[i] != 1 for i in range(len(shape))):
        raise Escape("gather of several columns")
    batch = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
    clipped = eqn.params["mode"] in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
    return _columns(flat, eqn.invars[1], shape, axis, batch, dims.start_index_map, clipped)


def scattered(flat: Flat, eqn: Any, axis: int) -> Columns:
    """Returns the column that a scatter adds to in each row, told the axis of the vocabulary.

    Raises:
      Escape: if it adds to anything else.
    """
    dims, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    batch = dict(zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True))
    if any(eqn.invars[2].aval.shape[i] != 1 for i in dims.update_window_dims):
        raise Escape("scatter to several columns")
    clipped = eqn.params["mode"] == GatherScatterMode.CLIP  # what is promised to lie within, XLA drops elsewhere
    return _columns(flat, eqn.invars[1], shape, axis, batch, dims.scatter_dims_to_operand_dims, clipped)


def _columns(
    flat: Flat, index: Any, shape: Any, axis: int, batch: dict[int, int], mapped: Any, clipped: bool
) -> Columns:
    if axis not in mapped or is_literal(index):
        raise Escape("a gather along tokens")
    of_index, parts = index.aval.shape, _parts(flat, index, len(mapped))
    tokens = dict(batch)
    for i, part in zip(mapped, parts, strict=True):
        if i != axis and shape[i] != 1:
            place = _position(flat, part)
            if place is None or of_index[place] != shape[i]:
                raise Escape("a gather of tokens in another order")
            tokens[i] = place
    wanted = real(shape, [i for i in range(len(shape)) if i != axis])
    places = [tokens.get(i, -1) for i in wanted]
    if places != sorted(places) or -1 in places or real(of_index[:-1]) != places:
        raise Escape("a gather of tokens in another order")
    column = source(flat, parts[list(mapped).index(axis)])
    if is_literal(column) or math.prod(column.aval.shape) != math.prod(of_index[:-1]):
        raise Escape("a gather of one column for all tokens")
    return Columns(column, clipped)


def _parts(flat: Flat, index: Any, count: int) -> list[Any]:
    """Returns the variables of which an array of several indices is made, along its last axis."""
    if count == 1:
        return [index]
    eqn = flat.maker(index)
    last = index.aval.ndim - 1
    if eqn is None or eqn.primitive.name != "concatenate" or eqn.params["dimension"] != last:
        raise Escape("a gather by indices that are not known apart")
    if len(eqn.invars) != count or any(x.aval.shape[-1] != 1 for x in eqn.invars):
        raise Escape("a gather by indices that are not known apart")
    return list(eqn.invars)


def source(flat: Flat, x: Any) -> Any:
    """Returns the variable of the same elements, in the same order, that one is reshaped from."""
    while (eqn := flat.maker(x)) is not None and eqn.primitive.name in _MOVES:
        y = eqn.invars[0]
        if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
            break
        if is_literal(y) or math.prod(y.aval.shape) != math.prod(x.aval.shape):
            break
        x = y
    return x


def _position(flat: Flat, x: Any) -> int | None:
    """Returns the axis along which an array holds the positions 0, 1, ...; None of any other."""
    eqn = flat.maker(x)
    if eqn is None:
        return None
    name, shape = eqn.primitive.name, x.aval.shape
    if name == "iota":
        return eqn.params["dimension"]
    if name == "select_n" and len(eqn.invars) == 3:  # a negative position would count from the end
        below, position, _ = eqn.invars
        least = flat.maker(below)
        if least is None or least.primitive.name != "lt" or source(flat, least.invars[0]) is not source(flat, position):
            return None
        zero = flat.known(least.invars[1])
        return _position(flat, position) if zero is not None and not zero.any() else None
    if not eqn.invars or is_literal(eqn.invars[0]):
        return None
    inside = _position(flat, eqn.invars[0])
    if inside is None or name == "convert_element_type":
        return inside
    if name == "broadcast_in_dim":
        return eqn.params["broadcast_dimensions"][inside]
    if (name in _MOVES and eqn.params.get("dimensions") is None) or name in ("squeeze", "expand_dims"):
        before, after = real(eqn.invars[0].aval.shape), real(shape)
        if before == [inside] and len(after) == 1:
            return after[0]
    return None
