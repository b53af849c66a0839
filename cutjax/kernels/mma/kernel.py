"""A kernel of ffi/device/mma/gemm.cuh: one config resolved for one problem, or every reason why it cannot be."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.dtypes import short
from cutjax.kernels import reasons as shared
from cutjax.kernels import results
from cutjax.kernels.arguments import Argument, Matrices
from cutjax.kernels.device import Device
from cutjax.kernels.mma import cost, slim, text
from cutjax.kernels.mma.arguments import arguments, operands_of, unit
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.math import Math, math_of
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import STORED, Staging, stage
from cutjax.runtime.architectures import number
from cutjax.runtime.compiler import Cubin, compile_kernel
from cutjax.runtime.launch import Call, Launch

STAGED = 8192  # bytes of a warp's staging buffer, at most where fewer columns make it so
BARRIER_BYTES = 16  # of a stage that TMA loads
BESIDE = 56  # registers of a thread beside accumulators and fragments, calibrated on the compiler's report
BESIDE_TMA = 31  # the same of float64 and TF32 whose tiles TMA loads: others have no larger tile to gain


@functools.lru_cache(maxsize=1024)
def staging_of(problem: Problem, swap: bool = False) -> Staging:
    """Returns how a problem's epilogue is staged, with the operands as they are or swapped."""
    multiplied = problem.transposed if swap else problem
    layout = swap, math.gcd(problem.n, 16), multiplied.n % 2 == 0
    return stage(multiplied.epilogue, problem.symmetric, *layout, tma=False)


@functools.lru_cache(maxsize=1024)
def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns why no kernel of this family can serve the problem; empty when one can."""
    staging = staging_of(problem)
    found = [] if problem.plain else list(staging.reasons)
    if number(problem.arch) < 75:
        return (f"architecture {problem.arch}: the kernels are for sm_75 and later",)
    math = math_of(problem)
    if math is None:
        how = f" as {problem.math}" if problem.math else ""
        found.append(f"{short(problem.a_dtype.name)} x {short(problem.b_dtype.name)}{how} on {problem.arch}")
    elif problem.epilogue.accumulator.name != math.accumulator:
        added = f"{short(problem.epilogue.accumulator.name)}: its products are added up in {short(math.accumulator)}"
        found.append(f"{short(problem.a_dtype.name)} added up in {added}")
    if problem.plain and staging.reasons:
        names = ", ".join(map(short, STORED))
        found.append(f"result {short(problem.out_dtype.name)}: one of {names}")
    if problem.narrow and problem.ragged == "k":
        found.append(f"{short(problem.b_dtype.name)} as {short(problem.a_dtype.name)} in groups of k")
    found += shared.of_groups(problem, staging)
    if problem.symmetric:
        found += staging.symmetric_reasons
    found += shared.of_sizes(problem)
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One config resolved for one problem.

    Attributes:
      problem, config: which.
      asked: the problem with its epilogue; where k has splits, `problem` is without.
      multiplied: `problem` as it is multiplied: where the operands are swapped, that of the transposed result.
      math: how the operands are multiplied.
      staging: of its epilogue.
      units: bytes that rows of a, and of b, begin at multiples of.
      chunk: columns of a staging buffer.
      stage_bytes, buffer_bytes: shared memory of one stage, and of one warp's staging buffer.
      shared_bytes: of one block, all together.
      tiles: their number; where there are groups, the most there may be.
      rows, columns: tiles along m and n; where rows have groups, those along m of a group of average size.
    """

    problem: Problem
    config: Config
    asked: Problem
    multiplied: Problem
    math: Math
    staging: Staging
    units: tuple[int, int]
    chunk: int
    stage_bytes: int
    buffer_bytes: int
    shared_bytes: int
    tiles: int
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """The entry symbol, which is the same wherever the kernel is seen."""
        name = self.config.name(self.problem)
        units = "" if self.units == (16, 16) else f"_u{self.units[0]}_{self.units[1]}"
        pitch = self.staging.pitch
        odd = "_odd" * (self.config.swap and not self.staging.even)
        return name + units + (f"_pitch{pitch}" if pitch < 16 else "") + odd

    @property
    def average_tiles(self) -> int:
        """The number of tiles of all splits, where groups are of average size."""
        p = self.multiplied
        if p.symmetric:
            return self.tiles * self.config.splits
        return self.rows * self.columns * p.batch_size * (max(1, p.groups) if p.ragged else 1) * self.config.splits

    @property
    def depth(self) -> float:
        """The contraction of a tile: of a group of average size, where k has groups, and of one split."""
        p = self.multiplied
        return p.k / max(1, p.groups if p.ragged == "k" else 1) / self.config.splits

    @property
    def slices(self) -> int:
        """Slices of a stage that one warp multiplies."""
        depth = self.config.bk // self.config.sliced_k
        return depth // self.math.slice(depth, self.problem.arch)

    @property
    def load_parts(self) -> int:
        """Slices of a stage beside which a part of a later stage is loaded."""
        if self.math.fragments == "fma":
            return 1  # a block is loaded at once, without tests of what of it is there
        if self.config.tma:
            return self.slices // 2  # those before the one beside which it is loaded
        return 1 if self.config.wm * self.config.wn > 2048 else min(self.slices - 1, 3)

    @property
    def numbers(self) -> int:
        """Real numbers of an element."""
        return 2 if self.problem.a_dtype.kind == "c" else 1

    @property
    def slices_at_once(self) -> int:
        """Slices that the code of one pass multiplies, an even number.

        Of FMA it is few: about 256 products. The compiler finds registers in different banks for what each reads then.
        """
        if self.math.fragments != "fma":
            return self.slices
        products = self.config.wm * self.config.wn // 32 * self.problem.products * self.math.instructions
        return next(n for n in (2, 4, 8) if n * products >= 256 or n == 8)

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""
        return arguments(self)

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons to add to those of a choice: operands that are transposed before the launch."""
        return tuple(dict.fromkeys(f"{'b' if i else 'a'} transposed" for i in self.transposed))

    @functools.cached_property
    def transposed(self) -> tuple[int, ...]:
        """The arrays whose matrices are transposed before the launch."""
        bs = (self.asked.bs, self.problem.bs) if not self.problem.symmetric else ((), ())
        operands = (self.asked.a, *bs[0]), (self.problem.a, *bs[1])
        return tuple(i for i, (given, taken) in enumerate(zip(*operands, strict=True)) if given != taken)

    @property
    def transposed_bytes(self) -> int:
        """Bytes of those arrays."""
        p = self.problem
        matrices = [math.prod(p.a_batch) * p.m, *[math.prod(p.b_batch) * max(1, p.groups) * p.n] * p.products]
        return sum(matrices[i] for i in self.transposed) * p.k * p.a_dtype.itemsize

    @property
    def source(self) -> str:
        """The device text; sizes are arguments of the kernel, so one text serves every shape."""
        return text.source(self)

    def time_us(self, device: Device) -> float:
        """Returns the predicted time of one launch."""
        return slim.predict(self, device) if self.config.slim else cost.predict(self, device)

    def xla_us(self, device: Device) -> float | None:
        """Returns the time that XLA's own product, and its pass over it, may take; None where it has no fast one."""
        return cost.xla_us(self, device)

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
        problem, config, outputs = self.problem, self.config, self.problem.epilogue.outputs
        written, finish = (), None
        if config.splits > 1:
            written = results.parts(problem, config.splits)
            finish = functools.partial(results.finish_parts, self.asked)
        elif self.staging.reductions:
            written = results.written(problem, config.wn)
            finish = functools.partial(results.finish, outputs)
        prepare = functools.partial(_prepare, self.transposed, problem.arrays + len(problem.epilogue.operands))
        return Call(
            (self._launch(self.compile().image),),
            results=written,
            finish=finish,
            prepare=prepare if config.splits > 1 or self.transposed else None,
            aliases=tuple((problem.arrays + operand, result) for operand, result in problem.in_place),
            operand_orders=(problem.orders[0], *(b.order for b in problem.bs)) if any(problem.orders) else (),
            result_orders=tuple(() if out.reduce else problem.orders[2] for out in outputs),
        )

    def _launch(self, cubin: bytes) -> Launch:
        config = self.config
        return Launch(
            kernel=self.name,
            cubin=cubin,
            grid=(self.tiles * config.splits, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(1, 1, 1),
            shared_bytes=self.shared_bytes,
            blocks_per_sm=config.blocks,
            params=tuple(argument.value for argument in self.arguments),
        )


def _prepare(transposed: Sequence[int], taken: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns what the kernel takes: the first arguments, some of them transposed."""
    found = list(arrays[:taken])
    for i in transposed:
        found[i] = jnp.matrix_transpose(found[i])
    return found


def registers(problem: Problem, config: Config, math: Math, units: tuple[int, int]) -> int:
    """Returns about how many registers a thread takes."""
    tile = config.wm // 16 * (config.wn // 8)
    fragments = math.read[0] * (config.wm // 16) + math.read[1] * problem.products * (config.wn // 8)
    fragments *= math.slice(config.bk // config.sliced_k, problem.arch) // math.k
    of_a, of_b = config.bm * problem.a_dtype.itemsize, problem.products * config.bn * problem.b_dtype.itemsize
    loads = [row * config.bk // 16 // config.threads for row in (of_a, of_b)]
    held = sum(5 * count + 8 for count, unit in zip(loads, units, strict=True) if unit < 4)
    apart = 0
    if math.rate.startswith("float8") and config.wm * config.wn >= 2048:
        # Of sums that are added apart, and on sm_90 of operands that are converted to 16 bits: calibrated too.
        apart = 72 if number(problem.arch) == 90 or config.wn > config.wm else 36 * (held > 0)
    if math.fragments == "fma" and number(problem.arch) < 80:  # half of what is loaded, calibrated as BESIDE
        held = 2 * sum(loads)
    if math.fragments == "tensor" and number(problem.arch) < 80:
        apart += 8  # all loads go through registers
    if math.name == "tf32x3" and number(problem.arch) >= 100:
        apart += 48  # calibrated too: warp tiles of 64 x 32 spill there
    if problem.ragged == "k" and config.bk == 128 and held:
        apart += 32  # calibrated too, where rows begin anywhere
    if problem.narrow:  # calibrated too: decoding takes more beside some of what else takes registers
        wide = any(np.dtype(out.dtype).itemsize > 2 for out in problem.epilogue.outputs)
        across = wide and problem.bs[0].contiguous == "mn"
        apart += 8 * bool(across or problem.ragged or problem.products > 1 or number(problem.arch) < 80)
        apart += (16 if config.bk == 32 else 56) * (min(units) < 4)
    beside = BESIDE + math.beside
    if config.tma and (math.name, math.accumulator) in (("dmma", "float64"), ("tf32", "float32")):
        beside = BESIDE_TMA
    return problem.products * tile * math.words + 2 * fragments + held + beside + apart


def tma_reasons(problem: Problem, math: Math, units: tuple[int, int] = (16, 16)) -> list[str]:
    """Returns why TMA cannot load the tiles of a problem, whose rows begin at multiples of so many bytes."""
    found, a, b = [], problem.a, problem.bs[0]
    if number(problem.arch) < 90:
        found.append(f"tma on {problem.arch}: sm_90 and later have it")
    if math.fragments == "fma":
        found.append(f"tma of {short(a.dtype.name)} by FMA: elements are permuted one by one on their way")
    if problem.narrow:
        found.append(f"tma with b in {short(b.dtype.name)}: tiles that are decoded are loaded by all threads")
    if problem.ragged == "k":
        found.append("tma with groups of k: it clears what is past the array, not what is past a group")
    if math.fragments != "fma" and a.dtype.itemsize == 4 and a.contiguous != b.contiguous:
        found.append(f"tma of {short(a.dtype.name)} in layout {problem.layout}: a and b lie along k, or both across it")
    for name, step in zip("ab", units, strict=True):
        if step < 16:
            found.append(f"tma of rows of {name} that begin at multiples of {step} bytes: it takes multiples of 16")
    return found


def chunk_of(staging: Staging, wn: int) -> int:
    """Returns the columns of a warp's staging buffer, of so many that it computes."""
    fitting = [c for c in (64, 32, 16) if wn % c == 0]
    return next((c for c in fitting if 16 * c * staging.column_bytes <= STAGED), fitting[-1])


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel, or every reason why the config cannot serve the problem."""
    asked, found = problem, list(reasons(problem))
    math = math_of(problem)
    if math is None or found:
        return tuple(found)
    problem = problem.along_k if math.along_k and not config.slim else problem
    if config.splits > 1:
        problem = problem.bare
        if problem.ragged == "m":
            found.append(f"splits={config.splits}: the contraction of groups of rows is whole")
    if config.swap and (why := slim.swap_reasons(problem)):
        return (*found, *why)
    staging, device, size = staging_of(problem, config.swap), problem.device, problem.a_dtype.itemsize
    bare, problem = problem, problem.transposed if config.swap else problem
    slices = config.bk // math.k // config.sliced_k
    if config.slim:
        found += slim.reasons(problem, config, math, staging)
    elif config.bk not in math.depths:
        found.append(f"bk={config.bk}: one of {', '.join(map(str, math.depths))}")
    elif slices < 2 or slices % 2:
        found.append(
            f"bk={config.bk} with sliced_k={config.sliced_k}: an even number of slices of {math.k} for each warp"
        )
    if problem.narrow and not config.slim and problem.bs[0].contiguous == "mn" and config.wn % 32:
        found.append(f"wn={config.wn}: a warp reads 32 columns of b[k, n] at once, of 8 bits each")
    if problem.symmetric and (config.bm % 64 or config.bn % 64):
        found.append(f"a tile of {config.bm}x{config.bn}: symmetric results are mirrored in blocks of 64x64")
    chunk = chunk_of(staging, config.wn)
    stage_bytes = math.stage_bytes(config.bm, config.bn, config.bk, problem.products, size)
    if config.slim:
        stage_bytes = slim.stage_bytes(problem, config, math)
    buffer_bytes = 16 * chunk * staging.column_bytes
    warps_m, warps_n, _ = config.warps
    shared = config.stages * (stage_bytes + BARRIER_BYTES * config.tma) + warps_m * warps_n * buffer_bytes
    most = min(device.shared_bytes, device.shared_bytes_per_sm // config.blocks - 1024)
    if shared > most:
        found.append(
            f"{config.stages} stages of {stage_bytes} bytes and staging of {buffer_bytes} a warp: {shared} bytes of "
            f"shared memory, at most {most} with {config.blocks} blocks an SM"
        )
    accumulators = 4 * problem.products * config.bm * config.bn // 4 * math.words
    if config.sliced_k > 1 and not config.slim and accumulators > config.stages * stage_bytes:
        found.append(f"sliced_k={config.sliced_k}: {accumulators} bytes of accumulators take the place of the stages")
    of_a, of_b = operands_of(problem)
    units = unit(problem, problem.a, problem.m, of_a), unit(problem, problem.bs[0], problem.n, of_b)
    if config.tma:
        found += tma_reasons(problem, math, units)
    limit = min(255, device.registers_per_sm // (config.threads * config.blocks) // 8 * 8)
    need = slim.registers(problem, config, math) if config.slim else registers(problem, config, math, units)
    if need > limit:
        found.append(f"a warp tile of {config.wm}x{config.wn}: about {need} registers a thread, at most {limit}")
    if config.blocks > device.max_blocks_per_sm or config.blocks * config.threads > device.max_threads_per_sm:
        found.append(f"blocks={config.blocks} of {config.threads} threads: more than an SM of {device.name} holds")
    rows, columns = problem.tiles(config.bm, config.bn)
    tiles = problem.most_tiles(config.bm, config.bn)
    found += _counted(problem, config, tiles * config.splits, (of_a, of_b))
    if found:
        return tuple(found)
    return Kernel(
        bare,
        config,
        asked,
        problem,
        math,
        staging,
        units=units,
        chunk=chunk,
        stage_bytes=stage_bytes,
        buffer_bytes=buffer_bytes,
        shared_bytes=shared,
        tiles=tiles,
        rows=rows,
        columns=columns,
    )


def _counted(p: Problem, config: Config, tiles: int, operands: tuple[Matrices, Matrices]) -> list[str]:
    """Returns why the kernel would not come to the end of something."""
    depth = 16 * config.threads if config.slim else config.bk  # all threads of a slim one go along k at once
    lines, along_k = [], p.k + (config.splits + 1) * depth
    for operand, length in ((p.a, p.m + 2 * config.bm), (p.bs[0], p.n + 2 * config.bn)):
        numbers = 2 if operand.dtype.kind == "c" else 1  # TMA counts those of a line in memory, threads its bytes
        unit = numbers if config.tma else operand.dtype.itemsize
        lines.append(unit * (along_k if operand.contiguous == "k" else length))
    return shared.of_counts(
        p,
        (config.bm, config.bn, depth),
        tiles=tiles,
        raster=config.raster,
        parts=config.splits,
        bytes_of_rows=max(lines),
        places_of_matrices=max(of.count for of in operands),
    )


def resolved(problem: Problem, config: Config) -> Kernel:
    """Returns the kernel of a config that serves a problem.

    Raises:
      ValueError: it does not; lists every reason.
    """
    kernel = resolve(problem, config)
    if isinstance(kernel, tuple):
        raise ValueError(f"no kernel for {problem} with {config}: {'; '.join(kernel)}")
    return kernel
