"""The cost model: the predicted time of a resolved kernel on a device. It reads fields, and computes no geometry."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cutjax.kernels.device import Device

if TYPE_CHECKING:
    from cutjax.kernels.mma.kernel import Kernel

LAUNCH_US = 3.0
LATENCY_US = 0.9  # of a load that misses L2
STORE_US = 0.4  # of a tile of 128 x 128, staged and stored


def predict(kernel: Kernel, device: Device) -> float:
    """Returns the predicted time of one launch in microseconds.

    Tiles run in waves of what all SMs hold. A wave takes what its multiplications take at the share of the peak that
    the warp tile allows, or the loads of its operands into shared memory, whichever is longer, and its epilogue.
    """
    p, c = kernel.problem, kernel.config
    rate = dict(device.flops).get(kernel.math.rate, 0.0)
    if not rate or not device.sms:
        return math.inf
    per_sm = rate / device.sms / 1e6  # flops in a microsecond
    tiles = kernel.rows * kernel.columns * p.batch_size * max(1, p.groups) * c.splits
    k = p.k / max(1, p.groups if p.ragged == "k" else 1) / c.splits
    slots = device.sms * c.blocks
    waves = math.ceil(tiles / slots)
    resident = min(c.blocks, math.ceil(tiles / device.sms))
    flops = 2 * c.bm * c.bn * k * p.products * resident * kernel.math.instructions
    size = p.a_dtype.itemsize
    # Words of fragments that are read for each word multiplied: shared memory feeds the tensor cores.
    reads = (1 / c.wm + 1 / c.wn) * 32
    share = min(0.62, 0.75 / reads) * min(1.0, c.threads * resident / 256)
    multiply = flops / (per_sm * share)
    loaded = (c.bm + p.products * c.bn) * k * size * resident
    narrow = max(1.0, 8 / min(kernel.units))
    load = loaded / (device.bytes_per_second * 1.6 / device.sms / 1e6) * narrow
    wave = max(multiply, load) + 0.2 * min(multiply, load) + LATENCY_US
    store = STORE_US * c.bm * c.bn / 128**2 * resident * len(p.epilogue.outputs)
    memory = p.bytes / device.bytes_per_second * 1e6
    parts = 2 * 4 * c.splits * p.m * p.n * p.batch_size / device.bytes_per_second * 1e6 if c.splits > 1 else 0.0
    return LAUNCH_US + max(waves * (wave + store), memory) + parts + (LAUNCH_US if c.splits > 1 else 0.0)
