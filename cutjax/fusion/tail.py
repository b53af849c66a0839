"""The elementwise equations around a product, evaluated on accumulators in the form that a kernel has them.

A value is its equation's, reshaped to ``[*batch, m, n]``: merging neighbouring axes moves nothing, and elementwise
functions do not mind. It has size 1 along an axis on which it does not depend. Floats of 16 bits are float32, as the
accumulators are: what a program rounds between two operations stays as it is until the kernel stores it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding.rules import match_varying
from cutjax.epilogue.flatten import REDUCTIONS, line_of
from cutjax.epilogue.jaxpr import CALLS, IDENTITIES, UNIT_MOVES, bind_equation, callee, has_rule, needed_equations
from cutjax.epilogue.rules import Irregular, Rule
from cutjax.fusion.form import axes_of
from cutjax.fusion.jaxprs import is_literal
from cutjax.primitives.accumulators import is_half

_PASS = IDENTITIES | {*UNIT_MOVES, "name"}  # what has names is differentiated as it was (build.py)
_OF_BITS = frozenset(["bitcast_convert_type", "nextafter"])  # they depend on the dtype, not on the value alone
# Their arguments may have axes of size 1, and numbers no axis, where others are longer.
_NAMES = "add sub mul div max min pow rem atan2 eq ne lt le gt ge and or xor"
_BROADCASTING = frozenset(_NAMES.split())
_REDUCED = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}


class Tile(NamedTuple):
    """A value in the form of the result; anything else is an array as the program has it."""

    array: jax.Array


class Unfit(NotImplementedError):
    """An equation that cannot be evaluated in the form of the result; the message says why."""


class Tail:
    """Evaluates equations in the form of a result, told how many of its axes are rows."""

    def __init__(self, form: tuple[int, ...], rows: int):
        self.form, self.rows = form, rows
        self.size = math.prod(form)
        self._lifted: dict[tuple[int, tuple[int, ...]], tuple[Any, jax.Array]] = {}

    def evaluate(self, eqns: Sequence[Any], env: dict[Any, Any]) -> None:
        """Computes the equations; ``env`` has what they read, and gets what they make."""
        for eqn in eqns:
            args = [self._literal(x) if is_literal(x) else env[x] for x in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, args), strict=True))

    def lift(self, x: Any, shape: Sequence[int] | None = None) -> jax.Array:
        """Returns a value in the form of the result; ``shape`` is that of what it is combined with."""
        if isinstance(x, Tile):
            return x.array
        shape = np.shape(x) if shape is None else tuple(shape)
        key = id(x), shape
        if key not in self._lifted:  # once: each is an operand of its own
            self._lifted[key] = x, self._lift(x, shape)
        return wide(self._lifted[key][1])

    def _lift(self, x: Any, shape: tuple[int, ...]) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim == 0:
            return lax.reshape(x, (1,) * len(self.form))
        if x.size == self.size:  # reshaped before it is widened: the kernel widens it
            return lax.reshape(x, self.form)
        groups = axes_of(shape, self.form)
        if groups is None or len(shape) != x.ndim:
            raise Unfit(f"an operand of shape {x.shape} is not of the form {self.form}")
        full, sizes = list(x.shape), []
        for axes in groups:
            if all(x.shape[i] == 1 for i in axes):
                sizes.append(1)
                continue
            for i in axes:  # along some of the axes that are merged: those it has not are written out
                full[i] = shape[i]
            sizes.append(math.prod(full[i] for i in axes))
        if full != list(x.shape):
            x = lax.broadcast_in_dim(x, full, range(x.ndim))
        return lax.reshape(x, sizes)

    def _literal(self, x: Any) -> Any:
        return np.asarray(x.val, x.aval.dtype)

    def _equation(self, eqn: Any, args: list[Any]) -> list[Any]:
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        tiles = any(isinstance(x, Tile) for x in args)
        if name in REDUCTIONS and tiles:
            return [self._reduced(eqn, args[0].array)]
        if not tiles and math.prod(shape) != self.size:
            return bind_equation(eqn, args)
        if name in CALLS:
            if has_rule(eqn):
                return self._with_rule(eqn, args)
            jaxpr, consts = callee(eqn)
            env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
            self.evaluate(needed_equations(jaxpr), env)
            return [self._literal(x) if is_literal(x) else env[x] for x in jaxpr.outvars]
        if name in _PASS and (tiles or name not in UNIT_MOVES):
            return args
        if name == "broadcast_in_dim":
            return [self._broadcast(eqn, args[0])]
        if name in UNIT_MOVES:
            return [Tile(self.lift(bind_equation(eqn, args)[0]))]
        if name == "iota":
            return [self._iota(eqn)]
        if name == "random_bits":
            return [self._random_bits(eqn, args[0])]
        if name not in _BROADCASTING:
            return [Tile(self.pointwise(eqn, [self.lift(x, shape) for x in args]))]
        numbers = [is_literal(x) and not x.aval.shape for x in eqn.invars]
        lifted = [wide(x) if number else self.lift(x, shape) for x, number in zip(args, numbers, strict=True)]
        if all(numbers):
            lifted[0] = self.lift(args[0])
        moved = iter(match_varying(*(x for x, number in zip(lifted, numbers, strict=True) if not number)))
        given = [x if number else next(moved) for x, number in zip(lifted, numbers, strict=True)]
        return [Tile(wide(eqn.primitive.bind(*given, **eqn.params)))]

    def pointwise(self, eqn: Any, args: list[jax.Array]) -> jax.Array:
        name, params = eqn.primitive.name, dict(eqn.params)
        if name in _OF_BITS:
            args = [x.astype(y.aval.dtype) for x, y in zip(args, eqn.invars, strict=True)]
        if name == "convert_element_type":
            if is_half(params["new_dtype"]):
                params["new_dtype"] = np.dtype(np.float32)
            params["sharding"] = None
            if args[0].dtype == params["new_dtype"]:
                return args[0]
        if name == "polynomial":  # whose coefficients stay numbers
            return bind_equation(eqn, [args[0], *(lax.reshape(x, ()) for x in args[1:])])[0]
        shape = np.broadcast_shapes(*(x.shape for x in args))
        args = match_varying(*(jnp.broadcast_to(x, shape) for x in args))
        out = eqn.primitive.bind(*args, **params)
        return wide(out)

    def _with_rule(self, eqn: Any, args: list[Any]) -> list[Any]:
        """Computes a function with a derivative of its own, in its own dtypes."""
        try:
            rule = Rule(eqn)
        except Irregular as why:
            raise Unfit(f"{why}, at {line_of(eqn)}") from None
        shape = eqn.outvars[0].aval.shape
        given = [self.lift(x, shape).astype(y.aval.dtype) for x, y in zip(args, eqn.invars, strict=True)]
        given = [x.reshape(y.aval.shape) if y.aval.ndim == 0 else x for x, y in zip(given, eqn.invars, strict=True)]
        return [Tile(wide(x)) for x in rule(*given)]

    def _broadcast(self, eqn: Any, x: Any) -> Tile:
        shape, at = eqn.params["shape"], eqn.params["broadcast_dimensions"]
        if isinstance(x, Tile):
            if math.prod(eqn.invars[0].aval.shape) != self.size:
                raise Unfit(f"broadcast_in_dim at {line_of(eqn)} of what is made of the result")
            return x
        sizes = [1] * len(shape)
        for axis, size in zip(at, np.shape(x), strict=True):
            sizes[axis] = size
        return Tile(self.lift(lax.reshape(jnp.asarray(x), sizes), shape) if np.ndim(x) else self.lift(x))

    def _iota(self, eqn: Any) -> Tile:
        shape, axis, dtype = eqn.params["shape"], eqn.params["dimension"], eqn.params["dtype"]
        groups = axes_of(shape, self.form)
        if groups is None:
            raise Unfit(f"iota at {line_of(eqn)} is of shape {tuple(shape)}, not of the form {self.form}")
        at = next(i for i, axes in enumerate(groups) if axis in axes)
        if [shape[i] for i in groups[at] if i != axis and shape[i] != 1]:
            sizes = [n if i == axis else 1 for i, n in enumerate(shape)]
            return Tile(self.lift(lax.broadcasted_iota(dtype, sizes, axis), shape))
        return Tile(wide(lax.broadcasted_iota(dtype, self.form, at)))

    def _random_bits(self, eqn: Any, key: Any) -> Tile:
        threefry = jax.typeof(key).dtype.name == "key<fry>" and np.ndim(key) == 0
        if not threefry or not getattr(getattr(eqn, "ctx", None), "threefry_partitionable", False):
            raise Unfit(f"random bits at {line_of(eqn)} that are not those of each element's index (threefry)")
        return Tile(eqn.primitive.bind(key, **{**eqn.params, "shape": self.form}))

    def _reduced(self, eqn: Any, x: jax.Array) -> jax.Array:
        out = eqn.outvars[0].aval
        groups = axes_of(eqn.invars[0].aval.shape, self.form)
        reduced = set(eqn.params["axes"])
        wanted = reduced_axes(eqn.invars[0].aval.shape, self.form, reduced, self.rows)
        if groups is None or wanted is None:
            raise Unfit(f"{eqn.primitive.name} at {line_of(eqn)} is not along all rows, or all columns")
        full = jnp.broadcast_to(x, self.form)
        result = _REDUCED[REDUCTIONS[eqn.primitive.name]](full, wanted)
        return lax.reshape(result.astype(out.dtype), out.shape)


def reduced_axes(shape: Sequence[int], form: Sequence[int], axes: set[int], rows: int) -> tuple[int, ...] | None:
    """Returns the rows, the columns or both, as axes of the form, that axes of a shape are; None where they are not.

    Of a form whose last axis but so many ``rows`` are batch axes. Rows of several axes are reduced over all of these.
    """
    groups = axes_of(shape, form)
    if groups is None:
        return None
    found, of_rows = [], range(len(form) - 1 - rows, len(form) - 1)
    for i, group in enumerate(groups):
        real = {axis for axis in group if shape[axis] != 1}
        if real & axes:
            if not real <= axes or i < of_rows.start:
                return None
            found.append(i)
    if rows > 1 and not {*of_rows}.isdisjoint(found):
        if any(i not in found and form[i] != 1 for i in of_rows):
            return None
        found = sorted({*found, *of_rows})
    return tuple(found) or None


def wide(x: Any) -> Any:
    """Returns an array with floats of 16 bits made float32."""
    return x.astype(np.float32) if is_half(x.dtype) else x
