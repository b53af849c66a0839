"""Rows scattered by the order of a sort: gathered by its inverse, and added in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from cutjax.epilogue.jaxpr import CALLS, IDENTITIES, callee, reorders
from cutjax.fusion.contraction import RAGGED, is_sharded
from cutjax.fusion.jaxprs import bodies, is_literal, is_marked, opened, variables, with_equations
from cutjax.fusion.narrow import in_place_of
from cutjax.primitives.routing import combined, dispatched, inverse_of
from cutjax.runtime import backends

_SCATTERS = frozenset(["scatter", "scatter-add"])
_GROUPED = frozenset([RAGGED, "cutjax_grouped_gemm", "cutjax_grouped_outer"])
_MOVING = _SCATTERS | {"sort", "gather"}
_RESHAPES = IDENTITIES | {"reshape", "squeeze", "expand_dims", "stop_gradient"}
_MOST = 1 << 22  # elements of an array whose values are followed


def moves_rows(jaxpr: Any) -> bool:
    """True if a program sorts, gathers or scatters: such calls are opened beside a product."""
    return any(eqn.primitive.name in _MOVING or any(map(moves_rows, bodies(eqn))) for eqn in opened(jaxpr).eqns)


def gathered(jaxpr: Any) -> Any:
    """Returns a program that gathers where it scattered rows by the order of a sort, and adds what comes to one place.

    Results of experts go back to their tokens so, and JAX's gradient of a gather does: a scatter, which on a GPU adds
    by atomics, in any order, and rounds each time. Where the places are ``order // k`` of a permutation, or ``order %
    places``, each gets the k rows that the inverse says. What is none by what the program itself does stays. Rows that
    are gathered so for products in groups, and nothing else, are dispatched: there is a kernel for that.
    """
    inner = opened(jaxpr)
    names = {eqn.primitive.name for eqn in inner.eqns}
    if "sort" not in names or names.isdisjoint(_SCATTERS | {"gather"}):
        return jaxpr
    follower = _Follower(inner)
    return with_equations(jaxpr, [made for eqn in inner.eqns for made in follower.follow(eqn)])


class Values(NamedTuple):
    """The values of an array of integers or truth values.

    Attributes:
      values: of the elements in their order, or one of all; where they have an order, of ``order[i]`` for element i.
      order: the variable of a permutation of as many; None where the values are known.
    """

    values: np.ndarray
    order: Any = None


class _Follower:
    """The values of integers in a program, as far as they follow from iotas and the orders of sorts."""

    def __init__(self, jaxpr: Any) -> None:
        readers: dict[bool, set[Any]] = {True: set(), False: {x for x in jaxpr.outvars if not is_literal(x)}}
        for eqn in jaxpr.eqns:
            readers[eqn.primitive.name in _GROUPED].update(variables(eqn))
        self._multiplied = readers[True] - readers[False]  # by products in groups, and read by nothing else
        self._found: dict[Any, Values] = {}
        self._inverses: dict[Any, Any] = {}  # of permutations, both ways
        self._zeros: set[Any] = set()

    def follow(self, eqn: Any) -> list[Any]:
        """Returns the equations that take the place of the next one of the program."""
        name, out = eqn.primitive.name, next(iter(eqn.outvars), None)
        if name == "sort":
            self._sort(eqn)
        elif name in _SCATTERS and not is_marked(eqn):
            return self._scattered(eqn) or [eqn]
        elif name == "gather" and not is_marked(eqn) and (made := self._copied(eqn)) is not None:
            return made
        elif name == "broadcast_in_dim" and is_literal(eqn.invars[0]) and eqn.invars[0].val == 0:
            self._zeros.add(out)
        if out is not None and _is_small(out.aval):
            args = [self._of(x) for x in eqn.invars]
            values = None if None in args else _result(eqn, [x for x in args if x is not None])
            if values is not None:
                self._found[out] = values
        return [eqn]

    def _of(self, x: Any) -> Values | None:
        return Values(np.asarray(x.val, x.aval.dtype)) if is_literal(x) else self._found.get(x)

    def _is_order(self, x: Values | None) -> bool:
        """True of a permutation itself."""
        return x is not None and x.order is not None and _counts(x.values)

    def _permutes(self, out: Any, inverse: Any) -> None:
        self._found[out] = Values(np.arange(out.aval.size, dtype=out.aval.dtype), out)
        if inverse is not None:
            self._inverses[out], self._inverses[inverse] = inverse, out

    def _sort(self, eqn: Any) -> None:
        """Follows a sort of keys with an iota, which becomes a permutation: of a permutation its inverse."""
        count, key = eqn.params["num_keys"], self._of(eqn.invars[0])
        for x, out in zip(eqn.invars[count:], eqn.outvars[count:], strict=True):
            values = self._of(x)
            if out.aval.ndim == 1 and values is not None and values.order is None and _counts(values.values):
                self._permutes(out, key.order if key is not None and count == 1 and self._is_order(key) else None)

    def _scattered(self, eqn: Any) -> list[Any] | None:
        """Returns the equations of gathers in the place of a scatter; None where it stays."""
        (operand, indices, updates), (out,) = eqn.invars, eqn.outvars
        places, *window = out.aval.shape or (0,)
        index = self._index(indices, eqn, places)
        if index is None or not _is_of_rows(eqn) or is_literal(updates) or updates.aval.dtype != out.aval.dtype:
            return None
        adds, given, (order, each, turned) = eqn.primitive.name == "scatter-add", self._of(updates), index
        if not adds and given is not None and given.order is None and each == 1 and _counts(given.values):
            self._permutes(out, order)  # a permutation inverted in the usual way
            return None
        if 0 in window or not (adds or each == 1):
            return None
        to = [operand] if adds and not is_literal(operand) and operand not in self._zeros else []

        def function(rows: jax.Array, *given: jax.Array) -> jax.Array:
            pairs, back = _both(*given[len(to) :], places, turned)
            found = combined(rows.reshape(pairs.size, math.prod(window)), pairs, back).reshape(places, *window)
            return lax.add(given[0], found) if to else found

        return in_place_of(eqn, function, [updates, *to, *self._orders(order)])

    def _copied(self, eqn: Any) -> list[Any] | None:
        """Returns the equations of a copy of rows that products in groups read; None where it is none."""
        (x, indices), (out,), dims = eqn.invars, eqn.outvars, eqn.params["dimension_numbers"]
        if out not in self._multiplied or is_literal(x) or x.aval.ndim != 2 or indices.aval.ndim != 2:
            return None
        index = self._index(indices, eqn, x.aval.shape[0])
        rows = dims.offset_dims == (1,) and dims.collapsed_slice_dims == dims.start_index_map == (0,)
        if index is None or not rows or out.aval.shape != (indices.aval.shape[0], x.aval.shape[1]):
            return None
        order, _, turned = index

        def function(x: jax.Array, *given: jax.Array) -> jax.Array:
            return dispatched(x, *_both(*given, x.shape[0], turned), backends.resolve(None, "dispatch"))

        return in_place_of(eqn, function, [x, *self._orders(order)])

    def _index(self, x: Any, eqn: Any, places: int) -> tuple[Any, int, bool] | None:
        """Returns the permutation by which indices have each place equally often, how often, and whether in turns."""
        index = self._of(x)
        if index is None or index.order is None or any(is_sharded(x.aval.sharding) for x in eqn.invars):
            return None
        each, rest = divmod(index.values.size, max(1, places))
        numbers = np.arange(each * places)
        if rest or not each:
            return None
        if np.array_equal(index.values, numbers // each):
            return index.order, each, False
        return (index.order, each, True) if np.array_equal(index.values, numbers % places) else None

    def _orders(self, order: Any) -> list[Any]:
        """The variables of a permutation, and of its inverse where the program has it by now."""
        return [order, self._inverses[order]] if order in self._inverses else [order]


def _both(order: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
    """Returns for each row its pair, as a routing has them, and for each place its rows.

    Args:
      order: a permutation, which makes places: divided by how many rows each has, or in turns.
      *rest: its inverse, if there is one; the number of places; whether they come in turns.
    """
    *inverse, places, turned = rest
    pairs = order.reshape(-1)
    back = inverse[0].reshape(-1) if inverse else inverse_of(pairs)
    each = pairs.size // places
    if turned:
        return pairs % places * each + pairs // places, back.reshape(each, places).T
    return pairs, back.reshape(places, each)


def _is_small(aval: Any) -> bool:
    return getattr(aval, "size", _MOST + 1) <= _MOST and getattr(aval.dtype, "kind", "") in ("b", "i", "u")


def _counts(values: np.ndarray) -> bool:
    return np.array_equal(values, np.arange(values.size))


def _is_of_rows(eqn: Any) -> bool:
    """True of a scatter of whole rows of the first axis, each at an index of its own."""
    operand, indices, updates = (x.aval for x in eqn.invars)
    dims, window = eqn.params["dimension_numbers"], operand.shape[1:]
    if indices.shape[-1:] != (1,) or updates.shape != (*indices.shape[:-1], *window) or dims.operand_batching_dims:
        return False
    first = dims.inserted_window_dims == dims.scatter_dims_to_operand_dims == (0,)
    return first and dims.update_window_dims == tuple(range(indices.ndim - 1, updates.ndim))


def _result(eqn: Any, args: list[Values]) -> Values | None:
    """Returns the values of an equation's first result; None where they are not followed."""
    name, (out, *_), values = eqn.primitive.name, eqn.outvars, [x.values for x in args]
    orders = {id(x.order): x.order for x in args if x.order is not None}
    order, shape = next(iter(orders.values()), None), out.aval.shape
    if len(orders) > 1 or reorders(eqn):
        return None
    if name == "iota":
        size, axis = out.aval.size, eqn.params["dimension"]
        return Values(np.arange(size, dtype=out.aval.dtype)) if size == shape[axis] else None
    if name == "gather":
        return _elements(eqn, *args)
    if name in _RESHAPES and len(args) == 1:
        return args[0]
    if name == "broadcast_in_dim":
        return _repeated(args[0], eqn.invars[0].aval.shape, out.aval.shape, eqn.params["broadcast_dimensions"])
    if order is not None and any(x.order is None and x.values.size > 1 for x in args):
        return None
    with np.errstate(all="ignore"):
        made = _computed(eqn, values)
    return None if made is None else Values(made[0], order)


def _repeated(x: Values, shape: tuple[int, ...], to: tuple[int, ...], axes: tuple[int, ...]) -> Values | None:
    """Returns the values of an array along some axes of another; one for all as it is."""
    if math.prod(to) == math.prod(shape) or (x.order is None and x.values.size == 1):
        return x
    if x.order is not None:
        return None
    sizes = [shape[axes.index(i)] if i in axes else 1 for i in range(len(to))]
    return Values(np.broadcast_to(x.values.reshape(sizes), to).reshape(-1))


def _elements(eqn: Any, x: Values, index: Values) -> Values | None:
    """Returns the values of elements of a list, by indices in it."""
    dims, size = eqn.params["dimension_numbers"], math.prod(eqn.invars[0].aval.shape)
    if dims.collapsed_slice_dims != (0,) or dims.offset_dims or x.order is not None or x.values.size != size:
        return None
    if index.values.size == 0 or index.values.min() < 0 or index.values.max() >= size:
        return None
    return Values(x.values[index.values], index.order)


def _computed(eqn: Any, args: list[np.ndarray]) -> list[np.ndarray] | None:
    """Returns the results of an elementwise equation, as of a call of such; None of another."""
    name = eqn.primitive.name
    if name in CALLS:
        jaxpr, consts = callee(eqn)
        found = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(np.asarray, consts), *args), strict=True))

        def of(x: Any) -> np.ndarray:
            return np.asarray(x.val, x.aval.dtype) if is_literal(x) else found[x]

        for inner in jaxpr.eqns:
            made = _computed(inner, list(map(of, inner.invars)))
            if made is None:
                return None
            found.update(zip(inner.outvars, made, strict=True))
        return list(map(of, jaxpr.outvars))
    if name == "convert_element_type":
        dtype = eqn.params["new_dtype"]
        return [args[0].astype(dtype)] if getattr(dtype, "kind", "") in ("b", "i", "u") else None
    function = _NUMPY.get(name)
    return None if function is None else [np.asarray(function(*args))]


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Rounds towards zero, as XLA does; by zero it makes -1."""
    by = np.where(y == 0, 1, y)
    up = (x % by != 0) & ((x < 0) != (by < 0))
    return np.where(y == 0, -1, x // by + up).astype(x.dtype)


_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _quotient,
    "rem": lambda x, y: (x - _quotient(x, y) * y).astype(x.dtype),
    "neg": np.negative,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "select_n": lambda which, *cases: np.select([which == i for i in range(len(cases))], cases),
}
