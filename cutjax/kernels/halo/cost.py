"""The predicted time of a convolution by halos: its steps' wgmmas, loads and stores, whichever takes longest."""

from __future__ import annotations

import math

from cutjax.kernels.device import Device
from cutjax.kernels.halo.resolved import Resolved
from cutjax.kernels.prepared import copies_us

# Fitted to 73 kernels of 11 convolutions on an H200; STORED, MEMORY and SLOWER to 44 of 34 (conv-report-2-h200.json and
# experiments/halos-h200.json in benchmarks/results): 80% of the predicted times are 0.92 to 1.13 of those measured. A
# third warpgroup hides what two do not, but not what an SM stores.
LAUNCH_US = 4.9  # with the loads of weights and first boxes
FLOPS = 4096  # of an SM's tensor cores in a cycle, of 16 bits
SHARED = 128  # bytes of shared memory in a cycle
L2 = 40  # bytes from L2 in a cycle, of an SM
STORED = 11.5  # bytes of results in a cycle, of an SM
BETWEEN = 610  # cycles from a step's last wgmma to the next step's first, of one warpgroup, for each result
RUN = 300  # cycles from a run to the next
MEMORY = 0.95  # of the rate of memory
AGAIN = 0.27  # of images, what each further block of columns reads from memory
SLOWED_US, SLOWER = 100, 0.045  # what takes longer is slowed by so much for each doubling: clocks fall
POWER = 4  # with which what runs at the same time adds up


def wgmma_cycles(columns: int) -> float:
    """Returns the cycles of 64 rows, so many columns and 16 of k, both operands in shared memory.

    On an H200 those of 32, 96 and 256 columns took 24.5, 48.5 and 128.4, wherever in a box rows begin.
    """
    return max(columns / 2, (2048 + 32 * columns) / SHARED)


def predict(kernel: Resolved, device: Device) -> float:
    """Returns the predicted microseconds of one launch."""
    p, c, of = kernel.problem, kernel.config, kernel.geometry
    multiplied = math.prod(of.taps) * of.pieces * of.chunk // 16 * wgmma_cycles(c.bn * of.stacked)
    loaded = of.pieces * of.box_bytes / L2
    results = kernel.staging.result_dtypes
    stored = 64 * min(c.bn, p.n) * sum(dtype.itemsize for dtype in results) / STORED
    # Of a step, warpgroups share the tensor cores, what is loaded and what is stored, and each waits for what it does.
    waited = (multiplied + BETWEEN * len(results)) / c.consumers
    step = together(max(multiplied, loaded), stored, waited)
    blocks = max(1, min(device.sms // of.columns, of.runs))
    rounds = -(-of.runs // (blocks * c.consumers))
    steps = min(c.steps, -(-of.view.grid[0] // of.step)) + of.stacked - 1
    us = rounds * (c.consumers * steps * step + RUN) * cycle(device)
    pixels = next((x.written for x in kernel.prepared if x.name == "a"), p.a.bytes(of.view.elements))
    read = pixels * (1 + AGAIN * (of.columns // of.view.groups - 1))
    moved = read + sum(p.m * p.n * dtype.itemsize for dtype in results)
    moved_us = moved / (MEMORY * device.bytes_per_second) * 1e6
    first_us = LAUNCH_US + copies_us(kernel.prepared, device) + of.weight_bytes / L2 * cycle(device)
    return first_us + together(slowed(us), moved_us)


def slowed(us: float) -> float:
    """Returns the microseconds that the SMs take for what is so long at the clock of short products."""
    return us * (1 + SLOWER * math.log2(max(1, us / SLOWED_US)))


def together(*times: float) -> float:
    """Returns the time of what runs at the same time."""
    return sum(time**POWER for time in times) ** (1 / POWER)


def cycle(device: Device) -> float:
    """Returns the microseconds of a cycle."""
    return FLOPS * device.sms / dict(device.flops)["bfloat16"] * 1e6
