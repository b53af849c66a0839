"""A kernel of ffi/device/mma/gemm.cuh: one config resolved for one problem, or every reason why it cannot be."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from cutjax.dtypes import short
from cutjax.kernels import base, sums
from cutjax.kernels import prologue as prologues
from cutjax.kernels import reasons as shared
from cutjax.kernels.arguments import Argument, Matrices, scale_buffers
from cutjax.kernels.device import Device
from cutjax.kernels.joined import Joined
from cutjax.kernels.mma import cost, prologue, slim, text, views
from cutjax.kernels.mma.arguments import arguments, operands_of, unit
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.math import Math, halved, math_of
from cutjax.kernels.mma.resolved import Resolved, in_units
from cutjax.kernels.operand import Gathered, Im2col, Pixels, Taps
from cutjax.kernels.prepared import Prepared, Transpose
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import STORED, Staging, plan_staging
from cutjax.runtime.architectures import number, too_old
from cutjax.runtime.launch import Launch

STAGING_BYTES = 8192  # bytes of a warp's staging buffer, at most where fewer columns make it so
BARRIER_BYTES = 16  # of a stage that TMA loads
BESIDE = 56  # registers of a thread beside accumulators and fragments, calibrated on the compiler's report
BESIDE_TMA = 31  # the same of float64 and TF32 whose tiles TMA loads: others have no larger tile to gain


@functools.lru_cache(maxsize=1024)
def staging_of(problem: Problem, swap: bool = False, pixels: bool = False) -> Staging:
    """Returns the staging of a problem's epilogue, with the operands as they are or swapped.

    Rows may be pixels apart in the images of the result.
    """
    multiplied = problem.transposed if swap else problem
    layout = swap, math.gcd(views.columns(problem), 16), views.columns(multiplied) % 2 == 0
    return plan_staging(multiplied.epilogue, problem.symmetric, *layout, tma=False, pixels=pixels)


@functools.lru_cache(maxsize=1024)
def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns the reasons against every kernel of this family; empty when one serves."""
    staging = staging_of(problem, pixels=bool(views.phases(problem)))
    found = [] if problem.plain else list(staging.reasons)
    found += staging.pixel_reasons if staging.pixels else ()
    if old := too_old(problem.arch, 75):
        return tuple(old)
    found += shared.of_operands(problem, (Gathered, Im2col, Joined), (Taps, Joined), prologues=True)
    found += [*sums.reasons(problem), *prologues.reasons(problem)]
    if len(sums.summands(problem)) > 1 and problem.products > 1:
        found.append("sums of products by several b: kernels go from one array of a single b to the next")
    way = math_of(problem)
    found += views.reasons(problem, way)
    if way is None:
        by = f" as {problem.math}" if problem.math else ""
        found.append(f"{short(problem.a.dtype.name)} x {short(problem.bs[0].dtype.name)}{by} on {problem.arch}")
    elif problem.epilogue.accumulator.name != way.accumulator:
        added = f"{short(problem.epilogue.accumulator.name)}: its products are added up in {short(way.accumulator)}"
        found.append(f"{short(problem.a.dtype.name)} added up in {added}")
    if problem.plain and staging.reasons:
        names = ", ".join(map(short, STORED))
        found.append(f"result {short(problem.out_dtype.name)}: one of {names}")
    if problem.bs[0].narrow_beside(problem.a) and problem.divided == "k":
        found.append(f"{short(problem.bs[0].dtype.name)} as {short(problem.a.dtype.name)} in groups of k")
    found += shared.of_groups(problem, staging)
    if problem.symmetric:
        found += staging.symmetric_reasons
    found += shared.of_sizes(problem)
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Kernel(Resolved, base.Kernel):
    """One config resolved for one problem.

    Attributes:
      phases: the kernels of the parts of a convolution whose images are spread, of which this is the first.
    """

    family = "mma"
    phases: tuple[Kernel, ...] = ()

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""
        return arguments(self)

    @property
    def unmeasured(self) -> str:
        """The part of it that was not faster on a device yet, or not timed; "" where all was."""
        if self.way.name == "dmma" and self.way.accumulator == "float64" and halved(self.config):
            return "warp tiles of 64 x 32 of float64 that threads load"
        return "a prologue in the loads" * (self.multiplied.a.prologue is not None)

    @property
    def source(self) -> str:
        """The device text; sizes are arguments of the kernel, so one text serves every shape."""
        return text.source(self, self.arguments)

    def launch_us(self, device: Device) -> float:
        """Returns the predicted time of one launch, and of preparing its operands."""
        predict = slim.predict if self.config.slim else cost.predict
        return sum(predict(kernel, device) for kernel in self.phases or (self,))

    def _launches(self, compiled: Callable[[base.Kernel], bytes]) -> tuple[Launch, ...]:
        """Returns the launches of all phases, which have one text."""
        code = compiled(self)
        return tuple(kernel._launch(code) for kernel in self.phases or (self,))

    @property
    def grid(self) -> base.Grid:
        """The blocks of its launch: one for each tile of each split."""
        return base.Grid(self.tiles * self.config.splits, self.config.threads, 1, self.config.blocks)


def prepared(asked: Problem, taken: Problem) -> tuple[Prepared, ...]:
    """Returns the operands that are transposed before the launch, as they lie otherwise than a kernel takes them."""
    matrices, further, arrays = asked.matrices[1], scale_buffers(asked), {}
    for i, (before, of) in enumerate(zip(sums.summands(asked), sums.summands(taken), strict=True)):
        arrays[further[0][i - 1] if i else 0] = ("a", before.a, of.a, asked.m, asked.matrices[0], of.k)
        for j, (given, b) in enumerate(zip(before.bs, of.bs, strict=True), 1) if not asked.symmetric else ():
            arrays[further[j][i - 1] if i else j] = ("b", given, b, asked.n, matrices, of.k)
    found = []
    for i, (name, given, of, length, count, k) in arrays.items():
        if given != of:
            rows, columns = given.array(length, k)
            size = given.bytes(count * rows * columns)
            taps = math.prod(given.view.stored) if isinstance(given.view, Taps) else 1
            shape = (taps, -1, columns) if views.axes(asked) else ()
            found.append(Prepared(name, i, (Transpose(shape),), size, size))
    return tuple(found)


def registers(problem: Problem, config: Config, way: Math, units: tuple[int, int]) -> int:
    """Estimates the registers of a thread."""
    tile = config.wm // 16 * (config.wn // 8)
    fragments = way.read[0] * (config.wm // 16) + way.read[1] * problem.products * (config.wn // 8)
    fragments = fragments * way.slice(config, problem.arch) // way.k
    of_a, of_b = problem.a.bytes(config.bm), problem.bs[0].bytes(problem.products * config.bn)
    loads = [row * config.bk // 16 // config.threads for row in (of_a, of_b)]
    held = sum(5 * count + 8 for count, unit in zip(loads, units, strict=True) if unit < 4)
    apart = 0
    if way.rate.startswith("float8") and config.wm * config.wn >= 2048:
        # Of sums that are added apart, and on sm_90 of operands that are converted to 16 bits: calibrated too.
        apart = 72 if number(problem.arch) == 90 or config.wn > config.wm else 36 * (held > 0)
    if way.fragments == "fma" and number(problem.arch) < 80:  # half of what is loaded, calibrated as BESIDE
        held = 2 * sum(loads)
    if in_units(problem, way, units, config.wm, config.wn):  # half of what is held, calibrated too
        lines = 16 * config.threads // config.bk  # in fours, of all threads
        held += sum(
            8 * -(-rows // lines)
            for x, rows in ((problem.a, config.bm), (problem.bs[0], config.bn))
            if x.contiguous == "k"
        )
    if way.fragments == "tensor" and number(problem.arch) < 80:
        apart += 8  # all loads go through registers
    if way.name == "tf32x3" and number(problem.arch) >= 100:
        apart += 48  # calibrated too: warp tiles of 64 x 32 spill there
    if problem.divided == "k" and config.bk == 128 and held:
        apart += 32  # calibrated too, where rows begin anywhere
    if problem.bs[0].narrow_beside(problem.a):
        # Calibrated too: decoding takes more beside some of what else takes registers.
        wide = any(np.dtype(out.dtype).itemsize > 2 for out in problem.epilogue.outputs)
        across = wide and problem.bs[0].contiguous == "mn"
        apart += 8 * bool(across or problem.groups or problem.products > 1 or number(problem.arch) < 80)
        apart += (16 if config.bk == 32 else 56) * (min(units) < 4)
    beside = BESIDE + way.beside
    if config.tma and (way.name, way.accumulator) in (("dmma", "float64"), ("tf32", "float32")):
        beside = BESIDE_TMA
    apart += views.registers(problem, config, way, units)
    apart += 24 * (len(sums.summands(problem)) > 1)  # calibrated too
    apart += prologue.REGISTERS * (problem.a.prologue is not None)
    return problem.products * tile * way.words + 2 * fragments + held + beside + apart


def tma_reasons(problem: Problem, way: Math, units: tuple[int, int] = (16, 16)) -> list[str]:
    """Returns the reasons against loads by TMA of a problem whose rows begin at multiples of so many bytes."""
    found, a, b = [], problem.a, problem.bs[0]
    if number(problem.arch) < 90:
        found.append(f"tma on {problem.arch}: sm_90 and later have it")
    if way.fragments == "fma":
        found.append(f"tma of {short(a.dtype.name)} by FMA: elements are permuted one by one on their way")
    if b.narrow_beside(a):
        found.append(f"tma with b in {short(b.dtype.name)}: tiles that are decoded are loaded by all threads")
    if a.prologue is not None:
        found.append("tma with a prologue: threads change what they copied themselves")
    if a.gathered:
        found.append("tma of gathered rows: its boxes are of rows that follow each other")
    if views.axes(problem):
        found.append("tma of windows of images: their addresses are computed by all threads")
    if len(sums.summands(problem)) > 1:
        found.append("tma with a sum of products: all threads go from one array to the next")
    if problem.divided == "k":
        found.append("tma with groups of k: it clears what is past the array, not what is past a group")
    if way.fragments != "fma" and a.bits == 32 and a.contiguous != b.contiguous:
        found.append(f"tma of {short(a.dtype.name)} in layout {problem.layout}: a and b lie along k, or both across it")
    for name, step in zip("ab", units, strict=True):
        if step < 16:
            found.append(f"tma of rows of {name} that begin at multiples of {step} bytes: it takes multiples of 16")
    return found


def chunk_of(staging: Staging, wn: int) -> int:
    """Returns the columns of a warp's staging buffer, of so many that it computes."""
    fitting = [c for c in (64, 32, 16) if wn % c == 0]
    return next((c for c in fitting if 16 * c * staging.column_bytes <= STAGING_BYTES), fitting[-1])


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel, or every reason why the config cannot serve the problem."""
    if found := reasons(problem):
        return found
    parts, kernels = views.phases(problem), []
    if not parts:
        return _resolve(problem, config)
    if config.splits > 1:
        return (f"splits={config.splits}: parts of phases",)
    for part, pixels in parts:
        kernel = _resolve(part, config, pixels)
        if isinstance(kernel, tuple):
            return kernel
        # One copy of an operand serves all.
        kernels.append(dataclasses.replace(kernel, prepared=()) if kernels else kernel)
    return dataclasses.replace(kernels[0], phases=tuple(kernels))


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """Everything that kernels of a problem have in common, whose configs differ in tiles and their order alone.

    Attributes:
      problem: of operands as they are read, without its epilogue where k has splits.
      multiplied: the same, transposed where operands are swapped.
      way: how they are multiplied.
      staging: of its epilogue.
      operands: the matrices of a, and of each b.
      units: bytes that their rows begin at multiples of.
      prepared: the operands that are transposed before.
    """

    problem: Problem
    multiplied: Problem
    way: Math
    staging: Staging
    operands: tuple[Matrices, Matrices]
    units: tuple[int, int]
    prepared: tuple[Prepared, ...]


def units_of(problem: Problem) -> tuple[int, int]:
    """Returns the bytes that rows of a, and of b, begin at multiples of."""
    return _facts(problem, False, False, False, False).units


@functools.lru_cache(maxsize=1024)
def _facts(asked: Problem, divided: bool, slim: bool, swap: bool, pixels: bool) -> Facts:
    """Returns the facts of kernels with splits or without, of few rows or more, of swapped operands or not."""
    way = math_of(asked)
    assert way is not None
    problem = views.along_k(asked) if way.along_k and not slim else asked
    problem = problem.bare if divided else problem
    p = problem.transposed if swap else problem
    of_a, of_b = operands_of(p)
    each = [(of, *operands_of(of)) for of in sums.summands(p)]
    units = min(unit(of, of.a, of.m, x) for of, x, _ in each), min(unit(of, of.bs[0], of.n, y) for of, _, y in each)
    copies = prepared(asked, problem) if way.along_k else ()
    return Facts(problem, p, way, staging_of(problem, swap, pixels), (of_a, of_b), units, copies)


def _resolve(asked: Problem, config: Config, pixels: Pixels | None = None) -> Kernel | tuple[str, ...]:
    """Returns the kernel of a problem, which may be a phase of one."""
    found = []
    if config.splits > 1 and asked.divided == "m":
        found.append(f"splits={config.splits}: the contraction of groups of rows is whole")
    if config.swap and (why := slim.swap_reasons(asked.bare if config.splits > 1 else asked)):
        return (*found, *why)
    facts = _facts(asked, config.splits > 1, config.slim, config.swap, pixels is not None)
    problem, way, staging, device = facts.multiplied, facts.way, facts.staging, asked.device
    size = problem.a.bytes(1)
    slices = config.bk // way.k // config.sliced_k
    if config.slim:
        found += slim.reasons(problem, config, way, staging)
    elif config.bk not in way.depths:
        found.append(f"bk={config.bk}: one of {', '.join(map(str, way.depths))}")
    elif slices < 2 or slices % 2:
        found.append(
            f"bk={config.bk} with sliced_k={config.sliced_k}: an even number of slices of {way.k} for each warp"
        )
    if (
        problem.bs[0].narrow_beside(problem.a)
        and not config.slim
        and problem.bs[0].contiguous == "mn"
        and config.wn % 32
    ):
        found.append(f"wn={config.wn}: a warp reads 32 columns of b[k, n] at once, of 8 bits each")
    if staging.reductions and views.groups(problem) > 1 and views.columns(problem) % config.bn:
        found.append(f"bn={config.bn}: reductions of groups of {views.columns(problem)} columns are of whole tiles")
    if problem.symmetric and (config.bm % 64 or config.bn % 64):
        found.append(f"a tile of {config.bm}x{config.bn}: symmetric results are mirrored in blocks of 64x64")
    chunk = chunk_of(staging, config.wn)
    units = facts.units
    by_units = in_units(problem, way, units, config.wm, config.wn)
    stage_bytes = way.stage_bytes(config.bm, config.bn, config.bk, problem.products, size, by_units)
    if config.slim:
        stage_bytes = slim.stage_bytes(problem, config, way)
    buffer_bytes = 16 * chunk * staging.column_bytes
    warps_m, warps_n, _ = config.warps
    shared = config.stages * (stage_bytes + BARRIER_BYTES * config.tma) + warps_m * warps_n * buffer_bytes
    most = min(device.shared_bytes, device.shared_bytes_per_sm // config.blocks - 1024)
    if shared > most:
        found.append(
            f"{config.stages} stages of {stage_bytes} bytes and staging of {buffer_bytes} a warp: {shared} bytes of "
            f"shared memory, at most {most} with {config.blocks} blocks an SM"
        )
    accumulators = 4 * problem.products * config.bm * config.bn // 4 * way.words
    if config.sliced_k > 1 and not config.slim and accumulators > config.stages * stage_bytes:
        found.append(f"sliced_k={config.sliced_k}: {accumulators} bytes of accumulators take the place of the stages")
    if config.tma:
        found += tma_reasons(problem, way, units)
    limit = min(255, device.registers_per_sm // (config.threads * config.blocks) // 8 * 8)
    need = slim.registers(problem, config, way) if config.slim else registers(problem, config, way, units)
    if need > limit:
        found.append(f"a warp tile of {config.wm}x{config.wn}: about {need} registers a thread, at most {limit}")
    if config.blocks > device.max_blocks_per_sm or config.blocks * config.threads > device.max_threads_per_sm:
        found.append(f"blocks={config.blocks} of {config.threads} threads: more than an SM of {device.name} holds")
    rows, columns = views.tiles(problem, config.bm, config.bn)
    tiles = views.most_tiles(problem, config.bm, config.bn)
    found += _counted(problem, config, tiles * config.splits, facts.operands)
    if found:
        return tuple(found)
    return Kernel(
        problem=facts.problem,
        config=config,
        asked=asked,
        multiplied=problem,
        way=way,
        staging=staging,
        prepared=facts.prepared,
        units=units,
        pixels=pixels,
        chunk=chunk,
        stage_bytes=stage_bytes,
        buffer_bytes=buffer_bytes,
        shared_bytes=shared,
        tiles=tiles,
        rows=rows,
        columns=columns,
    )


def _counted(p: Problem, config: Config, tiles: int, operands: tuple[Matrices, Matrices]) -> list[str]:
    """Returns the reasons against a kernel whose counters would pass 32 bits."""
    depth = 16 * config.threads if config.slim else config.bk  # all threads of a slim one go along k at once
    lines, along_k = [], p.k + (config.splits + 1) * depth
    for operand, length in ((p.a, p.m + 2 * config.bm), (p.bs[0], p.n + 2 * config.bn)):
        numbers = 2 if operand.dtype.kind == "c" else 1  # TMA counts those of a line in memory, threads its bytes
        unit = numbers if config.tma else operand.dtype.itemsize
        lines.append(unit * (along_k if operand.contiguous == "k" else length))
    counts = shared.counters(
        p,
        (config.bm, config.bn, depth),
        tiles=tiles,
        raster=config.raster,
        parts=config.splits,
        bytes_of_rows=max(lines),
        places_of_matrices=max(of.count for of in operands),
        **views.counts(p),
    )
    return shared.of_counters(counts, ", in whole tiles")


def resolved(problem: Problem, config: Config) -> Kernel:
    """Returns the kernel of a config that serves a problem.

    Raises:
      ValueError: it does not; lists every reason.
    """
    kernel = resolve(problem, config)
    if isinstance(kernel, tuple):
        raise ValueError(f"no kernel for {problem} with {config}: {'; '.join(kernel)}")
    return kernel
