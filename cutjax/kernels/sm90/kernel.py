"""A kernel of ffi/device/sm90/gemm.cuh: one config resolved for one problem, or every reason why it cannot be."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cutjax.dtypes import short
from cutjax.kernels import base
from cutjax.kernels import reasons as shared
from cutjax.kernels.columns import Taken, maximum, minimum, where
from cutjax.kernels.device import Device
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import cost, decode, dense_cost, operands, prologue, reasons, text, windows
from cutjax.kernels.sm90.arguments import Argument, arguments
from cutjax.kernels.sm90.config import Config, Configs, Sizes, Some
from cutjax.kernels.sm90.facts import ARCH, Facts, Footprint, facts_of, footprint, kind_of
from cutjax.kernels.sm90.phases import Phases, parts
from cutjax.kernels.sm90.resolved import Resolved


class Kernel(Resolved, base.Kernel):
    """One config resolved for one problem."""

    family = "sm90"

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""
        return arguments(self)

    @property
    def source(self) -> str:
        """The device text; sizes are arguments of the kernel, so one text serves every shape."""
        return text.source(self, self.arguments)

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons to add to those of a choice: weights that it decodes, and operands of which copies are made."""
        narrow, wide = (short(x.dtype.name) for x in (self.multiplied.a, self.multiplied.bs[0]))
        own = operands.decoded(self.multiplied.a, self.multiplied.bs[0])
        return (f"b in {narrow} is decoded to {wide} in registers",) * own + super().notes

    @property
    def unmeasured(self) -> str:
        """The part of it that was not faster on a device yet, or not timed; "" where all was."""
        return unmeasured(self.multiplied)

    def launch_us(self, device: Device) -> float:
        """Returns the predicted time of one launch, and of preparing its operands."""
        us = cost.predict(self, device.with_sms(min(self.config.sms or device.sms, device.sms)))
        return us * (GATHERED[self.multiplied.divided == "k"] if self.multiplied.a.gathered else 1.0)

    def _summed(self, x: jax.Array) -> jax.Array:
        return windows.weights(self.asked, x)

    @property
    def grid(self) -> base.Grid:
        """The blocks of its launch: all, of which as many run as there is room for, or those in flight."""
        config = self.config
        blocks = self.tiles * config.splits * config.cluster
        if config.stream_k:
            blocks = self._in_flight
        elif config.sms:
            blocks = min(blocks, self._in_flight)
        # One tile for each block, or for the cluster that shares one: the kernel is not persistent.
        one_tile = config.cluster_k > 1 or (self.problem.device.shared and not config.stream_k)
        return base.Grid(blocks, 128 * (1 + config.consumers), config.cluster, 0 if one_tile else self.blocks_per_sm)

    @property
    def _in_flight(self) -> int:
        """Thread blocks in flight, in whole clusters, one at least."""
        config, sms = self.config, self.problem.device.sms
        clusters = min(config.sms or sms, sms) * self.blocks_per_sm // config.cluster
        return max(1, clusters) * config.cluster

    def scratch(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the counter of tiles, or the memory of those in parts.

        That is two for each block in flight, and a ticket for each warpgroup.
        """
        p, c, blocks = self.problem, self.config, self._in_flight
        if self.has_counter:
            return (jax.ShapeDtypeStruct((1,), np.dtype(np.int32)),)
        if not c.stream_k:
            return ()
        tickets = 2 * blocks * (c.bm // (64 * c.m_blocks))  # fewer than two waves of tiles are in parts
        shape = (2 * blocks, p.products * c.bm * c.bn)
        return jax.ShapeDtypeStruct(shape, p.accumulator), jax.ShapeDtypeStruct((tickets,), np.dtype(np.int32))


# The time of rows gathered in loads over that of copied ones, of rows in groups and of groups along k: means of the
# best kernels in benchmarks/results/experiments/gathered-h200.json.
GATHERED = 1.15, 2.6
PROLOGUES = "a prologue in shared memory"  # "" once they are measured


def unmeasured(p: Problem) -> str:
    """Returns the words for what of a problem, as it is multiplied, was not faster on a device; "" where all was."""
    in_groups = "groups with operands swapped" * (p.divided == "n" and not operands.decoded(p.a, p.bs[0]))
    in_groups += f"{short(p.a.dtype.name)} in groups of k" * (p.divided == "k" and p.a.contiguous == "k")
    several = p.turned and p.products > 1 and not (operands.decoded(p.a, p.bs[0]) or p.transposed.streams)
    swapped = "several products with operands swapped" * several
    return PROLOGUES * prologue.is_in(p) or decode.unmeasured(p) or in_groups or swapped


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel, or every reason why the config cannot serve the problem."""
    view = windows.view_of(problem)
    if view is None or not windows.spread(view):
        return _resolve(problem, None, (), config, problem)
    if problem.a.contiguous == "mn":
        return facts_of(problem).reasons
    if config.splits > 1 or config.stream_k:
        return (f"splits={config.splits}, stream_k={config.stream_k}: parts of phases",)
    return _resolve(*parts(problem), config, problem)


def _resolve(
    problem: Problem, of: Phases | None, weights: tuple[Prepared, ...], config: Config, asked: Problem
) -> Kernel | tuple[str, ...]:
    """Returns the kernel of a problem, which may be of the phases of the one asked, with weights prepared for it."""
    facts = facts_of(problem, config.swap, of is not None)
    if problem.arch != ARCH:  # another device's memory says nothing of this family's tiles
        return facts.reasons
    found = list(facts.reasons)
    if problem.a.dtype == operands.C64 and (config.splits > 1 or config.stream_k):
        return (*found, f"splits={config.splits}, stream_k={config.stream_k}: parts of complex numbers")
    if windows.in_parts(problem, config.splits):
        problem, facts = problem.bare, facts.bare
    tile = footprint(facts, config)
    found += [why() for refused, why in reasons.checks(problem, facts, config, tile, of) if refused]
    return tuple(found) if found else Kernel(**_fields(problem, facts, config, tile, of, weights, asked))


def prices(
    problem: Problem,
    of: Phases | None,
    weights: tuple[Prepared, ...],
    sides: Sequence[Some],
    asked: Problem,
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, cost.Factors]:
    """Returns the configs of each side that can serve, told as `_resolve` is, and `cost.of_columns` of these."""
    found, kernels, fixed = [], [], []
    for shipped in sides:
        facts, whole, own = facts_of(problem, shipped.swap, of is not None), shipped.splits == 1, []
        small = reasons.is_small(facts, of)
        for divided in (False, True):  # parts of k are added up by XLA, which computes the epilogue
            rows = np.flatnonzero(whole != divided)
            if problem.a.dtype == operands.C64:
                rows = rows[(not divided) & ~shipped.stream_k[rows]]
            if not len(rows):
                continue
            bare = windows.in_parts(problem, 1 + divided)
            given, of_given = (problem.bare, facts.bare) if bare else (problem, facts)
            limits = _limits(kind_of(problem), of, shipped.table, bare)
            rows = rows[~limits.refused[shipped.at[rows]]]
            if not small:
                rows = rows[~shared.pass_32_bits(reasons.counters(of_given, shipped.take(rows), of))]
            if len(rows):
                config = shipped.take(rows)
                alike = {"problem": given, "asked": asked, "multiplied": of_given.problem, "phases": of}
                alike |= {"config": config, "sums": Taken(limits.record.sums, config.at)}
                alike["prepared"] = *weights, *of_given.prepared
                kernels.append(_Some(limits.record, config.at, **alike, **reasons.sized(of_given, config, of)))
                fixed.append(limits.fixed and limits.fixed.take(config.at))
                own.append(rows)
        found.append(np.concatenate(own) if own else np.empty(0, int))
    if not kernels:
        return found, np.empty(0), np.empty(0), np.ones_like
    us, l2_us, factors = cost.of_columns(kernels, fixed, problem.device)
    order = np.argsort(np.concatenate([x + (side << 32) for side, x in enumerate(found)]))
    return [np.sort(x) for x in found], us[order], l2_us[order], lambda rows: factors(order[rows])


class _Some(Taken, Resolved):
    """The record of some rows of configs."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Limits:
    """The part of many configs that does not depend on sizes: one record of all, and which of them cannot serve."""

    record: Resolved
    refused: np.ndarray
    fixed: dense_cost.Fixed | None


@functools.lru_cache(maxsize=128)
def _limits(kind: Problem, of: Phases | None, configs: Configs, bare: bool) -> _Limits:
    facts = facts_of(kind, configs.swap, of is not None)
    kind, facts = (kind.bare, facts.bare) if bare else (kind, facts)
    tile = footprint(facts, configs)
    refused = functools.reduce(operator.or_, (found for found, _ in reasons.checks(kind, facts, configs, tile, of)))
    record = Resolved(**_fields(kind, facts, configs, tile, of, (), kind))
    fixed = dense_cost.Fixed.of(record, kind.device) if cost.is_dense(record) else None
    return _Limits(record, np.broadcast_to(refused, len(configs)), fixed)


def _fields(
    problem: Problem,
    facts: Facts,
    config: Sizes,
    tile: Footprint,
    of: Phases | None,
    weights: tuple[Prepared, ...],
    asked: Problem,
) -> dict[str, Any]:
    """Returns the fields of the record of a config that serves a problem, or columns of those of many."""
    limit = tile.limit(config.stages)
    spare = (limit - tile.bytes(config.stages, 0)) // tile.staging_bytes
    buffers = maximum(2, minimum(spare, tile.whole_result))
    return {
        "problem": problem,
        "config": config,
        "asked": asked,
        "multiplied": facts.problem,
        "way": facts.way,
        "sums": facts.sums(config),
        "staging": facts.staging,
        "prepared": (*weights, *facts.prepared),
        "chunk": tile.chunk,
        "stage_bytes": tile.stage_bytes,
        "buffer_bytes": tile.buffer_bytes,
        "buffers": buffers,
        "shared_bytes": tile.bytes(config.stages, buffers),
        "blocks_per_sm": where(limit == tile.most, 1, 2),
        "phases": of,
        **reasons.sized(facts, config, of),
    }


def resolved(problem: Problem, config: Config) -> Kernel:
    """Returns the kernel of a config that serves a problem.

    Raises:
      ValueError: it does not; lists every reason.
    """
    kernel = resolve(problem, config)
    if isinstance(kernel, tuple):
        raise ValueError(f"no kernel for {problem} with {config}: {'; '.join(kernel)}")
    return kernel
