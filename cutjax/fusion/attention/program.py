"""Attention that was found, computed by the primitive: its arrays in the form of the kernel, and the expression."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.epilogue.trace import trace
from cutjax.fusion.attention.labels import MOVES, SAME, SIZE, VALUE, Labels, divided, given
from cutjax.fusion.attention.search import Search
from cutjax.fusion.jaxprs import is_literal
from cutjax.fusion.tail import Tail, wide
from cutjax.primitives.attention import attend


@dataclasses.dataclass(frozen=True)
class Program:
    """Attention as the primitive computes it. It keeps equations alive, not the program that they are of.

    Attributes:
      sizes, parts, q, k, v, out, scores, root, labels, axes, keys_first: as `Search` has them.
      leaves: the variables that the expression reads.
      makers: the equations, by variable, that it computes.
    """

    sizes: Mapping[Any, int]
    parts: Mapping[Any, Labels]
    q: tuple[Any, Labels]
    k: tuple[Any, Labels]
    v: tuple[Any, Labels]
    out: Labels
    scores: Any
    root: Any
    labels: Labels
    axes: Sequence[Sequence[Any]]
    keys_first: tuple[bool, bool]
    leaves: frozenset[Any]
    makers: Mapping[Any, Any]

    @classmethod
    def of(cls, search: Search) -> Program:
        """Makes it of what a search has found."""
        eqns = (search.flat.eqns[i] for i in search.core | search.beside)
        makers = {x: eqn for eqn in eqns for x in eqn.outvars}
        found: dict[str, Any] = {field.name: getattr(search, field.name, None) for field in dataclasses.fields(cls)}
        return cls(**found | {"leaves": frozenset(x for x, _ in search.leaves), "makers": makers})

    def __call__(self, env: Mapping[Any, Any], out: Any) -> jax.Array:
        """Computes the result, told what it is like, of arrays by variable.

        Raises:
          NotImplementedError: if no kernel has the expression.
        """
        shape, (batch, heads, *rows, keys) = tuple(map(self._size, self.axes)), self.axes

        def expression(acc: jax.Array) -> jax.Array:
            y = self._evaluate(self.root, self.labels, env, {self.scores: acc})
            return jnp.broadcast_to(y, shape).astype(np.float32)

        traced = trace(expression, [jax.ShapeDtypeStruct(shape, np.float32)])
        q = self._placed(env[self.q[0]], self.q[1], [batch, heads, *rows, [SIZE]])
        orders = [[batch, keys, heads] if first else [batch, heads, keys] for first in self.keys_first]
        k, v = (
            lax.reshape(env[x], [self._size(axis) for axis in (*order, [last])])
            for (x, _), order, last in zip((self.k, self.v), orders, (SIZE, VALUE), strict=True)
        )
        params = {"expression": traced.epilogue, "keys_first": self.keys_first, "out_dtype": out.dtype}
        y = attend(q, k, v, *traced.operands, **params)
        axes = [*batch, *heads, *(label for axis in rows for label in axis), VALUE]
        y = lax.reshape(y, [self.sizes[label] for label in axes])
        y = lax.transpose(y, [axes.index(label) for label in divided(self.out, self.parts)])
        return lax.reshape(y, out.shape)

    def _size(self, axis: Sequence[Any]) -> int:
        return math.prod(self.sizes[label] for label in axis)

    def _placed(self, x: Any, labels: Labels, axes: Sequence[Sequence[Any]]) -> jax.Array:
        """Returns an array along axes of the kernel, of size 1 along those on which it does not depend."""
        real = divided(labels, self.parts)
        x = lax.reshape(jnp.asarray(x), [self.sizes[label] for label in real])
        x = lax.transpose(x, [real.index(label) for axis in axes for label in axis if label in real])
        # Along some of the axes that are merged: those it has not are written out.
        some = [self.sizes[label] if label in real else 1 for axis in axes for label in axis]
        full = [self.sizes[label] if {*axis} & {*real} else 1 for axis in axes for label in axis]
        x = jnp.broadcast_to(lax.reshape(x, some), full)
        return lax.reshape(x, [self._size(axis) if {*axis} & {*real} else 1 for axis in axes])

    def _evaluate(self, x: Any, labels: Labels, env: Mapping[Any, Any], found: dict[Any, Any]) -> Any:
        """Computes a value of the expression; ``found`` has what is computed."""
        if is_literal(x):
            return wide(jnp.asarray(x.val, x.aval.dtype).reshape((1,) * len(self.axes)))
        if x in found:
            return found[x]
        if (x, labels) in found:
            return found[x, labels]
        eqn = self.makers.get(x)
        if eqn is None or x in self.leaves:
            y = wide(self._placed(env[x], labels, self.axes))
        elif eqn.primitive.name == "iota":
            y = self._index(eqn, labels)
        else:
            args = [self._evaluate(z, its, env, found) for z, its in zip(eqn.invars, given(eqn, labels), strict=False)]
            tail = Tail(tuple(map(self._size, self.axes)), 1)
            y = args[0] if eqn.primitive.name in MOVES | SAME else tail.pointwise(eqn, args)
        found[x, labels] = y
        return y

    def _index(self, eqn: Any, labels: Labels) -> jax.Array:
        """Returns the positions along an axis."""
        label, dtype = labels[eqn.params["dimension"]], eqn.params["dtype"]
        found, shape = [], tuple(map(self._size, self.axes))
        for part in divided((label,), self.parts):
            at = [list(axis) == [part] for axis in self.axes]
            if not any(at):
                raise NotImplementedError("positions along one of several axes that are merged")
            place = lax.broadcasted_iota(dtype, shape, at.index(True))
            found = [found[0] * self.sizes[part] + place] if found else [place]
        return wide(found[0]) if found else jnp.zeros((1,) * len(self.axes), dtype)
