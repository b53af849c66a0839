"""Rows copied by index: the kernel of bulk copies, its plan, and the choice between it and XLA's gather."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from cutjax.dtypes import DTYPES, bits_of, short
from cutjax.kernels import reasons, tuned
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.device import Device
from cutjax.runtime import sources
from cutjax.runtime.choice import Choice
from cutjax.runtime.compiler import Cubin, compile_kernel
from cutjax.runtime.launch import Call, Int64, Launch, Pointer

ARCH = "sm_90a"
THREADS = 256
LANES = 32  # a lane of a warp stores a token's row for one of its k pairs
LAUNCH_US = 2.0
# The shares of a copy's rate at which XLA's gather and the kernel move what they read and write, on an H200
# (benchmarks/results/gather-h200.json): XLA's 0.67 to 0.75, the kernel's 0.79 to 0.90.
XLA_SHARE = 0.72
SHARE = 0.84
STORE_US = 0.028  # of an SM, for a bulk store however short
SHORT_BYTES = 1024  # of rows for which more warps copy, whose number stores wait for


@dataclasses.dataclass(frozen=True)
class Config:
    """Buffers of a block: warps that copy, the stages of each, and the most bytes of a stage."""

    warps: int = 4
    stages: int = 4
    stage_bytes: int = 4096

    def __post_init__(self):
        if not (0 < self.warps < THREADS // 32 and self.stages >= 2 and self.stage_bytes % 128 == 0 < self.stage_bytes):
            raise ValueError(f"a block has up to 7 warps that copy, each 2 stages or more of 128-byte units: {self}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Rows ``[*batch, rows, d]`` of tokens ``[*batch, tokens, d]``, each of which has k of them.

    Attributes:
      tokens, rows, k, d: sizes.
      dtype: of the elements, which are bytes to the kernel.
      index_dtype: of the permutation and its inverse.
      batch: of the result.
      counts: how many of the batch x, the permutation and the inverse each have.
      device: which.
    """

    tokens: int
    rows: int
    k: int
    d: int
    dtype: np.dtype
    index_dtype: np.dtype
    batch: tuple[int, ...]
    counts: tuple[int, int, int]
    device: Device

    @classmethod
    def of(cls, x: Any, permutation: Any, inverse: Any, device: Device) -> Problem:
        """Makes one of the avals of ``dispatch_p``."""
        batch = tuple(np.broadcast_shapes(x.shape[:-2], permutation.shape[:-1]))
        counts = math.prod(x.shape[:-2]), math.prod(permutation.shape[:-1]), math.prod(inverse.shape[:-2])
        index = np.promote_types(permutation.dtype, inverse.dtype)
        tokens, k = inverse.shape[-2:]
        return cls(tokens, permutation.shape[-1], k, x.shape[-1], x.dtype, index, batch, counts, device)

    @property
    def size(self) -> int:
        """The number of examples in the batch."""
        return math.prod(self.batch)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.d * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """0 where there is nothing to move, else the elements of the result; no arithmetic is done."""
        return self.size * self.rows * self.d

    @property
    def bytes(self) -> int:
        """The least bytes that are moved: each token read once, each row written."""
        return (self.counts[0] * self.tokens + self.size * self.rows) * self.row_bytes

    @property
    def xla_us(self) -> float:
        """The predicted time of XLA's gather, which reads a row for each that it writes."""
        moved = 2 * self.size * self.rows * self.row_bytes
        return LAUNCH_US + 1e6 * moved / (XLA_SHARE * self.device.bytes_per_second)

    def __str__(self) -> str:
        shape, to = (",".join(map(str, (*self.batch, size, self.d))) for size in (self.tokens, self.rows))
        return f"rows {short(self.dtype.name)}[{shape}] -> [{to}]"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A config for a problem that it serves: text, arguments and launch."""

    problem: Problem
    config: Config

    @property
    def name(self) -> str:
        """The entry symbol: warps that copy, stages of each, bytes of a stage."""
        c = self.config
        return f"sm90_gather_{c.warps}x{c.stages}x{c.stage_bytes}"

    @property
    def arch(self) -> str:
        """The architecture it is compiled for."""
        return self.problem.device.arch

    @property
    def piece_bytes(self) -> int:
        """The bytes of a row that are copied at once, where the row is no shorter: whole lines, nearly equal pieces."""
        count = -(-self.problem.row_bytes // self.config.stage_bytes)
        return -(-self.problem.row_bytes // (128 * count)) * 128

    @property
    def pieces(self) -> int:
        """The copies that a row takes."""
        return -(-self.problem.row_bytes // self.piece_bytes)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""
        p = self.problem
        x, permutation, inverse = (count > 1 for count in p.counts)
        return (
            Argument("const char* x", Pointer(0)),
            Argument("const int* permutation", Pointer(1)),
            Argument("const int* inverse", Pointer(2)),
            Argument("char* out", Pointer(3)),
            integer("batch", p.size),
            integer("tokens", p.tokens),
            integer("rows", p.rows),
            integer("k", p.k),
            integer("row_bytes", p.row_bytes),
            integer("piece_bytes", self.piece_bytes),
            integer("pieces", self.pieces),
            Argument("long long x_step", Int64(x * p.tokens * p.row_bytes)),
            Argument("long long permutation_step", Int64(permutation * p.rows)),
            Argument("long long inverse_step", Int64(inverse * p.tokens * p.k)),
        )

    @property
    def source(self) -> str:
        """The device text; sizes are arguments, so one text serves every shape."""
        c = self.config
        constants = {"WARPS": c.warps, "STAGES": c.stages, "STAGE_BYTES": c.stage_bytes, "THREADS": THREADS}
        parts = ["common/atoms.cuh", "common/tma.cuh", "sm90/atoms.cuh", "sm90/gather.cuh"]
        return sources.source(self.name, constants, parts)

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: stages, and a barrier of each."""
        return self.config.warps * self.config.stages * (self.config.stage_bytes + 8)

    @property
    def blocks(self) -> int:
        """As many as find something to do; no more than one on each SM is launched."""
        p, warps = self.problem, self.config.warps
        moving = -(-p.size * p.tokens * self.pieces // warps)
        return max(moving, -(-p.size * p.rows // (THREADS - 32 * warps)))

    def reasons(self) -> list[str]:
        """Returns the reasons against counters that would pass 32 bits."""
        p = self.problem
        counts = {
            "pieces": p.size * p.tokens * self.pieces,
            "rows": p.size * p.rows + THREADS,
            "pairs": p.tokens * p.k,
            "bytes of a row": p.row_bytes + self.piece_bytes,
        }
        return reasons.of_counters(counts)

    def compile(self) -> Cubin:
        """Compiles the kernel, or takes it from the cache."""
        return compile_kernel(self.source, name=self.name, arch=self.arch)

    def call(self) -> Call:
        """Returns the compiled kernel and the plan of its launch."""
        return Call((self.launch(self.compile().image),))

    def launch(self, cubin: bytes) -> Launch:
        """Returns the launch of a cubin."""
        return Launch(
            kernel=self.name,
            cubin=cubin,
            grid=(self.blocks, 1, 1),
            block=(THREADS, 1, 1),
            shared_bytes=self.shared_bytes,
            blocks_per_sm=1,
            params=tuple(argument.value for argument in self.arguments),
        )


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, backend: str) -> Choice[Problem, Kernel]:
    """Returns the kernel that runs under a backend, or the reasons why XLA does."""
    if against := why_not(problem):
        return Choice(problem, tuple(against))
    kernel = shipped(problem)
    least_us = 1e6 * problem.bytes / problem.device.bytes_per_second
    stores = problem.size * problem.tokens * kernel.pieces * problem.k
    us = LAUNCH_US + max(least_us / SHARE, STORE_US * stores / problem.device.sms)
    if backend != "cuda" and problem.xla_us < tuned.SURE * us:
        why = f"XLA's gather is predicted to take {problem.xla_us:.1f} us, bulk copies {us:.1f}"
        return Choice(problem, (why,))
    return Choice(problem, ("bulk copies",), kernel, us, least_us / us)


def copied_us(rows: int, row_bytes: int, device: Device) -> float:
    """Returns the predicted time of copying so many rows of few tokens."""
    share = SHARE if device.arch == ARCH else XLA_SHARE / 2  # XLA reads a row for each that it writes
    return LAUNCH_US + 1e6 * rows * row_bytes / (share * device.bytes_per_second)


def shipped(problem: Problem) -> Kernel:
    """Returns the kernel that ships for a problem."""
    return Kernel(problem, Config(warps=6 if problem.row_bytes <= SHORT_BYTES else 4))


def why_not(problem: Problem) -> list[str]:
    """Returns the reasons against the kernel."""
    p = problem
    if 0 in (p.size, p.tokens, p.rows, p.k, p.d):
        return ["a size is 0: nothing to launch"]
    found = []
    if p.device.arch != ARCH:
        found.append(f"{p.device.arch}: gathers by bulk copies are for {ARCH}")
    if p.dtype.name not in DTYPES or bits_of(p.dtype) % 8:
        found.append(f"elements of {p.dtype}: the kernel copies whole bytes")
    elif p.row_bytes % 16:
        found.append(f"rows of {p.row_bytes} bytes: bulk copies move multiples of 16")
    if p.index_dtype != np.int32:
        found.append(f"indices of {p.index_dtype}: the kernel reads int32")
    if p.k > LANES:
        found.append(f"k = {p.k}: a row is stored up to {LANES} times")
    if any(count not in (1, p.size) for count in p.counts):
        found.append(f"batch {p.batch}: of x, the permutation and its inverse, each has all of it or none")
    return [*found, *shipped(p).reasons()]
