"""The cost model: the predicted time of a resolved kernel on a device. It reads fields, and computes no geometry."""

from __future__ import annotations

import dataclasses
import math

from cutjax.kernels.device import Device
from cutjax.kernels.mma.resolved import Resolved
from cutjax.kernels.operand import Im2col
from cutjax.kernels.problem import Problem
from cutjax.runtime.architectures import number


@dataclasses.dataclass(frozen=True)
class Fit:
    """The fitted numbers of the cost model.

    Attributes:
      peak: share of the rate of mma.sync, or of FMA, that warp tiles reach if reading fragments takes no time.
      reads: how much longer a warp multiplies for each word of fragments that it reads for a word of products.
      block: microseconds that each block of k takes beside multiplying: a barrier, and the loads' instructions.
      warps: the exponent with which fewer than 8 warps on an SM are slower.
      shared: how much longer an SM multiplies for several blocks than for one.
      l2: bytes a nanosecond that enter one SM.
      narrow: how much longer loads of less than 16 bytes take, for each time that their size is halved.
      tile: microseconds that storing 128 x 128 results of 16 bits takes.
      latency: of a tile's first loads and its last barrier, in microseconds.
      launch: of the kernel, in microseconds.
      parts: bytes a nanosecond at which XLA adds up parts of k, and the microseconds it takes to begin.
      change: microseconds that a prologue takes of each block of k, and of each 16 bytes of it that a thread changes:
        its operands are loaded then, and nothing hides that. Of two products of 16 and 64 rows on an H200.
    """

    peak: float = 1.91
    reads: float = 0.99
    block: float = 0.06
    warps: float = 0.55
    shared: float = 0.0
    l2: float = 92
    narrow: float = 0.94
    tile: float = 1.08
    latency: float = 1.85
    launch: float = 0.5
    parts: tuple[float, float] = (3000, 2.5)
    change: tuple[float, float] = (0.4, 0.18)


# Fitted to 230 kernels of 10 products of bfloat16 on an H200 (sm_90): a median error of 15%.
FIT = Fit()
# By the file that multiplies, and by math or accumulator: fitted to 20 kernels of float64 and complex128, 29 of float32
# and complex64, and 4 of complex64 by TF32, of 4096 and 8192 cubed and smaller, on an H200.
FMA = dataclasses.replace(FIT, peak=0.94, reads=0.03, warps=0.8)
FITS = {
    "fma": FMA,
    "fma float32": dataclasses.replace(FMA, shared=0.06),
    "double": dataclasses.replace(FIT, peak=1.23, reads=0.085, block=0.033, shared=0.02),
    "decode": dataclasses.replace(FIT, peak=1.63),  # 8 kernels of int8 and float8 beside bfloat16, 64 and 256 rows
    "double tf32": dataclasses.replace(FIT, peak=0.62, reads=0.12, block=0.028),
}
# How many times as fast kernels are whose tiles TMA loads. Where fragments are of ldmatrix, and rows of a tile have 128
# bytes, bfloat16 and int8 gained 1.02 to 1.07; elsewhere 0.82 to 0.99 were measured, but for float64 nt, 1.01. That was
# on an H200 (benchmarks/results/mma-parts-h200.json).
TMA_GAIN, TMA_OTHERWISE = 1.04, 0.85
SM90_SHARE = 0.67  # of the tensor cores' rate, which is wgmma's, that mma.sync reaches from sm_90 to sm_103
WINDOWS = 1.28  # how much longer convolutions take: 8 kernels of video patches, 84 bytes a row, on an H200 1.18 to 1.4
COPY_US = 2.0  # of a copy that XLA makes before the launch, beside moving its bytes


def predict(kernel: Resolved, device: Device, fit: Fit | None = None) -> float:
    """Returns the predicted time of one launch in microseconds.

    Tiles run in waves of what all SMs hold; of the last, each SM has a part. In a wave an SM multiplies, or waits for
    its operands, whichever takes longer, and then stores.
    """
    p, c = kernel.problem, kernel.config
    if fit is None:
        fragments = kernel.way.fragments
        names = f"{fragments} {p.math}", f"{fragments} {kernel.way.accumulator}", fragments
        fit = next((FITS[name] for name in names if name in FITS), FIT)
    rate = dict(device.flops).get(kernel.way.rate, 0.0)
    if kernel.way.rate not in ("float32", "float64") and 90 <= number(device.arch) < 120:
        rate *= SM90_SHARE
    if not rate or not device.sms:
        return math.inf
    k_blocks = math.ceil(kernel.depth / c.bk)
    waves, rest = divmod(kernel.average_tiles, device.sms * c.blocks)
    time = waves * _wave(kernel, device, c.blocks, k_blocks, rate, fit)
    if rest:
        time += _wave(kernel, device, math.ceil(rest / device.sms), k_blocks, rate, fit)
    memory = p.bytes / device.bytes_per_second * 1e6
    gains = kernel.way.fragments == "tensor" and p.a.bytes(c.bk) == 128
    gain = 1.0 if not c.tma else TMA_GAIN if gains else TMA_OTHERWISE
    if isinstance(p.a.view, Im2col):
        time *= WINDOWS
    time = fit.launch + (max(time, memory) + 0.1 * min(time, memory)) / gain
    copied = sum(operand.moved for operand in kernel.prepared)  # in launches of their own
    time += copied / device.bytes_per_second * 1e6 + COPY_US * len(kernel.prepared)
    return time + parts_us(p, c.splits, fit)


def parts_us(problem: Problem, splits: int, fit: Fit = FIT) -> float:
    """Returns the microseconds that XLA takes to add up the parts of k."""
    speed, begin = fit.parts
    moved = (4 * splits + 4) * problem.m * problem.n * problem.products * problem.batch_size
    return begin + moved / speed / 1e3 if splits > 1 else 0.0


def _wave(kernel: Resolved, device: Device, blocks: int, k_blocks: int, rate: float, fit: Fit) -> float:
    """Returns the time of one wave where each SM has so many blocks."""
    p, c = kernel.problem, kernel.config
    share = fit.peak / (1 + fit.reads * (32 / c.wm + 32 / c.wn))
    share *= min(1.0, blocks * c.threads / 256) ** fit.warps / (1 + fit.shared * (blocks > 1))
    multiply = 2 * c.bm * c.bn * c.bk * p.products * kernel.way.instructions / (rate / device.sms / 1e6 * share)
    load = (p.a.bytes(c.bm) + p.products * p.bs[0].bytes(c.bn)) * c.bk / fit.l2 / 1e3
    load *= 1 + fit.narrow * math.log2(16 / min(kernel.units))
    written = sum(out.reduce is None for out in p.epilogue.outputs)
    store = fit.tile * c.bm * c.bn / 128**2 * max(1, written)
    change = 0.0
    if p.a.prologue is not None:
        change = fit.change[0] + fit.change[1] * math.ceil(p.a.bytes(c.bm) * c.bk / 16 / c.threads)
    return fit.latency + k_blocks * (blocks * max(multiply, load) + fit.block + change) + blocks * store
