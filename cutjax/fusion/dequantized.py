"""Products of weights that a program dequantizes: made products of the quantized weights themselves.

(values.astype(x.dtype) - zero_point) * scale, with values and scale as they are, or split into blocks by a reshape
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cutjax.dtypes import NARROW, holds
from cutjax.fusion.contraction import is_sharded
from cutjax.fusion.jaxprs import is_literal, makers_and_readers, opened, with_equations
from cutjax.fusion.narrow import in_place_of
from cutjax.ops.contraction import alike
from cutjax.ops.dot_general import permuted
from cutjax.ops.quantized import Quantized

_CONVERT = "convert_element_type"


@dataclasses.dataclass(frozen=True)
class Found:
    """The variables of an operand that a program dequantizes, and their shapes.

    Attributes:
      values: the narrow values.
      scale: the scales.
      zero: the zero points; None where there are none.
      shape: that of the operand.
      counts: those of its scales and of its zero points, of the operand's rank.
    """

    values: Any
    scale: Any
    zero: Any
    shape: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def inputs(self) -> list[Any]:
        """The variables."""
        return [x for x in (self.values, self.scale, self.zero) if x is not None]

    def operand(self, values: jax.Array, scale: jax.Array, zero: jax.Array | None = None) -> Quantized:
        """Returns the operand of these arrays."""
        found = [lax.reshape(x, count) for x, count in zip((scale, zero), self.counts, strict=False) if x is not None]
        return Quantized(lax.reshape(values, self.shape), *found)


def requantized(jaxpr: Any) -> Any:
    """Returns a program whose products read quantized operands as they are, where nothing else reads them wide."""
    inner = opened(jaxpr)
    products = [eqn for eqn in inner.eqns if eqn.primitive is lax.dot_general_p]
    if not products or not any(eqn.primitive.name == "mul" for eqn in inner.eqns):
        return jaxpr
    makers, readers = makers_and_readers(inner)
    made: dict[int, list[Any]] = {}
    for eqn in products:
        if any(is_literal(x) or is_sharded(x.aval.sharding) for x in eqn.invars):
            continue
        for i in range(2):
            turned = _unturned(eqn, i, makers, readers)
            found = _Search(makers, readers).found(turned.invars[i])
            if found is not None and (equations := _equations(turned, i, found)) is not None:
                made[id(eqn)] = equations
                break
    if not made:
        return jaxpr
    return with_equations(jaxpr, [new for eqn in inner.eqns for new in made.get(id(eqn), [eqn])])


def _unturned(eqn: Any, i: int, makers: dict[Any, Any], readers: dict[Any, int]) -> Any:
    """Returns a product that reads operand ``i`` as it was before a transposition, where its result is the same."""
    x = eqn.invars[i]
    turn = makers.get(x)
    if turn is None or turn.primitive.name != "transpose" or readers[x] > 1 or is_literal(turn.invars[0]):
        return eqn
    order = turn.params["permutation"]
    contract, batch = (list(pair) for pair in eqn.params["dimension_numbers"])
    free = [order[axis] for axis in range(len(order)) if axis not in (*contract[i], *batch[i])]
    if free != sorted(free):
        return eqn
    contract[i], batch[i] = (tuple(order[axis] for axis in pair[i]) for pair in (contract, batch))
    invars = [turn.invars[0] if j == i else y for j, y in enumerate(eqn.invars)]
    return eqn.replace(invars=invars, params={**eqn.params, "dimension_numbers": (tuple(contract), tuple(batch))})


def _equations(eqn: Any, i: int, found: Found) -> list[Any] | None:
    """Returns the equations of a product whose operand ``i`` is what was found.

    Scales that are one for all of the contraction multiply the sums in float32, beside what else a kernel's epilogue
    may have; others are the product's.
    """
    (contract, batch), out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    axes = contract[i]
    other = eqn.invars[1 - i]
    if other.aval.dtype.name not in ("bfloat16", "float16", "float32"):
        return None
    params = {**eqn.params, "preferred_element_type": out.dtype}
    of_sums = found.zero is None and all(found.counts[0][axis] == 1 for axis in axes)
    free = [axis for axis in range(len(found.shape)) if axis not in (*axes, *batch[i])]
    whole = all(found.counts[0][axis] in (1, found.shape[axis]) for axis in (*free, *batch[i]))

    def by_sums(other: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        values, scale = lax.reshape(values, found.shape), lax.reshape(scale, found.counts[0])
        operands = (values, other) if i == 0 else (other, values)
        acc = permuted(*operands, **{**params, "preferred_element_type": jnp.float32})
        order = (*batch[i], *free)
        along = lax.transpose(scale, (*order, *axes)).reshape([scale.shape[axis] for axis in order])
        others = acc.ndim - len(order)
        at = len(batch[i]) + (0 if i == 0 else others)
        places = range(len(order)) if i == 0 else (*range(len(batch[i])), *range(at, acc.ndim))
        shape = [1] * acc.ndim
        for place, size in zip(places, along.shape, strict=True):
            shape[place] = size
        return (acc * along.reshape(shape).astype(acc.dtype)).astype(out.dtype)

    def by_blocks(other: jax.Array, *arrays: jax.Array) -> jax.Array:
        q = found.operand(*arrays)
        return permuted(*((q, other) if i == 0 else (other, q)), **params)

    columns = i == 1 and other.aval.dtype.itemsize == 2  # narrow columns are read as they are
    function = by_sums if of_sums and whole and columns else by_blocks
    try:
        return in_place_of(eqn, function, [other, *found.inputs])
    except (TypeError, ValueError, NotImplementedError):
        return None


class _Search:
    """A search for what makes an operand, through equations of which nothing else reads the result."""

    def __init__(self, makers: dict[Any, Any], readers: dict[Any, int]):
        self.makers, self.readers = makers, readers

    def found(self, x: Any) -> Found | None:
        """Returns the quantized operand that a variable stands for; None where it is none."""
        shape = tuple(x.aval.shape)
        product = self._maker(self._through(x, (_CONVERT, "reshape", "copy")), "mul")
        if product is None:
            return None
        for values, scale in (product.invars, product.invars[::-1]):
            if is_literal(values) or is_literal(scale):
                continue
            zero, inside = None, self._through(values, (_CONVERT, "reshape", "copy"))
            if (difference := self._maker(inside, "sub")) is not None:
                values, zero = difference.invars
                if is_literal(values):
                    continue
                inside = self._through(values, (_CONVERT, "reshape", "copy"))
            split = tuple(values.aval.shape)
            if inside.aval.dtype.name not in NARROW or inside is x:
                continue
            of_scale = self._blocks(scale, split, shape)
            of_zero = None if zero is None else self._blocks(zero, split, shape)
            if of_scale is None or (zero is not None and of_zero is None):
                continue
            if jnp.issubdtype(of_scale[0].aval.dtype, jnp.floating):
                point, *counts = of_zero or (None,)
                return Found(inside, of_scale[0], point, shape, (of_scale[1], *counts))
        return None

    def _maker(self, x: Any, name: str) -> Any:
        eqn, dtype = self.makers.get(x), x.aval.dtype
        exact = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.signedinteger)  # others wrap around
        known = eqn is not None and eqn.primitive.name == name and self.readers[x] == 1
        return eqn if known and exact and dtype.name not in NARROW else None

    def _through(self, x: Any, names: Sequence[str]) -> Any:
        """Returns the variable behind equations of some names, as long as nothing else reads their results."""
        while (eqn := self.makers.get(x)) is not None and eqn.primitive.name in names and self.readers[x] == 1:
            if eqn.params.get("dimensions") is not None or not _rounds(eqn.invars[0].aval.dtype, x.aval.dtype):
                break
            x = eqn.invars[0]
        return x

    def _blocks(self, x: Any, split: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...]] | None:
        """Returns an array and how many blocks of each axis of a shape it has a number for; None where it has others.

        Args:
          x: what broadcasts against values.
          split: the shape of the values there.
          shape: that which they are reshaped to afterwards.
        """
        places: list[int | None] = list(range(len(split)))  # of each axis, that of the array; None where it broadcasts
        while not is_literal(x) and (eqn := self.makers.get(x)) is not None:
            (operand, *rest), name = eqn.invars, eqn.primitive.name
            if rest or is_literal(operand):
                break
            own, its = x.aval.shape, operand.aval.shape
            if name == "broadcast_in_dim":
                back = {axis: j for j, axis in enumerate(eqn.params["broadcast_dimensions"]) if its[j] == own[axis]}
            elif name in ("reshape", "squeeze", "expand_dims"):
                pairs = ([axis for axis, size in enumerate(y) if size != 1] for y in (own, its))
                kept, left = pairs
                if [own[axis] for axis in kept] != [its[j] for j in left]:
                    break
                back = dict(zip(kept, left, strict=True))
            elif name == _CONVERT and _widens(operand.aval.dtype, x.aval.dtype):
                back = {axis: axis for axis in range(len(own))}
            else:
                break
            places = [None if axis is None else back.get(axis) for axis in places]
            x = operand
        if is_literal(x):
            return None
        places = places if x.aval.shape else [None] * len(places)  # a number for all may stand beside arrays as it is
        kept = [axis for axis in places if axis is not None and x.aval.shape[axis] != 1]
        sizes = [1 if axis is None else x.aval.shape[axis] for axis in places]
        if kept != sorted(kept) or math.prod(sizes) != x.aval.size or math.prod(sizes) == math.prod(shape):
            return None
        counts = []
        for of_shape, of_split in alike(shape, split):
            given, whole = [sizes[j] for j in of_split], [split[j] for j in of_split]
            last = max((j for j, size in enumerate(given) if size > 1), default=-1)
            if given == whole or last < 0:  # one for each element, or for all
                counts += [shape[j] if last >= 0 else 1 for j in of_shape]
            elif len(of_shape) == 1 and given[: last + 1] == whole[: last + 1]:
                counts.append(math.prod(given))
            else:
                return None
        return x, tuple(counts)


def _rounds(dtype: Any, to: Any) -> bool:
    """True if a conversion does no more than round floats, to 16 bits at the least."""
    return to.name not in NARROW and (holds(to, dtype) or jnp.issubdtype(to, jnp.floating))


def _widens(dtype: Any, to: Any) -> bool:
    """True if a conversion does no more than that, of what has as many bits or fewer."""
    return dtype.itemsize <= to.itemsize and _rounds(dtype, to)
