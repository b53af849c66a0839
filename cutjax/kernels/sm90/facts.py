"""The facts of a problem that its kernels have in common, and the shared memory that a tile takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from cutjax.dtypes import short
from cutjax.kernels import prologue as prologues
from cutjax.kernels import reasons as shared
from cutjax.kernels import sums
from cutjax.kernels.columns import each, minimum, where
from cutjax.kernels.joined import Joined
from cutjax.kernels.operand import Gathered, Im2col, Taps
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import decode, operands, prologue, scales, windows
from cutjax.kernels.sm90.arguments import matrices_of, result_matrices
from cutjax.kernels.sm90.config import MAX_ACCUMULATORS, MOST_OF_SLICES, Sizes, Sums
from cutjax.kernels.staging import STORED_BY_TMA, Staging, instructions, plan_staging

ARCH = "sm_90a"
LIGHT = 5  # instructions of an epilogue that fits beside 128 accumulators whose sums were promoted
ITEMS_BYTES = 80  # of the slots through which warps are told their items: ffi/device/sm90/counter.cuh


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """Everything that the kernels of a problem have in common, whatever their config.

    Attributes:
      problem: the problem as it is multiplied: of copies of the operands where the kernel takes such, and, where they
        are swapped, of the transposed result.
      way: how its operands are multiplied.
      prepared: the operands of which kernels read copies.
      staging: of its epilogue.
      heavy: whether the epilogue takes too many registers for two blocks beside each other.
      reasons: why no kernel can serve the problem; empty when one can.
    """

    problem: Problem
    way: operands.Way
    prepared: tuple[Prepared, ...]
    staging: Staging
    heavy: bool
    reasons: tuple[str, ...]

    @functools.cached_property
    def integers(self) -> bool:
        """True if wgmma multiplies integers."""
        return self.way.dtype is None and self.problem.a.dtype.name in operands.INT8

    @functools.cached_property
    def bare(self) -> Facts:
        """The facts of the products without their epilogue, in the accumulators' dtype."""
        problem, of = self.problem.bare, self.staging
        staging = plan_staging(problem.epilogue, problem.symmetric, of.swap, of.pitch, of.even, pixels=of.pixels)
        return dataclasses.replace(self, problem=problem, staging=staging, heavy=False, reasons=())

    @functools.cached_property
    def addressed(self) -> bool:
        """True if threads store a result, each by addresses of its own, and not TMA."""
        return not self.staging.pixels and not all(self.staging.by_tma(out) for _, out in self.staging.results)

    def accumulators(self, config: Sizes) -> Any:
        """Returns the accumulator registers of a thread, all products together, and those they are promoted to."""
        accumulators = config.accumulator_registers * self.problem.products
        if self.way.promoted:
            return accumulators + self.sums(config).registers
        return accumulators

    def sums(self, config: Sizes) -> Sums:
        """Returns the sums that are promoted, where some are."""
        if self.way.each:
            return config.sums(self.problem)
        return Sums(1, 1, config.accumulator_registers * self.problem.products)

    def max_accumulators(self, config: Sizes) -> Any:
        """Returns the accumulator registers a thread may have, all products together, beside what its epilogue keeps.

        Of every operand and every result, 8 values are held in registers; of an operand that varies along rows and
        columns, in elements too short for TMA, a chunk. Calibrated on the compiler's report: no spill below
        (tests/kernels/test_fusion.py, tests/kernels/test_swapped_kernels.py).
        """
        problem = self.problem
        if operands.decoded(problem.a, problem.bs[0]):
            most = 64 if self.heavy else 128  # beside two sets of fragments
            zeros = problem.groups is not None and problem.a.scale is not None and problem.a.scale.zero is not None
            # Beside more, wgmmas would wait, or some registers spill.
            of_slices = where(config.by_warps, 16, 8 if zeros else 16)
            of_three = MOST_OF_SLICES * (1 + bool(self.way.each))  # sums that are promoted are as many
            of_slices = where(config.consumers == 3, of_three, of_slices)
            of_slices = where((config.bm == 256) & (problem.a.bits == 8), 0, of_slices)
            return where(config.sliced, of_slices, most)
        if problem.a.gathered:
            return 128  # fewer registers are left beside a producer that copies
        # The addresses of transposes take registers too.
        wide = sum(dtype.itemsize for dtype in self.staging.result_dtypes) > 2
        beside = problem.symmetric & ((config.coop == 0) | wide)
        widest = where(beside, 160, 160 if self.addressed else MAX_ACCUMULATORS)
        if problem.divided == "k" and self.way.each:  # two buffers, and blocks that are cleared between wgmmas
            widest = where(config.coop, widest, 128)
        most = self._beside_epilogue(config, widest)
        # Beside more, epilogues of more instructions spill, or of two results.
        light = len(problem.epilogue.outputs) == 1 and not self.staging.reductions
        light = light and instructions(problem.epilogue) <= LIGHT
        few = config.accumulator_registers * problem.products <= where(config.stream_k, 96, 128 if light else 96)
        if self.way.each and not problem.groups:  # an epilogue begins when all sums are added up
            most = where(few, minimum(widest, most + self.sums(config).registers), most)
        if windows.view_of(problem):
            most = where(config.stream_k, 128, most)  # of 192, some spill
        if prologue.is_in(problem):
            most = minimum(most, 176 - prologue.registers(config, problem))
        return most

    def _beside_epilogue(self, config: Sizes, widest: Any) -> Any:
        """Returns the accumulator registers beside an epilogue, of so many that there may be beside none."""
        problem, epilogue = self.problem, self.problem.epilogue
        if problem.plain or (problem.divided == "k" and epilogue.identities):
            alone = (config.coop == 0) & (config.cluster == 1)
            if self.way.each:
                return widest
            if problem.divided == "m":  # 256x192 took 1.06 of 128x192's time (sweeps/experts-in-step-h200.json)
                return where(config.coop | (len(sums.summands(problem)) > 1), 160, widest)
            return where(alone, widest, 160) if problem.groups else widest
        # Where TMA cannot load an operand, its elements have addresses of their own.
        apart = any(spec.row and spec.col and not self.staging.by_tma(spec) for spec in epilogue.operands)
        if self.staging.reductions:
            return 128 if self._few_sums_of_rows and not apart else 64
        if apart or (self.staging.called and not self.staging.even):
            return 96
        varying = any(spec.row or spec.col for spec in epilogue.operands)
        if problem.groups or (varying and not self.staging.even):
            return 128
        several = len(epilogue.outputs) > 1 and bool(epilogue.operands)
        most = minimum(160, widest) if varying or several else widest
        if several and config.swap:  # of 128x96 and 64x256 some spill, though not of 128x160
            most = where(config.stream_k, 64, most)
        if self.staging.called:  # random bits and others that are called spill beside 192 accumulators, not beside 128
            most = where(self.accumulators(config) > 128, 128, most)
        return most

    @property
    def _few_sums_of_rows(self) -> bool:
        """True if a lane keeps no more for reductions than a value or two for each of its rows."""
        staging, operands = self.staging, self.problem.epilogue.operands
        alone = len(staging.results) <= 1 and not staging.called and not any(x.col for x in operands)
        beside = len(staging.results) <= 2 and not staging.swap and all(x.row or not x.col for x in operands)
        few = len(staging.reductions) <= (3 if alone else 1 if beside else 0) and staging.even
        return few and all(out.axes == ("col",) for _, out in staging.reductions)


def facts_of(problem: Problem, swap: bool = False, pixels: bool = False) -> Facts:
    """Returns the facts that all kernels of a problem share, with its operands as they are or swapped.

    Its rows may be pixels apart in the images of the result.
    """
    return _facts_of(problem, swap, pixels)


@functools.lru_cache(maxsize=1024)
def _facts_of(problem: Problem, swap: bool, pixels: bool) -> Facts:
    why, narrow = _reasons_of_operands(problem), operands.decoded(problem.bs[0], problem.a)
    way = operands.Way() if why else operands.way(problem)
    unswappable = shared.of_swap(problem) if swap else []
    if swap and problem.products > 1 and not narrow and (problem.a.bits != 16 or way.promoted):
        unswappable.append(f"swap with {problem.products} products, but of 16 bits as they are")
    if problem.a.prologue is not None and not swap:
        unswappable.append("a prologue of a: it is computed of the operand of the columns, where operands are swapped")
    unswappable += ["swap with windows of images: they are the rows"] * (swap and windows.view_of(problem) is not None)
    if narrow and not swap:
        name = short(problem.bs[0].dtype.name)
        unswappable.append(f"b in {name}: it is decoded as the operand of the rows, where operands are swapped")
    multiplied = problem if why else operands.as_multiplied(problem)
    of_pairs = problem.a.dtype == operands.C64
    if swap and of_pairs:
        unswappable = ["swap of complex numbers"]
    stored = multiplied if of_pairs else problem
    multiplied = multiplied.transposed if swap and not unswappable else multiplied
    even = multiplied.n % 2 == 0 and multiplied.divided != "n"  # groups of columns begin anywhere
    layout = swap, math.gcd(stored.n, 16), even
    epilogue = multiplied.epilogue
    staging = plan_staging(epilogue, problem.symmetric, *layout, pixels=pixels)
    heavy = (
        bool(staging.reductions)
        or any(spec.row and spec.col for spec in epilogue.operands)
        or bool(problem.groups and epilogue.operands)
        or (len(epilogue.outputs) > 1 and staging.called)
    )
    prepared = () if why else operands.prepared(problem)
    return Facts(multiplied, way, prepared, staging, heavy, (*why, *_problem_reasons(problem, staging), *unswappable))


@functools.lru_cache(maxsize=256)
def _reasons_of_operands(problem: Problem) -> tuple[str, ...]:
    views = (Gathered, Im2col, Joined), (Taps, Joined)
    why = [*shared.of_operands(problem, *views, blocks=True, prologues=True, across=True), *sums.reasons(problem)]
    why += [*operands.reasons(problem), *prologues.reasons(problem), *scales.reasons(problem)]
    return (*why, *(decode.reasons(problem, b) if operands.decoded(b := problem.bs[0], problem.a) else ()))


@functools.lru_cache(maxsize=64)
def kind_of(problem: Problem) -> Problem:
    """Returns the problem that stands for all whose kernels have the same limits, of small sizes: always the same one.

    Tiles have room and registers whatever the sizes are, but for how even rows in memory are, of scales too. Views have
    sizes of their own, and so are kinds of their own.
    """
    if any(x.view is not None for x in (problem.a, *problem.bs)):
        return _same(problem)

    def few(batch: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(size, 2) for size in batch)

    a, *bs = (dataclasses.replace(x, batch=few(x.batch)) if x.batch else x for x in (problem.a, *problem.bs))
    groups = problem.groups and dataclasses.replace(problem.groups, count=1, batch=few(problem.groups.batch))
    n = math.gcd(problem.n, 128 if operands.decoded(problem.bs[0], problem.a) else 16)
    k = max(64, *(x.scale.k if x.scale else 0 for x in (problem.a, *problem.bs)))
    sizes = {"m": n if problem.symmetric else 2 - problem.m % 2, "n": n, "k": k, "batch": few(problem.batch)}
    return _same(problem.derived(**sizes, a=a, bs=tuple(bs), groups=groups))


@functools.lru_cache(maxsize=256)
def _same(kind: Problem) -> Problem:
    return kind


def _problem_reasons(problem: Problem, staging: Staging) -> list[str]:
    reasons = [] if problem.plain else list(staging.reasons)
    reasons += shared.of_groups(problem, staging)
    if problem.symmetric:
        reasons += staging.symmetric_reasons
    if staging.pixels:
        reasons += staging.pixel_reasons
    if problem.arch != ARCH:
        reasons.append(f"architecture {problem.arch}: the kernels are for {ARCH}")
    if problem.plain and staging.reasons:
        names = ", ".join(map(short, STORED_BY_TMA))
        reasons.append(f"result {short(problem.out_dtype.name)}: one of {names}")
    reasons += shared.of_sizes(problem)
    if problem.strided:
        reasons += _order_reasons(problem, staging)
    return reasons


def _order_reasons(problem: Problem, staging: Staging) -> list[str]:
    """Returns the reasons against a problem's orders of axes in memory."""
    reasons = []
    arrays = [matrices_of(problem, problem.a, problem.m), matrices_of(problem, problem.bs[0], problem.n)]
    if problem.order:
        arrays.append(result_matrices(problem, np.dtype(np.uint8)))
        if not all(staging.by_tma(out) for _, out in staging.results):
            reasons.append("results in an order of their own, whose rows are of no whole units of 16 bytes")
    if len(problem.batch_groups) <= 3 and max(array.count for array in arrays) >= 2**31:
        reasons.append("matrices begin at 2^31 places or more: TMA coordinates have 32 bits")
    return reasons


@dataclasses.dataclass(frozen=True, eq=False)
class Footprint:
    """Shared memory that a tile takes, whatever the number of its stages; of many tiles columns of it.

    Attributes:
      chunk: columns of a staging buffer.
      stage_bytes: a bm x bk tile of a, and a tile of each b as it is loaded.
      buffer_bytes: one staging buffer: 64 rows of a chunk of every result, and of operands beside them.
      staging_bytes: one staging buffer for each consumer, with its barrier.
      whole_result: staging buffers that hold all that a warpgroup stores of a tile.
      most: bytes that one block may take.
      half: bytes that each of two blocks on an SM may take; 0 where registers do not fit two.
      scale_bytes: scales of the operands, of a stage.
      sums_bytes: accumulators of warpgroups that share a tile's k blocks.
      items_bytes: slots through which warps are told their items, where they may take them as they come.
    """

    chunk: Any
    stage_bytes: Any
    buffer_bytes: Any
    staging_bytes: Any
    whole_result: Any
    most: int
    half: Any
    scale_bytes: Any = 0
    sums_bytes: Any = 0
    items_bytes: int = 0

    def bytes(self, stages: Any, buffers: Any = 2) -> Any:
        """Returns the shared memory of so many stages and staging buffers a warpgroup."""
        stage = self.stage_bytes + self.scale_bytes + 16
        return stages * stage + buffers * self.staging_bytes + self.sums_bytes + self.items_bytes

    def limit(self, stages: Any) -> Any:
        """Returns the shared memory a block may take: half an SM's where two fit, each with two staging buffers."""
        return where(self.bytes(stages) <= self.half, self.half, self.most)

    def deepest(self, buffers: Any = 2) -> Any:
        """Returns the most stages beside so many staging buffers a warpgroup."""
        return 2 + (self.limit(2) - self.bytes(2, buffers)) // (self.stage_bytes + self.scale_bytes + 16)


def footprint(facts: Facts, config: Sizes) -> Footprint:
    """Returns the shared memory that the tile of a config takes."""
    problem, staging = facts.problem, facts.staging
    chunk = each(staging.chunk, config.epilogue_columns)
    of_a, of_b = problem.beside
    loaded = config.loaded(problem.bs[0], of_b) * of_b
    depth = config.depth(problem)
    buffer_bytes = 64 * chunk * staging.column_bytes
    # Registers fit two when each has 256 threads of 128, half of them accumulators.
    two = (config.consumers == 1) & (facts.accumulators(config) <= 64) & (not facts.heavy)
    return Footprint(
        chunk=chunk,
        stage_bytes=problem.a.bytes(of_a * config.bm * depth)
        + decode.factor_bytes(config, problem)
        + problem.bs[0].bytes(loaded * depth),
        buffer_bytes=buffer_bytes,
        staging_bytes=config.stagers(problem) * (buffer_bytes + (8 if staging.operands else 0)),
        whole_result=config.m_blocks * config.epilogue_columns // chunk,
        most=problem.device.shared_bytes,
        half=where(two, problem.device.shared_bytes_per_sm // 2 - 1024, 0),
        scale_bytes=scales.bytes_of(problem, config),
        sums_bytes=(config.slice_groups > 1) * config.slice_groups * 4 * config.bm * config.bn * problem.products,
        items_bytes=ITEMS_BYTES if problem.device.several else 0,
    )
