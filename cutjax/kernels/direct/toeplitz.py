"""The sizes and the predicted time of a convolution by Toeplitz matrices: wide windows, on the tensor cores."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from cutjax.kernels import reasons
from cutjax.kernels.device import Device
from cutjax.kernels.direct.config import Config
from cutjax.kernels.direct.cost import shares_us
from cutjax.kernels.direct.geometry import Geometry
from cutjax.kernels.direct.text import as_large, held, planes, reduced
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import instructions
from cutjax.runtime.architectures import number

STRIP, FRAGMENT = 8, 16  # places of a strip; and strips of a fragment
STEP = 2  # rows of pixels of a stage
WIDEST = 9  # window: 16 pixels are read for 8 places
DTYPES = ("bfloat16", "float16")
LANES = (8, 16)  # warps of a block; 4 would read half of each sector of L2
BESIDE = 40  # registers of a thread beside sums and matrices
# Fitted to 107 kernels of 10 layers on an H200. Clocks are those of a row of pixels: of a warp on a quarter of an SM,
# beside its products, and more of a weight gradient; of a block that is alone, at least. A block has others before its
# first row.
LAUNCH_US, SUM_US = 4.4, 4.1
WARP_CLOCKS, GRADIENT_CLOCKS, ROW_CLOCKS, PROLOGUE_CLOCKS = 72, 59, 270, 4200
MMA_CLOCKS = 6.5  # of m16n8k16 on a quarter of an SM of sm_90
ELEMENTWISE_CLOCKS = 9  # of an instruction of an epilogue
REDUCTION_CLOCKS = 4
OF_EIGHT = 1.05  # blocks of 8 warps read 32 bytes in a row, those of 16 warps 64
ALONE = 1.06  # of a weight gradient by one block an SM; six pairs of kernels took 1.02 to 1.09 times as long
MOVED, OVERLAPPED = 0.81, 0.39  # shares: of a copy's rate; of bytes' or clocks' time, the shorter one, that is added
# Where operands are as large as the result, fitted to 35 kernels of 5 layers: the share of a copy's rate, how many
# times as long blocks of 8 warps take, and how many times as long rows do whose blocks leave the cache less than this.
MOVED_BESIDE, PIECES, CROWDED, LEAST_CACHE = 0.9, 1.35, 1.24, 8192


@dataclasses.dataclass(frozen=True, eq=False)
class Shape:
    """The sizes of a launch. A block has ``lanes`` warps of two channels each, and `subs` images at once."""

    problem: Problem
    config: Config
    geometry: Geometry

    @property
    def lanes(self) -> int:
        """Warps of a block, each of two channels."""
        return self.config.lanes

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.lanes

    @property
    def tiles(self) -> int:
        """Blocks along channels."""
        return -(-self.geometry.pairs // (2 * self.lanes))

    @property
    def pieces(self) -> int:
        """Parts of a row of the result."""
        return -(-self.geometry.columns.grid // (STRIP * FRAGMENT))

    @property
    def strips(self) -> int:
        """Strips of a part of a row."""
        return -(-self.geometry.columns.grid // (STRIP * self.pieces))

    @property
    def subs(self) -> int:
        """Images that share a fragment."""
        return FRAGMENT // self.strips

    @property
    def read(self) -> tuple[int, int]:
        """Pixels, and places, of a part of a row: as many as an image has in the only one, or at most in one."""
        places, columns = STRIP * self.strips, self.geometry.columns
        left, right = max(columns.first, 0), min(columns.first + places + STRIP, columns.image)
        pixels = right - left if self.pieces == 1 else min(places + STRIP, columns.image)
        return max(pixels, 1), min(columns.grid, places)

    @property
    def chunks(self) -> int:
        """Chunks of an image."""
        return -(-self.geometry.rows.grid // self.config.rows)

    @property
    def groups(self) -> int:
        """Groups of images that share fragments."""
        return -(-self.geometry.view.images // self.subs)

    @property
    def parts(self) -> int:
        """Blocks of the same channels: as many of each chunk and part of a row, and no more than there are groups."""
        kinds = self.pieces * self.chunks
        return kinds * max(1, min(self.config.parts // kinds, self.groups))

    @property
    def rounds(self) -> int:
        """Groups that a block goes through, at most."""
        return self.rounds_of(0)

    def rounds_of(self, part: int) -> int:
        """Returns the groups that a block of this part goes through: every so many-th, from its own on."""
        kinds = self.pieces * self.chunks
        return -(-(self.groups - part // kinds) // (self.parts // kinds))

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.tiles * self.parts

    @property
    def steps(self) -> int:
        """Rows of pixels that a block goes through in a round, those behind an image too."""
        rows = self.geometry.rows
        return self.config.rows + rows.window - 1 + (rows.first if self.chunks == 1 else 0)

    @property
    def loads(self) -> int:
        """Words that a thread copies of each row."""
        return sum(-(-x // (32 // self.subs)) for x in self.read[: 1 + self.geometry.gradient])

    @property
    def unit(self) -> int:
        """Channels that are stored at once."""
        return math.gcd(8, self.geometry.pairs)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages of pixels and of operands like results, and two steps' rows of these."""
        places = STRIP * self.strips
        pitches = [(self.subs * x + 27) // 32 * 32 + 4 for x in (places + STRIP, places)]
        if self.geometry.gradient:
            return 4 * self.lanes * max(self.config.ahead * STEP * sum(pitches), 2 * FRAGMENT * 9)
        epilogue = self.problem.epilogue
        words = sum(np.dtype(out.dtype).itemsize // 2 for out in epilogue.outputs if not out.reduce)
        row = self.lanes * (STRIP * FRAGMENT + (2 if self.lanes > 8 else 4)) * words
        if as_large(epilogue):  # sums, not results
            row = 2 * self.lanes * (STRIP * FRAGMENT + 2)
        planes_bytes = 16 * self.threads * len(planes(epilogue))
        ahead = self.config.ahead * (4 * self.lanes * pitches[0] + planes_bytes)
        return max(STEP * (ahead + 8 * row), self.threads * self.held * 4)

    @property
    def held(self) -> int:
        """Words that a thread has of reductions."""
        return len(reduced(self.problem.epilogue)) * held(self.problem.epilogue)

    @property
    def most_bytes(self) -> int:
        """Shared memory that a block may have."""
        device = self.problem.device
        return min(device.shared_bytes, device.shared_bytes_per_sm // self.config.blocks - 1024)

    @property
    def registers(self) -> int:
        """Registers of a thread, about."""
        older = 8 * (number(self.problem.arch) < 90)
        return 12 * self.geometry.rows.window + self.held + BESIDE + older

    def reasons(self) -> list[str]:
        """Returns the reasons against these sizes."""
        p, c, g, device, found = self.problem, self.config, self.geometry, self.problem.device, []
        if number(p.arch) < 80:
            found.append(f"architecture {p.arch}: Toeplitz matrices are for sm_80 and later")
        if p.a.dtype.name not in DTYPES:
            found.append(f"{p.a.dtype.name}: Toeplitz matrices are of elements of 16 bits")
        plain = all(axis.stride == axis.dilation == axis.spread == axis.every == 1 for axis in (g.rows, g.columns))
        if not plain or g.planes.window != 1 or g.planes.grid != 1 or g.channels * g.multiplier > 1:
            found.append("Toeplitz matrices are of one channel to one, of images without steps")
        if g.pairs % 2:
            found.append(f"{g.pairs} channels: a warp has two")
        if not 2 <= max(g.columns.window, g.rows.window) <= WIDEST:
            found.append(f"a window of {g.rows.window} x {g.columns.window}: up to {WIDEST} along both axes")
        if any(np.dtype(out.dtype).itemsize not in (2, 4) for out in p.epilogue.outputs):
            found.append("results of other than 16 and 32 bits")
        if not c.parts:
            found.append("parts=0: blocks of the same channels")
        if (c.pairs, c.strip, c.threads) != (2, STRIP, self.threads) or c.lanes not in LANES or c.ahead < 2:
            found.append(f"a block has {LANES} warps of 2 channels and strips of 8 places, two rows or more ahead")
        limit = min(255, device.registers_per_sm // (self.threads * c.blocks) // 8 * 8)
        if self.registers > limit:
            found.append(f"about {self.registers} registers a thread, at most {limit}")
        if c.blocks * self.threads > device.max_threads_per_sm:
            found.append(f"blocks={c.blocks} of {self.threads} threads: more than an SM of {device.name} holds")
        if self.shared_bytes > (most := self.most_bytes):
            found.append(f"{self.shared_bytes} bytes of shared memory, at most {most} with {c.blocks} blocks an SM")
        images = g.view.images + 2 * self.subs * self.parts
        sizes = {
            "blocks": self.blocks,
            "pixels": images * (g.rows.image + g.rows.grid + 64) * (g.columns.image + 128),
            "steps": self.rounds * (self.steps + 64),
        }
        return found + reasons.of_counters(sizes)


def predict(shape: Shape, device: Device) -> float:
    """Returns the predicted microseconds of a launch."""
    p, c, g = shape.problem, shape.config, shape.geometry
    rate = dict(device.flops).get("float32", 0.0)
    if not rate or not device.sms:
        return math.inf
    clock = rate / device.sms / 256  # of an SM
    multiply = 2 * g.rows.window * MMA_CLOCKS
    row = multiply + WARP_CLOCKS + GRADIENT_CLOCKS * g.gradient
    finished = ELEMENTWISE_CLOCKS * instructions(p.epilogue) + REDUCTION_CLOCKS * len(reduced(p.epilogue))
    moved = MOVED
    if beside := not g.gradient and as_large(p.epilogue):  # then rows of pixels that end none of the result make none
        finished *= c.rows / shape.steps
        moved = MOVED_BESIDE / (PIECES if c.lanes == 8 else 1.0)
    row = (row + finished) * shape.lanes / 4
    if g.gradient:
        row *= ALONE if c.blocks == 1 else 1.0
    else:
        row *= OF_EIGHT if c.lanes == 8 else 1.0
    if beside and device.shared_bytes_per_sm - c.blocks * (shape.shared_bytes + 1024) < LEAST_CACHE:
        row *= CROWDED
    # Blocks of an SM share it; one alone waits for each row in turn. Behind the first wave SMs take blocks as they end
    # others, and the last SM has half of a block more than the mean.
    even, mean = shape.blocks / device.sms, shape.groups * shape.pieces * shape.chunks / shape.parts
    if even <= c.blocks:
        of_sm, alone = math.ceil(even), shape.rounds
        each = [shape.rounds_of(i * device.sms // shape.tiles) for i in range(of_sm)]
        rounds = of_sm * shape.rounds if g.gradient else sum(each)  # of a gradient one alone was as slow as with others
    else:
        of_sm = even + 0.5
        rounds, alone = max(shape.rounds, of_sm * mean), of_sm / c.blocks * mean
    rows = shape.steps * max(rounds * row, alone * ROW_CLOCKS)
    busy = 1e6 * (max(1.0, of_sm / c.blocks) * PROLOGUE_CLOCKS + rows) / clock
    written = 8 * shape.parts * g.taps * g.pairs if g.gradient else 0
    memory = 1e6 * (p.bytes + written) / (moved * device.bytes_per_second)
    more_us = SUM_US * g.gradient + shares_us(p, shape.parts)
    return LAUNCH_US + more_us + max(busy, memory) + OVERLAPPED * min(busy, memory)
