"""The cost model: the predicted time of a resolved kernel on a device. It reads fields, and computes no geometry."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from cutjax.kernels.device import Device

if TYPE_CHECKING:
    from cutjax.kernels.mma.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Fit:
    """The fitted numbers of the cost model.

    Attributes:
      peak: share of the device's rate that the largest warp tiles reach.
      reads: how much longer a warp multiplies for each word of fragments that it reads for a word of products.
      block: microseconds that each block of k takes beside multiplying: a barrier, and the loads' instructions.
      warps: the exponent with which fewer than 8 warps on an SM are slower.
      l2: bytes a nanosecond that enter one SM.
      narrow: how much longer loads of less than 16 bytes take, for each time that their size is halved.
      tile: microseconds that storing 128 x 128 results of 16 bits takes.
      latency: of a tile's first loads and its last barrier, in microseconds.
      launch: of the kernel, in microseconds.
      parts: bytes a nanosecond at which XLA adds up parts of k, and the microseconds it takes to begin.
    """

    peak: float = 1.28
    reads: float = 0.99
    block: float = 0.06
    warps: float = 0.55
    l2: float = 92
    narrow: float = 0.94
    tile: float = 1.08
    latency: float = 1.85
    launch: float = 0.5
    parts: tuple[float, float] = (3000, 2.5)


# Fitted to 230 kernels of 10 products of bfloat16 on an H200 (sm_90): a median error of 15%.
FIT = Fit()
# By the file that multiplies. Of these, nothing is fitted yet: counts of instructions say how near to the rate they
# come, 88 of 100 being FMA with 64 x 64 to a warp, and what DMMA waits for is less than it takes.
FITS = {
    "fma": dataclasses.replace(FIT, peak=1.05, reads=0.15, block=0.02),
    "double": dataclasses.replace(FIT, peak=1.1, reads=0.1, block=0.03),
}
COPY_US = 2.0  # of a copy that XLA makes before the launch, beside moving its bytes


def predict(kernel: Kernel, device: Device, fit: Fit | None = None) -> float:
    """Returns the predicted time of one launch in microseconds.

    Tiles run in waves of what all SMs hold; of the last, each SM has a part. In a wave an SM multiplies, or waits for
    its operands, whichever takes longer, and then stores.
    """
    p, c = kernel.problem, kernel.config
    fit = fit or FITS.get(kernel.math.fragments, FIT)
    rate = dict(device.flops).get(kernel.math.rate, 0.0)
    if not rate or not device.sms:
        return math.inf
    tiles = kernel.rows * kernel.columns * p.batch_size * (max(1, p.groups) if p.ragged else 1)
    tiles = (kernel.tiles if p.symmetric else tiles) * c.splits
    k_blocks = math.ceil(p.k / max(1, p.groups if p.ragged == "k" else 1) / c.splits / c.bk)
    waves, rest = divmod(tiles, device.sms * c.blocks)
    time = waves * _wave(kernel, device, c.blocks, k_blocks, rate, fit)
    if rest:
        time += _wave(kernel, device, math.ceil(rest / device.sms), k_blocks, rate, fit)
    memory = p.bytes / device.bytes_per_second * 1e6
    time = fit.launch + max(time, memory) + 0.1 * min(time, memory)
    if kernel.transposed:
        time += 2 * kernel.transposed_bytes / device.bytes_per_second * 1e6 + COPY_US * len(kernel.transposed)
    if c.splits > 1:
        speed, begin = fit.parts
        time += begin + (4 * c.splits + 4) * p.m * p.n * p.products * p.batch_size / speed / 1e3
    return time


def _wave(kernel: Kernel, device: Device, blocks: int, k_blocks: int, rate: float, fit: Fit) -> float:
    """Returns the time of one wave where each SM has so many blocks."""
    p, c = kernel.problem, kernel.config
    share = fit.peak / (1 + fit.reads * (32 / c.wm + 32 / c.wn))
    share *= min(1.0, blocks * c.threads / 256) ** fit.warps
    multiply = 2 * c.bm * c.bn * c.bk * p.products * kernel.math.instructions / (rate / device.sms / 1e6 * share)
    load = (c.bm + p.products * c.bn) * c.bk * p.a_dtype.itemsize / fit.l2 / 1e3
    load *= 1 + fit.narrow * math.log2(16 / min(kernel.units))
    written = sum(out.reduce is None for out in p.epilogue.outputs)
    store = fit.tile * c.bm * c.bn / 128**2 * max(1, written)
    return fit.latency + k_blocks * (blocks * max(multiply, load) + fit.block) + blocks * store
