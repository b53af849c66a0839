"""The config of a kernel: the frozen, validated choice of tiles, pipeline, parts of k and tile order."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator

import numpy as np

from cutjax.dtypes import short
from cutjax.kernels.joined import Joined
from cutjax.kernels.operand import Gathered, Im2col, Taps
from cutjax.kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class Config:
    """One kernel of the mma family: block tile, warp tile and instruction, from the outside in.

    Attributes:
      bm, bn, bk: tile of the result that a block computes, and depth of one stage, in elements. bk is 64 or 128 bytes.
        A bm of 1, 2 or 4 is that of a slim kernel, which multiplies so few rows without tensor cores, as fast as b is
        read: it has no stages but what registers hold, so stages is 1, and all warps read, whatever wm, wn and
        sliced_k.
      wm, wn: tile of the result that a warp computes, or, of a slim kernel, stores. They divide bm and bn, and are
        multiples of 16; in a slim kernel wm is bm.
      sliced_k: warps that share a warp tile, each multiplying its slices of every stage. They add up what they have in
        shared memory, in order. 1, 2 or 4; of a slim kernel up to 16.
      stages: tiles of a and b kept in flight in shared memory.
      splits: equal ranges of k blocks that are products of their own, as along a batch axis. XLA adds them up, in
        order, and computes the epilogue. At most 128.
      raster: tile order. Positive: bands of that many rows of tiles, walked column by column. Negative: bands of
        columns, walked row by row.
      blocks: thread blocks that share an SM: registers are divided among them.
      swap: whether the operands are swapped, for few columns: a slim kernel computes ``d^T = b^T a^T`` and stores it
        transposed. All of the other fields are those of the transposed result.
      tma: whether TMA loads tiles, by one thread, from sm_90 on. Rows of the operands begin at multiples of 16 bytes
        then.

    Raises:
      ValueError: a field is outside its range; lists every reason.

    Examples:
      >>> import cutjax
      >>> config = cutjax.MmaConfig(bm=64, bn=64, wm=32, stages=3)  # of cutjax.gemm(a, b, config=config)
      >>> config.name(cutjax.Problem.of(4096, 4096, 4096, arch="sm_80"))
      'mma_bf16_nn_64x64x32_w32x32_s3'
    """

    bm: int = 128
    bn: int = 128
    bk: int = 32
    wm: int = 64
    wn: int = 32
    sliced_k: int = 1
    stages: int = 4
    splits: int = 1
    raster: int = 8
    blocks: int = 1
    swap: bool = False
    tma: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, (bool, np.bool_)):
                    raise ValueError(f"MmaConfig: {field.name}={value!r}, expected a bool")
                object.__setattr__(self, field.name, bool(value))
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ValueError(f"MmaConfig: {field.name}={value!r}, expected an int")
            object.__setattr__(self, field.name, operator.index(value))  # as numpy has it too
        reasons = []
        for block, warp in (("bm", "wm"), ("bn", "wn")):
            tile, part = getattr(self, block), getattr(self, warp)
            if part not in (16, 32, 64, 128) and not (block == "bm" and self.slim and part == tile):
                reasons.append(f"{warp}={part}: a warp computes 16, 32, 64 or 128 rows and columns")
            elif tile not in range(part, 257, part):
                reasons.append(f"{block}={tile}: a multiple of {warp}={part}, at most 256")
        if self.bk not in (4, 8, 16, 32, 64, 128):
            reasons.append(f"bk={self.bk}: a power of two from 4 to 128")
        if self.sliced_k not in ((1, 2, 4, 8, 16) if self.slim else (1, 2, 4)):
            reasons.append(f"sliced_k={self.sliced_k}: 1, 2 or 4 warps share a tile, of a slim kernel up to 16")
        if self.slim and self.stages != 1:
            reasons.append(f"stages={self.stages} with bm={self.bm}: a slim kernel has 1, in registers")
        if not self.slim and not 2 <= self.stages <= 8:
            reasons.append(f"stages={self.stages}: loading one stage while reading another takes 2, at most 8")
        if not 1 <= self.splits <= 128:
            reasons.append(f"splits={self.splits}: XLA adds up 1 to 128 parts")
        if self.raster == 0:
            reasons.append("raster=0: a band has at least one row (positive) or column (negative) of tiles")
        if self.tma and self.slim:
            reasons.append(f"tma with bm={self.bm}: slim kernels load b to registers")
        if self.swap and not self.slim:
            reasons.append(f"swap with bm={self.bm}: slim kernels alone swap operands, bm is 1, 2 or 4")
        if not 1 <= self.blocks <= 8:
            reasons.append(f"blocks={self.blocks}: an SM has 1 to 8 of them")
        if not reasons and self.threads not in (32, 64, 128, 256, 512):
            reasons.append(f"{self.threads // 32} warps: 1, 2, 4, 8 or 16")
        if reasons:
            raise ValueError("MmaConfig: " + "; ".join(reasons))

    @property
    def slim(self) -> bool:
        """True of a few rows, without tensor cores."""
        return self.bm in (1, 2, 4)

    @property
    def warps(self) -> tuple[int, int, int]:
        """Warps along m, n and k."""
        return self.bm // self.wm, self.bn // self.wn, self.sliced_k

    @property
    def threads(self) -> int:
        """Threads of a block."""
        m, n, k = self.warps
        return 32 * m * n * k

    @property
    def epilogue_columns(self) -> int:
        """Columns of a tile that one warp stores."""
        return self.wn

    def name(self, problem: Problem) -> str:
        """Returns the name of the kernel wherever it is seen: HLO, profiler, explain, benchmark rows."""
        if self.splits > 1:
            problem = problem.bare
        dtypes = short(problem.a.dtype.name)
        if problem.bs[0].dtype != problem.a.dtype:
            dtypes += f"x{short(problem.bs[0].dtype.name)}"
        if problem.plain and problem.out_dtype != problem.a.dtype:
            dtypes += short(problem.out_dtype.name)
        tile = f"{self.bm}x{self.bn}x{self.bk}_w{self.wm}x{self.wn}_s{self.stages}"
        tile += f"_k{self.sliced_k}" * (self.sliced_k > 1) + f"_b{self.blocks}" * (self.blocks > 1)
        tile += "_tma" * self.tma + "_swap" * self.swap + "_parts" * (self.splits > 1)
        ragged = f"_groups_{problem.divided}" if problem.divided else ""
        symmetric = "_symmetric" if problem.symmetric else ""
        strided = "_strided" if problem.order else ""
        strided += "".join(f"_{word}" for word in _views(problem))
        name = f"mma_{dtypes}{problem.math}_{problem.layout}_{tile}{ragged}{symmetric}{strided}"
        return name if problem.plain else f"{name}_e{problem.epilogue.digest}"


def _views(problem: Problem) -> Iterator[str]:
    """Yields the words of the operands' views."""
    view = problem.a.view
    if problem.a.prologue is not None:
        yield f"p{problem.a.prologue.digest}"
    if isinstance(view, Joined):
        yield f"sum{len(view.ks)}"
    if isinstance(view, Gathered):
        yield "gathered"
    if isinstance(view, Im2col):
        yield f"im2col{len(view.image)}d"
        if set(view.spread) != {1}:
            yield "spread"
        if isinstance(problem.bs[0].view, Taps):
            yield "taps"
        if view.groups > 1:
            yield "groups_n"
