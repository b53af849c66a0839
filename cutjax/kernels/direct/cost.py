"""The sizes of a kernel, of a thread's registers, and its predicted time: of the bytes, or of the instructions."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from cutjax.kernels import reasons
from cutjax.kernels.device import Device
from cutjax.kernels.direct.config import Config
from cutjax.kernels.direct.geometry import Geometry
from cutjax.kernels.direct.text import as_large, reduced
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import instructions

WEIGHT_REGISTERS = 40  # up to which weights are in registers, not in shared memory
BESIDE = 25  # registers of a thread beside sums, pixels and weights, calibrated on the compiler's report
REDUCED_BYTES = 32768  # of shared memory in which a block adds up a weight gradient
MOST_SUMS = 72  # of a thread of a weight gradient, about
MOST_PRODUCTS = (800, 400)  # of a thread in one turn of its loop, which is unrolled: code that compiles in a second
LATENCY_US, LAUNCH_US, SUM_US = 1.0, 2.0, 3.0
# In which XLA adds up blocks' shares of a reduction, and one block's: 57 of them, 80% within 0.82 to 1.21.
SHARES_US, SHARE_US = 1.1, 0.0027
# Of spread images, where an epilogue has operands as large as the result, and reductions. Clocks: of a block before its
# first row, and for each weight that a thread puts into shared memory; of an instruction, which waits since few threads
# have registers, and those that start it; of a warp's word of weights out of shared memory. Instructions beside those
# of all kernels: of a row, and of a place that may be beyond its end. 22 kernels of 3 gradients took 0.86 to 1.12.
BEGIN_CLOCKS, WEIGHT_CLOCKS, WAIT_CLOCKS, STARTED, WORD_CLOCKS, ROW, PLACE = 8800, 178, 1.22, 0.62, 0.55, 30, 20
ISSUED = 0.75  # share of the instructions that an SM could start
# The logarithm of what was measured over what these instructions and bytes take, as a sum over what is true of a
# kernel: 97 kernels of 31 depthwise convolutions on an H200 (benchmarks/results, conv-tune-1 and conv-tune-2). "strip"
# is of each time that a strip is half of 4 places, where no image of several rows is on its way. "short", of spread
# images and such strips, and "alone" and "line", of weight gradients by one block an SM, of small images and of
# sequences, are of fourteen kernels since.
OVER = {
    "always": 0.06,
    "shared": 0.28,
    "strip": 0.15,
    "ahead": -0.29,
    "spread": -0.57,
    "small": 0.3,
    "short": 0.1,
    "alone": 0.06,
    "line": 0.18,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Shape:
    """The sizes of a thread's work and of a launch."""

    problem: Problem
    config: Config
    geometry: Geometry

    @functools.cached_property
    def lanes(self) -> int:
        """Threads of a block along channels: no more than there is work for, in equal tiles."""
        threads = -(-self.geometry.pairs // self.config.pairs)
        return -(-threads // -(-threads // self.config.lanes))

    @property
    def across(self) -> int:
        """Strips of a block."""
        return max(1, self.config.threads // self.lanes)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.across

    @property
    def tiles(self) -> int:
        """Blocks along channels."""
        return -(-self.geometry.pairs // (self.config.pairs * self.lanes))

    @property
    def words(self) -> int:
        """Words of a sum."""
        return self.problem.accumulator.itemsize // 4

    @property
    def inputs(self) -> int:
        """Channels of the image that a thread reads."""
        c, g = self.config, self.geometry
        return c.pairs // g.multiplier if c.pairs % g.multiplier == 0 else 1

    @property
    def columns(self) -> int:
        """Columns of the result that a thread has."""
        return self.config.pairs // self.geometry.channels

    @functools.cached_property
    def read(self) -> int:
        """Pixels of a strip."""
        axis, strip = self.geometry.columns, self.config.strip
        used = {axis.stride * t + axis.dilation * k - axis.low for t in range(strip) for k in range(axis.window)}
        return sum(at >= 0 and at % axis.spread == 0 for at in used)

    @property
    def slides(self) -> bool:
        """True if a thread goes along the one axis with a window of pixels in registers."""
        return self.geometry.slides and self.words == 1 and self.config.strip == 1

    @property
    def in_registers(self) -> bool:
        """True if weights are in registers, not in shared memory."""
        g = self.geometry
        return self.slides or (g.planes.window == 1 and g.taps * self.config.pairs * self.words <= WEIGHT_REGISTERS)

    # ---- of a weight gradient ----

    @functools.cached_property
    def window_rows(self) -> int:
        """Rows of taps that a thread has."""
        h, w = self.geometry.rows.window, self.geometry.columns.window
        most = max(1, MOST_SUMS // (w * self.config.pairs * self.words))
        return -(-h // -(-h // most))

    @property
    def row_slices(self) -> int:
        """Parts of a window's rows."""
        return -(-self.geometry.rows.window // self.window_rows)

    @property
    def slices(self) -> int:
        """Parts of a window."""
        return self.geometry.planes.window * self.row_slices

    @functools.cached_property
    def parts(self) -> int:
        """Parts of the places: of a weight gradient no more than blocks find strips for."""
        blocks = -(-self.items // self.across)
        return max(1, min(self.config.parts, blocks)) if self.geometry.gradient else blocks

    @property
    def taps_at_once(self) -> int:
        """Taps that a block adds up at once."""
        taps = self.window_rows * self.geometry.columns.window
        return max(1, min(taps, REDUCED_BYTES // (self.threads * self.config.pairs * 4 * self.words)))

    # ---- of a launch ----

    @functools.cached_property
    def items(self) -> int:
        """Chunks of strips."""
        return self.geometry.items(self.config.strip, self.config.rows)

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        if self.geometry.gradient:
            return self.tiles * self.slices * self.parts
        return self.tiles * self.parts

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        if self.geometry.gradient:
            return self.taps_at_once * self.threads * self.config.pairs * 4 * self.words
        weights = 0 if self.in_registers else self.geometry.taps * self.lanes * self.config.pairs * 4 * self.words
        return max(weights, self.threads * self.held * 4)

    @property
    def held(self) -> int:
        """Words that a thread has of reductions."""
        return len(reduced(self.problem.epilogue)) * self.columns * self.words

    @property
    def whole_strips(self) -> bool:
        """True if no strip ends beyond a row."""
        return self.geometry.columns.grid % (self.config.strip * self.geometry.columns.every) == 0

    @property
    def beside(self) -> int:
        """Words of operands that a thread loads for each place."""
        operands = self.problem.epilogue.operands
        nbytes = (np.dtype(x.dtype).itemsize * (self.columns if x.col else 1) for x in operands if x.row)
        return sum(-(-each // 4) for each in nbytes)

    @property
    def products(self) -> int:
        """Products of a thread in one turn of its loop."""
        c, g = self.config, self.geometry
        if g.gradient:
            return self.window_rows * g.columns.window * c.strip * c.pairs
        return c.ahead * g.rows.window * g.rows.steps[1] * g.columns.window * c.strip * c.pairs // g.columns.spread

    @property
    def registers(self) -> int:
        """Registers of a thread, about."""
        c, g, size = self.config, self.geometry, self.problem.a.dtype.itemsize
        pixel, strip = -(-self.inputs * size // 4), self.read
        if self.slides:
            return c.pairs * (2 * g.rows.window + 3) + c.ahead * pixel + BESIDE - 1
        if g.gradient:
            sums = self.window_rows * g.columns.window * c.pairs
            result = c.strip * self.columns
            held = (sums + result) * self.words + 2 * strip * pixel + c.strip * -(-self.columns * size // 4)
            return held + 2 * self.inputs * self.words + BESIDE + 6 * self.window_rows
        sums = g.rows.open[1] * c.strip * c.pairs * self.words
        ahead = (c.ahead + 1) * g.rows.steps[0] * strip * pixel
        weights = g.taps * c.pairs * self.words if self.in_registers else 2 * c.pairs * self.words
        held = self.held + 6 * bool(self.held)  # and where a block's share goes
        held += self.beside * g.rows.steps[1] * c.strip
        return sums + ahead + g.rows.steps[0] * strip * self.inputs * self.words + weights + held + BESIDE

    def reasons(self) -> list[str]:
        """Returns the reasons against these sizes."""
        c, g, device = self.config, self.geometry, self.problem.device
        found = []
        if g.pairs % c.pairs or c.pairs % g.channels or (c.pairs % g.multiplier and g.multiplier % c.pairs):
            found.append(
                f"pairs={c.pairs} of {g.view.groups} groups of {g.channels} channels to {g.multiplier}: a thread has "
                "whole channels"
            )
        if c.strip % g.columns.steps[1]:
            found.append(f"strip={c.strip}: pixels repeat every {g.columns.steps[1]} places")
        if c.rows % g.rows.steps[1]:
            found.append(f"rows={c.rows}: the image's rows repeat every {g.rows.steps[1]}")
        if c.ahead > 1 and (g.gradient or g.planes.window > 1):
            found.append(f"ahead={c.ahead}: of a result alone, without planes")
        if g.columns.count(c.strip) > 64:
            found.append(f"a strip of {c.strip} reads {g.columns.count(c.strip)} pixels, at most 64")
        if self.products > (most := MOST_PRODUCTS[g.gradient]):
            found.append(f"{self.products} products of a thread in a turn, at most {most}")
        if bool(c.parts) != g.gradient:
            found.append(f"parts={c.parts}: those of a weight gradient, and of no other")
        if g.gradient and self.row_slices > 1 and g.rows.spread > 1:
            found.append("a window of a spread image that one thread cannot hold")
        limit = min(255, device.registers_per_sm // (-(-self.threads // 32) * 32 * c.blocks) // 8 * 8)
        if self.registers > limit:
            found.append(f"about {self.registers} registers a thread, at most {limit}")
        if c.blocks * self.threads > device.max_threads_per_sm or c.blocks > device.max_blocks_per_sm:
            found.append(f"blocks={c.blocks} of {self.threads} threads: more than an SM of {device.name} holds")
        most = min(device.shared_bytes, device.shared_bytes_per_sm // c.blocks - 1024)
        if self.shared_bytes > most:
            found.append(f"{self.shared_bytes} bytes of shared memory, at most {most} with {c.blocks} blocks an SM")
        counts = {
            "blocks": self.blocks,
            "items": (self.parts + 1) * self.across + self.items,
            "pairs": g.pairs + c.pairs * self.lanes,
            "bytes of a pixel": g.view.groups * g.channels * self.problem.a.dtype.itemsize * g.columns.every,
            "pixels": g.view.images * math.prod(g.view.image),
            "taps": g.taps * g.pairs,
            "steps": max(axis.stride * (axis.grid + 64) + axis.dilation * axis.every * axis.window for axis in g.axes),
        }
        return found + reasons.of_counters(counts)


def shares_us(problem: Problem, parts: int) -> float:
    """Returns the predicted time of so many shares of each reduction, which are added up one by one."""
    return len(reduced(problem.epilogue)) * (SHARES_US + SHARE_US * parts)


def _sums_us(shape: Shape, device: Device, row: float) -> float:
    """Returns the predicted time of sums beside operands as large as results, given a row's instructions."""
    c, g, flops = shape.config, shape.geometry, dict(device.flops)
    clock = flops["float32"] / device.sms / 256
    slower = flops["float32"] / flops["float64"] if shape.words > 1 else 1.0
    blocks = min(c.blocks, -(-shape.blocks // device.sms))  # of an SM
    waves, warps = -(-shape.blocks // (device.sms * blocks)), blocks * -(-shape.threads // 32)
    taps = 0 if shape.in_registers else g.taps  # in shared memory
    row += ROW + PLACE * c.strip * (not shape.whole_strips)
    clocks = row * (WAIT_CLOCKS + STARTED * slower * warps / 4)
    clocks += WORD_CLOCKS * warps * taps / g.rows.spread * c.pairs * shape.words
    begin = BEGIN_CLOCKS + WEIGHT_CLOCKS * taps * c.pairs / shape.across
    return 1e6 * waves * (c.rows * clocks + begin) / clock


def predict(shape: Shape, device: Device) -> float:
    """Returns the predicted microseconds of a call."""
    p, c, g = shape.problem, shape.config, shape.geometry
    rate = dict(device.flops).get("float64" if shape.words > 1 else "float32", 0.0) / 2
    if not rate or not device.sms:
        return math.inf
    d, h, w = g.planes, g.rows, g.columns
    convert = 1 if p.a.dtype.itemsize < 4 else 0
    strip = shape.read * (3 + shape.inputs * convert)
    if g.gradient:
        taps = shape.window_rows * w.window / (h.spread * w.spread)
        row = taps * c.strip * c.pairs + shape.window_rows / h.spread * (strip + 8)
        row += c.strip * (3 + shape.columns * convert) + 10
        threads = shape.tiles * shape.lanes * shape.items * shape.slices
        written = 8.0 * shape.parts * g.taps * g.pairs * shape.words
        more_us = SUM_US
    else:
        taps = d.window * h.window * w.window / (d.spread * h.spread * w.spread)
        loads = 0 if shape.in_registers else -(-c.pairs * shape.words // 4)
        halo = 1 + (h.open[1] - 1) / c.rows
        rows = h.stride / h.spread * d.window / d.spread * halo
        row = taps * (c.strip * c.pairs + loads) + rows * (strip + 12 + 2 * h.open[1])
        finished = 1 + instructions(p.epilogue) + len(reduced(p.epilogue))
        row += c.strip * (5 + shape.columns * finished)
        threads, written, more_us = shape.tiles * shape.lanes * shape.items, 0.0, shares_us(p, shape.parts)
        if h.spread > 1 and reduced(p.epilogue) and as_large(p.epilogue):
            return LAUNCH_US + more_us + max(_sums_us(shape, device, row), 1e6 * p.bytes / device.bytes_per_second)
    issued = 1e6 * threads * (c.rows * row + 60) / (rate * ISSUED)
    # Of the last of the waves that all SMs take blocks in, each has a part.
    waves = shape.blocks / (device.sms * c.blocks)
    issued *= max(1.0, math.ceil(waves) / waves if waves < 8 else 1.0)
    if g.gradient:  # threads go through chunks in rounds, of which the last is of fewer
        at_once = shape.parts * shape.across
        issued *= -(-shape.items // at_once) * at_once / shape.items
    resident = min(shape.blocks, device.sms * c.blocks) * shape.threads
    ahead = shape.read * shape.inputs * p.a.dtype.itemsize * c.ahead * h.steps[0]
    speed = min(device.bytes_per_second / 1e6, resident * ahead / LATENCY_US)
    memory = (p.bytes + written) / speed
    us = LAUNCH_US + more_us + max(issued, memory) + 0.15 * min(issued, memory)
    true = {
        "always": 1,
        "shared": not shape.in_registers,
        "strip": max(0.0, 2 - math.log2(c.strip)) * (c.ahead == 1),
        "ahead": c.ahead > 1,
        "spread": h.spread > 1,
        "short": h.spread > 1 and c.strip < 4,
        "alone": g.gradient and c.blocks == 1 and w.grid <= 8,
        "line": g.gradient and c.blocks == 1 and h.window == 1,
        "small": not g.gradient and w.grid <= 8,  # images of 7 x 7 took 1.4 to 1.9 times as long
    }
    return us * math.exp(sum(weight * true[name] for name, weight in OVER.items()))
