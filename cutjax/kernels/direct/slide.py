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
ISSUED, MOVED = 0.6, 0.9  # shares of an SM's instructions, a guess, and of a copy's rate
LATENCY_US, LAUNCH_US = 1.0, 2.0


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
    issued = 1e6 * elements * (axis.window + 3 + instructions(p.epilogue) + 10 / c.pairs) / (rate * ISSUED)
    resident = min(shape.tiles * shape.lanes * shape.items, device.sms * c.blocks * shape.threads)
    # About half of the bytes are read, and bytes in flight are those.
    speed = min(MOVED * device.bytes_per_second / 1e6, 2 * resident * c.ahead * c.pairs * size / LATENCY_US)
    memory = (p.bytes + g.view.images * chunks * halo * g.pairs * size) / speed
    waves = shape.blocks / (device.sms * c.blocks)
    uneven = math.ceil(waves) / waves if waves < 8 else 1.0
    issued, memory = issued * uneven, memory * (uneven if waves > 1 else 1.0)
    return LAUNCH_US + max(issued, memory) + 0.25 * min(issued, memory)
