"""Operands as wgmma takes them: dtypes, terms of float32, rows that TMA walks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from cutjax.dtypes import FLOAT8, FOUR_BITS, are_narrow, short
from cutjax.epilogue.expression import identity
from cutjax.kernels.arguments import scale_buffers
from cutjax.kernels.operand import Operand, Scale
from cutjax.kernels.prepared import Pad, Pairs, Prepared, Step, Terms, Transpose
from cutjax.kernels.problem import BF16, Problem
from cutjax.kernels.sm90 import windows
from cutjax.kernels.sums import summands

F32, C64 = np.dtype(np.float32), np.dtype(np.complex64)
INT8 = ("int8", "uint8")

# Pairs of terms (of a, of b) that are multiplied, in this order: the smallest products first, those of the highest
# terms last. Terms beyond the pairs of a number are products too small for it.
_THREE = ((1, 0), (0, 1), (0, 0))
_SIX = ((2, 0), (1, 1), (0, 2), *_THREE)
PAIRS = {1: ((0, 0),), 3: _THREE, 6: _SIX, 9: ((2, 2), (2, 1), (1, 2), *_SIX)}


@dataclasses.dataclass(frozen=True)
class Way:
    """A way in which wgmma multiplies operands.

    Attributes:
      terms: matrices that an operand is the sum of.
      pairs: of terms, those that are multiplied, in order.
      rounded: bits of the mantissa of a term of f32; 0 where operands are as they are.
      dtype: of a term of f32; None where operands are as they are.
      promoted: 128 bytes of k after which accumulators are added to others in registers, as the tensor cores add with
        fewer bits than f32 has, or round towards zero; 0 for never.
    """

    terms: int = 1
    pairs: tuple[tuple[int, int], ...] = PAIRS[1]
    rounded: int = 0
    dtype: np.dtype | None = None
    promoted: int = 0

    @property
    def each(self) -> bool:
        """True if the sums of each stage are promoted, in parts."""
        return self.promoted == 1


# Sums of float8 products have 14 bits: 128 of k are added up in f32. Of the full products of float32 by terms, the
# tensor cores' own rounding, towards zero at every 16 of k, would be the largest error: 512 of k.
_WAYS = {
    "tf32": Way(),
    "tf32x3": Way(2, PAIRS[3], 10, F32, 16),
    "bf16": Way(1, PAIRS[1], 7, BF16),
    "bf16x3": Way(2, PAIRS[3], 7, BF16, 8),
    "bf16x6": Way(3, PAIRS[6], 7, BF16, 8),
    "bf16x9": Way(3, PAIRS[9], 7, BF16, 8),
    "fast": Way(),
}
_AS_THEY_ARE, _FLOAT8 = Way(), Way(promoted=1)


def way(problem: Problem) -> Way:
    """Returns the way in which wgmma multiplies the operands of a problem."""
    if problem.math:
        return _WAYS[problem.math]
    return _FLOAT8 if problem.a.dtype.name in FLOAT8 else _AS_THEY_ARE


def decoded(operand: Operand, other: Operand) -> bool:
    """True if an operand is decoded in registers, in front of wgmma, which multiplies the other one's dtype."""
    return in_halves(operand, other) or in_bytes(operand, other)


def in_halves(operand: Operand, other: Operand) -> bool:
    """True if it is decoded to 16 bits, and multiplied by its scales before."""
    return are_narrow(other.dtype, operand.dtype)


def in_bytes(operand: Operand, other: Operand) -> bool:
    """True if it is decoded to float8, whose sums are multiplied by scales as they are promoted."""
    return _to_float8(operand.dtype, other.dtype)


@functools.cache
def _to_float8(narrow: np.dtype, dtype: np.dtype) -> bool:
    return dtype.name == "float8_e4m3fn" and narrow.name in FOUR_BITS


def factors(problem: Problem) -> Scale | None:
    """Returns the scales that a problem's a is multiplied by as it is decoded; None where there are none."""
    return problem.a.scale if in_halves(problem.a, problem.bs[0]) else None


def k_major(dtype: np.dtype) -> bool:
    """True if wgmma reads operands of a dtype along k alone."""
    return dtype.itemsize != 2


def reasons(problem: Problem) -> list[str]:
    """Returns the reasons against wgmma for the operands of a problem."""
    a, b, acc = problem.a.dtype.name, problem.bs[0].dtype.name, problem.accumulator
    both = f"{short(a)} x {short(b)}"
    if a == b == "complex64" and problem.math == "tf32":
        if not problem.plain or problem.groups or problem.symmetric or problem.strided or len(summands(problem)) > 1:
            return [f"{both} by tf32: wgmma multiplies their parts, in dense products without an epilogue"]
        return [] if problem.out_dtype == C64 else [f"{both} as {short(problem.out_dtype.name)}: both parts are stored"]
    if a == b == "float32":
        if problem.math not in (ways := [name for name in _WAYS if name != "fast"]):
            return [f"{both}: wgmma multiplies float32 as one of {', '.join(ways)}"]
    elif problem.math not in ("", "fast"):
        return [f"{both} by {problem.math}: wgmma computes these products as they are"]
    elif decoded(problem.bs[0], problem.a):
        return []  # decode.py
    elif not ((a == b and a in ("bfloat16", "float16")) or {a, b} <= {*FLOAT8} or {a, b} <= {*INT8}):
        return [f"{both}: both operands are bf16, f16, f32, of float8 or of 8-bit integers"]
    of_integers = acc.name in ("int32", "uint32")
    if (a in INT8) != of_integers and (of_integers or a in INT8):
        return [f"{both} added up in {short(acc.name)}: wgmma adds up integers in 32 bits, and floats in f32"]
    if len(summands(problem)) > 1 and way(problem).terms > 1:
        return [f"{both} by {problem.math} in a sum of products: kernels multiply pairs of terms, or of arrays"]
    if problem.a.gathered and (way(problem).dtype or problem.a.bits > 16):
        return [f"gathered rows of {both}: threads copy elements as they are, of 8 and 16 bits"]
    if windows.view_of(problem) and problem.a.contiguous == "mn" and k_major(way(problem).dtype or problem.a.dtype):
        return [f"{both} in a weight gradient: wgmma reads these along pixels, which are apart in memory"]
    return windows.reasons(problem)


@functools.lru_cache(maxsize=1024)
def as_multiplied(problem: Problem) -> Problem:
    """Returns the problem of the copies that kernels take of the arrays: terms of float32, and rows along k.

    Complex numbers are pairs of real ones, in rows twice as long. Two rows of b make the two columns of a pair: (real,
    -imag) the real ones, (imag, real) the imaginary ones.
    """
    if problem.a.dtype == C64:
        a, b = (x.of(F32).along_k for x in (problem.a, problem.bs[0]))
        return dataclasses.replace(problem, n=2 * problem.n, k=2 * problem.k, a=a, bs=(b,), epilogue=identity(F32, F32))
    if windows.patches(problem):
        problem = dataclasses.replace(problem, a=dataclasses.replace(problem.a, view=None))
    dtype = way(problem).dtype

    def taken(operand: Operand) -> Operand:
        operand = operand.of(dtype or operand.dtype)
        if not k_major(operand.dtype) or operand.contiguous == "k" or decoded(operand, problem.a):
            return operand
        if view := windows.view_of(problem):
            operand = dataclasses.replace(operand, view=operand.view or windows.in_order(view))
        return operand.along_k

    a, bs = taken(problem.a), tuple(map(taken, problem.bs))
    if (a, bs) != (problem.a, problem.bs):
        problem = dataclasses.replace(problem, a=a, bs=bs, math="" if a.dtype == BF16 else problem.math)
    return windows.as_multiplied(problem)


@functools.lru_cache(maxsize=1024)
def prepared(problem: Problem) -> tuple[Prepared, ...]:
    """Returns the operands of which kernels read copies: other numbers, rows along k, rows that TMA walks."""
    p, taken, found = as_multiplied(problem), way(problem), []
    view = windows.view_of(p)
    for buffer, (name, operand, given, length, matrices, k) in _arrays(problem, p):
        own = windows.steps(problem, name)
        if own and view and name == "a":  # of images, which are larger then
            found.append(_images(problem, taken))
            continue
        rows, size = operand.array(length, k)
        pitch = row_bytes(operand, length, k)
        columns = operand.elements(pitch) - size
        transposed = operand.contiguous != ("mn" if windows.packed(problem) else given.contiguous)
        pairs = 1 if given.dtype != C64 else 4 if buffer else 2  # numbers that a complex one makes
        steps: list[Step] = [] if taken.dtype is None else [Terms(taken.terms, taken.rounded, taken.dtype)]
        steps += own
        turn = Transpose((-1, view.channels, length), groups=view.groups) if view else Transpose()
        steps += [turn] * transposed + [Pairs()] * (pairs == 4)
        steps += [Pad(columns // 2 if pairs == 2 else columns, pitch)] * (columns > 0)
        if steps:
            rows *= matrices
            whole = transposed or taken.dtype is not None or pairs > 1 or own
            read = given.bytes(size * rows) // pairs if whole else rows * pitch
            found.append(Prepared(name, buffer, tuple(steps), read, taken.terms * rows * pitch, taken.terms))
    return tuple(found)


def _arrays(given: Problem, p: Problem) -> Iterator[tuple[int, tuple[str, Operand, Operand, int, int, int]]]:
    """Yields the arrays of a problem that is multiplied as another, by their buffers: of a sum all, each with its k."""
    further = scale_buffers(given)
    for i, (of, before) in enumerate(zip(summands(p), summands(given), strict=True)):
        found = [("a", of.a, before.a, p.m, p.matrices[0], windows.depth(of))]
        found += [("b", x, y, p.n, p.matrices[1], windows.depth(of)) for x, y in zip(of.bs, before.bs, strict=True)]
        for j, array in enumerate(found[:1] if p.symmetric else found):
            yield further[j][i - 1] if i else j, array


def _images(problem: Problem, way: Way) -> Prepared:
    """Returns the images of a convolution, padded for windows of few channels."""
    packing, given = windows.packed(problem), problem.a
    assert packing is not None
    of, steps = packing.of, windows.steps(problem, "a")
    terms: list[Step] = [] if way.dtype is None else [Terms(way.terms, way.rounded, way.dtype)]
    written = of.images * packing.strides((way.dtype or given.dtype).itemsize)[-1]
    return Prepared("a", 0, (*terms, *steps), given.bytes(of.elements), way.terms * written, way.terms)


def row_bytes(operand: Operand, rows: int, k: int) -> int:
    """Returns the pitch in bytes of the rows of an operand whose m or n axis is `rows` long.

    TMA walks rows that start at multiples of 16 bytes. Copies of others start on lines of memory, or as even as adds a
    fiftieth at most.
    """
    size = operand.bytes(operand.array(rows, k)[1])
    if size % 16 == 0:
        return size
    return next(x for unit in (128, 64, 32, 16) if (x := -(-size // unit) * unit) <= 1.02 * size or unit == 16)
