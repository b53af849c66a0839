"""Matrices quantized to float8 in one pass, or two: the kernels, their plan, and the choice between them and XLA."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

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
# Where a pass before has found the greatest magnitudes, both orders are as fast as one, and so many bytes of what that
# has read last are in L2: within 9% of 12 on an H200 (experiments/fp8-passes-h200.json).
FROM_L2 = 20e6
XLA_SHARE = 0.7
FLOATS = ("bfloat16", "float16", "float32")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Values of matrices ``[*batch, rows, columns]`` in float8, and their scales.

    Attributes:
      batch, rows, columns: sizes.
      dtype: of the matrices.
      rounded: the dtype to which they are rounded before, the same one where they are not.
      to: of the values.
      block: the elements of a scale, across what is contiguous in the values and along it; -1 is the whole axis.
      own, turned: which values are written: as the matrix lies, its transpose, or both.
      device: which.
    """

    batch: tuple[int, ...]
    rows: int
    columns: int
    dtype: np.dtype
    rounded: np.dtype
    to: np.dtype
    block: tuple[int, int]
    own: bool
    turned: bool
    device: Device

    @classmethod
    def of(
        cls,
        x: Any,
        dtype: Any,
        block: tuple[int, int],
        own: bool,
        turned: bool,
        device: Device,
        rounded: Any = None,
    ) -> Problem:
        """Makes one of the aval and the parameters of ``quantize_p``."""
        *batch, rows, columns = x.shape
        of = np.dtype(x.dtype)
        dtypes = of, np.dtype(rounded or of), np.dtype(dtype)
        return cls(tuple(batch), rows, columns, *dtypes, block, own, turned, device)

    @property
    def arch(self) -> str:
        """The architecture it is compiled for."""
        return self.device.arch

    @property
    def elements(self) -> int:
        """The elements of all matrices."""
        return math.prod(self.batch) * self.rows * self.columns

    @property
    def square(self) -> bool:
        """True if a scale is of several rows of the values; else of one, or of a part of it."""
        return self.block[0] != 1

    @property
    def whole(self) -> bool:
        """True if scales are of whole axes: a pass before finds the greatest magnitudes."""
        return self.block[1] < 0

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
    """The kernels for a problem: texts, arguments and launches."""

    problem: Problem

    @property
    def name(self) -> str:
        """The entry symbol of what quantizes: dtypes, blocks, and which values are written."""
        return self._named("quantize", short(self.problem.to.name))

    def _named(self, what: str, *to: str) -> str:
        p = self.problem
        block = "x".join("all" if size < 0 else str(size) for size in p.block)
        of = [short(p.dtype.name), *[short(p.rounded.name)] * (p.rounded != p.dtype)]
        return "_".join([what, *of, *to, block, *["own"] * p.own, *["turned"] * p.turned])

    @property
    def time_us(self) -> float:
        """Predicted microseconds."""
        p = self.problem
        if not p.whole:
            return LAUNCH_US + p.device.moving_us(p.bytes, SHARE_OF_BOTH if p.own and p.turned else SHARE)
        read = p.elements * p.dtype.itemsize
        return 2 * LAUNCH_US + p.device.moving_us(p.bytes + read - min(read, FROM_L2), SHARE)

    @property
    def maxima(self) -> tuple[int, int]:
        """The number of greatest magnitudes that a pass before finds: of matrices, or of rows, and of columns."""
        p, matrices = self.problem, math.prod(self.problem.batch) * self.problem.whole
        return (matrices, 0) if p.square else (matrices * p.rows * p.own, matrices * p.columns * p.turned)

    def _read(self) -> Iterator[Argument]:
        """The arguments that both kernels read: matrices, and greatest magnitudes where scales are of whole axes."""
        p = self.problem
        yield Argument("const char* x", Pointer(0))
        yield Argument("u32* most_of_rows", Pointer(int(p.whole)))
        yield Argument("u32* most_of_columns", Pointer(int(p.whole), 4 * self.maxima[0] * bool(self.maxima[1])))
        yield integer("rows", p.rows)
        yield integer("columns", p.columns)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of the kernel that quantizes, in order."""
        return (*self._read(), *self._written())

    def _written(self) -> Iterator[Argument]:
        p = self.problem
        at = 1 + p.whole  # behind the zeros that maxima begin with
        for there, prefix in ((p.own, ""), (p.turned, "turned_")):
            yield Argument(f"char* {prefix}values", Pointer(at if there else 0))
            yield Argument(f"float* {prefix}scales", Pointer(at + 1 if there else 0))
            at += 2 * there

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The launches, in order."""
        p = self.problem
        quantizes = self._entry(self.name, self.arguments, "quantize/tile.cuh", self.shared_bytes)
        if not p.whole:
            return (quantizes,)
        return self._entry(self._named("maxima"), tuple(self._read()), "quantize/maxima.cuh", 0), quantizes

    def _entry(self, name: str, arguments: tuple[Argument, ...], file: str, shared_bytes: int) -> Entry:
        p = self.problem
        types = "".join(
            f"constexpr Dtype {name} = Dtype::{DTYPES[dtype.name].stored};\n"
            for name, dtype in (("FROM", p.dtype), ("OF", p.rounded), ("TO", p.to))
        )
        parameters = f"#define PARAMETERS {', '.join(argument.declaration for argument in arguments)}\n"
        common = "common/atoms.cuh", *sources.MATH, "common/elements.cuh", types, parameters, "quantize/elements.cuh"
        constants = {"SQUARE": p.square, "WHOLE": p.whole, "OWN": p.own, "TURNED": p.turned}
        text = sources.source(name, constants, (*common, file))
        return Entry(p, name, text, arguments, p.elements // BLOCK**2, THREADS, shared_bytes)

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: magnitudes, reciprocals of scales, and the transposed tile."""
        words = BLOCK * (8 * self.problem.rounded.itemsize // 4) + 3 * BLOCK
        return 4 * words + BLOCK**2 * self.problem.turned

    def call(self) -> Call:
        """Returns the compiled kernels and the plan of their launches."""
        launches = tuple(entry.launch(entry.compile().image) for entry in self.entries)
        if not self.problem.whole:
            return Call(launches)
        maxima = jax.ShapeDtypeStruct((sum(self.maxima),), np.dtype(np.uint32))
        return Call(
            launches,
            results=(*self.results, maxima),
            finish=lambda written, _: written[:-1],
            aliases=((1, len(self.results)),),
            prepare=lambda given: [*given, lax.full(maxima.shape, 0, maxima.dtype)],
        )

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that the kernel writes: values and scales of each order."""
        p = self.problem
        each = ((p.rows, p.columns),) * p.own + ((p.columns, p.rows),) * p.turned
        return tuple(
            jax.ShapeDtypeStruct((*p.batch, *shape), dtype)
            for sizes in each
            for shape, dtype in ((sizes, p.to), (counts(sizes, p.block), np.dtype(np.float32)))
        )


def counts(sizes: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """The number of scales that the values of a matrix have along either axis."""
    mn, k = (1 if step < 0 else size // step for size, step in zip(sizes, block, strict=True))
    return mn, k


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, backend: str) -> Choice[Problem, Kernel]:
    """Returns the kernel that runs under a backend, or the reasons why XLA does."""
    one = tuple(why_not(problem)) or Kernel(problem)
    return choice.fastest(
        problem, [one], "two passes" if problem.whole else "one pass", problem.device.moving_us(problem.bytes)
    )


def why_not(problem: Problem) -> list[str]:
    """Returns the reasons against the kernel."""
    p = problem
    if not p.elements:
        return ["a size is 0: nothing to launch"]
    found = []
    if number(p.arch) < 89:
        found.append(f"{p.arch}: float8 is converted to from sm_89 on")
    is_rounded = p.rounded != p.dtype
    if p.dtype.name not in FLOATS or p.to.name not in FLOAT8 or (is_rounded and p.dtype.itemsize <= p.rounded.itemsize):
        found.append(f"{p.dtype} to {p.to}: the kernel reads {', '.join(map(short, FLOATS))}, and writes float8")
    if p.rows % BLOCK or p.columns % BLOCK:
        found.append(f"{p.rows} x {p.columns}: the kernel has tiles of {BLOCK} x {BLOCK}")
    counts = {"tiles": p.elements // BLOCK**2, "rows": p.rows + BLOCK, "columns": p.columns + BLOCK}
    return [*found, *reasons.of_counters({**counts, "tiles of a matrix": p.rows * p.columns // BLOCK**2})]
