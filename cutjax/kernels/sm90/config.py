"""The config of a kernel: the frozen, validated choice of tile, pipeline, cluster, schedule and tile order."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from cutjax.dtypes import short
from cutjax.kernels.columns import Taken, maximum, minimum, where
from cutjax.kernels.operand import Operand
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import operands, windows
from cutjax.kernels.sums import summands

SCHEDULES = ("coop", "pingpong", "sliced", "warps")
EVICTED = ("", "a", "b", "d", "ab", "ad", "bd", "abd")


@dataclasses.dataclass(frozen=True)
class Sums:
    """The parts in which a warpgroup multiplies a stage, where the sums of each are promoted (drain_each.cuh).

    Attributes:
      columns: parts of the tile's columns. Blocks of 64 rows are parts of their own.
      buffers: parts whose sums are kept at a time: 2 where one is added while the next is multiplied.
      registers: that the sums take, of a thread.
      group: blocks of k that are promoted beside each other.
    """

    columns: Any
    buffers: Any
    registers: Any
    group: Any = 1


class Sizes:
    """The sizes that follow from the fields of a config, or from columns of those of many."""

    bm: Any
    bn: Any
    bk: Any
    stages: Any
    cluster_m: Any
    cluster_n: Any
    schedule: Any
    swap: Any
    stream_k: Any
    cluster_k: Any
    splits: Any
    raster: Any

    @functools.cached_property
    def coop(self) -> Any:
        """True where warpgroups share each tile."""
        return self.schedule != "pingpong"

    @functools.cached_property
    def sliced(self) -> Any:
        """True where warpgroups share a tile's k blocks."""
        return (self.schedule == "sliced") | self.by_warps

    @functools.cached_property
    def by_warps(self) -> Any:
        """True where warps multiply by themselves, by mma.sync."""
        return self.schedule == "warps"

    @functools.cached_property
    def consumers(self) -> Any:
        """Warpgroups that multiply."""
        slices = where((self.bm == 128) & (self.bn > FEWEST_OF_SLICES), 3, 4)
        return where(self.sliced, slices, 2 - (self.coop & (self.bm == 64)))

    @functools.cached_property
    def storers(self) -> Any:
        """Warpgroups that store: those beside each other in a tile, or all that have tiles of their own."""
        return where(self.sliced, maximum(self.bm // 128, 1), self.consumers)

    @functools.cached_property
    def slice_groups(self) -> Any:
        """Warpgroups that multiply the same rows, of other k blocks."""
        return self.consumers // self.storers

    def stagers(self, problem: Problem) -> Any:
        """Returns the warpgroups that have staging buffers: where a block has many tiles, slices store them in turn."""
        return where(self.sliced & (problem.divided == "n"), self.consumers, self.storers)

    @functools.cached_property
    def m_blocks(self) -> Any:
        """64-row blocks of the tile that one warpgroup holds."""
        return self.bm // 64 // where(self.coop, self.storers, 1)

    @property
    def accumulator_registers(self) -> Any:
        """f32 accumulators of one product that a thread holds."""
        return self.m_blocks * self.bn // 2

    def sums(self, problem: Problem) -> Sums:
        """Returns the parts in which sums of float8 are promoted, for a problem as it is multiplied.

        Where two warpgroups share a tile, one adds up while the other multiplies. Their parts are as wide as fit beside
        the accumulators: each reads its rows of a again, and shared memory is nearly as busy as the tensor cores. One
        that multiplies alone has two buffers, if they fit.
        """
        width, accumulators = self.bn * problem.products, self.accumulator_registers * problem.products
        decodes = operands.in_bytes(problem.a, problem.bs[0])
        shared = self.coop & (self.storers == 2) & (not decodes)
        wide = 2 * accumulators > MAX_ACCUMULATORS
        columns = where((self.m_blocks == 1) & (width % 16 == 0) & (wide | (shared == 0)), 2, 1)
        parts = self.m_blocks * columns
        buffers = where((parts > 1) & (2 * accumulators <= MAX_ACCUMULATORS) & (shared == 0), 2, 1)
        # Blocks that are decoded are longer text; those whose columns have scales of their own spill.
        scale = problem.bs[0].scale
        most = 1 if scale and scale.mn % 8 else 2 if decodes else 4
        group = where(buffers == 2, most, 1)
        return Sums(columns, buffers, buffers * accumulators // parts, group)

    @functools.cached_property
    def cluster(self) -> Any:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @functools.cached_property
    def parts(self) -> Any:
        """Ranges that the contraction of a tile is cut into."""
        return self.cluster_k * self.splits

    @functools.cached_property
    def epilogue_columns(self) -> Any:
        """Columns of a tile that one CTA stores: of those that share one each has as many, or none."""
        owners = 1
        for count in (2, 4, 8):
            even = self.bn % ((8 if self.swap else 16) * count) == 0
            owners = where((count <= self.cluster_k) & even, count, owners)
        return self.bn // owners

    def depth(self, problem: Problem) -> Any:
        """Returns the elements of k in a stage: as many as the wider operand has in its rows there."""
        return 16 * self.bk // max(problem.a.bits, problem.bs[0].bits)

    def decoded_chunk(self, problem: Problem) -> Any:
        """Returns the elements of a row of a's tile in shared memory, where a is decoded: 128 bytes, or all."""
        length = self.depth(problem) if problem.a.contiguous == "k" else self.bm
        return minimum(length, problem.a.elements(128))

    def slices(self, problem: Problem) -> Any:
        """Returns the slices of 16 of k that a warpgroup decodes at once; 0 where a is not decoded.

        As many as registers take beside two sets of them: most of a step's time is its latency, not its instructions.
        """
        if not operands.decoded(problem.a, problem.bs[0]):
            return 0
        scale = operands.factors(problem)
        deep = (self.bk == 128) & (scale is None or scale.k % 64 == 0) & (self.sliced == 0)
        return where(deep & ((self.m_blocks == 1) | (self.bn * (1 + self.by_sums(problem)) <= FEW)), 4, 2)

    def by_sums(self, problem: Problem) -> Any:
        """Returns True if the factors of a decoded operand multiply the float32 sums of their k, and not each element.

        Where a thread has few sums, they are fewer than the elements, and those of one k have room beside all.
        """
        of_slices = where(self.consumers == 3, MOST_OF_SLICES, FEW_OF_SLICES)
        few = self.accumulator_registers * problem.products <= where(self.sliced, of_slices, FEW)
        return few & (operands.factors(problem) is not None)

    def chunk(self, b: Operand, products: int = 1) -> Any:
        """Returns the elements of a row of b's tile in shared memory, which its swizzle spans.

        Where b's rows in memory lie along bn, chunks narrower than 64 have bank conflicts, so that of one product the
        last may be wider than the tile, where it loads a third more at most.
        """
        if b.contiguous == "k":
            return b.elements(128)
        whole = (self.bn % 64 == 0) | ((3 * (-self.bn % 64) <= self.bn) & (products == 1))
        return where(whole, 64, where(self.bn % 32 == 0, 32, 16))

    def loaded(self, b: Operand, products: int = 1) -> Any:
        """Returns the columns that are loaded for the bn of a tile."""
        return self.bn if b.contiguous == "k" else self.bn + -self.bn % self.chunk(b, products)


@dataclasses.dataclass(frozen=True)
class Config(Sizes):
    """One kernel of the sm_90a GEMM family.

    Attributes:
      bm, bn, bk: tile of the result, and depth of one stage, in elements. bm is 64, 128 or 256; bn a multiple of
        8 up to 256, of 16 where b's rows are contiguous along it; bk 64 or 128, counted in elements of 16 bits: of
        others as many as take as many bytes.
      stages: tiles of a and b kept in flight in shared memory.
      cluster_m, cluster_n: CTAs of a cluster along m and n, which multicast what they share; their product is 1 or 2.
      schedule: "coop" (two warpgroups split each tile; one when bm is 64), "pingpong" (two warpgroups take
        whole tiles in turn, so that one's epilogue runs beside the other's mainloop), "sliced" (four warpgroups, each
        with up to 128 rows of the tile and every second or fourth of its k blocks: of weights that are decoded; three,
        of 128 rows and more than 8 columns) or
        "warps" (the same by mma.sync, whose warps do not wait for each other: of 8 columns).
      raster: tile order. Positive: bands of that many rows of tiles, walked column by column. Negative: bands of
        columns, walked row by row.
      swap: whether the operands are swapped: the kernel computes ``d^T = b^T a^T`` and stores it transposed. All of the
        above is then of d^T: bm lies along n, and bn along m.
      stream_k: whether tiles of what would be an unfilled last wave are computed in parts, so that all SMs multiply
        equally long. Parts are added up through memory, in a fixed order.
      cluster_k: CTAs of a cluster that share a tile, each multiplying an equal range of its k blocks. Their
        accumulators are added up through distributed shared memory, in the order of the ranges. At most 8; more than 1
        with "coop" alone, and without another cluster.
      splits: equal ranges of k blocks that are products of their own, in f32, as along a batch axis. XLA adds them up,
        in order, and computes the epilogue. At most 128.
      sms: on how many SMs the kernel runs at most, and leaves the others to what runs beside it, such as transfers
        between devices; 0 is all of them.
      evict_first: of a, b and the results ("d"), whose lines leave L2 before others: some of the letters of "abd". What
        is read, or written, once leaves room so for what many tiles read.

    Raises:
      ValueError: a field is outside its range, or the accumulators do not fit the registers; lists every reason.

    Examples:
      >>> import cutjax
      >>> config = cutjax.Config(bm=128, bn=128, schedule="pingpong")  # of cutjax.gemm(a, b, config=config)
      >>> config.name(cutjax.Problem(4096, 4096, 4096))
      'sm90_bf16_nn_128x128x64_s4_c1x1_pingpong'
    """

    bm: int = 128
    bn: int = 256
    bk: int = 64
    stages: int = 4
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: str = "coop"
    raster: int = 8
    swap: bool = False
    stream_k: bool = False
    cluster_k: int = 1
    splits: int = 1
    sms: int = 0
    evict_first: str = ""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "schedule":
                if value not in SCHEDULES:
                    raise ValueError(f"Config: schedule={value!r}, expected one of {SCHEDULES}")
            elif field.name == "evict_first":
                if value not in EVICTED:
                    raise ValueError(f"Config: evict_first={value!r}, expected one of {EVICTED}")
            elif isinstance(field.default, bool):
                if not isinstance(value, (bool, np.bool_)):
                    raise ValueError(f"Config: {field.name}={value!r}, expected a bool")
                object.__setattr__(self, field.name, bool(value))
            elif isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ValueError(f"Config: {field.name}={value!r}, expected an int")
            else:
                object.__setattr__(self, field.name, operator.index(value))  # as numpy has it too
        reasons = []
        if self.bm not in (64, 128, 256):
            reasons.append(f"bm={self.bm}: a warpgroup's wgmma has 64 rows, so bm is 64, 128 or 256")
        if self.bn not in range(8, 257, 8):
            reasons.append(f"bn={self.bn}: wgmma takes multiples of 8 columns, at most 256")
        if self.bk not in (64, 128):
            reasons.append(f"bk={self.bk}: a 128-byte swizzled row holds 64 elements, so bk is 64 or 128")
        if not 2 <= self.stages <= 16:
            reasons.append(f"stages={self.stages}: loading one stage while reading another takes 2, at most 16")
        if (self.cluster_m, self.cluster_n) not in ((1, 1), (2, 1), (1, 2)):
            reasons.append(f"cluster {self.cluster_m}x{self.cluster_n}: one of 1x1, 2x1, 1x2")
        if self.cluster_m == 2 and self.bn % 16:
            reasons.append(f"bn={self.bn} with cluster_m=2: each of the cluster loads whole units of 8 columns")
        if self.schedule == "pingpong" and self.bm == 256:
            reasons.append("bm=256 with pingpong: one warpgroup holds the whole tile, so bm is 64 or 128")
        if self.raster == 0:
            reasons.append("raster=0: a band has at least one row (positive) or column (negative) of tiles")
        if not 1 <= self.cluster_k <= 8:
            reasons.append(f"cluster_k={self.cluster_k}: a cluster has 1 to 8 CTAs")
        if self.cluster_k != 1 and (self.schedule == "pingpong" or (self.cluster_m, self.cluster_n) != (1, 1)):
            reasons.append(f"cluster_k={self.cluster_k}: CTAs share one tile, in a cluster 1x1, and warpgroups too")
        if self.parts > 1 and self.stream_k:
            reasons.append(f"stream_k with cluster_k={self.cluster_k}, splits={self.splits}: k is divided in one way")
        if not 1 <= self.splits <= 128:
            reasons.append(f"splits={self.splits}: XLA adds up 1 to 128 parts")
        if self.sms < 0:
            reasons.append(f"sms={self.sms}: a kernel runs on at least one SM; 0 is all of them")
        if self.sms and self.cluster_k != 1:
            reasons.append(
                f"sms={self.sms} with cluster_k={self.cluster_k}: each cluster has one tile, and is launched"
            )
        if not reasons and self.accumulator_registers > MAX_ACCUMULATORS:
            reasons.append(
                f"{self.bm}x{self.bn} {self.schedule} needs {self.accumulator_registers} accumulator registers, "
                f"at most {MAX_ACCUMULATORS} a thread"
            )
        if reasons:
            raise ValueError("Config: " + "; ".join(reasons))

    def name(self, problem: Problem) -> str:
        """Returns the name of the kernel wherever it is seen: HLO, profiler, explain, benchmark rows."""
        if windows.in_parts(problem, self.splits):
            problem = problem.bare
        dtypes = short(problem.a.dtype.name) + problem.math
        if problem.bs[0].dtype != problem.a.dtype:
            dtypes += f"x{short(problem.bs[0].dtype.name)}"
        halves = operands.in_halves(problem.bs[0], problem.a)
        if halves and (scale := problem.bs[0].scale):
            dtypes += f"by{scale.k}{short(scale.dtype.name)}" + "z" * (scale.zero is not None)
        if problem.plain and problem.out_dtype != problem.a.dtype:
            dtypes += short(problem.out_dtype.name)
        tile = f"{self.bm}x{self.bn}x{self.bk}_s{self.stages}_c{self.cluster_m}x{self.cluster_n}_{self.schedule}"
        tile += "_swap" if self.swap else ""
        tile += "_stream" if self.stream_k else ""
        tile += f"_k{self.cluster_k}" * (self.cluster_k > 1) + "_parts" * (self.splits > 1)
        tile += f"_first_{self.evict_first}" if self.evict_first else ""
        ragged = f"_groups_{problem.divided}" if problem.divided else ""
        symmetric = "_symmetric" if problem.symmetric else ""
        strided = "_strided" if problem.order else ""  # other text
        scales = [str(x.scale.mn if x.scale else 0) for x in (problem.a, problem.bs[0])]
        strided += f"_scaled_{'x'.join(scales)}" if scales != ["0", "0"] and not halves else ""
        strided += "_gathered" * problem.a.gathered + windows.name(problem)
        strided += f"_p{problem.a.prologue.digest}" if problem.a.prologue else ""
        strided += f"_sum{len(summands(problem))}" * (len(summands(problem)) > 1)
        name = f"sm90_{dtypes}_{problem.layout}_{tile}{ragged}{symmetric}{strided}"
        if not problem.plain:
            name += f"_e{problem.epilogue.digest}"
        pitch, full = math.gcd(problem.n, 16), [out for out in problem.epilogue.outputs if not out.reduce]
        full += [spec for spec in problem.epilogue.operands if spec.row and spec.col]
        if any(pitch * np.dtype(array.dtype).itemsize % 16 for array in full):  # other text
            name += f"_pitch{pitch}"
        if self.swap and problem.m % 2 and not problem.plain:
            name += "_odd"
        return name


@dataclasses.dataclass(frozen=True, eq=False)
class Configs(Sizes):
    """Many configs: a column for each field that prices and limits read, but for what all have in common.

    The order of tiles is none of these, nor are splits: a config has them when it is taken out.
    """

    bm: np.ndarray
    bn: np.ndarray
    bk: np.ndarray
    stages: np.ndarray
    cluster_m: np.ndarray
    cluster_n: np.ndarray
    schedule: np.ndarray
    swap: bool
    stream_k: np.ndarray
    cluster_k: np.ndarray
    splits: ClassVar[int] = 1
    raster: ClassVar[int] = 1
    sms: ClassVar[int] = 0
    evict_first: ClassVar[str] = ""

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, ...]], swap: bool) -> Configs:
        """Makes those of rows (bm, bn, bk, stages, cluster_m, cluster_n, schedule), whose contraction is whole."""
        bm, bn, bk, stages, cluster_m, cluster_n, schedule = map(np.array, zip(*rows, strict=True))
        one = np.ones_like(bm)
        return cls(bm, bn, bk, stages, cluster_m, cluster_n, schedule, swap, one > 1, one)

    def __len__(self) -> int:
        return len(self.bm)

    def take(self, rows: np.ndarray, **columns: np.ndarray) -> Configs:
        """Returns the configs of some rows, with other columns."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in ("swap", *columns))
        return Configs(**{name: getattr(self, name)[rows] for name in names}, **columns, swap=self.swap)

    def deep(self, stages: np.ndarray) -> Configs:
        """Returns the same with other stages, and all columns that follow from fields: none reads stages."""
        found = copy.copy(self)
        object.__setattr__(found, "stages", stages)
        return found


class Some(Taken, Sizes):
    """Some configs: rows of a table, of which columns are taken as they are asked for, and the splits of each."""

    _FIELDS = tuple(field.name for field in dataclasses.fields(Configs) if field.name != "swap")

    def __init__(self, table: Configs, at: np.ndarray, splits: np.ndarray):
        super().__init__(table, at, table=table, at=at, splits=splits)

    def __len__(self) -> int:
        return len(self.at)

    def take(self, rows: np.ndarray) -> Some:
        """Returns some of them."""
        return Some(self.table, self.at[rows], self.splits[rows])

    def rows(self, rows: np.ndarray) -> list[tuple[Any, ...]]:
        """Returns the fields of some of them, as what tells configs apart."""
        columns = [getattr(self.table, name)[self.at[rows]] for name in self._FIELDS]
        return [
            (self.swap, *fields) for fields in zip(*(x.tolist() for x in (*columns, self.splits[rows])), strict=True)
        ]

    def fields(self, row: int) -> dict[str, Any]:
        """Returns the fields of a config, but for the order of its tiles."""
        found = {name: getattr(self.table, name)[self.at[row]].item() for name in self._FIELDS}
        return {**found, "swap": self.swap, "splits": self.splits[row].item()}


# 232 registers a consumer thread; what the mainloop and epilogue need beside the accumulators was read off the
# compiler's report: every config up to here compiles without a spill (tests/kernels/test_kernels.py compiles them all).
MAX_ACCUMULATORS = 192
MOST_BY_WARPS = 8  # columns of a tile: of 16 they were as fast as wgmma, of 24 and 32 slower
FEW = 64  # columns of a tile, beside which a warpgroup of 128 rows decodes twice as much at once
# Columns of a tile of 128 rows whose k blocks four warpgroups share, of one of 256, and those that three share.
FEWEST_OF_SLICES, FEW_OF_SLICES, MOST_OF_SLICES = 8, 16, 32
