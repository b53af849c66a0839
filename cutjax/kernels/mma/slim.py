"""Slim kernels: products of at most 4 rows, by ffi/device/mma/slim.cuh, as fast as the other matrix is read."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from cutjax.kernels.device import Device
from cutjax.kernels.mma import prologue
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.cost import parts_us
from cutjax.kernels.mma.math import MIXED, Math
from cutjax.kernels.mma.resolved import Resolved
from cutjax.kernels.problem import Problem
from cutjax.kernels.reasons import of_swap
from cutjax.kernels.staging import Staging

ROWS = (1, 2, 4)
AT_ONCE = 8  # loads of 16 bytes that a thread waits for at once, as in slim.cuh
_config = functools.lru_cache(maxsize=None)(Config)
BESIDE = 40  # registers of a thread beside what it loads and adds up, calibrated on the compiler's report


def columns_of(problem: Problem) -> int:
    """Returns the columns that a thread adds up."""
    return AT_ONCE if problem.bs[0].contiguous == "k" else problem.bs[0].elements(16)


def reasons(problem: Problem, config: Config, way: Math, staging: Staging) -> list[str]:
    """Returns the reasons against a slim kernel of a config."""
    found, b = [], problem.bs[0]
    if way.words < 4:
        found.append(f"bm={config.bm}: slim kernels add up in {way.accumulator}")
    if problem.bs[0].contiguous == "k":
        warps, needed = config.threads // 32, config.bn // AT_ONCE
        if warps % needed:
            found.append(
                f"bn={config.bn}: of b[n, k] each warp reads {AT_ONCE} columns, and {warps} share {needed} of them"
            )
    elif b.bytes(config.bn) not in (16, 32, 64, 128, 256, 512):
        found.append(f"bn={config.bn}: lanes beside each other read 16 to 512 bytes of b[k, n], a power of two")
    if staging.reductions and problem.m > config.bm:
        found.append(f"bm={config.bm}: of {problem.m} rows, reductions are of 16 rows at a time")
    if problem.symmetric:
        found.append("a symmetric product")
    found += prologue.slim_reasons(problem)
    if problem.a.view is not None:
        found.append(f"bm={config.bm}: slim kernels read rows of a that follow each other")
    if (problem.a.dtype.name, problem.bs[0].dtype.name) in MIXED:
        found.append(f"bm={config.bm}: slim kernels multiply operands of one dtype")
    return found


def swap_reasons(problem: Problem) -> list[str]:
    """Returns the reasons against swapping the operands."""
    found = of_swap(problem)
    found += ["swap with a prologue of a: it is that of the first operand"] * (problem.a.prologue is not None)
    if problem.products > 1 or problem.groups:
        found.append("swap with several products, or in groups: slim kernels multiply one b, of all rows")
    if problem.bs[0].narrow_beside(problem.a):
        found.append(f"swap with b in {problem.bs[0].dtype.name}")
    if any(out.reduce for out in problem.epilogue.outputs):
        found.append("swap with a reduction")
    if problem.order:
        found.append("swap with results in an order of their own")
    return found


def stage_bytes(problem: Problem, config: Config, way: Math) -> int:
    """Returns the bytes of shared memory in which warps add up their sums."""
    warps = config.threads // 32
    parts = warps // max(1, config.bn // AT_ONCE) if problem.bs[0].contiguous == "k" else warps
    return parts * problem.products * config.bm * config.bn * way.words


def registers(problem: Problem, config: Config, way: Math) -> int:
    """Estimates the registers of a thread."""
    sums = problem.products * config.bm * columns_of(problem) * way.words // 4
    a, b, narrow = problem.a, problem.bs[0], problem.bs[0].narrow_beside(problem.a)
    left = config.bm * (4 if a.contiguous == "k" else AT_ONCE * way.words // 4)
    if narrow:  # twice as many at once, and those of a that does not lie along k as floats
        left *= 2 if a.contiguous == "k" else 4
    # Of rows of b that begin anywhere each load has a shift of its own: with 4 rows of a that spills.
    along_k = b.contiguous == "k"
    shifted = b.bytes(problem.k if along_k else problem.n) % 4 > 0
    left += prologue.slim_registers(problem)
    more = (72 if narrow else 0) if along_k else 32  # of 8 bits, 16 elements are decoded at once
    return sums + left + 5 * AT_ONCE + BESIDE + more * config.bm * shifted


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the shipped slim kernels, for problems of so few rows or columns, or of groups of so few rows."""
    yield from _configs(problem, False)
    if not swap_reasons(problem):
        yield from _configs(problem.transposed, True)


def _configs(problem: Problem, swap: bool) -> Iterator[Config]:
    m = -(-problem.m // problem.groups_along("m"))
    if m > ROWS[-1]:
        return
    b = problem.bs[0]
    along_k = b.contiguous == "k"
    rows = next(rows for rows in ROWS if rows >= m)
    for bn in (16, 32, 64) if along_k else [bn for x in (64, 128, 256, 512) if 16 <= (bn := b.elements(x)) <= 256]:
        wn = min(bn, 32)
        for warps, blocks in ((8, 2), (16, 1), (8, 1)):  # the last one for those that need registers
            sliced_k = warps * wn // bn
            if 1 <= sliced_k <= 16:
                yield _config(rows, bn, 128, rows, wn, sliced_k, stages=1, raster=1, blocks=blocks, swap=swap)


def predict(kernel: Resolved, device: Device) -> float:
    """Returns the predicted microseconds of one launch: of the bytes, as many as are in flight, or of the arithmetic.

    The numbers are the hardware's, but for decoding.
    """
    p, c = kernel.multiplied, kernel.config
    latency, l2, launch = 0.9, 92.0, 1.5  # us; bytes a nanosecond that enter one SM; us
    b = p.bs[0]
    tiles, k = kernel.average_tiles, kernel.depth
    resident = min(c.blocks, math.ceil(tiles / device.sms))
    busy = min(tiles, device.sms * c.blocks)
    in_flight = busy * min(c.threads * AT_ONCE * 16, p.products * b.bytes(1) * c.bn * k)
    speed = min(device.bytes_per_second / 1e6, in_flight / latency)  # bytes a microsecond
    line = min(1.0, b.bytes(c.bn) / 128) if b.contiguous == "mn" else 1.0
    narrow = 1 + 0.5 * math.log2(16 / kernel.units[1])
    memory = p.bytes / speed / (0.8 + 0.2 * line) * narrow
    rate = dict(device.flops).get("float64" if kernel.way.words > 4 else "float32", 0.0)
    if not rate or not device.sms:
        return math.inf
    of_tile = p.products * c.bn * k
    waves = math.ceil(tiles / (device.sms * resident)) * resident
    decoding = 3 if b.narrow_beside(p.a) else 1  # times as long: 8 kernels of int8 and float8 beside bfloat16
    multiply = waves * of_tile * (2 * c.bm + 3) * decoding / (rate / device.sms / 1e6)
    load = waves * of_tile * b.bytes(1) / l2 / 1e3 * narrow
    end = waves * 0.3 + latency
    return launch + max(memory, multiply, load) + end + parts_us(p, c.splits)
