"""Attention of few query rows, as a step of decoding has it: two products with a softmax between them, as one kernel.

What is computed of the scores element by element, before the softmax, is the kernel's expression: a scale, a bound, a
mask of positions or of arrays. Axes are followed by labels: a program may move those of scores as it likes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.binding import lowering
from cutjax.binding.rules import any_divided, varying_axes
from cutjax.epilogue.jaxpr import any_equation, bind_equation, reverse_only
from cutjax.epilogue.trace import trace
from cutjax.fusion.build import Template, placed
from cutjax.fusion.heads.flat import Flat
from cutjax.fusion.jaxprs import Graph, is_literal, is_marked, opened, pointwise, with_equations
from cutjax.fusion.keys import Keys
from cutjax.fusion.price import GAIN
from cutjax.fusion.region import Region
from cutjax.fusion.report import Report
from cutjax.fusion.tail import Tail, wide
from cutjax.kernels import choose
from cutjax.kernels.attention import MOST_ROWS
from cutjax.kernels.device import device_of
from cutjax.primitives.attention import attend, attention_p
from cutjax.primitives.derivative import outside

Labels = tuple[Any, ...]  # of each axis of an array: which axis of the products it is; None of one of size 1
_LEAST_KEYS = 64  # with fewer there is nothing to gain
_DTYPES, _FLOATS = ("bfloat16", "float16"), ("bfloat16", "float16", "float32")
_SIZE, _VALUE = "size", "value"  # labels of what the first product adds up, and of what the second makes
_MOVES = frozenset(["transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim"])
_SAME = frozenset(["stop_gradient", "copy", "copy_p"])
_PAIRS: dict[tuple[str, ...], str] = {("sub", "score", "most"): "shifted", ("div", "power", "total"): "weight"}
# XLA takes at least three kernels: each its launch, and the softmax a pass over the scores that fit the cache.
_XLA_LAUNCHES_US = 8.0


class _Escape(Exception):
    """No kernel has this."""


@dataclasses.dataclass(frozen=True)
class Price:
    """The time of attention, in predicted microseconds; None where there is no kernel.

    Attributes:
      runs: "fused" or "XLA".
      xla_us: the least that XLA's products and its softmax take.
      fused_us: the kernel.
      why: why there is none.
    """

    runs: str
    xla_us: float | None
    fused_us: float | None
    why: str = ""

    def __str__(self) -> str:
        times = [("XLA at least", self.xla_us), ("fused", self.fused_us)]
        parts = [f"{name} {us:.1f} us" for name, us in times if us is not None]
        return ", ".join(["attention in one kernel", *parts, *filter(None, [self.why])])


def attended(
    jaxpr: Any, always: bool, keys: Keys, template: Callable[[Hashable, Any, Sequence[Any]], Template]
) -> tuple[Any, list[Report]]:
    """Returns a program with attention of few query rows as equations of their own, and a report of each product.

    Args:
      jaxpr: the program.
      always: whether it is replaced whatever that costs.
      keys, template: the rewriter's, which builds each equation once.
    """
    if sum(_may_be(eqn) for eqn in opened(jaxpr).eqns) == 0:
        return jaxpr, []
    graph, reports = Graph(opened(jaxpr)), []
    flat = Flat(graph)
    for one in _found(graph, flat, 1 if always else _LEAST_KEYS):
        region = one.region
        try:
            made = template(("attention", keys.region(graph, region)), one.function, region.inputs)
        except NotImplementedError:
            continue
        cost = Price("fused", None, None) if always else _price(made)
        products = [graph.eqns[i] for i in region.members if graph.eqns[i].primitive.name == "dot_general"]
        if cost.runs == "fused":
            region.made, _ = placed(made, region.inputs, region.results, graph.eqns[region.members[-1]])
            graph.replace(region)
            reports += [Report(eqn, "fused", cost) for eqn in products]
    return (with_equations(jaxpr, graph.equations()) if reports else jaxpr), reports


def _may_be(eqn: Any) -> bool:
    """True of a product that may be one of scores: of one axis, and with few rows on one side."""
    if eqn.primitive.name != "dot_general" or is_marked(eqn) or eqn.effects:
        return False
    (contracted, (batch, _)), (left, right) = eqn.params["dimension_numbers"], (x.aval for x in eqn.invars)
    if len(contracted[0]) != 1 or left.dtype != right.dtype or left.dtype.name not in _DTYPES:
        return False
    if not _is_exact(eqn) or any_divided(left, right):
        return False
    whole = math.prod(left.shape[axis] for axis in batch) * left.shape[contracted[0][0]]
    return bool(whole) and min(left.size, right.size) // whole <= MOST_ROWS


def _is_exact(eqn: Any) -> bool:
    """True of a product of 16 bits that is added up in float32."""
    dtype = eqn.invars[0].aval.dtype
    return dtype.name in _DTYPES and dot_precision.math(eqn.params["precision"], dtype, np.dtype(np.float32)) == ""


def _price(made: Template) -> Price:
    """Returns the predicted times, told the equation that is built."""
    inner = made.product
    choice = lowering.choosers[attention_p](*(x.aval for x in inner.invars), target=lowering.target(), **inner.params)
    if not choice.served or choice.time_us is None:
        return Price("XLA", None, None, "; ".join(choice.reasons))
    device = device_of(lowering.target())
    xla_us = _XLA_LAUNCHES_US + device.moving_us(choice.problem.bytes)
    return Price("fused" if choose.leads(choice.time_us, xla_us, GAIN) else "XLA", xla_us, choice.time_us)


@dataclasses.dataclass
class _Attention:
    """Attention in a program: its region, and what makes the function that takes its place."""

    region: Region
    function: Callable[[], Callable[..., list[Any]]]


def _found(graph: Graph, flat: Flat, least_keys: int) -> Iterator[_Attention]:
    """Yields the attention of a program; each may have been replaced before the next."""
    names = {flat.name(x): x for i in graph.live for x in (*graph.inputs[i], *graph.eqns[i].outvars)}
    for k, eqn in enumerate(flat.eqns):
        if not _may_be(eqn) or flat.tops[k] not in graph.live:
            continue
        for side in (0, 1):
            try:
                one = _of(graph, flat, names, _Search(flat, names, k, side, least_keys))
            except _Escape:
                continue
            yield one
            break


def _of(graph: Graph, flat: Flat, names: dict[Any, Any], search: _Search) -> _Attention:
    members = sorted({flat.tops[k] for k in search.taken})
    inside, (out,) = set(members), graph.eqns[flat.tops[search.end]].outvars
    for i in members:
        if i not in graph.live or graph.eqns[i].effects:
            raise _Escape
        for x in graph.eqns[i].outvars:
            if x is not out and (x in graph.outvars or not inside.issuperset(graph.consumers.get(x, ()))):
                raise _Escape  # scores, or what is made of them, in memory
    read = list(dict.fromkeys([search.q[0], search.k[0], search.v[0], *(x for x, _ in search.leaves)]))
    if any(x not in names for x in read):
        raise _Escape
    inputs = [names[x] for x in read]
    if any_divided(*(x.aval for x in inputs)) or len({varying_axes(x.aval) for x in inputs}) > 1:
        raise _Escape
    if graph.reaches(inputs, [out]):
        raise _Escape
    if any(names[x] not in graph.outvars and _is_passing(flat.maker(x)) for x in (search.k[0], search.v[0])):
        raise _Escape
    eqns = [graph.eqns[i] for i in members]
    made = {x for eqn in eqns for x in eqn.outvars}
    given = list(dict.fromkeys([*inputs, *(x for i in members for x in graph.inputs[i] if x not in made)]))
    found: Any = ("attention",)
    region = Region((members[0],), set(), found, (), members, given, [out], [])
    return _Attention(region, functools.partial(_function, search, list(map(flat.name, given)), eqns, given, out))


def _is_passing(eqn: Any) -> bool:
    """True if XLA need not write what an equation makes to memory: it computes that where a product reads it."""
    return eqn is not None and (eqn.primitive.name in ("broadcast_in_dim", "slice") or pointwise(eqn))


def _function(
    search: _Search, names: Sequence[Any], eqns: Sequence[Any], inputs: Sequence[Any], out: Any
) -> Callable[..., list[Any]]:
    """Returns the function of attention, with the derivative of the equations that it takes the place of."""

    def fused(*args: Any) -> list[Any]:
        return [search.attend(dict(zip(names, args, strict=True)), out.aval)]

    def as_it_was(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))
        for eqn in eqns:
            given = [np.asarray(x.val, x.aval.dtype) if is_literal(x) else env[x] for x in eqn.invars]
            env.update(zip(eqn.outvars, bind_equation(eqn, given), strict=True))
        return [env[out]]

    return functools.partial(outside, any_equation(eqns, reverse_only), fused, as_it_was)


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value that is made of the scores.

    Attributes:
      kind: "score", "most", "shifted", "power", "total" or "weight".
      labels: of its axes; None too of one along which it does not vary.
      root: the scores that it is made of, or that it has moved or cast.
    """

    kind: str
    labels: Labels
    root: Any


class _Search:
    """Follows the scores of a product through a program, up to the product with the values.

    Attributes:
      sizes: of each label.
      key: the label of the keys.
      q, k, v: the variables that are read, with the labels of their axes.
      leaves: those that the expression reads, with theirs.
      taken, end: the equations, and the last.

    Raises:
      _Escape: if something else is made of the scores.
    """

    def __init__(self, flat: Flat, names: Container[Any], at: int, side: int, least_keys: int):
        self.flat, self._names, self.sizes, self._positional = flat, names, {}, {}
        self.leaves: list[tuple[Any, Labels]] = []
        self.taken, self.end = {at}, -1
        eqn = flat.eqns[at]
        contracted, batches = eqn.params["dimension_numbers"]
        of_sides: list[Labels] = []
        for x, (axis,), batch in zip(eqn.invars, contracted, batches, strict=True):
            free = [i for i in range(x.aval.ndim) if i != axis and i not in batch]
            labels: list[Any] = [None] * x.aval.ndim
            for i in range(x.aval.ndim):
                labels[i] = _SIZE if i == axis else ("batch", batch.index(i)) if i in batch else (len(of_sides), i)
            for i, label in enumerate(labels):
                self.sizes[label] = x.aval.shape[i]
            of_sides.append(tuple(labels))
            if len(of_sides) - 1 == side:
                long = [labels[i] for i in free if x.aval.shape[i] != 1]
                if len(long) != 1:
                    raise _Escape
                (self.key,) = long
                if self.sizes[self.key] < least_keys:
                    raise _Escape
        self.q, self.k = ((eqn.invars[i], self._real(of_sides[i])) for i in (1 - side, side))
        own = [
            [label for i, label in enumerate(labels) if i != axis and i not in batch]
            for labels, (axis,), batch in zip(of_sides, contracted, batches, strict=True)
        ]
        out = self._real((*(("batch", i) for i in range(len(batches[0]))), *own[0], *own[1]))
        self.scores = eqn.outvars[0]
        self.values = {self.scores: _Value("score", out, self.scores)}
        for i in range(at + 1, len(flat.eqns)):
            if any(not is_literal(x) and x in self.values for x in flat.eqns[i].invars):
                self.taken.add(i)
                if self._step(flat.eqns[i]):
                    self.end = i
                    break
        else:
            raise _Escape
        used = {x for i in range(self.end + 1, len(flat.eqns)) for x in flat.eqns[i].invars if not is_literal(x)}
        if not used.isdisjoint(self.values):
            raise _Escape
        self._arrange()
        self._leaves(self.root, self.values[self.root].labels, set())

    def _real(self, labels: Sequence[Any]) -> Labels:
        return tuple(label if label is not None and self.sizes[label] != 1 else None for label in labels)

    def _step(self, eqn: Any) -> bool:
        """Notes what an equation makes of the scores; True of the product with the values."""
        name = eqn.primitive.name
        if eqn.effects or is_marked(eqn) or len(eqn.outvars) != 1:
            raise _Escape
        (out,) = eqn.outvars
        if name == "dot_general":
            self._mix(eqn)
            return True
        if out.aval.dtype.name not in _FLOATS:
            raise _Escape
        given = [None if is_literal(x) else self.values.get(x) for x in eqn.invars]
        self.values[out] = self._made(eqn, given)
        return False

    def _made(self, eqn: Any, given: Sequence[_Value | None]) -> _Value:
        name, first = eqn.primitive.name, given[0]
        kinds = ["" if x is None else x.kind for x in given]
        if first is not None and name in _MOVES:
            return dataclasses.replace(first, labels=self._moved(eqn, first.labels, first.kind in ("most", "total")))
        if first is not None and (name in _SAME or (name == "convert_element_type" and len(given) == 1)):
            return first
        if name in ("reduce_max", "reduce_sum") and first is not None:
            labels = [label for i, label in enumerate(first.labels) if i not in eqn.params["axes"]]
            gone = [first.labels[i] for i in eqn.params["axes"] if first.labels[i] is not None]
            kind = {("reduce_max", "score"): "most", ("reduce_sum", "power"): "total"}.get((name, first.kind))
            if kind is None or gone != [self.key]:
                raise _Escape
            return _Value(kind, tuple(labels), first.root)
        if name == "max" and sorted(kinds) == ["", "most"]:
            at = kinds.index("most")
            if (known := self.flat.known(eqn.invars[1 - at])) is None or not np.all(np.isneginf(known.astype(float))):
                raise _Escape
            found = given[at]
            assert found is not None
            return found
        pair = _PAIRS.get((name, *kinds))
        if pair is not None:
            x, y = given
            assert x is not None
            assert y is not None
            if x.root is not y.root or len(x.labels) != len(y.labels):
                raise _Escape
            if any(b not in (None, a) for a, b in zip(x.labels, y.labels, strict=True)):
                raise _Escape
            return _Value(pair, x.labels, x.root)
        if name == "exp" and kinds == ["shifted"]:
            assert first is not None
            return dataclasses.replace(first, kind="power")
        if {*kinds} <= {"score", ""} and pointwise(eqn):
            labels = [x.labels for x in given if x is not None]
            if any(x != labels[0] for x in labels) or len(labels[0]) != eqn.outvars[0].aval.ndim:
                raise _Escape
            return _Value("score", labels[0], eqn.outvars[0])
        raise _Escape

    def _moved(self, eqn: Any, labels: Labels, broadcasts: bool) -> Labels:
        """Returns the labels of what moves axes, told those of what is moved."""
        name, (x, *_), out = eqn.primitive.name, eqn.invars, eqn.outvars[0].aval
        if name == "transpose":
            return tuple(labels[i] for i in eqn.params["permutation"])
        if name == "broadcast_in_dim":
            if not broadcasts and x.aval.size != out.size:
                raise _Escape
            found: list[Any] = [None] * out.ndim
            for i, axis in enumerate(eqn.params["broadcast_dimensions"]):
                found[axis] = labels[i] if x.aval.shape[i] == out.shape[axis] else None
            return tuple(found)
        return _around_ones(x.aval.shape, out.shape, labels)

    def _mix(self, eqn: Any) -> None:
        """Notes the product with the values."""
        contracted, batches = eqn.params["dimension_numbers"]
        side = next(i for i, x in enumerate(eqn.invars) if not is_literal(x) and x in self.values)
        weight, other = self.values[eqn.invars[side]], eqn.invars[1 - side]
        if weight.kind != "weight" or is_literal(other) or other in self.values or len(contracted[0]) != 1:
            raise _Escape
        if (
            not _is_exact(eqn)
            or other.aval.dtype != self.k[0].aval.dtype
            or eqn.invars[side].aval.dtype != other.aval.dtype
        ):
            raise _Escape
        labels: list[Any] = [None] * other.aval.ndim
        pairs = [*zip(batches[side], batches[1 - side], strict=True)]
        pairs += zip(contracted[side], contracted[1 - side], strict=True)
        for mine, its in pairs:
            labels[its] = weight.labels[mine]
        if labels[contracted[1 - side][0]] != self.key:
            raise _Escape
        free = [i for i in range(other.aval.ndim) if i not in (*batches[1 - side], *contracted[1 - side])]
        if len(free) != 1:
            raise _Escape
        labels[free[0]], self.sizes[_VALUE] = _VALUE, other.aval.shape[free[0]]
        self.v, self.root = (other, tuple(labels)), weight.root
        rows = [weight.labels[i] for i in range(len(weight.labels)) if i not in (*batches[side], *contracted[side])]
        own = [rows, [_VALUE]][:: 1 if side == 0 else -1]
        self.out: Labels = (*(weight.labels[i] for i in batches[side]), *own[0], *own[1])

    def _arrange(self) -> None:
        """Finds the axes of the kernel: each a list of labels. Keys and values lie as they are read."""
        self.k, self.v = (self._before_transposes(*x) for x in (self.k, self.v))
        found = []
        for labels, last in ((self.k[1], _SIZE), (self.v[1], _VALUE)):
            real = [label for label in labels if label is not None]
            if labels[-1] != last or self.key not in real:
                raise _Escape
            at = real.index(self.key)
            found.append((real[:at], real[at + 1 : -1]))
        self.keys_first = tuple(bool(after) for _, after in found)
        batch, heads = next((each for each in found if each[1]), (found[0][0][:-1], found[0][0][-1:]))
        if any((before, after) not in ((batch, heads), ([*batch, *heads], [])) for before, after in found):
            raise _Escape
        rows = [x for x in self.q[1] if x is not None and x not in (*batch, *heads, _SIZE)]
        if len(rows) > 2 or self.q[0].aval.dtype != self.k[0].aval.dtype:
            raise _Escape
        self.axes = [batch, heads, *([label] for label in rows), *[[]] * (2 - len(rows)), [self.key]]
        self.shape = tuple(self._size(axis) for axis in self.axes)
        if {*batch, *heads, *rows} != {x for x in self.values[self.root].labels if x is not None} - {self.key}:
            raise _Escape

    def _size(self, axis: Sequence[Any]) -> int:
        return math.prod(self.sizes[label] for label in axis)

    def _before_transposes(self, x: Any, labels: Labels) -> tuple[Any, Labels]:
        """Returns the variable that is transposed to make another: a kernel reads it as it lies."""
        while (eqn := self.flat.maker(x)) is not None and eqn.primitive.name == "transpose":
            order = eqn.params["permutation"]
            labels = tuple(labels[order.index(i)] for i in range(len(order)))
            (x,) = eqn.invars
        return x, labels

    # The expression of scores.

    def _is_positional(self, x: Any) -> bool:
        """True of what is made of indices and of single numbers."""
        if is_literal(x) or x.aval.size == 1:
            return True
        if x not in self._positional:
            eqn = self.flat.maker(x)
            if eqn is None or not self._is_inside(eqn):
                self._positional[x] = False
            else:
                self._positional[x] = all(map(self._is_positional, eqn.invars))
        return self._positional[x]

    def _is_leaf(self, x: Any) -> bool:
        """True of what the kernel reads."""
        eqn = self.flat.maker(x)
        if x in self.values or (eqn is not None and x not in self._names):
            return False
        if eqn is None or not self._is_inside(eqn):
            return True
        return x.aval.size < math.prod(self.shape) and (x.aval.size == 1 or not self._is_positional(x))

    def _is_inside(self, eqn: Any) -> bool:
        """True if the kernel may compute an equation."""
        name, x = eqn.primitive.name, eqn.outvars[0].aval
        if name == "reshape" and [n for n in x.shape if n != 1] != [n for n in eqn.invars[0].aval.shape if n != 1]:
            return False
        return name == "iota" or name in _MOVES or pointwise(eqn)

    def _given(self, eqn: Any, labels: Labels) -> list[Labels]:
        """Returns the labels of what an equation reads, told those of what it makes."""
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
        if name in _MOVES:
            return [_around_ones(out.shape, x.shape, labels)]
        return [
            tuple(None if n == 1 else label for n, label in zip(y.aval.shape, labels, strict=True))
            if y.aval.ndim
            else ()
            for y in eqn.invars
        ]

    def _leaves(self, x: Any, labels: Labels, seen: set[Any]) -> None:
        if is_literal(x) or (x, labels) in seen or x is self.scores:
            return
        seen.add((x, labels))
        if self._is_leaf(x):
            if any(label is None and n != 1 for n, label in zip(x.aval.shape, labels, strict=True)):
                raise _Escape
            eqn = self.flat.maker(x)
            if eqn is not None and eqn.primitive.name in ("random_bits", "iota"):
                raise _Escape
            self.leaves.append((x, labels))
            return
        eqn = self.flat.maker(x)
        if not self._is_inside(eqn):
            raise _Escape
        for y, its in zip(eqn.invars, self._given(eqn, labels), strict=eqn.primitive.name not in _MOVES):
            self._leaves(y, its, seen)

    # What is computed, told arrays.

    def attend(self, env: dict[Any, Any], out: Any) -> jax.Array:
        """Computes the attention of arrays by variable, like an aval."""

        def expression(acc: jax.Array) -> jax.Array:
            found: dict[Any, jax.Array] = {}
            y = self._evaluate(self.root, self.values[self.root].labels, env, acc, found)
            return jnp.broadcast_to(y, self.shape).astype(np.float32)

        traced = trace(expression, [jax.ShapeDtypeStruct(self.shape, np.float32)])
        if traced.outside or len(traced.epilogue.outputs) != 1:
            raise NotImplementedError("an expression with a derivative of its own")
        batch, heads, *rows, keys = self.axes
        q = self._placed(env[self.q[0]], self.q[1], [batch, heads, *rows, [_SIZE]])
        orders = [[batch, keys, heads] if first else [batch, heads, keys] for first in self.keys_first]
        k, v = (
            lax.reshape(env[x], [self._size(axis) for axis in (*order, [labels[-1]])])
            for (x, labels), order in zip((self.k, self.v), orders, strict=True)
        )
        params = {"expression": traced.epilogue, "keys_first": self.keys_first, "out_dtype": out.dtype}
        y = attend(q, k, v, *traced.operands, **params)
        flat = [*batch, *heads, *(label for axis in rows for label in axis), _VALUE]
        y = lax.reshape(y, [self.sizes[label] for label in flat])
        y = lax.transpose(y, [flat.index(label) for label in self.out if label is not None])
        return lax.reshape(y, out.shape)

    def _placed(self, x: Any, labels: Labels, axes: Sequence[Sequence[Any]]) -> jax.Array:
        """Returns an array along axes of the kernel, of size 1 along those on which it does not depend."""
        x = jnp.asarray(x)
        real = [label for label in labels if label is not None]
        x = lax.reshape(x, [self.sizes[label] for label in real])
        order = [label for axis in axes for label in axis if label in real]
        x = lax.transpose(x, [real.index(label) for label in order])
        sizes: list[int] = []
        full: list[int] = []
        for axis in axes:
            has = [label in real for label in axis]
            sizes += [self.sizes[label] if there else 1 for label, there in zip(axis, has, strict=True)]
            full += [self.sizes[label] if any(has) else 1 for label in axis]
        x = jnp.broadcast_to(lax.reshape(x, sizes), full)
        return lax.reshape(x, [self._size(axis) if set(axis) & set(real) else 1 for axis in axes])

    def _evaluate(self, x: Any, labels: Labels, env: dict[Any, Any], acc: jax.Array, found: dict[Any, Any]) -> Any:
        """Computes a value in the form of the kernel's scores."""
        if is_literal(x):
            return wide(jnp.asarray(x.val, x.aval.dtype).reshape((1,) * 5))
        if x is self.scores:
            return acc
        if (x, labels) in found:
            return found[x, labels]
        eqn = self.flat.maker(x)
        if self._is_leaf(x):
            y = wide(self._placed(env[x], labels, self.axes))
        elif eqn.primitive.name == "iota":
            y = self._index(eqn, labels)
        else:
            pairs = zip(eqn.invars, self._given(eqn, labels), strict=eqn.primitive.name not in _MOVES)
            args = [self._evaluate(z, its, env, acc, found) for z, its in pairs]
            y = args[0] if eqn.primitive.name in _MOVES else Tail(self.shape, 1).pointwise(eqn, args)
        found[x, labels] = y
        return y

    def _index(self, eqn: Any, labels: Labels) -> jax.Array:
        """Returns the positions along an axis."""
        label, dtype = labels[eqn.params["dimension"]], eqn.params["dtype"]
        if label is None:
            return jnp.zeros((1,) * 5, dtype)
        at = [axis == [label] for axis in self.axes]
        if not any(at):
            raise NotImplementedError("positions along one of several axes that are merged")
        return wide(lax.broadcasted_iota(dtype, self.shape, at.index(True)))


def _around_ones(shape: Sequence[int], new: Sequence[int], labels: Labels) -> Labels:
    """Returns the labels after a reshape that puts axes of size 1 somewhere, or takes them away."""
    if [n for n in shape if n != 1] != [n for n in new if n != 1]:
        raise _Escape
    left = iter([label for n, label in zip(shape, labels, strict=True) if n != 1])
    return tuple(None if n == 1 else next(left) for n in new)
