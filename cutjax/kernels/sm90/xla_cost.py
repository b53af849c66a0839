"""The predicted time of XLA's own dense products on Hopper, which a kernel must not be slower than to run under "auto".

cuBLAS's and Triton's kernels take a time that follows from ours, where both do the same; where they do not, formulas of
their own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cutjax.kernels.device import Device
from cutjax.kernels.sm90.dense_cost import CONSTANTS, copies_us, features, time_us
from cutjax.kernels.sm90.operands import F32

if TYPE_CHECKING:
    from cutjax.kernels.problem import Problem
    from cutjax.kernels.sm90.kernel import Kernel

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
    "walked": 0.18,  # 14 more of attention, in an order of memory of their own: experiments/strided-h200.json
}


def xla_us(kernel: Kernel, device: Device) -> float | None:
    """Returns the time that XLA's own product may take, told of the kernel predicted fastest; None where unknown."""
    p = kernel.asked
    if not p.plain or p.ragged or p.symmetric:
        return None
    if p.a_dtype.itemsize != 2:
        return _others_us(p, device)
    f = features(kernel, device)
    odd = p.n * p.a_dtype.itemsize % 16 != 0
    if f.few_rows and not odd and not f.copies and p.n * p.k >= _LEAST_WEIGHTS:
        return _few_rows_us(p, device)
    padded = time_us(f, CONSTANTS)
    if f.copies and p.batch_size == 1:
        return _unaligned_us(p, device, padded)
    ours = padded - copies_us(f)
    unaligned = bool(f.copies or odd)
    flop_us, byte_us = 1e6 * p.flops / device.peak(p.a_dtype), 1e6 * p.bytes / device.bytes_per_second
    multiplies = flop_us / (flop_us + byte_us)
    tiles = math.ceil(p.m / 128) * math.ceil(p.n / 128) * p.batch_size
    few, deep = max(0.0, math.log2(device.sms / tiles)), max(0.0, math.log2(p.k / 4096))
    true = {
        "always": 1,
        "launch": 1 / ours,
        "unaligned": unaligned,
        "busy": unaligned * multiplies,
        "padded": f.copies > 0,
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
        "pitch": sum(row * p.a_dtype.itemsize % 128 != 0 for row in _rows(p)),
        "long": math.log2(ours),
        "walked": f.copies > 0 and any(p.orders),
    }
    weights = PLAIN if p.batch_size == 1 else BATCHED
    us = ours * math.exp(sum(weight * true[name] for name, weight in weights.items())) + _transposes_us(p, device)
    # One block of k, in a Triton kernel as fast as a copy: 1500 x 256 x 40.
    return us if p.k >= 64 or p.batch_size > 1 else min(us, 2 + byte_us)


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
    flop_us, byte_us = 1e6 * p.flops / device.peak(p.a_dtype), 1e6 * p.bytes / device.bytes_per_second
    tiles = math.ceil(p.m / 128) * math.ceil(p.n / 128)
    waves = math.ceil(tiles / device.sms) * device.sms / tiles
    multiplied_us = 2 + math.hypot(slower * flop_us * waves, 1.6 * byte_us)
    return multiplied_us if tiles >= device.sms else min(multiplied_us, padded_us)


_LEAST_WEIGHTS = 1 << 16  # elements: of the smallest products of few rows that were measured


def _few_rows_us(p: Problem, device: Device) -> float:
    """Returns the time of XLA's product of up to 64 rows: of the bytes, of dividing k, and of rows that are multiplied.

    Fitted to 125 products of salts report12 to report20; off by 8%, and 2% less: a kernel as fast gains nothing.
    """
    byte_us = 1e6 * p.bytes / device.bytes_per_second
    return 1.99 + (0.902 + 1.6e-3 * p.m) * byte_us + (2.32 + 0.043 * p.m) * byte_us / (byte_us + 0.37)


# XLA's products of float32 and int8: how long they multiply, in units of those by TF32 at the device's rate, and
# microseconds for each megabyte of a, b and the result, which splitting takes. Of 4096 and 8192 cubed on an H200
# (benchmarks/results/experiments/wide-h200.json).
_OTHERS = {
    "tf32": (1.15, 0.0),
    "bf16": (0.585, 0.24),
    "bf16x3": (1.44, 1.23),
    "bf16x6": (2.92, 2.74),
    "bf16x9": (2.27, 0.0),
    "int8": (0.2615, 0.0),
    "complex64": (7.2, 0.0),  # of 2048 cubed (mma-h200.json)
}


def _others_us(p: Problem, device: Device) -> float | None:
    """Returns the time of XLA's product of float32 in the problem's math, or of int8; None where none was measured."""
    name = p.a_dtype.name if p.a_dtype.kind == "c" else p.math or p.a_dtype.name
    if name not in _OTHERS:
        return None
    multiplied, split = _OTHERS[name]
    multiply_us = multiplied * 1e6 * p.flops / device.peak(F32, "tf32")
    return 2 + max(multiply_us + split * p.bytes / 1e6, 1e6 * p.bytes / device.bytes_per_second)


def _transposes_us(p: Problem, device: Device) -> float:
    """Returns the microseconds of XLA's copies of arrays that lie in an order which its product cannot walk.

    cuBLAS walks one batch axis, at any stride and with any pitch of rows: axes that are neighbours in memory are one.
    Where each operand lacks an axis of the batch, XLA multiplies all rows by all columns and transposes the result.
    """
    copied = 0.0
    crossed = all(batch != p.batch for batch in (p.a_batch, p.b_batch))
    dtypes = p.a_dtype, p.b_dtype, p.out_dtype
    for order, shape, dtype, result in zip(p.orders, p.shapes, dtypes, (False, False, True), strict=True):
        moving = [axis for axis in order if shape[axis] != 1]
        places = [moving.index(axis) for axis in range(len(p.batch)) if axis in moving]
        if (crossed and result) or (places and places != list(range(places[0], places[0] + len(places)))):
            # 3.2 to 3.8 bytes in 1000 a nanosecond on an H200: benchmarks/results/experiments/strided-h200.json
            copied += 2e6 * math.prod(shape) * dtype.itemsize / (0.8 * device.bytes_per_second) + 1
    return copied
