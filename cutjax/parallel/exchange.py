"""Experts divided over devices, and tokens too: each row travels to its expert's device, and its result back."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cutjax.binding.rules import match_varying, varying_axes
from cutjax.parallel.links import ALL_GATHER, ALL_TO_ALL, MEMORY, REDUCE_SCATTER
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.routing import Routing, from_slots, sorted_by, to_slots

ROWS = "cutjax_rows"  # the name jax.checkpoint policies see, of the gathered rows
FORMS = ("auto", "exchange", "ragged", "gather")
ROOM = 1.5  # even shares of rows that a device receives at once


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that the choice of a form depends on: tokens of a device, experts of a token, devices, widths."""

    tokens: int
    k: int
    devices: int
    d: int
    h: int
    n: int
    room: float = ROOM
    itemsize: int = 2

    def exchange(self) -> tuple[Mapping[int, float], float]:
        """Returns bytes that a device sends, by GB/s, and that its memory moves, beside products, in a forward pass."""
        rows, d, n = self.room * self.tokens * self.k * self.itemsize, self.d, self.n
        sent = rows * (self.devices - 1) / self.devices * (d + n)
        return {ALL_TO_ALL: sent}, rows * (4 * d + 4 * n)  # put into boxes, sorted there; back, and added up

    def gather(self) -> tuple[Mapping[int, float], float]:
        """Returns the same of the form in which every device routes all tokens."""
        tokens = self.tokens * (self.devices - 1) * self.itemsize
        rows = self.tokens * self.k * self.devices * self.itemsize  # those of other devices' experts are zero
        wide = max(4, self.itemsize) // self.itemsize  # in which sums travel
        sent = {ALL_GATHER: tokens * self.d, REDUCE_SCATTER: wide * tokens * self.n}
        return sent, rows * (2 * self.d + self.h + 2 * self.n)

    def us(self, form: str) -> float:
        """Returns the time predicted for a form, without its products, which are the same in each."""
        sent, moved = self.costs()[form]
        return sum(size / rate for rate, size in sent.items()) / 1e3 + moved / MEMORY / 1e3

    def form(self) -> str:
        """Returns the form that is predicted to be faster."""
        return min(self.costs(), key=self.us)

    def costs(self) -> dict[str, tuple[Mapping[int, float], float]]:
        return {"gather": self.gather(), "exchange": self.exchange()}


Experts = Callable[..., jax.Array]  # (rows sorted by expert, their routing) -> their results


def exchanged(
    parts: Sequence[tuple[jax.Array, Routing]], experts: Experts, axis: str, room: float, ragged: bool = False
) -> list[jax.Array]:
    """Computes the sum over each token's experts, each by the device that has it.

    Rows travel in boxes of equal sizes, one for each device. Where the load is nearly even they hold all rows. Where
    any box is too small, all devices fill them in rounds, so no token is dropped, whatever the load is; then the
    backward pass makes everything again, or each round would keep what it needs.

    Args:
      parts: tokens ``[tokens, d]`` of this device, and their routing to the experts of all devices. Each part's rows
        travel beside another's products.
      experts: what this device computes of rows of its experts: zeros for those of none.
      axis: the mesh axis over which tokens and experts are divided.
      room: how many rows a device receives at once, in multiples of those that it sends.
      ragged: whether rows travel by ragged_all_to_all, without boxes; a device is then full where its rows are more.
    """
    devices, me = lax.axis_size(axis), lax.axis_index(axis)
    mine, runs = [], []
    for _, routing in parts:
        groups = routing.group_sizes.shape[0] // devices
        # A sum of which each device has a row: unlike all_gather's result it is known to be equal on all.
        row = jnp.where((jnp.arange(devices, dtype=jnp.int32) == me)[:, None], routing.group_sizes, 0)
        mine.append(row.reshape(devices, devices, groups))
    sizes = lax.psum(mine, axis)  # [source, device, expert]
    fits, rounds = [], []
    for (_, routing), size in zip(parts, sizes, strict=True):
        tokens, k = routing.indices.shape
        most = tokens * min(k, size.shape[2])  # from one device to another
        share, most, loads = (
            (room * tokens * k, devices * most, size.sum((0, 2), dtype=jnp.int32))
            if ragged
            else (room * tokens * k / devices, most, size.sum(2, dtype=jnp.int32))
        )
        count = max(1, min(most, math.ceil(share)))
        rounds.append(-(-most // count))
        fits.append(loads.max() <= count)
        run = _ragged_round if ragged else _round
        runs.append(functools.partial(run, routing=routing, sizes=size, experts=experts, axis=axis, count=count))

    def first(sent: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [run(*each, 0) for run, each in zip(runs, sent, strict=True)]

    def every(sent: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        outs = []
        for run, each, out, number in zip(runs, sent, first(sent), rounds, strict=True):

            def add(out: jax.Array, i: jax.Array, run: Any = run, each: Any = each) -> Any:
                return out + run(*each, i), None

            numbers = jnp.arange(1, number, dtype=jnp.int32)
            outs.append(lax.scan(jax.checkpoint(add, prevent_cse=False), out, numbers)[0])
        return outs

    sent = [(x, routing.weights) for x, routing in parts]
    if max(rounds) == 1:
        outs = first(sent)
    else:
        fit = _agreed(functools.reduce(jnp.logical_and, fits), first, sent)
        outs = lax.cond(fit, first, jax.checkpoint(every), sent)
    return [out.astype(x.dtype) for out, (x, _) in zip(outs, parts, strict=True)]


def _agreed(fit: jax.Array, branch: Callable[[Any], Any], args: Any) -> jax.Array:
    """True if it is so on all devices over which something differs that a branch closes over as equal on them.

    Such as a number that an activation captures: its gradient is a sum over those devices, in the branch, and a device
    that took the other branch would not join it.
    """
    captured = jax.closure_convert(branch, args)[1]
    axes = frozenset().union(*(varying_axes(jax.typeof(fit)) - varying_axes(jax.typeof(x)) for x in captured))
    return lax.psum(jnp.logical_not(fit).astype(jnp.int32), tuple(axes)) == 0 if axes else fit


def _computed(rows: jax.Array, expert: jax.Array, groups: int, scale: jax.Array, experts: Experts) -> jax.Array:
    """Applies this device's experts to rows that arrived; returns their scaled results in the order of arrival."""
    there = sorted_by(expert, groups, scale)
    return there.combine(experts(checkpoint_name(there.dispatch(rows), ROWS), there))


def _round(
    x: jax.Array,
    weights: jax.Array,
    number: Any,
    *,
    routing: Routing,
    sizes: jax.Array,
    experts: Experts,
    axis: str,
    count: int,
) -> jax.Array:
    """Returns the sums of the results of those rows that travel in a round, in boxes of ``count`` rows."""
    devices, _, groups = sizes.shape
    me, first = lax.axis_index(axis), number * count
    mine = sizes.sum(2, dtype=jnp.int32)[me]  # rows for each device
    start = jnp.cumsum(mine, dtype=jnp.int32) - mine
    places = first + jnp.arange(count, dtype=jnp.int32)
    row = jnp.minimum(start[:, None] + places, routing.permutation.size - 1)
    pairs = jnp.where(places < mine[:, None], routing.permutation[row], routing.permutation.size).reshape(-1)
    device = routing.indices // groups
    at = routing.inverse - start[device] - first
    slots = jnp.where((at >= 0) & (at < count), device * count + at, devices * count)

    def swapped(rows: jax.Array) -> jax.Array:
        boxes = rows.reshape(devices, count, rows.shape[-1])
        return lax.all_to_all(boxes, axis, 0, 0).reshape(rows.shape)

    arrived = swapped(to_slots(x, pairs, slots))
    scale = swapped(to_slots(weights.reshape(-1, 1), pairs, slots.reshape(-1, 1)))
    ends = jnp.cumsum(sizes[:, me], 1, dtype=jnp.int32)  # of the rows of each source and expert
    expert = (places[:, None] >= ends[:, None]).sum(2, dtype=jnp.int32)  # that of no group after the last
    back = swapped(_computed(arrived, expert.reshape(-1), groups, scale, experts))
    return from_slots(back.astype(accumulator(back.dtype)), pairs, slots)


def _ragged_round(
    x: jax.Array,
    weights: jax.Array,
    number: Any,
    *,
    routing: Routing,
    sizes: jax.Array,
    experts: Experts,
    axis: str,
    count: int,
) -> jax.Array:
    """Returns the sums of the results of those rows that travel in a round, of which a device receives ``count``.

    What a device receives in all rounds is in the order of the sources, and of each source's experts.
    """
    routing = routing._replace(weights=weights)
    rows, weights = routing.dispatch(x), routing.row_weights()
    me, first = lax.axis_index(axis), number * count
    whole = sizes.sum(2, dtype=jnp.int32)  # [source, device]
    start, arrival = (jnp.cumsum(whole, along, dtype=jnp.int32) - whole for along in (1, 0))
    low, high = (jnp.clip(edge - arrival, 0, whole) for edge in (first, first + count))
    sent = high - low
    there, here = jnp.clip(arrival + low - first, 0, count), start + low
    send = here[me], sent[me], there[me], sent[:, me]
    back = there[:, me], sent[:, me], here[:, me], sent[me]
    arrived = ragged_exchange(rows, count, send, axis)
    scale = ragged_exchange(weights, count, send, axis)
    ends = jnp.cumsum(sizes[:, me].reshape(-1), dtype=jnp.int32)  # of the rows of each source and expert
    places = first + jnp.arange(count, dtype=jnp.int32)
    groups = sizes.shape[2]
    block = jnp.searchsorted(ends, places, side="right").astype(jnp.int32)
    expert = jnp.where(places < ends[-1], block % groups, groups)
    y = _computed(arrived, expert, groups, scale, experts)
    back = ragged_exchange(y, rows.shape[0], back, axis)
    return routing.combine(back.astype(accumulator(back.dtype)))


Slices = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def ragged_exchange(x: jax.Array, count: int, slices: Slices, axis: str) -> jax.Array:
    """Sends a slice of rows to each device of an axis, and returns ``count`` rows: those received, and zeros.

    Args:
      x: ``[rows, d]``.
      count: how many rows the result has.
      slices: for each device the first row sent, their number, the place of the first at the receiver, and how many
        rows come from there, as ``jax.lax.ragged_all_to_all`` has them.
      axis: the mesh axis.
    """
    x, *args = match_varying(x, *slices)
    return lax.platform_dependent(
        x,
        *args,
        cuda=functools.partial(_ragged, count=count, axis=axis),
        default=jax.checkpoint(functools.partial(_bounded, count=count, axis=axis)),  # its masks are not kept
    )


def _ragged(x: jax.Array, *slices: jax.Array, count: int, axis: str) -> jax.Array:
    return lax.ragged_all_to_all(x, lax.full_like(x, 0, shape=(count, *x.shape[1:])), *slices, axis_name=axis)


def _bounded(
    x: jax.Array, first: jax.Array, sent: jax.Array, there: jax.Array, received: jax.Array, *, count: int, axis: str
) -> jax.Array:
    """Sends as many rows to each device as may go to one: for backends without ragged_all_to_all."""
    offsets = jnp.arange(min(x.shape[0], count), dtype=np.int32)
    boxes = x.at[first[:, None] + offsets].get(mode="fill", fill_value=0)  # [devices, bound, d]
    boxes = jnp.where((offsets < sent[:, None])[..., None], boxes, jnp.zeros((), x.dtype))
    boxes = lax.all_to_all(boxes, axis, 0, 0)
    places = lax.all_to_all(there, axis, 0, 0, tiled=True)[:, None] + offsets
    places = jnp.where(offsets < received[:, None], places, count)  # past the end: dropped
    zeros = lax.full_like(x, 0, shape=(count, *x.shape[1:]))
    return zeros.at[places].set(boxes, mode="drop", unique_indices=True)


def everywhere(x: jax.Array, logits: jax.Array, bias: Any, experts: Callable[..., jax.Array], axis: str) -> jax.Array:
    """Computes the same by devices that each route all tokens, and compute their experts' part of the sum.

    ``experts`` is of tokens, logits, selection bias and the first expert of this device.
    """
    whole = functools.partial(lax.all_gather, axis_name=axis, axis=0, tiled=True)
    y = experts(whole(x), whole(logits), None if bias is None else whole(bias))
    return lax.psum_scatter(y.astype(accumulator(y.dtype)), axis, scatter_dimension=0, tiled=True).astype(y.dtype)
