"""Experts divided over devices, and tokens too: each row travels to its expert's device, and its result back."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cutjax.binding.rules import match_varying
from cutjax.ops.routing import Routing, sorted_by
from cutjax.primitives.accumulators import accumulator

ROWS = "cutjax_rows"  # the name jax.checkpoint policies see, of the gathered rows
FORMS = ("auto", "exchange", "gather")
# Bytes that a GPU's memory moves in the time in which its links send one: 4.3 TB/s and about 0.4 TB/s on an H200.
MEMORY_PER_LINK = 10
ROOM = 2.0  # even shares of rows that a device receives at once


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that the choice of a form depends on: tokens of a device, experts of a token, devices, widths."""

    tokens: int
    k: int
    devices: int
    d: int
    h: int
    n: int

    def exchange(self) -> tuple[int, int]:
        """Returns elements that a device sends, and that its memory moves, beside the products, in a forward pass."""
        rows, d, n = self.tokens * self.k, self.d, self.n
        sent = rows * (self.devices - 1) // self.devices * (d + n)
        return sent, rows * (5 * d + 4 * n)  # sorted here, received, sorted there; then back, and added up

    def gather(self) -> tuple[int, int]:
        """Returns the same of the form in which every device routes all tokens."""
        sent = self.tokens * (self.devices - 1) * (self.d + 2 * self.n)  # the sums travel in 32 bits
        rows = self.tokens * self.k * self.devices  # those of other devices' experts are gathered, and zero
        return sent, rows * (2 * self.d + self.h + 2 * self.n)

    def form(self) -> str:
        """Returns the form that is predicted to be faster."""
        cost = {name: MEMORY_PER_LINK * sent + moved for name, (sent, moved) in self.costs().items()}
        return min(cost, key=cost.__getitem__)

    def costs(self) -> dict[str, tuple[int, int]]:
        return {"exchange": self.exchange(), "gather": self.gather()}


Experts = Callable[..., jax.Array]  # (rows sorted by expert, their routing) -> their results


def exchanged(parts: Sequence[tuple[jax.Array, Routing]], experts: Experts, axis: str, room: float) -> list[jax.Array]:
    """Computes the sum over each token's experts, each by the device that has it.

    A device receives as many rows of a part as it has room for. Where the load is nearly even these are all. Where any
    device is to receive more, all of them take the rows in rounds, so no token is dropped, whatever the load is; then
    the backward pass makes everything again, or each round would keep what it needs.

    Args:
      parts: tokens ``[tokens, d]`` of this device, and their routing to the experts of all devices. Each part's rows
        travel beside another's products.
      experts: what this device computes of rows of its experts: zeros for those of none.
      axis: the mesh axis over which tokens and experts are divided.
      room: how many rows a device receives at once, in multiples of those that it sends.
    """
    devices, me = lax.axis_size(axis), lax.axis_index(axis)
    sizes, sent, counts, rounds = [], [], [], []
    for x, routing in parts:
        pairs, k = routing.permutation.shape[0], routing.indices.shape[-1]
        groups = routing.group_sizes.shape[0] // devices
        most = devices * pairs // k * min(k, groups)  # that one device may receive
        counts.append(max(1, min(most, math.ceil(room * pairs))))
        rounds.append(-(-most // counts[-1]))
        # A sum of which each device has a row: unlike all_gather's result it is known to be equal on all.
        mine = jnp.where((jnp.arange(devices, dtype=jnp.int32) == me)[:, None], routing.group_sizes, 0)
        sizes.append(lax.psum(mine, axis).reshape(devices, devices, groups))  # [source, device, expert]
        sent.append((checkpoint_name(routing.dispatch(x), ROWS), routing.row_weights()))
    one = [
        functools.partial(_round, sizes=size, experts=experts, axis=axis, count=count)
        for size, count in zip(sizes, counts, strict=True)
    ]

    def first(sent: Any) -> list[jax.Array]:
        return [run(rows, weights, 0) for run, (rows, weights) in zip(one, sent, strict=True)]

    def every(sent: Any) -> list[jax.Array]:
        outs = []
        for run, (rows, weights), out, number in zip(one, sent, first(sent), rounds, strict=True):

            def add(out: jax.Array, i: jax.Array, run: Any = run, more: Any = (rows, weights)) -> Any:
                return out + run(*more, i), None

            numbers = jnp.arange(1, number, dtype=jnp.int32)
            outs.append(lax.scan(jax.checkpoint(add, prevent_cse=False), out, numbers)[0])
        return outs

    if max(rounds) == 1:
        outs = first(sent)
    else:
        loads = [size.sum((0, 2), dtype=jnp.int32).max() <= count for size, count in zip(sizes, counts, strict=True)]
        outs = lax.cond(functools.reduce(jnp.logical_and, loads), first, jax.checkpoint(every), sent)
    return [routing.combine(out) for (_, routing), out in zip(parts, outs, strict=True)]


def _round(
    rows: jax.Array, weights: jax.Array, number: Any, *, sizes: jax.Array, experts: Experts, axis: str, count: int
) -> jax.Array:
    """Returns the results of those rows that travel in a round, and zeros for the others.

    What a device receives in all rounds is in the order of the sources, and of each source's experts.
    """
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
    routing = sorted_by(expert, groups, scale)
    y = routing.combine(experts(routing.dispatch(arrived), routing))
    return ragged_exchange(y, rows.shape[0], back, axis)


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
