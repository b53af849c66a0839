"""A kernel of ffi/device/sm90/gemm.cuh: one config resolved for one problem, or every reason why it cannot be."""

from __future__ import annotations

import functools

import jax
import numpy as np

from cutjax.dtypes import short
from cutjax.kernels import base
from cutjax.kernels import reasons as shared
from cutjax.kernels.device import Device
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import cost, decode, operands, text, windows
from cutjax.kernels.sm90.arguments import Argument, arguments
from cutjax.kernels.sm90.config import Config
from cutjax.kernels.sm90.facts import ARCH, Facts, facts_of, footprint
from cutjax.kernels.sm90.phases import Phases, parts
from cutjax.kernels.sm90.resolved import Resolved, cluster_tile


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
        """The part of it that has not run on a device yet; "" where all has."""
        p = self.multiplied
        in_groups = "groups with operands swapped" * (p.divided == "n")
        in_groups += f"{short(p.a.dtype.name)} in groups of k" * (p.divided == "k" and p.a.contiguous == "k")
        return decode.unmeasured(p) or in_groups

    def launch_us(self, device: Device) -> float:
        """Returns the predicted time of one launch, and of preparing its operands."""
        return cost.predict(self, device.with_sms(min(self.config.sms or device.sms, device.sms)))

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
        """Returns the memory of tiles in parts: two for each block in flight, and a ticket for each warpgroup."""
        p, c, blocks = self.problem, self.config, self._in_flight
        if not c.stream_k:
            return ()
        tickets = 2 * blocks * (c.bm // (64 * c.m_blocks))  # fewer than two waves of tiles are in parts
        shape = (2 * blocks, p.products * c.bm * c.bn)
        return jax.ShapeDtypeStruct(shape, p.accumulator), jax.ShapeDtypeStruct((tickets,), np.dtype(np.int32))


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
    reasons = list(facts.reasons)
    if problem.a.dtype == operands.C64 and (config.splits > 1 or config.stream_k):
        return (*reasons, f"splits={config.splits}, stream_k={config.stream_k}: parts of complex numbers")
    if windows.in_parts(problem, config.splits):
        problem = problem.bare
        facts = facts_of(problem, config.swap)
    tile = footprint(facts, config)
    limit = tile.limit(config.stages)
    if config.parts > 1 and problem.divided == "m":
        reasons.append(
            f"cluster_k={config.cluster_k}, splits={config.splits}: the contraction of groups of rows is whole"
        )
    if problem.a.gathered and config.cluster_m * config.cluster_n > 1:
        reasons.append("a cluster with gathered rows: threads copy to their own block")
    if config.stream_k and (problem.groups or problem.symmetric):
        reasons.append("stream_k=True: only the tiles of a dense product are all as deep")
    if (need := tile.bytes(config.stages)) > tile.most:
        reasons.append(
            f"{config.stages} stages of {tile.stage_bytes} bytes and two staging buffers a warpgroup: "
            f"{need} bytes of shared memory, at most {tile.most}"
        )
    products, columns = problem.products, config.bn * facts.problem.beside[1]
    accumulators = 4 * config.bm * config.bn * products
    if config.cluster_k > 1 and accumulators > config.stages * tile.stage_bytes:
        reasons.append(
            f"cluster_k={config.cluster_k}: {accumulators} bytes of accumulators take the place of {config.stages} "
            f"stages of {tile.stage_bytes}"
        )
    registers, most = facts.accumulators(config), facts.max_accumulators(config)
    if registers > most:
        reasons.append(
            f"{products} products of {config.bm}x{config.bn} with this epilogue: {registers} accumulator "
            f"registers a thread, at most {most}"
        )
    if columns > 256:
        reasons.append(f"{products} products of {config.bn} columns: wgmma multiplies at most 256 at once")
    if facts.integers and columns > 24 and columns % 16:
        reasons.append(f"{columns} columns: wgmma of integers takes 8, 24 and multiples of 16")
    if facts.way.each and config.schedule == "pingpong" and facts.sums(config).buffers == 1:
        reasons.append("pingpong of float8 with one buffer of sums: nothing is multiplied while they are added up")
    if config.bk == 128 and facts.way.each:
        reasons.append("bk=128 of float8: sums of 128 bytes of k are added up in f32, which are one stage of bk=64")
    if facts.problem.a.bits == 4 and config.m_blocks != 2:
        reasons.append(f"{config.bm}x{config.bn} {config.schedule} with weights of 4 bits: a warpgroup holds 128 rows")
    if facts.problem.a.bits == 4 and facts.staging.reductions:
        reasons.append("reductions of a product of weights of 4 bits: two warps store 64 rows")
    reasons += windows.phase_reasons(problem, of)
    reasons += windows.tile_reasons(facts.problem, config.bn * config.cluster_n)
    if config.bn % 16 and facts.problem.bs[0].contiguous == "mn":
        reasons.append(f"bn={config.bn} where rows in memory lie along it: the narrowest swizzle spans 16 elements")
    if not config.swap and tile.chunk * facts.staging.narrowest < 32:
        narrow = next(d for d in facts.staging.result_dtypes if tile.chunk * d.itemsize < 32)
        reasons.append(
            f"{config.epilogue_columns} columns make staging rows of less than 32 bytes in {short(narrow.name)}"
        )
    tiles = facts.problem.most_tiles(*cluster_tile(config)) * (of.count if of else 1)
    reasons += _counted(facts, config, tiles)
    if reasons:
        return tuple(reasons)
    spare = (limit - tile.bytes(config.stages, 0)) // tile.staging_bytes
    buffers = max(2, min(spare, tile.whole_result))
    rows, columns = facts.problem.tiles(*cluster_tile(config))
    return Kernel(
        problem=problem,
        config=config,
        asked=asked,
        multiplied=facts.problem,
        way=facts.way,
        sums=facts.sums(config),
        staging=facts.staging,
        prepared=(*weights, *facts.prepared),
        chunk=tile.chunk,
        stage_bytes=tile.stage_bytes,
        buffer_bytes=tile.buffer_bytes,
        buffers=buffers,
        shared_bytes=tile.bytes(config.stages, buffers),
        blocks_per_sm=1 if limit == tile.most else 2,
        phases=of,
        tiles=tiles,
        rows=rows,
        columns=columns,
    )


def _counted(facts: Facts, config: Config, tiles: int) -> list[str]:
    """Returns the reasons against a kernel whose counters would pass 32 bits."""
    p, depth = facts.problem, config.depth(facts.problem)
    more = {}
    if config.stream_k:  # of the tiles that are computed in parts, two waves at most
        more["k_blocks_of_two_waves"] = min(tiles, 4 * p.device.sms) * (-(-p.k // depth) + 1)
    if p.a.gathered:
        more["bytes_of_rows"] = p.a.bytes(p.k + (config.parts + 1) * depth)
    tile = *cluster_tile(config), depth
    counted = {"tiles": tiles * config.splits, "raster": config.raster, "parts": config.parts}
    return shared.of_counts(p, tile, **counted, **more)


def resolved(problem: Problem, config: Config) -> Kernel:
    """Returns the kernel of a config that serves a problem.

    Raises:
      ValueError: it does not; lists every reason.
    """
    kernel = resolve(problem, config)
    if isinstance(kernel, tuple):
        raise ValueError(f"no kernel for {problem} with {config}: {'; '.join(kernel)}")
    return kernel
