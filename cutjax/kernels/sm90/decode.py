"""Weights that are decoded in registers: what their kernels read beside them, and which files of text decode."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cutjax.dtypes import DTYPES, bits_of, short
from cutjax.kernels.arguments import Argument, Matrices, matrix_map
from cutjax.kernels.columns import maximum, where
from cutjax.kernels.operand import Operand, Scale
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.config import FEW_OF_SLICES, Config, Sizes
from cutjax.kernels.sm90.operands import decoded, factors, in_bytes

# Of a dtype in memory: its name in text, and the file that decodes it.
_NARROW = {
    "int8": ("s8", "int8"),
    "uint8": ("u8", "int8"),
    "int4": ("s4", "int4"),
    "uint4": ("u4", "int4"),
    "float8_e4m3fn": ("e4m3", "float8"),
    "float8_e5m2": ("e5m2", "float8"),
    "float4_e2m1fn": ("e2m1", "float4"),
}
# Of a scale's dtype: the file that multiplies by it, where it is not the dtype that is multiplied.
_FACTORS = {"float32": "f32", "bfloat16": "other", "float16": "other", "float8_e8m0fnu": "e8m0"}
_TMA_ALIGNED = 128  # bytes at which TMA writes
TIMED = {4: 1024, 8: 2048}  # rows beside which several products of so many bits were timed
TIMED_GROUPS = 256  # the same of an average group, of 4 bits
TIMED_BATCHES = 64


def _factor(scale: Scale, wide: np.dtype) -> str | None:
    """Returns the file that multiplies elements of a dtype by a scale; None where there is none."""
    return "halves" if scale.dtype == wide else _FACTORS.get(scale.dtype.name)


def factor_kind(config: Sizes, problem: Problem) -> Any:
    """Returns a number for the factors of elements: 0 for none, 1 for scales of 16 bits, 2 for others."""
    if (scale := factors(problem)) is None:
        return 0
    return where(config.by_sums(problem), 0, 1 if _factor(scale, problem.bs[0].dtype) == "halves" else 2)


def rescaled(config: Sizes, problem: Problem) -> Any:
    """Returns the number of sums of a thread that are multiplied by scales in a stage."""
    sums = config.accumulator_registers * problem.products * factor_rows(config, problem)
    return where(config.by_sums(problem), sums, 0)


def factor_rows(config: Sizes, problem: Problem) -> Any:
    """Returns the rows of a's factors that a stage has, each along bm; 0 where a has none."""
    scale = factors(problem)
    return maximum(1, config.depth(problem) // scale.k) if scale else 0


def factor_places(config: Sizes, problem: Problem) -> tuple[Any, ...]:
    """Returns the places in a stage, in bytes, of the arrays of a matrix's factors, and of their end."""
    scale, found = factors(problem), [0]
    for dtype in scale.arrays if scale else ():
        size = factor_rows(config, problem) * config.bm * bits_of(dtype) // 8
        found.append(found[-1] + -(-size // _TMA_ALIGNED) * _TMA_ALIGNED)
    return tuple(found)


def factor_bytes(config: Sizes, problem: Problem) -> Any:
    """Returns the memory of a stage's factors, in units in which swizzled tiles begin."""
    return -(-problem.beside[0] * factor_places(config, problem)[-1] // 1024) * 1024


def reasons(problem: Problem, b: Operand) -> list[str]:
    """Returns the reasons against decoding b in front of wgmma."""
    found, scale = [], b.scale
    if b.contiguous == "k" and (b.bits == 4 or scale):
        found.append(f"b in {b.bits} bits{' with scales' if scale else ''} along k: kernels decode rows along n")
    if b.bits == 4 and problem.n % 32:
        found.append(f"n = {problem.n}: rows of b in 4 bits are no whole units of 16 bytes")
    if in_bytes(b, problem.a):
        several = f"{problem.products} products of weights in 4 bits beside float8: kernels decode those of one"
        return found + [several] * (problem.products > 1)
    if problem.a.scale:
        found.append(
            f"a with scales of {problem.a.scale.mn} x {problem.a.scale.k} elements: kernels multiply b by scales"
        )
    return found if scale is None else found + _of_scale(problem, b, scale)


def _of_scale(problem: Problem, b: Operand, scale: Scale) -> list[str]:
    found = []
    if scale.mn != 1 or scale.k % 32 or (128 % scale.k and scale.k % 128) or problem.k % scale.k:
        found.append(f"scales of {scale.mn} x {scale.k} elements: kernels take one for 32, 64 or times 128 of k")
    if scale.zero not in (None, b.dtype) or (scale.zero and not b.dtype.name.endswith(("int4", "int8"))):
        found.append(
            f"zero points in {short(scale.zero.name)} of {short(b.dtype.name)}: kernels subtract those in the dtype of "
            "integers"
        )
    if _factor(scale, problem.a.dtype) is None:
        known = ", ".join(map(short, _FACTORS))
        found.append(f"scales in {short(scale.dtype.name)}: kernels multiply by {known}")
    if any(problem.n * bits_of(dtype) % 128 for dtype in scale.arrays):
        found.append(f"n = {problem.n}: rows of scales are no whole units of 16 bytes")
    if problem.strided:
        found.append("weights with scales in an order of their own")
    return found


def arguments(config: Config, problem: Problem) -> Iterator[Argument]:
    """Yields the tensor maps of the factors of each matrix a, as Scaled in load_scaled.cuh loads them."""
    if (scale := factors(problem)) is None:
        return
    rows, of_stage = -(-problem.k // scale.k), factor_rows(config, problem)
    buffer = problem.told + problem.bs[0].arrays  # behind the operands of a prologue of x
    for i in range(problem.beside[0]):
        for name, dtype in zip(("factors", "zeros"), scale.arrays, strict=False):
            packed, kind = (2, np.dtype(np.uint8)) if bits_of(dtype) == 4 else (1, dtype)  # 4 bits as bytes
            row, box = problem.m // packed * kind.itemsize, (config.bm // packed, of_stage)
            of = Matrices(row, row * rows, problem.matrices[0], ())
            value = matrix_map(buffer, kind, (problem.m // packed, rows), of, box, 0, 256)
            yield Argument(f"const __grid_constant__ TensorMap map_{name}{i}", value, "a")
            buffer += 1


def few_columns(config: Config, problem: Problem) -> tuple[int, ...]:
    """Returns the columns of a narrower wgmma, for tiles with no more of a group; none where it saves nothing."""
    decoded_alone = decoded(problem.a, problem.bs[0]) and not in_bytes(problem.a, problem.bs[0])
    few = decoded_alone and problem.divided == "n" and config.sliced and not config.by_warps
    return (FEW_OF_SLICES,) if few and config.bn > FEW_OF_SLICES else ()


def multiply(config: Config, problem: Problem) -> list[str]:
    """Returns the files that multiply what is decoded."""
    if in_bytes(problem.a, problem.bs[0]):
        return ["sm90/multiply_bytes.cuh"]
    return ["sm90/weights.cuh", f"sm90/multiply_{'warps' if config.by_warps else 'registers'}.cuh"]


def unit(problem: Problem) -> int:
    """Returns the factor by which elements are too small once they are decoded to bytes of float8."""
    return 2**6 if problem.a.dtype.name == "float4_e2m1fn" else 2**9


def text(config: Config, problem: Problem) -> list[str]:
    """Returns the files that decode, and the constants ahead of them: dtypes, and where the factors of a stage lie."""
    name, file = _NARROW[problem.a.dtype.name]
    kinds = f"""#line 1 "narrow (generated)"
enum class Narrow {{ {", ".join(name for name, _ in _NARROW.values())} }};
constexpr Narrow NARROW = Narrow::{name};
"""
    if in_bytes(problem.a, problem.bs[0]):
        return [kinds]
    scale, wide = factors(problem), DTYPES[problem.bs[0].dtype.name]
    of_scale, of_zero = (*(bits_of(dtype) for dtype in scale.arrays), 0)[:2] if scale else (0, 0)
    places = factor_places(config, problem)
    narrow = f"""{kinds}constexpr Dtype WIDE = Dtype::{wide.stored};
constexpr int FACTOR_ROWS = {factor_rows(config, problem)}, FACTOR_K = {scale.k if scale else config.depth(problem)};
constexpr int FACTOR_BITS = {of_scale}, ZERO_BITS = {of_zero};
constexpr bool FACTORS_OF_SUMS = {str(bool(config.by_sums(problem))).lower()};
constexpr int FACTORS_EACH = {places[-1]}, ZERO_PLACE = {places[1] if of_zero else 0};
"""
    factor = _factor(scale, problem.bs[0].dtype) if scale else "none"
    hooks = f"decode_{file}", f"factor_{factor}", f"zero_{'points' if of_zero else 'none'}"
    return [narrow, "sm90/halves.cuh", *(f"sm90/{hook}.cuh" for hook in hooks)]


def unmeasured(problem: Problem) -> str:
    """Returns the words for what of a problem, as it is multiplied, was not faster on a device; "" where all was."""
    if not decoded(problem.a, problem.bs[0]):
        return ""
    several, batch = problem.products > 1, math.prod(problem.batch) > 1
    if several and (batch or (problem.groups and problem.a.bits == 8)):
        return "weights decoded of several products in a batch, or of 8 bits in groups"
    if not (several or (batch and factors(problem))):
        return ""
    what, most = ("of several products", TIMED[problem.a.bits]) if several else ("in a batch", TIMED_BATCHES)
    if problem.groups and several:
        what, most = f"{what} in groups", TIMED_GROUPS * problem.groups_along("n")
    return f"weights decoded {what} beside more than {most} rows" if problem.n > most else ""
