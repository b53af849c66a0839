"""A kernel of ffi/device/sm90/gemm.cuh: one config resolved for one problem, or every reason why it cannot be."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from cutjax.dtypes import short
from cutjax.kernels import reasons as shared
from cutjax.kernels import results
from cutjax.kernels.device import Device
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import cost, operands, text, xla_cost
from cutjax.kernels.sm90.arguments import Argument, arguments, matrices_of, result_matrices
from cutjax.kernels.sm90.config import MAX_ACCUMULATORS, Config
from cutjax.kernels.staging import STORED_BY_TMA, Staging, stage
from cutjax.runtime.compiler import Cubin, compile_kernel
from cutjax.runtime.launch import Call, Launch

ARCH = "sm_90a"


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """Everything that the kernels of a problem have in common, whatever their config.

    Attributes:
      problem: the problem as it is multiplied: of copies of the operands where the kernel takes such, and, where they
        are swapped, of the transposed result.
      way: how its operands are multiplied.
      staging: of its epilogue.
      heavy: whether the epilogue takes too many registers for two blocks beside each other.
      reasons: why no kernel can serve the problem; empty when one can.
      footprints: of the tiles looked at so far.
    """

    problem: Problem
    way: operands.Way
    staging: Staging
    heavy: bool
    reasons: tuple[str, ...]
    footprints: dict[tuple[str, int, int, int, int], Footprint] = dataclasses.field(default_factory=dict, repr=False)

    def accumulators(self, config: Config) -> int:
        """Returns the accumulator registers of a thread, all products together, and those they are promoted to."""
        return config.accumulator_registers * self.problem.products * (2 if self.way.promoted else 1)

    def max_accumulators(self, config: Config) -> int:
        """Returns the accumulator registers a thread may have, all products together, beside what its epilogue keeps.

        Of every operand and every result, 8 values are held in registers; of an operand that varies along rows and
        columns, in elements too short for TMA, a chunk. Calibrated on the compiler's report (tests/test_fusion.py,
        tests/test_swapped_kernels.py): no spill below.
        """
        problem, epilogue = self.problem, self.problem.epilogue
        stored_bytes = sum(dtype.itemsize for dtype in self.staging.result_dtypes)
        # The addresses of transposes take registers too.
        beside = problem.symmetric and (config.schedule == "pingpong" or stored_bytes > 2)
        addressed = not all(self.staging.by_tma(out) for _, out in self.staging.results)
        widest = 160 if beside or addressed else MAX_ACCUMULATORS
        if problem.plain:
            alone = config.schedule == "pingpong" and config.cluster == 1
            return 160 if problem.ragged == "m" or (problem.ragged and not alone) else widest
        # Where TMA cannot load an operand, its elements have addresses of their own.
        apart = any(spec.row and spec.col and not self.staging.by_tma(spec) for spec in epilogue.operands)
        if self.staging.reductions or apart or (self.staging.called and not self.staging.even):
            return 64 if self.staging.reductions else 96
        varying = any(spec.row or spec.col for spec in epilogue.operands)
        several = len(epilogue.outputs) > 1 and bool(epilogue.operands)
        # Beside 192 accumulators, random bits and others that are called spill; beside 128 nothing does.
        called = self.accumulators(config) > 128 and self.staging.called
        if called or problem.groups or (varying and not self.staging.even):
            return 128
        if several and config.swap and config.stream_k:  # of 128x96 and 64x256 some spill, though not of 128x160
            return 64
        return min(160, widest) if varying or several else widest


@functools.lru_cache(maxsize=1024)
def facts_of(problem: Problem, swap: bool = False) -> Facts:
    """Returns what the kernels of a problem have in common, with its operands as they are or swapped."""
    why, unswappable = operands.reasons(problem), shared.of_swap(problem) if swap else []
    multiplied = problem if why else operands.as_multiplied(problem)
    of_pairs = problem.a_dtype == operands.C64
    if swap and of_pairs:
        unswappable = ["swap of complex numbers"]
    stored = multiplied if of_pairs else problem
    multiplied = multiplied.transposed if swap and not unswappable else multiplied
    layout = swap, math.gcd(stored.n, 16), multiplied.n % 2 == 0
    staging, epilogue = stage(multiplied.epilogue, problem.symmetric, *layout), multiplied.epilogue
    heavy = (
        bool(staging.reductions)
        or any(spec.row and spec.col for spec in epilogue.operands)
        or bool(problem.groups and epilogue.operands)
        or (len(epilogue.outputs) > 1 and staging.called)
    )
    way = operands.Way() if why else operands.way(problem)
    return Facts(multiplied, way, staging, heavy, (*why, *_problem_reasons(problem, staging), *unswappable))


def _problem_reasons(problem: Problem, staging: Staging) -> list[str]:
    reasons = [] if problem.plain else list(staging.reasons)
    reasons += shared.of_groups(problem, staging)
    if problem.symmetric:
        reasons += staging.symmetric_reasons
    if problem.arch != ARCH:
        reasons.append(f"architecture {problem.arch}: the kernels are for {ARCH}")
    if problem.plain and staging.reasons:
        names = ", ".join(map(short, STORED_BY_TMA))
        reasons.append(f"result {short(problem.out_dtype.name)}: one of {names}")
    reasons += shared.of_sizes(problem)
    if any(problem.orders):
        reasons += _order_reasons(problem, staging)
    return reasons


def _order_reasons(problem: Problem, staging: Staging) -> list[str]:
    """Returns why orders of memory cannot be walked."""
    reasons = []
    arrays = [matrices_of(problem, problem.a, problem.m), matrices_of(problem, problem.bs[0], problem.n)]
    if problem.orders[2]:
        arrays.append(result_matrices(problem, np.dtype(np.uint8)))
        if not all(staging.by_tma(out) for _, out in staging.results):
            reasons.append("results in an order of their own, whose rows are of no whole units of 16 bytes")
    if len(problem.batch_groups) <= 3 and max(array.count for array in arrays) >= 2**31:
        reasons.append("matrices begin at 2^31 places or more: TMA coordinates have 32 bits")
    return reasons


@dataclasses.dataclass(frozen=True, eq=False)
class Footprint:
    """Shared memory that a tile takes, whatever the number of its stages.

    Attributes:
      chunk: columns of a staging buffer.
      stage_bytes: a bm x bk tile of a, and a tile of each b as it is loaded.
      buffer_bytes: one staging buffer: 64 rows of a chunk of every result, and of operands beside them.
      staging_bytes: one staging buffer for each consumer, with its barrier.
      whole_result: staging buffers that hold all that a warpgroup stores of a tile.
      most: bytes that one block may take.
      half: bytes that each of two blocks on an SM may take; 0 where registers do not fit two.
    """

    chunk: int
    stage_bytes: int
    buffer_bytes: int
    staging_bytes: int
    whole_result: int
    most: int
    half: int

    def bytes(self, stages: int, buffers: int = 2) -> int:
        """Returns the shared memory of so many stages and staging buffers a warpgroup."""
        return stages * (self.stage_bytes + 16) + buffers * self.staging_bytes

    def limit(self, stages: int) -> int:
        """Returns what a block may take: half an SM's memory where two fit, each with two staging buffers."""
        return self.half if self.bytes(stages) <= self.half else self.most

    def deepest(self, buffers: int = 2) -> int:
        """Returns the most stages beside so many staging buffers a warpgroup."""
        return 2 + (self.limit(2) - self.bytes(2, buffers)) // (self.stage_bytes + 16)


def footprint(facts: Facts, config: Config) -> Footprint:
    """Returns the shared memory that the tile of a config takes."""
    tile = config.schedule, config.bm, config.bn, config.bk, config.epilogue_columns
    if tile not in facts.footprints:
        facts.footprints[tile] = _footprint(facts, config)
    return facts.footprints[tile]


def _footprint(facts: Facts, config: Config) -> Footprint:
    problem, staging = facts.problem, facts.staging
    chunk = staging.chunk(config.epilogue_columns)
    loaded = config.loaded(problem.bs[0], problem.products) * problem.products
    buffer_bytes = 64 * chunk * staging.column_bytes
    # Registers fit two when each has 256 threads of 128, half of them accumulators.
    two = config.consumers == 1 and facts.accumulators(config) <= 64 and not facts.heavy
    return Footprint(
        chunk=chunk,
        stage_bytes=(config.bm + loaded) * config.bk * 2,
        buffer_bytes=buffer_bytes,
        staging_bytes=config.consumers * (buffer_bytes + (8 if staging.operands else 0)),
        whole_result=config.m_blocks * config.epilogue_columns // chunk,
        most=problem.device.shared_bytes,
        half=problem.device.shared_bytes_per_sm // 2 - 1024 if two else 0,
    )


def cluster_tile(config: Config) -> tuple[int, int]:
    """Returns the rows and columns that a cluster computes."""
    return config.bm * config.cluster_m, config.bn * config.cluster_n


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One config resolved for one problem.

    Attributes:
      problem, config: which.
      asked: the problem with its epilogue; where k has splits, `problem` is without.
      multiplied: `problem` as it is multiplied: of copies of the operands where the kernel takes such, and, where they
        are swapped, of the transposed result.
      way: how its operands are multiplied.
      staging: of its epilogue.
      chunk: columns of a staging buffer.
      stage_bytes, buffer_bytes: shared memory of one stage, and of one staging buffer.
      buffers: staging buffers a warpgroup: as many as there is room for, up to the whole of its accumulators.
      shared_bytes: of one block, all together.
      blocks_per_sm: thread blocks that share an SM.
      tiles: the number of cluster tiles; where there are groups, the most there may be.
      rows, columns: cluster tiles along m and n; where rows have groups, those along m of a group of average size.
    """

    problem: Problem
    config: Config
    asked: Problem
    multiplied: Problem
    way: operands.Way
    staging: Staging
    chunk: int
    stage_bytes: int
    buffer_bytes: int
    buffers: int
    shared_bytes: int
    blocks_per_sm: int
    tiles: int
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """The entry symbol, which is the same wherever the kernel is seen."""
        return self.config.name(self.problem)

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""
        return arguments(self)

    @property
    def notes(self) -> tuple[str, ...]:
        """Copies that run before it, of operands whose rows TMA cannot walk, or that wgmma cannot multiply."""
        return tuple(dict.fromkeys(copy.note for copy in operands.copies(self.problem)))

    @property
    def stored(self) -> Problem:
        """The problem as results are stored: `problem`, or, of complex numbers, that of their parts."""
        return self.multiplied if self.problem.a_dtype == operands.C64 else self.problem

    @property
    def more_parts(self) -> int:
        """Arguments that are parts of operands beyond the first of each."""
        return (self.way.parts - 1) * (1 if self.problem.symmetric else 1 + self.problem.products)

    @property
    def k_blocks(self) -> int:
        """Stages that a tile of the whole contraction takes."""
        return -(-self.multiplied.k // self.config.depth(self.multiplied.a)) * len(self.way.pairs)

    @property
    def source(self) -> str:
        """The device text; sizes are arguments of the kernel, so one text serves every shape."""
        return text.source(self)

    def time_us(self, device: Device) -> float:
        """Returns the predicted time of one launch."""
        return cost.predict(self, device.with_sms(min(self.config.sms or device.sms, device.sms)))

    def xla_us(self, device: Device) -> float | None:
        """Returns the time that XLA's own product may take, if this is the kernel predicted fastest."""
        return xla_cost.xla_us(self, device)

    def unlaunchable(self) -> tuple[str, ...]:
        """Returns why it cannot be launched: there is a limit to what one launch is told."""
        try:
            self._launch(b"-")
        except ValueError as error:
            return (f"operands and results are too many or too large for one launch ({error})",)
        return ()

    def compile(self) -> Cubin:
        """Compiles the kernel, or takes it from the cache."""
        return compile_kernel(self.source, name=self.name, arch=self.problem.arch)

    def call(self) -> Call:
        """Returns the compiled kernel and the plan of its launch."""
        problem, config, outputs = self.problem, self.config, self.multiplied.epilogue.outputs
        aliases = tuple((problem.arrays + operand, result) for operand, result in problem.in_place)
        taken, written, finish, tickets = problem.arrays + len(problem.epilogue.operands), (), None, 0
        if config.splits > 1:
            written, finish = results.parts(problem, config.splits), functools.partial(results.finish_parts, self.asked)
        elif self.staging.reductions or config.stream_k:
            written = results.written(self.multiplied, config.epilogue_columns, config.swap)
            finish = functools.partial(results.finish, outputs)
        if config.stream_k:
            scratch, state = self._stream()
            written, tickets = (*written, scratch, state), state.size
            aliases += ((taken + self.more_parts, len(outputs) + 1),)
        copied, given = operands.copies(problem), operands.as_multiplied(problem)
        orders = [given.orders[0], *[given.orders[1]] * (0 if problem.symmetric else problem.products)]
        more = [order for order in orders for _ in range(self.way.parts - 1)]
        prepare = functools.partial(_prepare, taken, copied, self.way, tickets)
        return Call(
            (self._launch(self.compile().image),),
            results=written,
            finish=finish,
            prepare=prepare if config.splits > 1 or copied or tickets else None,
            aliases=aliases,
            operand_orders=(*orders, *[()] * (taken - len(orders)), *more) if any(given.orders) else (),
            result_orders=tuple(() if out.reduce else problem.orders[2] for out in outputs),
        )

    def _launch(self, cubin: bytes) -> Launch:
        config = self.config
        blocks = self.tiles * config.splits * config.cluster
        return Launch(
            kernel=self.name,
            cubin=cubin,
            grid=(self._blocks if config.stream_k else min(blocks, self._blocks) if config.sms else blocks, 1, 1),
            block=(128 * (1 + config.consumers), 1, 1),
            cluster=(config.cluster, 1, 1),
            shared_bytes=self.shared_bytes,
            blocks_per_sm=0 if self._one_tile else self.blocks_per_sm,
            params=tuple(argument.value for argument in self.arguments),
        )

    @property
    def _one_tile(self) -> bool:
        """True if each block, or cluster that shares one, has one tile: the kernel is not persistent."""
        return self.config.cluster_k > 1 or (self.problem.device.shared and not self.config.stream_k)

    @property
    def _blocks(self) -> int:
        """Thread blocks in flight, in whole clusters, one at least."""
        config, sms = self.config, self.problem.device.sms
        clusters = min(config.sms or sms, sms) * self.blocks_per_sm // config.cluster
        return max(1, clusters) * config.cluster

    def _stream(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Returns what tiles in parts take: two of them for each block in flight, and a ticket for each warpgroup."""
        p, c, blocks = self.problem, self.config, self._blocks
        tickets = 2 * blocks * (c.bm // (64 * c.m_blocks))  # fewer than two waves of tiles are in parts
        shape = (2 * blocks, p.products * c.bm * c.bn)
        return jax.ShapeDtypeStruct(shape, p.accumulator), jax.ShapeDtypeStruct((tickets,), np.dtype(np.int32))


def _prepare(
    taken: int, copied: Sequence[operands.Copy], way: operands.Way, tickets: int, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns what the kernel takes: the first arguments, some of them copies, more parts of those, and tickets."""
    found, more = operands.prepare(copied, way, arrays[:taken])
    return [*found, *more, *([lax.full((tickets,), 0, np.int32)] if tickets else [])]


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel, or every reason why the config cannot serve the problem."""
    asked, facts = problem, facts_of(problem, config.swap)
    if problem.arch != ARCH:  # another device's memory says nothing of this family's tiles
        return facts.reasons
    reasons = list(facts.reasons)
    if problem.a_dtype == operands.C64 and (config.splits > 1 or config.stream_k):
        return (*reasons, f"splits={config.splits}, stream_k={config.stream_k}: parts of complex numbers")
    if config.splits > 1:
        problem = problem.bare
        facts = facts_of(problem, config.swap)
    tile = footprint(facts, config)
    limit = tile.limit(config.stages)
    if config.parts > 1 and problem.ragged == "m":
        reasons.append(
            f"cluster_k={config.cluster_k}, splits={config.splits}: the contraction of groups of rows is whole"
        )
    if config.stream_k and (problem.ragged or problem.symmetric):
        reasons.append("stream_k=True: only the tiles of a dense product are all as deep")
    if (need := tile.bytes(config.stages)) > tile.most:
        reasons.append(
            f"{config.stages} stages of {tile.stage_bytes} bytes and two staging buffers a warpgroup: "
            f"{need} bytes of shared memory, at most {tile.most}"
        )
    products, integers = problem.products, facts.way.dtype is None and problem.a_dtype.name in operands.INT8
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
    if products * config.bn > 256:
        reasons.append(f"{products} products of {config.bn} columns: wgmma multiplies at most 256 at once")
    if integers and products * config.bn > 24 and products * config.bn % 16:
        reasons.append(f"{products * config.bn} columns: wgmma of integers takes 8, 24 and multiples of 16")
    if config.bk == 128 and facts.way.promoted == 1:
        reasons.append("bk=128 of float8: sums of 128 bytes of k are added up in f32, which are one stage of bk=64")
    if config.bn % 16 and facts.problem.bs[0].contiguous == "mn":
        reasons.append(f"bn={config.bn} where rows in memory lie along it: the narrowest swizzle spans 16 elements")
    if not config.swap and tile.chunk * facts.staging.narrowest < 32:
        narrow = next(d for d in facts.staging.result_dtypes if tile.chunk * d.itemsize < 32)
        reasons.append(
            f"{config.epilogue_columns} columns make staging rows of less than 32 bytes in {short(narrow.name)}"
        )
    tiles = facts.problem.most_tiles(*cluster_tile(config))
    reasons += _counted(facts, config, tiles)
    if reasons:
        return tuple(reasons)
    spare = (limit - tile.bytes(config.stages, 0)) // tile.staging_bytes
    buffers = max(2, min(spare, tile.whole_result))
    rows, columns = facts.problem.tiles(*cluster_tile(config))
    return Kernel(
        problem,
        config,
        asked,
        facts.problem,
        facts.way,
        facts.staging,
        chunk=tile.chunk,
        stage_bytes=tile.stage_bytes,
        buffer_bytes=tile.buffer_bytes,
        buffers=buffers,
        shared_bytes=tile.bytes(config.stages, buffers),
        blocks_per_sm=1 if limit == tile.most else 2,
        tiles=tiles,
        rows=rows,
        columns=columns,
    )


def _counted(facts: Facts, config: Config, tiles: int) -> list[str]:
    """Returns why the kernel would not come to the end of something."""
    p, depth = facts.problem, config.depth(facts.problem.a)
    more = {}
    if config.stream_k:  # of the tiles that are computed in parts, two waves at most
        more["k_blocks_of_two_waves"] = min(tiles, 4 * p.device.sms) * (-(-p.k // depth) + 1)
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
