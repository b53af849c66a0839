"""The predicted time of XLA's own product of a problem, which a kernel must not be slower than to run under "auto".

On Hopper, cuBLAS's and Triton's kernels take a time that follows from that of ours, where both do the same; where they
do not, and elsewhere, formulas of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from cutjax.kernels import xla_convolution
from cutjax.kernels.device import Device, reference
from cutjax.kernels.families import fastest
from cutjax.kernels.operand import Im2col
from cutjax.kernels.prepared import Prepared, applied, converted_us, copies_us, passing_us, wide, widened, widest
from cutjax.kernels.problem import Problem
from cutjax.kernels.sums import alone, summands
from cutjax.runtime.architectures import number

OURS = "sm90"  # the family of wgmma, as cuBLAS's kernels on Hopper are
# Shares of the rate of a copy at which cuBLAS reads and writes at most: 1.03 of 2048 x 16 x 2048 x 192 nn (1.76 GB in
# 399 us), 0.96 of 64 results of 4096 x 4096 in float32, k = 40, on an H200.
READ_SHARE, WRITE_SHARE = 1.03, 0.96
# Products that XLA multiplies in a second on an H200, in units of 2 m n k: measured at 2048 to 8192 cubed
# (benchmarks/results/experiments/mma-h200.json). It has no fast products of other integers.
XLA_FLOPS = {
    "float32": 50.8e12,
    "float64": 58e12,
    "complex64": 13.3e12,
    "complex64 tf32": 57.8e12,
    "complex128": 16.9e12,
}
XLA_SMALL_US = 0.68  # that an SM takes for each of many products in FMA: 4096 of 32 x 32 x 32
XLA_HAS_NONE = ("int16", "uint16", "int32", "uint32", "int64", "uint64")
# Where XLA multiplies in a fusion of its own that converts what it reads, the microseconds it takes to begin, and the
# shares of the memory's bandwidth and of the tensor cores' rate that it reaches. These: 1 to 4096 rows by weights of
# int8 and float8_e4m3fn, 8192 x 8192 and 4096 x 14336, on an H200.
FUSED_US, FUSED_BYTES, FUSED_FLOPS = 2.0, 0.65, 0.8
PASS_US = 2.0  # of a pass over products, beside moving its bytes
# Of decoded weights, products one by one must take a tenth less than one kernel of them all, which needs no memory for
# sums: 12 gates took 0.9 to 1.1 of what is told (experiments/gates-groups-h200.json), and by this the faster way is
# taken in ten, and one as fast in two.
APART = 1.1
# The pass that makes 4 bits with scales of blocks wide, over a conversion's predicted time: 0.77 to 0.82 of four.
DEQUANTIZED = 0.8
# What XLA's products take over our fastest kernel's predicted time, as its logarithm: a sum over what is true of the
# problem. Fitted to the same sweeps, to the sixth of them in which XLA is fastest: running a kernel where XLA is faster
# costs a user speed, running XLA where a kernel is faster only does not bring any.
PLAIN = {
    "always": -0.127,
    "launch": 0.0504,
    "unaligned": 0.105,
    "busy": 0.0612,
    "tn": 0.0153,
    "nt": 0.00376,
    "few": 0.0539,
    "few_deep": -0.0127,
    "deep": -0.0278,
    "tokens": 0.0173,
    "shallow": -0.18,  # of three products of report12-17, where k is 256
    "multiplies": 0.0955,
    "pitch": -0.00996,
    # It divides k of few tiles from 4096 on, and not below 3072: of 105 below it took 1.56 times as long as our kernels
    # in the median, of 164 above 1.03. These two terms are as large as left no more of them slower.
    "divides": -0.05,
    "whole": 0.03,
    # Of 52 products XLA took 1.05 of our time (0.97 to 1.18; experiments/uneven-rows-h200.json), where those of even
    # rows took 1.0.
    "uneven": 0.085,
}
# The same of batched products: 304 of attention (sweeps/attention-h200.json), to the fifth in which XLA is fastest.
BATCHED = {
    "always": 0.297,
    "launch": -0.972,
    "padded": 0.449,
    "odd": -0.411,
    "nt": 0.0178,
    "multiplies": -0.29,
    "rows": -0.0435,
    "long": -0.0367,
    # Scores of which no operand has rows of whole lines: of 24 below 16 us it took 1.17 of what was told without, of 30
    # above 20 us 0.99 (medians); of five from 15 to 18 us 0.97 of what was told as if the two met at 16 us, not at 12.
    # Where rows are whole half lines, it took 0.87 to 1.3 of our kernels' time, from run to run, of three below 6 us.
    "off_lines": 0.1,
    "padded_short": -0.2,  # of 7 decoding values of 197 positions XLA took 0.6 to 1.0 of what was told without
    "walked": 0.18,  # 14 more of attention, in an order of memory of their own: experiments/strided-h200.json
}


def time_us(problem: Problem) -> float | None:
    """Returns the time that XLA may take for a problem on its device; None where unknown."""
    device = problem.device
    if made := applied(problem):
        us = time_us(made)
        return us and us + converted_us(widened(problem, made), device)
    if alone(problem):
        return alone_us(problem)
    found = fastest(problem)
    if found is None:
        return None
    if (into := wide(problem)) and fastest(into):
        return _narrow_us(problem, into, device)
    if any(x.scale for x in (problem.a, *problem.bs)):
        return _dequantized_us(problem, device)
    if isinstance(problem.a.view, Im2col):
        return xla_convolution.time_us(problem)
    kernel, ours, _ = found
    if kernel.family == OURS:
        return _of_ours(problem, device, ours, kernel.prepared)
    return _of_rates(problem, device)


def alone_us(p: Problem, kernels: bool = False) -> float | None:
    """Returns the time of the products of a problem one by one, each a kernel's or XLA's, or all kernels'.

    Of a sum in groups each but the first reads what those before it wrote; of another XLA adds up what all wrote. None
    where one of them has neither.
    """
    products = alone(p)
    passes = len(products) + (-1 if p.groups or not p.plain else 1)
    total = passes * 1e6 * p.result_bytes / p.device.bytes_per_second * (len(summands(p)) > 1)
    for product in products:
        kernel, xla_us = fastest(product, unmeasured=kernels), None if kernels else time_us(product)
        known = [us for us in (kernel and kernel[1], xla_us) if us is not None]
        if not known:
            return None
        total += min(known)
    if p.products > 1 and not p.epilogue.identities:  # a pass over what all wrote
        moved = sum(product.result_bytes for product in products) + p.result_bytes
        total = APART * (total + PASS_US + 1e6 * moved / p.device.bytes_per_second)
    return total


def _of_rates(p: Problem, device: Device) -> float | None:
    """Returns the time of XLA's product at the device's rates, and of its pass over it; None where it has no fast one.

    Where nothing was measured XLA is taken to reach the rates: what users have there runs until a measurement says that
    a kernel is faster.
    """
    if p.groups or p.symmetric or p.a.dtype.name in XLA_HAS_NONE:
        return None
    rate = device.peak(p.a.dtype, p.math)
    if (measured := XLA_FLOPS.get(f"{p.a.dtype.name} {p.math}".strip())) and number(device.arch) >= 90:
        rate *= measured / reference("sm_90a").peak(p.a.dtype, p.math)
    if not rate:
        return None
    product = p.m * p.n * p.batch_size * p.products * p.accumulator.itemsize
    moved = p.bare.bytes if p.plain else p.bare.bytes + product + p.bytes
    passes = 1 if p.plain else 1 + p.products
    small_us = 0.0 if device.tensor(p.a.dtype, p.math) else XLA_SMALL_US * p.batch_size * p.products / device.sms
    us = 2.0 * passes + max(1e6 * p.flops / rate, 1e6 * moved / device.bytes_per_second, small_us)
    return us + _transposes_us(p, device)


def _narrow_us(p: Problem, into: Problem, device: Device) -> float | None:
    """Returns the time of XLA's product of narrow operands, which it converts before, or in a fusion with the product.

    In a fusion 4 bits take as long as 8: 24.5 us for 16 x 14336 x 4096. Those with scales of blocks it makes wide
    before, with the scales: 16 x 14336 x 4096 take 86 us.
    """
    of_wide, operands = time_us(into), (p.a, *p.bs)
    if of_wide is None:
        return None
    if any(x.scale and x.scale.k < p.k for x in operands):
        return of_wide + DEQUANTIZED * converted_us(widened(p, into), device)
    eight = [dataclasses.replace(x, bits=8, scale=None) if x.bits < 16 else x for x in operands]
    read = dataclasses.replace(p, a=eight[0], bs=tuple(eight[1:])).bytes
    fused_us = FUSED_US + 1e6 * read / (FUSED_BYTES * device.bytes_per_second)
    fused_us += 1e6 * p.flops / (FUSED_FLOPS * device.peak(into.a.dtype))
    return min(of_wide + converted_us(widened(p, into), device), fused_us)


def _dequantized_us(p: Problem, device: Device) -> float | None:
    """Returns the time of XLA's product of narrow operands that it makes float32 before, with the scales of blocks."""
    into = widest(p)
    of_wide = time_us(dataclasses.replace(into, math=device.tf32 and "tf32"))
    return of_wide and of_wide + converted_us(widened(p, into), device)


def _of_ours(p: Problem, device: Device, padded: float, copied: Sequence[Prepared]) -> float | None:
    """Returns the time of XLA's product on Hopper, told that of our fastest kernel and the copies that it reads."""
    if p.groups or p.symmetric:
        return None
    if p.a.bits != 16:
        return _others_us(p, device)
    if not p.plain:
        return None
    us = _halves_us(p, device, padded, copied)
    # Beyond what was fitted XLA may have a Triton kernel that takes little more than its launch.
    fitted = p.k > _FITTED_K and p.n >= _FITTED_N and (p.layout[0] == "n" or p.m >= _FITTED_N)
    return us if fitted or p.batch_size > 1 else min(us, 1.4 + 2 * sum(_roofline_us(p, device)))


# The contractions and the widths that the products of the sweeps have: more than the one, at least the other. Of a
# sample beyond them that draws widths and depths of tens, XLA took 1.4 us and one to two roofline times where
# it was fast (256 x 512 x 128 nt 1.7 us, 1008 x 512 x 128 2.5, 30 x 384 x 96 1.5), and a kernel was at most 0.93 of it.
_FITTED_K, _FITTED_N = 128, 256


def _roofline_us(p: Problem, device: Device) -> tuple[float, float]:
    """Returns the times of the flops, and of the bytes, at the device's rates."""
    return 1e6 * p.flops / device.peak(p.a.dtype), 1e6 * p.bytes / device.bytes_per_second


def _halves_us(p: Problem, device: Device, padded: float, copied: Sequence[Prepared]) -> float:
    """Returns the time of XLA's product of 16 bits, told as ``_of_ours`` is."""
    odd = p.a.bytes(p.n) % 16 != 0
    if not copied and reads_weights(p):
        return _few_rows_us(p, device)
    if copied and p.batch_size == 1:
        return _unaligned_us(p, device, padded)
    ours = padded - copies_us(copied, device)
    unaligned = bool(copied or odd)
    flop_us, byte_us = _roofline_us(p, device)
    multiplies = flop_us / (flop_us + byte_us)
    few, deep = max(0.0, math.log2(device.sms / _tiles(p))), max(0.0, math.log2(p.k / 4096))
    pitch = sum(p.a.bytes(row) % 128 != 0 for row in _rows(p))
    off = 1.0 if any(p.a.bytes(row) % 64 for row in _rows(p)) else 0.2
    divides = _within(math.log2(p.k / 3072) / math.log2(4096 / 3072))
    true = {
        "always": 1,
        "launch": 1 / ours,
        "unaligned": unaligned,
        "busy": unaligned * multiplies,
        "padded": len(copied) > 0,
        "odd": odd,
        "tn": p.layout == "tn",
        "nt": p.layout == "nt",
        "few": few,
        "few_deep": few * deep,
        "deep": deep,
        "tokens": max(0.0, math.log2(128 / min(p.m, p.n))),
        # Nothing nearby was measured, so it ends at half of that k, and at twice.
        "shallow": max(0.0, math.log2(128 / min(p.m, p.n))) * max(0.0, 1 - abs(math.log2(p.k / 256))),
        "rows": max(0.0, math.log2(128 / p.m)),
        "multiplies": multiplies,
        "divides": _within(few) * divides,
        "whole": _within(math.log2(p.k / _tiles(p)) - 3.5) * (1 - divides),
        "uneven": _uneven(p, device),
        "pitch": pitch,
        "off_lines": (pitch == 2 and not copied and not p.strided) * max(-1.0, min(off, math.log2(12 / ours))),
        "long": math.log2(ours),
        "padded_short": (len(copied) > 0 and p.m <= _FEW) * max(0.0, math.log2(512 / p.k)),
        "walked": len(copied) > 0 and p.strided,
    }
    weights = PLAIN if p.batch_size == 1 else BATCHED
    fitted_us = ours * math.exp(sum(weight * true[name] for name, weight in weights.items()))
    if p.batch_size > 1 and not odd:
        fitted_us = min(fitted_us, _moving_us(p, bool(copied), byte_us))
    return max(fitted_us, passing_us(p, READ_SHARE, WRITE_SHARE)) + _transposes_us(p, device)


def _uneven(p: Problem, device: Device) -> float:
    """Returns 0 of even rows, multiples of 64, and up to 1.5 of others, the more the longer and shallower they are."""
    if p.m % 64 == 0 or min(p.m, p.n) < 1024:  # narrower ones were not measured
        return 0.0
    long, shallow = _within(math.log2(_tiles(p) / device.sms) - 2), _within(math.log2(4096 / p.k))
    return long * (shallow + _within(math.log2(1024 / p.k)) / 2)


# Batched products that do little but read or write (sweeps/auto-again-h200.json). Where decoding has rows that are no
# multiples of 16 bytes Triton's kernel takes 5 ns for each of k, or the time of its bytes: of eleven with 1500 of k it
# took 0.95 to 1.12 of both together, but for one of 64 columns, 0.78. Scores of one block of k cuBLAS writes at 0.87 of
# the rate of a copy (seven at 0.84 to 0.9).
# Where decoding has 577 of k, an odd one, a line of launch and bytes tells no less than it took: 0.87 to 1.07 of large
# ones, up to 1.6 of small ones (16 of 2 to 16 rows), where what is fitted tells less.
LAUNCH_US, _US_OF_K, _FEW, _ONE_BLOCK, _STORE_SHARE, _ODD_K = 2.0, 0.005, 16, 64, 0.87, (3.0, 1.4)


def _moving_us(p: Problem, copied: bool, byte_us: float) -> float:
    """Returns the time of XLA's batched product at the rate at which it moves bytes; infinite where that is unknown.

    Triton copies what it reads ahead by 4 bytes at least, so rows that are odd take longer.
    """
    moving_us = LAUNCH_US + passing_us(p, READ_SHARE, _STORE_SHARE)
    if copied and 1 < p.m <= _FEW:
        return _ODD_K[0] + _ODD_K[1] * moving_us if p.k % 2 else math.hypot(LAUNCH_US + _US_OF_K * p.k, byte_us)
    return moving_us if not copied and p.k <= _ONE_BLOCK else math.inf


def _within(x: float) -> float:
    """Returns the number, at least 0 and at most 1."""
    return min(1.0, max(0.0, x))


# Where operands have rows of no whole 16 bytes, XLA's autotuner takes kernels of Triton: how much longer than at the
# device's rate they multiply, by the layout, where rows are even and where they are odd. Of 26 products of report12-17.
_UNALIGNED = {"nn": (2.0, 3.5), "tn": (3.0, 3.5), "nt": (3.6, 6.0), "tt": (3.6, 6.0)}


def _rows(p: Problem) -> tuple[int, int]:
    """Returns the elements of a row of memory of a, and of b."""
    return p.k if p.a.contiguous == "k" else p.m, p.k if p.bs[0].contiguous == "k" else p.n


def _unaligned_us(p: Problem, device: Device, padded_us: float) -> float:
    """Returns the time of XLA's product of unaligned operands, told what ours takes with the copies that align them.

    Tiles of 128 x 128 are multiplied in waves. Where they are too few for that, XLA divides k, and pads as ours does.
    """
    slower = _UNALIGNED[p.layout][any(rows % 2 for rows in _rows(p))]
    flop_us, byte_us = _roofline_us(p, device)
    multiplied_us = 2 + math.hypot(slower * flop_us * _waves(p, device), 1.6 * byte_us)
    return multiplied_us if _tiles(p) >= device.sms else min(multiplied_us, padded_us)


def _tiles(p: Problem) -> int:
    """Returns the number of tiles of 128 x 128."""
    return math.ceil(p.m / 128) * math.ceil(p.n / 128) * p.batch_size


def _waves(p: Problem, device: Device) -> float:
    """Returns the tiles that whole waves would have, one to an SM, for each that there is."""
    return math.ceil(_tiles(p) / device.sms) * device.sms / _tiles(p)


_LEAST_WEIGHTS = 1 << 16  # elements: of the smallest products of few rows that were measured
_LONG_READ_US = 45.0


def reads_weights(p: Problem) -> bool:
    """True of a product of few rows whose time, `_few_rows_us`, was fitted to all that XLA took, not to the least."""
    aligned = p.a.bytes(p.n) % 16 == p.a.bytes(p.k) % 16 == 0
    halves = all(x.bits == 16 for x in (p.a, *p.bs))
    return p.few_rows and halves and aligned and p.n * p.k >= _LEAST_WEIGHTS


def _few_rows_us(p: Problem, device: Device) -> float:
    """Returns the time of XLA's product of up to 64 rows: of the bytes, of dividing k, and of rows that are multiplied.

    Fitted to 125 products of salts report12 to report20; off by 8%, and 2% less: a kernel as fast gains nothing. Tiles,
    and parts of k, are powers of two: of 22 products whose n and k are such, too, XLA took 0.93 of what it took of
    others (medians of what was told without). Ten that read memory for longer than 45 us took 0.99 to 1.03 of that.
    """
    byte_us = 1e6 * p.bytes / device.bytes_per_second
    even = p.m > 1 and not p.n & (p.n - 1) and not p.k & (p.k - 1)  # one row is no product of Triton's
    fitted_us = 1.99 + (0.902 + 1.6e-3 * p.m) * byte_us + (2.32 + 0.043 * p.m) * byte_us / (byte_us + 0.37)
    fitted_us = 0.98 * fitted_us if even else fitted_us
    return min(fitted_us, 1.01 * byte_us) if byte_us > _LONG_READ_US else fitted_us


# XLA's products of float32 and of 8 bits: how long they multiply, in units of those by TF32 at the device's rate, and
# microseconds for each megabyte of a, b and the result, which splitting takes. Of 4096 and 8192 cubed on an H200
# (benchmarks/results/experiments/wide-h200.json). Those of float8 are the least of six that take 0.252 to 0.266 at 4096
# rows and more, in bursts; longer ones take more, as power limits them (`_HOT_FLOAT8`). Of two float8_e5m2 none was
# measured: cuBLAS has none, so they are no faster than 16 bits.
_OTHERS = {
    "tf32": (1.08, 0.0),  # and as many times longer as the last wave of tiles lacks
    "bf16": (0.585, 0.24),
    "bf16x3": (1.44, 1.23),
    "bf16x6": (2.92, 2.74),
    "bf16x9": (2.27, 0.0),
    "int8": (0.2615, 0.0),
    "float8": (0.25, 0.0),
    "float8_e5m2": (0.5, 0.0),
    "complex64": (7.2, 0.0),  # of 2048 cubed (mma-h200.json)
}


# How many times as long cuBLAS multiplies TF32 where neither operand lies along k, as wgmma reads them: 19 GFLOP took
# 108 us tn and 61 nt (benchmarks/results/experiments/contractions-h200.json).
_ACROSS_TF32 = 1.75

# Of few rows and columns of a deep contraction, whose k it divides, cuBLAS multiplies TF32 as if tiles had so many: of
# eight squares of 96 to 512, 24576 to 98304 deep, XLA took 0.97 to 1.5 of what this tells, and up to 1.8 of what was
# told without (experiments/deep-tf32-h200.json).
_DIVIDED_TF32, _DIVIDED_K, _DIVIDED_SIZE = (256, 128), 16384, 512

# How much of the shorter of multiplying and moving bytes XLA's products of TF32 hide, as the exponent of their norm: of
# ten products of 2 to 20 GFLOP they took 0.96 to 1.2 of what this tells. Triton's of few columns hide more.
_OVERLAP_TF32, _OVERLAP_FEW, _FEW_COLUMNS = 1.4, 2.0, 64
# cuBLAS multiplies complex numbers in tiles of so many rows and columns, and of so much k: a gate of two qubits, 4 x 4
# by 2**23 columns, took it 0.9 ms beside the copies, and takes 0.5 by this.
_LEAST_COMPLEX = 128, 16

# cuBLAS multiplies float8 only where rows of both operands lie along k; XLA transposes the others before, and reaches
# this share of the memory's bandwidth: 0.06 and 0.07 of 4096 x 7168 x 16384 and 4096 x 24576 x 1536 nn on an H200,
# which took 1372 and 473 us where nt took 674 and 203; more here, as no smaller ones were measured. A fusion that
# multiplies them as they lie takes this many times as long, or longer: there it was not chosen.
_TURNED_SHARE, _FUSED_FLOAT8 = 0.12, 2.0
# Float8 heats a device more than it bears for long: as our own kernels' model has it, the time grows by up to this
# share, half of it at `_HOT_US`. In turns with others on an H200 cuBLAS took 673 to 693 us for 4096 x 7168 x 16384, 213
# for 4096 x 24576 x 1536 and 804 to 868 for 8192 cubed (low-precision-h200.json, experiments/fp8-blocks-h200.json).
_HOT_FLOAT8, _HOT_US = 0.45, 800.0


def _turned_bytes(p: Problem) -> int:
    """Returns the bytes of the operands whose rows do not lie along k."""
    sizes = [(p.a, p.m * p.k), *((b, p.k * p.n) for b in p.bs)]
    return p.batch_size * sum(operand.bytes(size) for operand, size in sizes if operand.contiguous != "k")


def _others_us(p: Problem, device: Device) -> float | None:
    """Returns the time of XLA's products of float32 in the problem's math, or of 8 bits; None where none was measured.

    An epilogue is a pass over the accumulators at the rate of a copy, which is the least it may take: rows' scales of
    float8 took 85 us of 8192 cubed, and 57 of 4096 x 7168 x 16384 (low-precision-h200.json).
    """
    name = p.a.dtype.name if p.a.dtype.kind == "c" or p.math == "fast" else p.math or p.a.dtype.name
    if name.startswith("float8"):
        name = "float8_e5m2" if {p.a.dtype.name, p.bs[0].dtype.name} == {"float8_e5m2"} else "float8"
    if name not in _OTHERS:
        return None
    multiplied, split = _OTHERS[name]
    multiply_us = multiplied * 1e6 * p.flops / device.peak(np.dtype(np.float32), "tf32")
    if name == "complex64":
        multiply_us *= math.prod(
            max(1.0, least / size) for size, least in zip((min(p.m, p.n), p.k), _LEAST_COMPLEX, strict=True)
        )
    if name == "float8":
        multiply_us *= 1 + _HOT_FLOAT8 * multiply_us / (multiply_us + _HOT_US)
    transposes_us = _transposes_us(p, device)
    if name == "tf32":  # of fewer tiles than SMs it divides k
        across = p.layout == "tn" and not transposes_us  # else what is copied lies along k
        multiply_us *= (_ACROSS_TF32 if across else 1.0) * (_waves(p, device) if _tiles(p) > device.sms else 1.0)
        few = min(p.m, p.n) > _FEW_COLUMNS and max(p.m, p.n) <= _DIVIDED_SIZE and p.batch_size == 1
        if few and p.k >= _DIVIDED_K:
            sizes = zip((p.m, p.n), _DIVIDED_TF32, strict=True)
            multiply_us *= math.prod(math.ceil(size / tile) * tile / size for size, tile in sizes)
    byte_us, overlap = 1e6 * p.bytes / device.bytes_per_second, math.inf
    if name == "tf32":
        overlap = _OVERLAP_FEW if min(p.m, p.n) <= _FEW_COLUMNS or transposes_us else _OVERLAP_TF32
    us = 2 + _norm(multiply_us + split * p.bytes / 1e6, byte_us, overlap)
    if name == "float8" and (turned := _turned_bytes(p)):
        fused_us = FUSED_US + 1e6 * p.bytes / (FUSED_BYTES * device.bytes_per_second) + _FUSED_FLOAT8 * multiply_us
        us = min(us + 1e6 * 2 * turned / (_TURNED_SHARE * device.bytes_per_second), fused_us)
    us += transposes_us
    accumulated = p.m * p.n * p.batch_size * p.products * p.accumulator.itemsize
    return us if p.plain else us + 1 + 1e6 * (accumulated + p.result_bytes) / device.bytes_per_second


def _norm(x: float, y: float, exponent: float) -> float:
    """Returns the time of two works that overlap: from the sum, of exponent 1, to the longer, of an infinite one."""
    longer, shorter = max(x, y), min(x, y)
    return longer * (1 + (shorter / longer) ** exponent) ** (1 / exponent) if longer else 0.0


def _transposes_us(p: Problem, device: Device) -> float:
    """Returns the microseconds of XLA's copies of arrays that lie in an order which its product cannot walk.

    cuBLAS walks one batch axis, at any stride and with any pitch of rows: axes that are neighbours in memory are one.
    An axis that one operand lacks is none of the batch to XLA: it merges it with the other's rows, or columns, which it
    transposes for it, and the result, where they are no neighbours, or lie in another order than in what was before.
    """
    batch = range(len(p.batch))
    row, column, depth = (len(batch) + i for i in range(3))
    rows, columns = ([i for i in batch if x.batch[i] != p.batch[i]] for x in (p.bs[0], p.a))  # what is another's alone
    groups = [i for i in batch if i not in (*rows, *columns)], [*rows, row], [*columns, column]
    names = [(row, depth), (column, depth)]  # as they lie, rows along k
    names = [x if of.contiguous == "k" else x[::-1] for x, of in zip(names, (p.a, p.bs[0]), strict=True)]
    dtypes, found, copied = (p.a.dtype, p.bs[0].dtype, p.out_dtype), {}, 0.0
    for order, shape, dtype, last in zip(p.orders, p.shapes, dtypes, (*names, (row, column)), strict=True):
        axes = [[*batch, *last][i] for i in order or range(len(shape)) if shape[i] != 1]
        parts = {i: [x for x in axes if x in group] for i, group in enumerate(groups)}
        parts = {i: part for i, part in parts.items() if part}
        together = all(part == axes[(at := axes.index(part[0])) : at + len(part)] for part in parts.values())
        if together and all(found.get(i, part) == part for i, part in parts.items()):
            found |= parts
        else:  # 3.2 to 3.8 bytes in 1000 a nanosecond on an H200: benchmarks/results/experiments/strided-h200.json
            copied += 2e6 * math.prod(shape) * dtype.itemsize / (0.8 * device.bytes_per_second) + 1
    return copied
