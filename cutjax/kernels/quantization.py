"""Matrices quantized to float8 in one pass: the kernel, its plan, and the choice between it and XLA."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cutjax.dtypes import DTYPES, short
from cutjax.kernels import reasons
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.device import Device
from cutjax.kernels.entry import Entry
from cutjax.runtime import choice, sources
from cutjax.runtime.architectures import number
from cutjax.runtime.choice import Choice
from cutjax.runtime.launch import Call, Pointer

BLOCK = 128
THREADS = 256
LAUNCH_US = 2.0
# Of a copy's rate: of one order, of both. On an H200 0.90 to 1.01, and 0.76 to 0.92 (experiments/quantize-h200.json).
SHARE, SHARE_OF_BOTH = 0.95, 0.8
XLA_SHARE = 0.7
FLOATS = ("bfloat16", "float16", "float32")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Values of matrices ``[*batch, rows, columns]`` in float8, and their scales.

    Attributes:
      batch, rows, columns: sizes.
      dtype: of the matrices.
      to: of the values.
      square: whether a scale is that of 128 x 128 elements; else of 128 along what is contiguous in the values.
      own, turned: which values are written: as the matrix lies, its transpose, or both.
      device: which.
    """

    batch: tuple[int, ...]
    rows: int
    columns: int
    dtype: np.dtype
    to: np.dtype
    square: bool
    own: bool
    turned: bool
    device: Device

    @classmethod
    def of(cls, x: Any, dtype: Any, square: bool, own: bool, turned: bool, device: Device) -> Problem:
        """Makes one of the aval and the parameters of ``quantize_p``."""
        *batch, rows, columns = x.shape
        return cls(tuple(batch), rows, columns, np.dtype(x.dtype), np.dtype(dtype), square, own, turned, device)

    @property
    def arch(self) -> str:
        """The architecture it is compiled for."""
        return self.device.arch

    @property
    def elements(self) -> int:
        """The elements of all matrices."""
        return math.prod(self.batch) * self.rows * self.columns

    @property
    def flops(self) -> int:
        """0 where there is nothing to quantize, else the elements; no arithmetic counts."""
        return self.elements

    @property
    def bytes(self) -> int:
        """The least bytes that are moved; scales are too few to count."""
        return self.elements * (self.dtype.itemsize + self.own + self.turned)

    @property
    def xla_us(self) -> float:
        """The predicted time of XLA's fusions: two reads and a write for each, values are transposed in 8 bits."""
        each = (2 * self.dtype.itemsize + 1) * (self.own + self.turned) + 2 * self.turned
        return self.device.moving_us(self.elements * each, XLA_SHARE)

    def __str__(self) -> str:
        shape = ",".join(map(str, (*self.batch, self.rows, self.columns)))
        return f"quantization {short(self.dtype.name)}[{shape}] to {short(self.to.name)}"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel for a problem: text, arguments and launch."""

    problem: Problem

    @property
    def name(self) -> str:
        """The entry symbol: dtypes, blocks, and which values are written."""
        p = self.problem
        block = f"{BLOCK if p.square else 1}x{BLOCK}"
        return f"quantize_{short(p.dtype.name)}_{short(p.to.name)}_{block}{'_own' * p.own}{'_turned' * p.turned}"

    @property
    def time_us(self) -> float:
        """Predicted microseconds."""
        p = self.problem
        return LAUNCH_US + p.device.moving_us(p.bytes, SHARE_OF_BOTH if p.own and p.turned else SHARE)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""
        return tuple(self._arguments())

    def _arguments(self) -> Iterator[Argument]:
        p = self.problem
        yield Argument("const char* x", Pointer(0))
        at = 1
        for there, prefix in ((p.own, ""), (p.turned, "turned_")):
            yield Argument(f"char* {prefix}values", Pointer(at if there else 0))
            yield Argument(f"float* {prefix}scales", Pointer(at + 1 if there else 0))
            at += 2 * there
        yield integer("rows", p.rows)
        yield integer("columns", p.columns)

    @property
    def entry(self) -> Entry:
        """The launch."""
        p = self.problem
        types = "".join(
            f"constexpr Dtype {name} = Dtype::{DTYPES[dtype.name].stored};\n"
            for name, dtype in (("OF", p.dtype), ("TO", p.to))
        )
        parameters = f"#define PARAMETERS {', '.join(argument.declaration for argument in self.arguments)}\n"
        parts = "common/atoms.cuh", *sources.MATH, "common/elements.cuh", types, parameters, "quantize/tile.cuh"
        constants = {"SQUARE": p.square, "OWN": p.own, "TURNED": p.turned}
        text = sources.source(self.name, constants, parts)
        blocks = p.elements // BLOCK**2
        return Entry(p, self.name, text, self.arguments, blocks, THREADS, self.shared_bytes)

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: magnitudes, reciprocals of scales, and the transposed tile."""
        words = BLOCK * (8 * self.problem.dtype.itemsize // 4) + 3 * BLOCK
        return 4 * words + BLOCK**2 * self.problem.turned

    def call(self) -> Call:
        """Returns the compiled kernel and the plan of its launch."""
        entry = self.entry
        return Call((entry.launch(entry.compile().image),))


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, backend: str) -> Choice[Problem, Kernel]:
    """Returns the kernel that runs under a backend, or the reasons why XLA does."""
    one = tuple(why_not(problem)) or Kernel(problem)
    return choice.fastest(problem, [one], "one pass", problem.device.moving_us(problem.bytes))


def why_not(problem: Problem) -> list[str]:
    """Returns the reasons against the kernel."""
    p = problem
    if not p.elements:
        return ["a size is 0: nothing to launch"]
    found = []
    if number(p.arch) < 89:
        found.append(f"{p.arch}: float8 is converted to from sm_89 on")
    if p.dtype.name not in FLOATS or p.to.name not in FLOAT8:
        found.append(f"{p.dtype} to {p.to}: the kernel reads {', '.join(map(short, FLOATS))}, and writes float8")
    if p.rows % BLOCK or p.columns % BLOCK:
        found.append(f"{p.rows} x {p.columns}: the kernel has tiles of {BLOCK} x {BLOCK}")
    counts = {"tiles": p.elements // BLOCK**2, "rows": p.rows + BLOCK, "columns": p.columns + BLOCK}
    return [*found, *reasons.of_counters({**counts, "tiles of a matrix": p.rows * p.columns // BLOCK**2})]
