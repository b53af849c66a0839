"""Sums over rows that no product makes, with the elementwise equations before them, as one kernel each.

A norm over images adds up what a pass computes of arrays in memory: of a batch norm's backward pass two sums, of a
squeeze the mean of an activation. XLA writes what it computes beside the sums, and its sums over rows take two to three
times what reading takes. A kernel reads, computes and adds up; what else needs the computed values makes them again in
the pass that it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding import lowering
from cutjax.binding.rules import any_divided, varying_axes
from cutjax.epilogue.jaxpr import placed_anywhere
from cutjax.epilogue.trace import trace
from cutjax.fusion.contraction import OWN
from cutjax.fusion.jaxprs import MOVES, Graph, byte_count, full_size, in_one_pass, is_literal
from cutjax.fusion.price import GAIN, pass_us
from cutjax.fusion.tail import Tail, Tile, wide
from cutjax.kernels import choose
from cutjax.kernels.staging import instructions
from cutjax.primitives.row_sums import row_sums_p

LEAST_BYTES = 4 << 20  # of what is read: less is in the cache, and a launch is much of it
_MOST_SUMS = 6
_MOST_EQUATIONS = 96
# Of 40 sums (benchmarks/results/experiments/row-sums-h200.json), the share of a copy's bandwidth that XLA reaches at
# best, and the microseconds beside: of each image, and over all images, of what takes so many instructions.
_XLA_OF_EACH = ((7, 0.5, 10.0), (0, 0.5, 3.0))
_XLA_OF_ALL = ((15, 0.385, 15.0), (7, 0.8, 8.0), (0, 1.0, 4.0))
_ADDED = frozenset(["bfloat16", "float16", "float32"])  # in float32, whatever the dtype of the sum
_COMPARISONS, _MOVED = frozenset(["eq", "ne", "lt", "le", "gt", "ge"]), MOVES | {"broadcast_in_dim"}
_NOT_CHOOSING = MOVES | {"reduce_sum", "dot_general", "conv_general_dilated", *OWN}
_NOT_INSIDE = frozenset(["iota", "random_bits", "name"])


@dataclasses.dataclass
class Sums:
    """Sums over rows of what equations make of the same arrays: a region without a product.

    Attributes:
      found: the shape ``(images, *pixels, channels)`` to which the arrays are reshaped: axes of channels are merged.
      reductions: the equations that add up, in order.
      members: these, and all that make what they add up.
      leaves: the variables of full size that are read.
      inputs: all that are read, the leaves first.
      added: of each reduction, the variable that the kernel adds up, and whether its sum has the other sign.
      made: the equation that takes their place, once it is built.
    """

    found: tuple[int, ...]
    reductions: list[int]
    members: list[int]
    leaves: list[Any]
    inputs: list[Any]
    results: list[Any]
    added: list[tuple[Any, bool]]
    made: Any = None
    products: tuple[int, ...] = ()

    def equation(self) -> Any:
        """Returns the equation that takes the place of the members."""
        return self.made


def search(graph: Graph, least_bytes: int) -> list[Sums]:
    """Returns the sums of a program that a kernel could make of so many bytes or more, those of the same together."""
    groups: list[Sums] = []
    choosing = [i for i in graph.live if not (graph.eqns[i].primitive.name in _NOT_CHOOSING or graph.is_pointwise(i))]
    for i in sorted(graph.live):
        one = _of(graph, i, choosing)
        if one is None or sum(map(byte_count, one.leaves)) < least_bytes:
            continue
        for k in reversed(range(len(groups))):
            if (both := _together(graph, groups[k], one)) is not None:
                groups[k] = both
                break
        else:
            groups.append(one)
    return groups


def form_of(shape: tuple[int, ...], axes: Iterable[int]) -> tuple[int, ...] | None:
    """Returns images, pixels and channels of an array of which pixels are added up; None where they are not.

    The first axis is that of images. Pixels are the axes after it, as far as they are added up; what is added up beside
    them is so afterwards.
    """
    rank, end = len(shape), _end(len(shape), axes)
    if rank < 4 or end in (1, rank) or 0 in shape:
        return None
    return *shape[:end], math.prod(shape[end:])


def _end(rank: int, axes: Iterable[int]) -> int:
    """Returns the first axis after those of pixels that are added up; the rank where there is none."""
    return next((axis for axis in range(1, rank) if axis not in axes), rank)


def _of(graph: Graph, i: int, choosing: list[int]) -> Sums | None:
    """Returns the sum of an equation; None where it is none that a kernel could make.

    Args:
      graph: the program.
      i: the equation.
      choosing: those whose results may be some of the values that they read.
    """
    eqn = graph.eqns[i]
    if eqn.primitive.name != "reduce_sum" or is_literal(eqn.invars[0]) or eqn.outvars[0] in graph.definition:
        return None
    (x,), (out,) = eqn.invars, eqn.outvars
    form = form_of(x.aval.shape, eqn.params["axes"])
    if form is None or not {x.aval.dtype.name, out.aval.dtype.name} <= _ADDED:
        return None
    cones = [cone for through in (False, True) if (cone := _cone(graph, x, through)) is not None]
    if not cones:
        return None
    members, leaves, small = min(cones, key=lambda cone: sum(map(byte_count, cone[1])))
    if any(_is_compared(graph, j, members) for j in members):
        return None
    inputs = [*leaves, *small]
    if any(_is_chosen(graph, j, inputs, members) for j in choosing):
        return None
    if any_divided(*(y.aval for y in inputs)) or len({varying_axes(y.aval) for y in inputs}) > 1:
        return None
    return Sums(form, [i], sorted({*members, i}), leaves, inputs, [out], [_signed(graph, x, members)])


def _signed(graph: Graph, x: Any, members: set[int]) -> tuple[Any, bool]:
    """Returns the variable that another is but for casts and its sign, and whether that is the other one.

    Casts between floats change nothing, as in tails. Other factors stay inside: a sum without them may overflow.
    """
    negative = False
    while (i := graph.producer.get(x, -1)) in members and x not in graph.definition:
        eqn = graph.eqns[i]
        if eqn.primitive.name not in ("neg", "convert_element_type") or eqn.invars[0].aval.dtype.name not in _ADDED:
            break
        negative ^= eqn.primitive.name == "neg"
        (x,) = eqn.invars
    return x, negative


def _is_compared(graph: Graph, i: int, members: set[int]) -> bool:
    """True if an equation compares what the kernel computes with another value: of that XLA may have other bits.

    A maximum, of which the places are counted, was made of rounded values, or by other instructions.
    """
    eqn = graph.eqns[i]
    if eqn.primitive.name not in _COMPARISONS or any(map(is_literal, eqn.invars)):
        return False
    return any(not _is_read(graph, x, members) for x in eqn.invars)


def _is_chosen(graph: Graph, i: int, inputs: list[Any], members: set[int]) -> bool:
    """True if something that is read is made of what an equation chose among values that the kernel computes.

    XLA chose among what it had rounded: a value less the greatest may be positive here.
    """
    return any(graph.depends_on(x, 1 << i) for x in inputs) and _is_of(graph, graph.inputs[i], members)


def _is_of(graph: Graph, variables: list[Any], members: set[int]) -> bool:
    """True if variables are made, element by element, of what some equations make."""
    stack, seen = list(variables), set()
    while stack:
        x = stack.pop()
        i = graph.producer.get(x, -1)
        if i in members:
            return True
        if i >= 0 and i not in seen and (graph.is_pointwise(i) or graph.eqns[i].primitive.name in MOVES):
            seen.add(i)
            stack += graph.inputs[i]
    return False


def _is_read(graph: Graph, x: Any, members: set[int]) -> bool:
    """True if a variable is what the kernel reads, moved or widened."""
    while (i := graph.producer.get(x, -1)) in members and x not in graph.definition:
        eqn = graph.eqns[i]
        widened = eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == np.float32
        if not (widened or eqn.primitive.name in _MOVED) or is_literal(eqn.invars[0]):
            return False
        x = eqn.invars[0]
    return True


def _cone(graph: Graph, x: Any, through: bool) -> tuple[set[int], list[Any], list[Any]] | None:
    """Returns the equations that make a variable element by element, what they read of its size, and what is smaller.

    Args:
      graph: the program.
      x: the variable.
      through: whether what lies in memory is computed again too.
    """
    size, members, leaves, small = full_size(x.aval), set(), [], []
    stack = [x]
    while stack:
        y = stack.pop()
        i = graph.producer.get(y, -1)
        if i in members or y in leaves or y in small:
            continue
        if full_size(y.aval) != size:
            small.append(y)
            continue
        kept = y in graph.definition or i < 0 or (not through and graph.in_memory(y))
        if not kept and graph.eqns[i].primitive.name in _NOT_INSIDE:
            return None
        if kept or not graph.is_pointwise(i) or any(full_size(z.aval) != size for z in graph.eqns[i].outvars):
            if not kept and not graph.in_memory(y) and in_one_pass(graph.eqns[i]):
                return None  # XLA computes it in the pass that adds it up
            leaves.append(y)
            continue
        members.add(i)
        stack += graph.inputs[i]
        if len(members) > _MOST_EQUATIONS:
            return None
    return (members, leaves, small) if leaves else None


def _together(graph: Graph, a: Sums, b: Sums) -> Sums | None:
    """Returns two sums as one; None where they read no array in common, or one is made of the other."""
    reductions, added = [*a.reductions, *b.reductions], [*a.added, *b.added]
    if a.found != b.found or set(a.leaves).isdisjoint(b.leaves) or len({x for x, _ in added}) > _MOST_SUMS:
        return None
    mask = sum(1 << i for i in reductions)
    if any(graph.depends_on(x, mask) for x in (*a.inputs, *b.inputs)):
        return None
    leaves = list(dict.fromkeys([*a.leaves, *b.leaves]))
    inputs = list(dict.fromkeys([*leaves, *a.inputs, *b.inputs]))
    members, results = sorted({*a.members, *b.members}), [*a.results, *b.results]
    return Sums(a.found, reductions, members, leaves, inputs, results, added)


def function(graph: Graph, sums: Sums) -> Callable[..., list[Any]]:
    """Returns the function of sums. It keeps equations alive, not the program."""
    inside = set(sums.reductions)
    eqns = [placed_anywhere(graph.eqns[i]) for i in sums.members if i not in inside]
    reductions, added = [graph.eqns[i] for i in sums.reductions], sums.added
    form, inputs, first = sums.found, sums.inputs, sums.leaves[0]
    each, pixels = list(dict.fromkeys(x for x, _ in added)), tuple(range(1, len(form) - 1))

    def call(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))
        x = lax.reshape(env[first], form)

        def expression(acc: Any) -> list[Any]:
            tail, values = Tail(form, len(pixels)), dict(env)
            values[first] = Tile(wide(acc))
            tail.evaluate(eqns, values)
            return [jnp.sum(jnp.broadcast_to(tail.lift(values[y]), form), pixels) for y in each]

        traced = trace(expression, [jax.ShapeDtypeStruct(form, x.dtype)], rows=len(pixels))
        found = row_sums_p.bind(x, *traced.operands, expression=traced.epilogue, backend="auto")
        over_rows = dict(zip(each, traced.finish(found), strict=True))
        return [
            _rest(-over_rows[y] if negative else over_rows[y], eqn)
            for (y, negative), eqn in zip(added, reductions, strict=True)
        ]

    return call


def _rest(y: jax.Array, eqn: Any) -> jax.Array:
    """Returns the result of an equation that adds up, of its sums over rows."""
    (x,), (out,), axes = eqn.invars, eqn.outvars, set(eqn.params["axes"])
    shape = x.aval.shape
    left = [0, *range(_end(len(shape), axes), len(shape))]
    y = lax.reshape(y, [shape[axis] for axis in left])
    y = jnp.sum(y, [k for k, axis in enumerate(left) if axis in axes])
    return lax.reshape(y.astype(out.aval.dtype), out.aval.shape)


def pays(graph: Graph, sums: Sums, inner: Any) -> bool:
    """True if a kernel is predicted to be faster than XLA; told the equation of the primitive."""
    choice = lowering.choosers[row_sums_p](*(x.aval for x in inner.invars), target=lowering.target(), **inner.params)
    if not choice.served or choice.time_us is None:
        return False
    problem, of_all = choice.problem, any(0 in graph.eqns[i].params["axes"] for i in sums.reductions)
    count = instructions(problem.expression)
    share, us = next(x for least, *x in (_XLA_OF_ALL if of_all else _XLA_OF_EACH) if count >= least)
    return choose.leads(choice.time_us, us + pass_us(problem.bytes, problem.device, share), GAIN)
