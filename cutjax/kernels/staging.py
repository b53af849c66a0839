"""Shared-memory staging of an epilogue's inputs and results: where tiles of them lie on their way to and from TMA."""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue, OperandSpec, Output

# Dtypes of operands and results in memory; of those, what TMA stages.
STORED = tuple(row.name for row in DTYPES.values() if row.stored)
STORED_BY_TMA = tuple(name for name in STORED if np.dtype(name).itemsize <= 4)

# About how many instructions of sm_90 code compute a device function or an operator; others are one. The long ones, of
# 15 to 90 without the slow paths of rare arguments, are each reason enough for a call. No common activation in 16 bits
# has one.
MOST_INLINED = 40
_LONG = (
    "acosf acoshf asinf asinhf atan2f atanf atanhf cbrtf cosf coshf erfcf erff erfinvf expm1f fmodf integer_div "
    "integer_rem log1pf logf nextafterf powf sinf sinhf tanf threefry2x32"
)
_INSTRUCTIONS = {word.removesuffix("f"): 100 for word in f"{_LONG} expf exp2f sqrtf tanhf".split()}  # of doubles
_INSTRUCTIONS |= dict.fromkeys(_LONG.split(), 50) | {"exp2f": 5, "expf": 8, "rsqrtf": 5}
_INSTRUCTIONS |= {"/": 15, "div_full": 7, "div_uniform": 3, "accurate_logistic": 14, "sqrtf": 15, "tanhf": 15}
_INSTRUCTIONS |= {"coarse_erfc_bf16": 12, "coarse_erfc_f16": 13}

BUFFER_BYTES = 16384  # of a staging buffer, at most where narrower chunks can make it so
TRANSPOSED_BYTES = 14336  # where any divisor of a tile's width will do: 112 columns of 16 bits, 56 of 32


@dataclasses.dataclass(frozen=True, eq=False)
class Staging:
    """Shared-memory staging of an epilogue's inputs and results, in chunks of so many columns of 64 rows.

    Results lie one after the other; an operand lies where a result of its size will be, which replaces it. A symmetric
    result's transpose, for TMA, lies where nothing else does: other threads write it than read the operand. Without TMA
    threads gather it from the result's own tile.

    Where the operands are swapped, rows and columns are those of the transposed result, and tiles lie transposed.

    Attributes:
      epilogue: whose, as it is computed.
      swap: whether that is of the transposed result.
      pitch: of how many elements, up to 16, rows in memory are multiples.
      even: whether the columns are even, so that two neighbours in memory are aligned.
      results: the results of full size, with their places among all.
      reductions: the results that are reductions, with their places among all.
      operands: the operands that TMA loads, with their places among all. They vary along rows and columns, and their
        rows are of whole units of 16 bytes in memory, of 32 in the tile.
      result_slots, operand_slots: where the tile of each begins, in bytes for each column of one row.
      mirror_slots: where that of each result's transpose begins; none where results are not symmetric.
      column_bytes: of one row, of all tiles together.
      narrowest: bytes of an element of the narrowest result.
      tma: whether TMA loads and stores tiles where it can, rather than threads.
      pixels: whether rows are pixels apart in images: threads find where each of them lies, and load and store there.
      called: whether the kernel calls a function for four elements at a time, instead of 64 to 192 copies of what it
        computes. A call costs 3 instructions an element (docs/fused-epilogues.md).
    """

    epilogue: Epilogue
    swap: bool
    pitch: int
    even: bool
    results: tuple[tuple[int, Output], ...]
    reductions: tuple[tuple[int, Output], ...]
    operands: tuple[tuple[int, OperandSpec], ...]
    result_slots: tuple[int, ...]
    operand_slots: tuple[int, ...]
    mirror_slots: tuple[int, ...]
    column_bytes: int
    narrowest: int
    called: bool
    tma: bool
    pixels: bool

    @functools.cached_property
    def result_dtypes(self) -> tuple[np.dtype, ...]:
        """The dtype of each result of full size."""
        return tuple(np.dtype(out.dtype) for _, out in self.results)

    @property
    def tile(self) -> str:
        """The struct by which tiles are staged."""
        return "Transposed" if self.swap and self.tma else "Staging"

    @property
    def by_tma_tile(self) -> str:
        """The struct by which TMA stores and loads them."""
        return "Transposed" if self.swap else "TmaStaging"

    @property
    def apart(self) -> bool:
        """True if two neighbours of a row, in an array of full size, may not be loaded together."""
        return self.swap or not self.even

    def by_tma(self, array: Output | OperandSpec) -> bool:
        """True if TMA can load or store an array of full size: rows side by side, of whole units of 16 bytes."""
        return self.tma and not self.pixels and _by_tma(array, self.pitch)

    def chunk(self, bn: int) -> int:
        """Columns staged at a time: as many as make a row of the narrowest result at most 128 bytes.

        Fewer where results and operands are many or wide, since they take room from the pipeline, but no row becomes
        shorter than 32 bytes, which is the least that TMA swizzles. Where tiles lie transposed their rows are as long
        whatever the chunk.
        """
        return _chunk(bn, self.swap, self.column_bytes, self.narrowest, bool(self.mirror_slots))

    @functools.cached_property
    def symmetric_reasons(self) -> tuple[str, ...]:
        """The reasons why a symmetric result cannot be made of what is on and below its diagonal."""
        found = []
        if any(node.op == "iota" and node.params[0] != "batch" for node in self.epilogue.nodes):
            found.append("a symmetric result that depends on where its elements lie")
        if any(spec.row != spec.col for spec in self.epilogue.operands):
            found.append("a symmetric result with an operand that varies along rows or columns alone")
        if self.reductions:
            found.append("a reduction of a symmetric result")
        if self.tma and self.narrowest < 2:
            found.append("a symmetric result of 8 bits: kernels transpose elements of 16 or 32")
        return tuple(found)

    @functools.cached_property
    def pixel_reasons(self) -> tuple[str, ...]:
        """The reasons against an epilogue whose rows are pixels apart."""
        found = []
        if any(node.op == "iota" and node.params[0] == "row" for node in self.epilogue.nodes):
            found.append("a result whose rows are pixels apart, which depends on where they lie")
        if self.reductions:
            found.append("a reduction of a result whose rows are pixels apart")
        return tuple(found)

    @functools.cached_property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why no kernel can have this epilogue; empty where one can."""
        found = list(emit.reasons(self.epilogue))
        for _, out in self.reductions:
            if self.tma and out.dtype != "float32":
                found.append(f"a reduction in {out.dtype}: kernels reduce in float32")
        for what, entries in (("operand", self.epilogue.operands), ("result", self.epilogue.outputs)):
            stored = STORED_BY_TMA if self.tma else STORED
            names = sorted({entry.dtype for entry in entries} - {*stored})
            found += [f"{what} {name}: one of {', '.join(stored)}" for name in names]
        return tuple(found)


@functools.lru_cache(maxsize=4096)
def _chunk(bn: int, swap: bool, column_bytes: int, narrowest: int, mirrored: bool) -> int:
    if swap:
        fitting = [c for c in range(bn, 0, -8) if bn % c == 0]
        return next((c for c in fitting if 64 * c * column_bytes <= TRANSPOSED_BYTES), 8)
    fitting = [c for c in (128, 64, 32, 16) if bn % c == 0 and c * narrowest <= 128] or [8]
    most = BUFFER_BYTES // 2 if mirrored else BUFFER_BYTES  # of two tiles each: a stage more is worth 1%
    small = (c for c in fitting if 64 * c * column_bytes <= most or c * narrowest <= 32)
    return next(small, fitting[-1])


@functools.lru_cache(maxsize=256)
def plan_staging(
    epilogue: Epilogue,
    symmetric: bool = False,
    swap: bool = False,
    pitch: int = 16,
    even: bool = True,
    tma: bool = True,
    pixels: bool = False,
) -> Staging:
    """Plans the staging of an epilogue's operands and results in shared memory."""
    # Transposed tiles of 8 columns begin at whole units of 1024 bytes only if elements take at least two each.
    least = 2 if swap else 1
    results = tuple((i, out) for i, out in enumerate(epilogue.outputs) if not out.reduce)
    reductions = tuple((i, out) for i, out in enumerate(epilogue.outputs) if out.reduce)
    narrowest = min((_size(out) for _, out in results), default=4)
    full = ((i, spec) for i, spec in enumerate(epilogue.operands) if spec.row and spec.col)
    aligned = ((i, spec) for i, spec in full if tma and not pixels and _by_tma(spec, pitch))
    operands = tuple((i, spec) for i, spec in aligned if swap or _size(spec) >= narrowest)
    result_slots, operand_slots, total, free = [], [], 0, []
    for _, out in results:
        result_slots.append(total)
        free.append((_size(out), total))
        total += max(least, _size(out))
    for _, spec in operands:
        slot = next((slot for slot in free if slot[0] == _size(spec)), None)
        if slot is None:
            slot = _size(spec), total
            total += max(least, _size(spec))
        else:
            free.remove(slot)
        operand_slots.append(slot[1])
    mirror_slots = []
    for slot, (_, out) in zip(result_slots, results, strict=True) if symmetric else ():
        mirror_slots.append(total if tma else slot)
        total += _size(out) if tma else 0
    total = total or 1  # where every result is a reduction, a buffer that nothing is staged in
    slots = tuple(result_slots), tuple(operand_slots), tuple(mirror_slots)
    layout = epilogue, swap, pitch, even, results, reductions, operands
    return Staging(*layout, *slots, total, narrowest, _called(epilogue), tma, pixels)


def _size(array: Output | OperandSpec) -> int:
    return np.dtype(array.dtype).itemsize


def _by_tma(array: Output | OperandSpec, pitch: int) -> bool:
    return pitch * _size(array) % 16 == 0


def _called(epilogue: Epilogue) -> bool:
    if emit.reasons(epilogue):
        return False
    if "coarse_erfc" in emit.emit(epilogue) and any(spec.row and not spec.col for spec in epilogue.operands):
        return True  # inlined, it spills beside 96 accumulators
    return instructions(epilogue) > MOST_INLINED


def not_inlined(function: Epilogue, what: str) -> list[str]:
    """Returns the reason against a function of each element where kernels can only inline it."""
    most = instructions(function)
    reason = f"{what} of about {most} instructions an element: more than {MOST_INLINED} are not inlined"
    return [reason] * (most > MOST_INLINED)


@functools.lru_cache(maxsize=1024)
def instructions(epilogue: Epilogue) -> int:
    """Estimates the instructions of an epilogue for one element; 0 where no kernel computes it."""
    if emit.reasons(epilogue):
        return 0
    body = emit.emit(epilogue).split("{", 1)[1]
    words = re.findall(r"\w+(?=[<(])|/", body)
    return body.count(";") + sum(_INSTRUCTIONS.get(word, 1) - 1 for word in words)
