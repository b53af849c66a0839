"""The predicted time of a convolution by halos: its steps' wgmmas, loads and stores, whichever takes longest."""

from __future__ import annotations

import math

from cutjax.kernels.device import Device
from cutjax.kernels.halo.resolved import Resolved

LAUNCH_US = 4.5  # with the loads of weights and first boxes
FLOPS = 4096  # of an SM's tensor cores in a cycle, of 16 bits
SHARED = 128  # bytes of shared memory in a cycle
L2 = 32  # bytes from L2 in a cycle, of an SM
BETWEEN = 250  # cycles from a step's last wgmma to the next step's first, of one warpgroup
STORE = 260  # cycles of a warpgroup for each 64 rows of 64 bytes that it stores beside its wgmmas
# No kernel has been timed yet: it is chosen where it is well ahead.
UNMEASURED = 1.3


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
    stored = sum(STORE * max(1, c.bn * dtype.itemsize / 64) for dtype in kernel.staging.result_dtypes)
    # Of a step, warpgroups share the tensor cores and what is loaded, and each waits for what it does itself.
    step = max(multiplied, loaded, (max(multiplied, stored) + BETWEEN) / c.consumers)
    blocks = max(1, min(device.sms // of.columns, of.runs))
    runs = -(-of.runs // (blocks * c.consumers)) * c.consumers
    steps = min(c.steps, -(-of.view.grid[0] // of.step)) + of.stacked - 1
    us = (runs * steps * step + of.weight_bytes / L2) * cycle(device)
    moved = p.a.bytes(of.view.elements) + sum(p.m * p.n * dtype.itemsize for dtype in kernel.staging.result_dtypes)
    return LAUNCH_US + UNMEASURED * max(us, moved / device.bytes_per_second * 1e6)


def cycle(device: Device) -> float:
    """Returns the microseconds of a cycle, at the clock of sustained products."""
    return FLOPS * device.sms / dict(device.flops)["bfloat16"] * 1e6
