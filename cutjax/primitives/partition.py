"""The division of a product with an epilogue over devices: what one device computes of its shards, once for all.

Axes of the result and of the batch map through. Where the contracted axis is divided, each device has partial sums:
those are added over devices in the result's dtype, or in the accumulators' (``use_partial_sums``), and the epilogue
runs on the sums, in plain JAX. Reductions of an epilogue over an axis that is divided are finished over devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding.partition import Rules, narrow_sums
from cutjax.binding.placement import Labels, Placement, Rule
from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, const, normal
from cutjax.primitives.accumulators import accumulator, is_half
from cutjax.primitives.product import Arithmetic, Product, bind, multiply

_ADDED = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


def _rule(*avals: Any, product: Product, epilogue: Epilogue, **_: Any) -> Rule:
    factors, operands = product.unpack(avals, epilogue)
    own, tile = product.labels(*factors.arrays)
    others = [product.operand_labels(x, tile) for x in operands]
    results = []
    for out in epilogue.outputs:
        gone = out.places(len(tile))
        results.append(tuple(label for i, label in enumerate(tile) if i not in gone))
    following = 0 if product.further else sum(map(len, factors.scales))
    return Rule((*own, *others), tuple(results), len(own), product.summed, product.late, product.gathered, following)


def _sums(epilogue: Epilogue, operand: np.dtype, narrow: bool) -> np.dtype:
    """Returns the dtype in which partial sums travel: as few bits as the program that jnp makes of it sends.

    What an epilogue reads has 32 bits at least, but where the operands have 16 jnp's would read those.
    """
    dtype = np.dtype(epilogue.outputs[0].dtype) if epilogue.plain else epilogue.accumulator
    if narrow and (epilogue.plain or is_half(operand)):
        return dtype if epilogue.plain else operand
    return accumulator(dtype)


def _shard(
    placement: Placement,
    *arrays: jax.Array,
    product: Product,
    epilogue: Epilogue,
    avals: Sequence[Any],
    in_place: tuple[tuple[int, int], ...],
    mark: Any,
    **params: Any,
) -> list[jax.Array]:
    whole, _ = product.unpack(avals, epilogue)
    full = product.tile(*whole.arrays).shape
    own, tile = product.labels(*whole.arrays)
    factors, operands = product.unpack(arrays, epilogue)
    rule = _rule(*avals, product=product, epilogue=epilogue)
    early = rule.early(placement)
    over = [axis for label in product.summed for axis in placement.axes.get(label, ())]
    labels = factors.like(own).context
    of_sums = [_kept(x, names, placement) for x, names in zip(factors.context, labels, strict=True)]
    after = product.after(placement, dataclasses.replace(factors, context=of_sums))
    product, factors = product.located(placement, whole, factors.like(own), factors)
    local, factors = product.shard(placement, factors)
    known = placement if early else dataclasses.replace(placement, scattered={})
    epilogue, more = located(epilogue, full, tile, known)
    operands = [*operands, *more]
    if early:
        shared = {name: params[name] for name in ("precision", "backend", "hints", "config")}
        dtype = np.dtype(epilogue.outputs[0].dtype) if epilogue.plain else epilogue.accumulator
        wide = _sums(epilogue, product.multiplied(factors.a.dtype), narrow_sums(mark) and not placement.exact)
        accs = [multiply(local, *x, out_dtype=wide, **shared) for x in factors.each]
        accs = [x.astype(dtype) for x in _added(accs, over, tile, placement)]
        if epilogue.plain:
            return accs
        product, context = after
        arithmetic = Arithmetic.of(product, factors, params)
        outs = list(product.applied(epilogue.primal, context, arithmetic).apply(accs, operands))
        over = []
    else:
        outs = bind(local, epilogue, factors, operands, in_place=in_place, **params)
    return _finished(outs, epilogue, tile, placement, over)


def _finished(
    outs: Sequence[jax.Array], epilogue: Epilogue, tile: Labels, placement: Placement, late: Sequence[str]
) -> list[jax.Array]:
    """Returns the results, reductions and those of which each device has a term finished over devices."""
    results = []
    for x, out in zip(outs, epilogue.outputs, strict=True):
        if out.reduce is None:
            results += _added([x], late, tile, placement) if late else [x]
            continue
        gone = [tile[i] for i in out.places(len(tile))]
        axes = tuple(axis for label in gone for axis in placement.axes.get(label or "", ()))
        if not late:
            axes += tuple(axis for label in gone for axis in placement.scattered.get(label or "", ()))
        kept = tuple(label for label in tile if label not in gone)
        if "row" in out.axes or out.reduce == "sum":
            add = _ADDED[out.reduce]
            x = add(x, (*axes, *late)) if (*axes, *late) else x
        else:  # over columns alone: of rows that are of no group here it is zero
            x = _ADDED[out.reduce](x, axes) if axes else x
            x = lax.psum(x, tuple(late)) if late else x
        results.append(_kept(x, kept, placement) if late else x)
    return results


def _kept(x: jax.Array, labels: Labels, placement: Placement) -> jax.Array:
    """Returns this device's part of an array that lies whole where sums are scattered."""
    for i, label in enumerate(labels):
        if axes := placement.scattered.get(label or "", ()):
            size = x.shape[i] // placement.count(axes)
            x = lax.dynamic_slice_in_dim(x, placement.index(axes) * size, size, i)
    return x


def _added(arrays: list[jax.Array], over: Sequence[str], tile: Labels, placement: Placement) -> list[jax.Array]:
    """Returns sums over devices, of which each keeps its part where they are scattered."""
    scattered = {axis for axes in placement.scattered.values() for axis in axes}
    if rest := tuple(axis for axis in over if axis not in scattered):
        arrays = list(lax.psum(tuple(arrays), rest))
    for label, axes in placement.scattered.items():
        at = tile.index(label)
        arrays = [lax.psum_scatter(x, axes, scatter_dimension=at, tiled=True) for x in arrays]
    return arrays


def located(
    epilogue: Epilogue, full: Sequence[int], tile: Labels, placement: Placement
) -> tuple[Epilogue, list[jax.Array]]:
    """Returns an epilogue with positions in the whole result, for a shard of it, and the operands that say which."""
    rank, starts, nodes, renamed = len(tile), {}, [], {}
    operands, more = list(epilogue.operands), []

    def append(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def index(at: int, dtype: str) -> int:
        """Returns the node of the position along an axis, counted from the last."""
        params = {-2: ("row",), -1: ("col",)}.get(at, ("batch", -3 - at))
        node = append(Node("iota", (), dtype, params))
        axes = placement.over(tile[at])
        if not axes:
            return node
        if at not in starts:
            start = placement.index(axes) * (full[at] // placement.count(axes))
            more.append(start.astype(jnp.int32).reshape((1,) * rank))
            operands.append(OperandSpec("int32", False, False, (False,) * (rank - 2)))
            starts[at] = len(operands) - 1
        start = append(Node("operand", (), "int32", (starts[at],)))
        if dtype != "int32":
            start = append(Node("convert_element_type", (start,), dtype))
        return append(Node("add", (node, start), dtype))

    for i, node in enumerate(epilogue.nodes):
        axes = _axes_of(node)
        if any(placement.over(tile[at]) for at in axes):
            value, stride = index(axes[0], node.dtype), full[axes[0]]
            for at in axes[1:]:
                scale = append(const(stride, node.dtype))
                term = append(Node("mul", (index(at, node.dtype), scale), node.dtype))
                value, stride = append(Node("add", (value, term), node.dtype)), stride * full[at]
            renamed[i] = value
        else:
            renamed[i] = append(dataclasses.replace(node, args=tuple(renamed[j] for j in node.args)))
    if not more:
        return epilogue, []
    outputs = [dataclasses.replace(out, node=renamed[out.node]) for out in epilogue.outputs]
    return normal(epilogue.products, operands, nodes, outputs), more


def _axes_of(node: Node) -> list[int]:
    """Returns the axes whose positions a node counts, counted from the last, the fastest first."""
    if node.op != "iota":
        return []
    axis, *i = node.params
    return [-3 - i[0]] if axis == "batch" else [{"row": -2, "col": -1}[axis], *range(-3, -3 - sum(i), -1)]


RULES = Rules(_rule, _shard, lambda product, **_: bool(product.why_not()))
