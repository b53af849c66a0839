"""The values of integers in a program, where they follow from iotas, numbers and the elements of one permutation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cutjax.epilogue.jaxpr import CALLS, IDENTITIES, callee, reorders
from cutjax.fusion.jaxprs import is_literal

_RESHAPES = IDENTITIES | {"reshape", "squeeze", "expand_dims", "stop_gradient"}
_MOST = 1 << 22  # elements of an array whose values are followed


class Values(NamedTuple):
    """The values of an array of integers or truth values.

    Attributes:
      values: of the elements in their order, or one of all; where they have an order, of ``order[i]`` for element i.
      order: the variable of a permutation of as many, or one whose own order sorts it; None where values are known.
    """

    values: np.ndarray
    order: Any = None


def is_followed(aval: Any) -> bool:
    """True of an array of integers or truth values that is not too large."""
    return getattr(aval, "size", _MOST + 1) <= _MOST and getattr(aval.dtype, "kind", "") in ("b", "i", "u")


def results(eqn: Any, args: list[Values]) -> Sequence[Values]:
    """Returns the values of an equation's results; none where they are not followed."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    orders = {id(x.order): x.order for x in args if x.order is not None}
    order = next(iter(orders.values()), None)
    if len(orders) > 1 or reorders(eqn):
        return ()
    if name in _RESHAPES and len(args) == 1:
        return args
    if name in ("gather", "broadcast_in_dim"):
        if name == "gather":
            found = _elements(eqn, *args)
        else:
            found = _repeated(args[0], eqn.invars[0].aval.shape, shape, eqn.params["broadcast_dimensions"])
        return () if found is None else (found,)
    if order is not None and any(x.order is None and x.values.size > 1 for x in args):
        return ()
    with np.errstate(all="ignore"):
        made = _computed(eqn, [x.values for x in args], order is not None)
    return () if made is None else [Values(x, order if x.size > 1 else None) for x in made]


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


def _computed(eqn: Any, args: list[np.ndarray], ordered: bool) -> list[np.ndarray] | None:
    """Returns the results of an elementwise equation, as of a call of such; None of another.

    Elements that are ordered are not where an iota counts them.
    """
    name = eqn.primitive.name
    if name in CALLS:
        jaxpr, _ = callee(eqn)
        if jaxpr.constvars:
            return None
        found = dict(zip(jaxpr.invars, args, strict=True))

        def of(x: Any) -> np.ndarray:
            return np.asarray(x.val, x.aval.dtype) if is_literal(x) else found[x]

        for inner in jaxpr.eqns:
            made = _computed(inner, list(map(of, inner.invars)), ordered)
            if made is None:
                return None
            found.update(zip(inner.outvars, made, strict=True))
        return list(map(of, jaxpr.outvars))
    if not all(is_followed(x.aval) for x in (*eqn.invars, *eqn.outvars)):
        return None
    if any(x.size not in (1, eqn.outvars[0].aval.size) for x in args):  # repeated along an axis of one
        return None
    if name == "iota":
        size, axis = eqn.outvars[0].aval.size, eqn.params["dimension"]
        counts = not ordered and size == eqn.params["shape"][axis]
        return [np.arange(size, dtype=eqn.params["dtype"])] if counts else None
    if name == "convert_element_type":
        return [args[0].astype(eqn.params["new_dtype"])]
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
