"""Kernels for 8-bit weights beside 16-bit operands that convert b to 16 bits before the launch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from cutjax.dtypes import short
from cutjax.kernels.device import Device
from cutjax.kernels.family import Kernel
from cutjax.kernels.problem import Problem
from cutjax.runtime.launch import Call

PASS_US = 2.0  # of a conversion, beside moving its bytes
PASS_SHARE = 0.52  # of the memory's bandwidth, at which XLA converts 8 bits to 16
# Where XLA multiplies in a fusion of its own that converts what it reads, the shares of the memory's bandwidth and of
# the tensor cores' rate that it reaches. These and that: 1 to 4096 rows by weights of int8 and float8_e4m3fn, 8192 x
# 8192 and 4096 x 14336, on an H200.
FUSED_BYTES, FUSED_FLOPS = 0.65, 0.8


@dataclasses.dataclass(frozen=True, eq=False)
class Widened:
    """A kernel of any family that multiplies b in a's dtype, and the conversion before it.

    Attributes:
      problem: what was asked.
      kernel: the kernel of the wide problem.
    """

    problem: Problem
    kernel: Kernel

    @property
    def config(self) -> Any:
        """Config of the kernel."""
        return self.kernel.config

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.kernel.name

    @property
    def source(self) -> str:
        """Text of the kernel."""
        return self.kernel.source

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the kernel, and the conversion."""
        return (f"b converted to {short(self.problem.a_dtype.name)}", *self.kernel.notes)

    def time_us(self, device: Device) -> float:
        """Returns the predicted time of the conversion and the launch."""
        return self.kernel.time_us(device) + pass_us(self.problem, device)

    def xla_us(self, device: Device) -> float | None:
        """Returns the time that XLA may take."""
        return xla_us(self.problem, self.kernel, device)

    def unlaunchable(self) -> tuple[str, ...]:
        """Returns the reasons against launching the kernel."""
        return self.kernel.unlaunchable()

    def call(self) -> Call:
        """Returns the compiled kernel and the plan of its launch."""
        call = self.kernel.call()
        widen = functools.partial(_widen, self.problem.products, self.problem.a_dtype, call.prepare)
        return dataclasses.replace(call, prepare=widen)


def _widen(
    products: int,
    dtype: np.dtype,
    prepare: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] | None,
    arrays: Sequence[jax.Array],
) -> Sequence[jax.Array]:
    """Returns the kernel's arrays: a, each b converted to the dtype, and the others."""
    taken = [x.astype(dtype) if 1 <= i <= products else x for i, x in enumerate(arrays)]
    return prepare(taken) if prepare else taken


def pass_us(problem: Problem, device: Device) -> float:
    """Returns the microseconds of converting each b: it is read, and written in a's dtype."""
    matrices = problem.products * math.prod(problem.b_batch) * (problem.groups if problem.ragged == "m" else 1)
    moved = problem.k * problem.n * matrices * (problem.a_dtype.itemsize + problem.b_dtype.itemsize)
    return PASS_US * problem.products + 1e6 * moved / (PASS_SHARE * device.bytes_per_second)


def xla_us(problem: Problem, wide: Kernel | None, device: Device) -> float | None:
    """Returns the time that XLA may take for a narrow product, from the kernel predicted fastest for the wide one."""
    of_wide = None if wide is None else wide.xla_us(device)
    if of_wide is None:
        return None
    fused_us = PASS_US + 1e6 * problem.bytes / (FUSED_BYTES * device.bytes_per_second)
    fused_us += 1e6 * problem.flops / (FUSED_FLOPS * device.peak(problem.a_dtype))
    return min(of_wide + pass_us(problem, device), fused_us)
