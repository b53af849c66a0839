"""Values as expressions: of rows, of columns and of the product, element by element, that kernels or XLA compute."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from cutjax.binding.rules import match_varying
from cutjax.epilogue.expression import OPS
from cutjax.epilogue.jaxpr import IDENTITIES
from cutjax.fusion.tail import wide
from cutjax.primitives.accumulators import is_half

ELEMENTWISE = OPS - {"bitcast_convert_type", "nextafter", "optimization_barrier"}
ELEMENTWISE |= {"add_any", "log2", "one_minus_square"}  # JAX before 0.11 has no one_minus_square
PASSING = IDENTITIES | {"stop_gradient"}


class Escape(Exception):
    """A use of the logits that needs them in memory; the message says which."""


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """A value that an expression begins with.

    Attributes:
      kind: of logits, "product", "column" (an array along the vocabulary) or "index" (of the column). Of rows, "row"
        (an array along tokens), "inside" (of a slice of the tokens), "scalar", and what products find: "largest",
        "powers", "total", "picked", "known".
      of: the variable and how it lies, or of what that is.
      made: whether it is made of the logits.
    """

    kind: str
    of: tuple[Any, ...] = ()
    made: bool = False

    @property
    def full(self) -> bool:
        """True if it has a value for each column."""
        return self.kind in ("product", "column", "index")


@dataclasses.dataclass(frozen=True, eq=False)
class Expr:
    """An operation on values, element by element.

    Attributes:
      op: a function of arrays.
      args: numbers, leaves and expressions.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    full: bool = False
    made: bool = False


Value = Any  # a number, a Leaf or an Expr


def is_full(x: Value) -> bool:
    """True if a value has one for each column."""
    return getattr(x, "full", False)


def is_made(x: Value) -> bool:
    """True if a value of rows is made of the logits."""
    return getattr(x, "made", False)


def expression(op: Callable[..., Any], *args: Value) -> Expr:
    """Returns an operation on values."""
    return Expr(op, args, any(map(is_full, args)), any(map(is_made, args)))


def is_number(x: Value, *values: float) -> bool:
    """True of a number, or of one of some."""
    return isinstance(x, float) and (not values or x in values)


def plus(x: Value, y: Value) -> Value:
    """Returns the sum of two values."""
    if is_number(x) and is_number(y):
        return x + y
    if is_number(x, 0.0) or is_number(y, 0.0):
        return y if is_number(x, 0.0) else x
    return expression(operator.add, x, y)


def times(x: Value, y: Value) -> Value:
    """Returns the product of two values."""
    if is_number(x) and is_number(y):
        return x * y
    if is_number(x, 0.0) or is_number(y, 0.0):
        return 0.0
    if is_number(x, 1.0) or is_number(y, 1.0):
        return y if is_number(x, 1.0) else x
    if is_number(x, -1.0) or is_number(y, -1.0):
        return minus(y if is_number(x, -1.0) else x)
    return expression(operator.mul, x, y)


def over(x: Value, y: Value) -> Value:
    """Returns the quotient of two values."""
    if is_number(x, 0.0) or is_number(y, 1.0):
        return x
    return x / y if is_number(x) and is_number(y) and y else expression(_divided, x, y)


def _divided(x: Any, y: Any) -> Any:
    return jnp.divide(x, y)


def minus(x: Value) -> Value:
    """Returns the negative of a value."""
    if is_number(x):
        return -x
    return x.args[0] if isinstance(x, Expr) and x.op is operator.neg else expression(operator.neg, x)


def power(x: Value) -> Value:
    """Returns the exponential of a value."""
    return expression(jnp.exp, x)


def where(condition: Value, x: Value, y: Value) -> Value:
    """Returns one of two values."""
    return expression(_where, condition, x, y)


def _where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y)


def as_number(x: Value) -> Value:
    """Returns a condition as a number: 1 where it holds, else 0."""
    return expression(_as_number, x)


def _as_number(x: Any) -> Any:
    return jnp.asarray(x).astype(jnp.float32)


def bound(eqn: Any, args: Sequence[Value]) -> Expr:
    """Returns the result of an elementwise equation on values."""
    return expression(Bound(eqn), *args)


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """An elementwise equation, with floats of 16 bits as float32."""

    eqn: Any

    def __call__(self, *args: Any) -> Any:
        """Returns its result for arguments that broadcast."""
        eqn, params = self.eqn, dict(self.eqn.params)
        dtypes = (x.aval.dtype for x in eqn.invars)
        given = [jnp.asarray(x).astype(_wide(dtype)) for x, dtype in zip(args, dtypes, strict=True)]
        if eqn.primitive.name == "convert_element_type":
            return given[0].astype(_wide(params["new_dtype"]))
        if "sharding" in params:
            params["sharding"] = None
        shape = np.broadcast_shapes(*(x.shape for x in given))
        given = match_varying(*(jnp.broadcast_to(x, shape) for x in given))
        if eqn.primitive.name == "add_any":
            return given[0] + given[1]
        return wide(eqn.primitive.bind(*given, **params))


def _wide(dtype: Any) -> Any:
    return np.dtype(np.float32) if is_half(dtype) else dtype


def number(x: Any) -> Value:
    """Returns the value of a literal: floats are Python's."""
    value = np.asarray(x.val, x.aval.dtype)
    return float(value) if jnp.issubdtype(value.dtype, jnp.floating) else value


def evaluate(value: Value, read: Callable[[Leaf], Any], memo: dict[int, Any]) -> Any:
    """Computes a value, told those of leaves; ``memo`` keeps what was computed with these."""
    if isinstance(value, Leaf):
        return read(value)
    if not isinstance(value, Expr):
        return value
    if id(value) not in memo:
        memo[id(value)] = value.op(*(evaluate(x, read, memo) for x in value.args))
    return memo[id(value)]


def leaves(values: Sequence[Value]) -> list[Leaf]:
    """Returns the leaves of values, and of what those are of."""
    found: dict[Any, None] = {}
    stack = list(values)
    while stack:
        x = stack.pop()
        if not isinstance(x, Leaf | Expr | Label) or x in found:
            continue
        found[x] = None
        stack += x.args if isinstance(x, Expr) else (x.index,) if isinstance(x, Label) else x.of
    return [x for x in found if isinstance(x, Leaf)]


@dataclasses.dataclass(frozen=True)
class Label:
    """The column of a label in each row.

    Attributes:
      index: integers of rows; what is no column is no label.
      clipped: whether what is outside of the vocabulary is the nearest column instead.
    """

    index: Value
    clipped: bool
