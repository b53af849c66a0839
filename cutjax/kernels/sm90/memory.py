"""What of a kernel is its epilogue's, in shared memory and in the plan of a launch; the device text: _fusion_text.py.

A plain product is a product with the identity for an epilogue, so every kernel is made here in the same way.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from cutjax.epilogue import emit
from cutjax.epilogue.expression import REDUCTIONS, Epilogue, Node, OperandSpec, Output
from cutjax.kernels.problem import Problem

# Dtypes of operands and results in memory, as enumerators of Dtype (staging.cuh).
DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "s8",
    "uint8": "u8",
    "int16": "s16",
    "uint16": "u16",
    "int32": "s32",
    "uint32": "u32",
    "bool": "boolean",
}


# About how many instructions of sm_90 code compute a device function or an operator; others are one. The long ones, of
# 15 to 90 without the slow paths of rare arguments, are each reason enough for a call. No common activation in 16 bits
# has one.
_MOST_INLINED = 40
_LONG = (
    "acosf acoshf asinf asinhf atan2f atanf atanhf cbrtf cosf coshf erfcf erff erfinvf expm1f fmodf integer_div "
    "integer_rem log1pf logf nextafterf powf sinf sinhf tanf threefry2x32"
)
_INSTRUCTIONS = dict.fromkeys(_LONG.split(), 50) | {"exp2f": 5, "expf": 8, "rsqrtf": 5}
_INSTRUCTIONS |= {"/": 15, "accurate_logistic": 14, "sqrtf": 15, "tanhf": 15}
_INSTRUCTIONS |= {"coarse_erfc_bf16": 12, "coarse_erfc_f16": 13}

BUFFER_BYTES = 16384  # of a staging buffer, at most where narrower chunks can make it so


@functools.lru_cache(maxsize=64)
def _identity(dtype: np.dtype) -> Epilogue:
    return Epilogue(1, (), (Node("acc", params=(0,)),), (Output(0, dtype.name),))


def of(problem: Problem) -> Epilogue:
    """The problem's epilogue; the identity where it has none."""
    return problem.epilogue or _identity(problem.out_dtype)


def tiles(epilogue: Epilogue) -> list[tuple[int, Output]]:
    """The results of full size, with their places among all."""
    return [(i, out) for i, out in enumerate(epilogue.outputs) if not out.reduce]


def reductions(epilogue: Epilogue) -> list[tuple[int, Output]]:
    """The results that are reductions, with their places among all."""
    return [(i, out) for i, out in enumerate(epilogue.outputs) if out.reduce]


def result_dtypes(problem: Problem) -> list[np.dtype]:
    """The dtype of each result of full size."""
    return [np.dtype(out.dtype) for _, out in tiles(of(problem))]


def reasons(problem: Problem) -> list[str]:
    """Why no kernel can have this epilogue; empty where one can."""
    epilogue = of(problem)
    found = list(emit.reasons(epilogue))
    if not tiles(epilogue):
        found.append("every result is a reduction: kernels store at least one of full size")
    for _, out in reductions(epilogue):
        if out.dtype != "float32":
            found.append(f"a reduction in {out.dtype}: kernels reduce in float32")
    for what, entries in (("operand", epilogue.operands), ("result", epilogue.outputs)):
        names = sorted({entry.dtype for entry in entries} - DTYPES.keys())
        found += [f"{what} {name}: one of {', '.join(DTYPES)}" for name in names]
    return found


@functools.lru_cache(maxsize=256)
def called(epilogue: Epilogue) -> bool:
    """Whether the kernel calls a function for four elements at a time, instead of 64 to 192 copies of what it computes.

    A call costs 3 instructions an element (docs/fused-epilogues.md).
    """
    if emit.reasons(epilogue):
        return False
    body = emit.emit(epilogue).split("{", 1)[1]
    words = re.findall(r"\w+(?=[<(])|/", body)
    return body.count(";") + sum(_INSTRUCTIONS.get(word, 1) - 1 for word in words) > _MOST_INLINED


def chunk(bn: int, problem: Problem) -> int:
    """Columns staged at a time: as many as make a row of the narrowest result at most 128 bytes.

    Fewer where results and operands are many or wide, since they take room from the pipeline, but no row becomes
    shorter than 32 bytes, which is the least that TMA swizzles.
    """
    narrowest = min((dtype.itemsize for dtype in result_dtypes(problem)), default=4)
    total = slots(of(problem)).total
    fitting = [c for c in (128, 64, 32, 16) if bn % c == 0 and c * narrowest <= 128]
    return next((c for c in fitting if 64 * c * total <= BUFFER_BYTES or c * narrowest <= 32), fitting[-1])


def buffer_bytes(bn: int, problem: Problem) -> int:
    """Shared memory of one staging buffer: 64 rows of a chunk of every result, and of operands beside them."""
    return 64 * chunk(bn, problem) * slots(of(problem)).total


def tile_operands(epilogue: Epilogue) -> list[tuple[int, OperandSpec]]:
    """The operands that TMA loads into the staging buffers, with their places among all.

    They vary along rows and columns, and are no narrower than some result: so their rows are of whole units of 16
    bytes, as that result's are.
    """
    full = [(i, spec) for i, spec in enumerate(epilogue.operands) if spec.row and spec.col]
    if not full:
        return []
    least = min((np.dtype(out.dtype).itemsize for _, out in tiles(epilogue)), default=4)
    return [(i, spec) for i, spec in full if np.dtype(spec.dtype).itemsize >= least]


class Slots(NamedTuple):
    """Where tiles lie in a staging buffer, in bytes for each of its columns of one row; and all together."""

    results: list[int]
    operands: list[int]
    total: int


def slots(epilogue: Epilogue) -> Slots:
    """Results lie one after the other; an operand lies where a result of its size will be, which replaces it."""
    results, operands, total, free = [], [], 0, []
    for _, out in tiles(epilogue):
        size = np.dtype(out.dtype).itemsize
        results.append(total)
        free.append((size, total))
        total += size
    for _, spec in tile_operands(epilogue):
        size = np.dtype(spec.dtype).itemsize
        slot = next((slot for slot in free if slot[0] == size), None)
        if slot is None:
            slot = size, total
            total += size
        else:
            free.remove(slot)
        operands.append(slot[1])
    return Slots(results, operands, total)


def span(bn: int, problem: Problem, dtype: np.dtype) -> int:
    """Bytes of a row of a result's staging tile, which is its swizzle span too."""
    return min(128, chunk(bn, problem) * dtype.itemsize)


def partial_shape(out: Output, problem: Problem, bn: int) -> tuple[int, ...]:
    """What a kernel makes of a reduction: one value for each 16 rows, for each tile's columns, or both."""
    rows = -(-problem.m // 16) if "row" in out.axes else problem.m
    columns = -(-problem.n // bn) if "col" in out.axes else problem.n
    return (*problem.batch, rows, columns)


def finish(problem: Problem, results: Sequence[jax.Array]) -> list[jax.Array]:
    """The results, of what the kernel makes: reductions are reduced further."""
    outs = []
    for out, x in zip(of(problem).outputs, results, strict=True):
        axes = [{"row": -2, "col": -1}[axis] for axis in out.axes]
        outs.append(REDUCTIONS[out.reduce](x, axes) if out.reduce else x)
    return outs


def place_steps(problem: Problem) -> list[int]:
    """For each place in the batch that the epilogue uses, how many results lie between two, and how many there are."""
    found = []
    for axis, i in emit.places(of(problem)):
        inner = math.prod(problem.batch[len(problem.batch) - i :])
        found += [inner, problem.batch[-1 - i]] if axis == "batch" else [1, inner]
    return found
