"""Convolutions along one axis, of places and taps without steps: a window of pixels that slides, in registers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cutjax.kernels.device import Device
from cutjax.kernels.direct.config import Config
from cutjax.kernels.direct.cost import Shape
from cutjax.kernels.direct.geometry import Geometry
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import instructions

THREADS = 128
ROWS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 512)  # of a chunk, about
AHEAD_BYTES = 64  # of a thread, at most
# Of a pass over memory row by row, fitted to 68 kernels of causal convolutions, forward and backward, on an H200.
LAUNCH_US = 2.0
ISSUED, MOVED = 0.8, 1.08  # shares of an SM's instructions, and of a copy's rate: each where nothing else holds it up
OVERLAPPED = 0.19  # of bytes' or instructions' time, the shorter one, that is added
LATENCY_US, INSTRUCTION_US = 0.4, 7e-4  # a thread waits for its rows, and goes through their instructions
UNEVEN = 0.36  # of a last wave of fewer blocks: those that it has run faster


def configs(problem: Problem, geometry: Geometry) -> Iterator[Config]:
    """Yields the ways to divide a problem among threads: as many blocks on an SM as its registers let."""
    size, device, length = problem.a.dtype.itemsize, problem.device, geometry.rows.grid
    for pairs in (8, 4, 2, 1):
        if geometry.pairs % pairs or pairs * size > 16:
            continue
        for ahead in (2, 4, 8):
            if ahead * pairs * size > AHEAD_BYTES:
                continue
            least = Shape(problem, Config(pairs, 1, 1, 32, THREADS, ahead, 1), geometry).registers
            fitting = [b for b in range(1, 13) if device.registers_per_sm // (THREADS * b) // 8 * 8 >= least]
            for chunks in sorted({-(-length // rows) for rows in ROWS}):
                rows = -(-length // (chunks * ahead)) * ahead
                yield Config(pairs, 1, rows, 32, THREADS, ahead, max(fitting, default=1))


def predict(shape: Shape, device: Device) -> float:
    """Returns the predicted microseconds of a call: of the bytes, or of the instructions."""
    p, c, g = shape.problem, shape.config, shape.geometry
    rate = dict(device.flops).get("float32", 0.0) / 2
    if not rate or not device.sms:
        return math.inf
    size, axis = p.a.dtype.itemsize, g.rows
    halo, chunks = axis.window - 1, -(-axis.grid // c.rows)
    elements = g.view.images * chunks * (c.rows + 0.5 * halo) * g.pairs
    each = axis.window + 3 + instructions(p.epilogue) + 10 / c.pairs
    moved = p.bytes + g.view.images * chunks * halo * g.pairs * size
    resident = min(shape.tiles * shape.lanes * shape.items, device.sms * c.blocks * shape.threads)
    # Half of the bytes are read, and bytes in flight are those.
    flying = 2 * resident * c.ahead * c.pairs * size
    return LAUNCH_US + pass_us(c, device, elements, each, moved, flying, shape.blocks)


def pass_us(
    config: Config, device: Device, elements: float, each: float, moved: float, flying: float, blocks: int
) -> float:
    """Returns the predicted microseconds of a pass row by row, without those of its launch.

    Args:
      config: of a thread.
      device: that it is on; its rate of float32 is known.
      elements, each: elements, and the instructions of one.
      moved, flying: bytes read and written in all; and those for which as many loads as threads have are on their way.
      blocks: of the launch.
    """
    issued = 1e6 * elements * each / (dict(device.flops)["float32"] / 2 * ISSUED)
    turn_us = LATENCY_US + INSTRUCTION_US * config.ahead * config.pairs * each
    memory = moved * math.hypot(1e6 / (MOVED * device.bytes_per_second), turn_us / flying)
    waves = blocks / (device.sms * config.blocks)
    uneven = 1 + UNEVEN * (math.ceil(waves) / waves - 1)
    issued, memory = issued * uneven, memory * (uneven if waves > 1 else 1.0)
    return max(issued, memory) + OVERLAPPED * min(issued, memory)
