"""The device text that stores a kernel's results, by TMA or by threads, from where the epilogue has staged them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.kernels.arguments import Argument
from cutjax.kernels.staging import Staging


def by_tma(staging: Staging) -> str:
    """Returns the function by which TMA stores a chunk."""

    def calls(struct: str, slots: Sequence[int], first: int) -> str:
        store = "{}<Dtype::{}>::store(map_d[{}], buffer + {}, x, y, z);"
        return "\n  ".join(
            store.format(struct, DTYPES[out.dtype].stored, place, place_of(slot))
            for place, (slot, (_, out)) in enumerate(zip(slots, staging.results, strict=True), first)
            if staging.by_tma(out)
        )

    stores = calls(staging.by_tma_tile, staging.result_slots, 0)
    if staging.mirror_slots:
        stores = f"""int right = right_of_diagonal(y, x);
  if (right > 0) return;
  {stores}
  if (right == 0) return;
  {calls("Transposed", staging.mirror_slots, len(staging.results))}"""
    return f"""DEVICE void epilogue_store(const Extras& extras, const TensorMap* const (&map_d)[OUTPUTS], u32 buffer,
                           int x, int y, int z) {{
  {stores}
}}
"""


def rows(staging: Staging, arguments: Sequence[Argument], ragged: str) -> str:
    """The struct that stores without TMA: where rows or columns have groups, or are of no whole units of 16 bytes."""
    pointers = [argument.declaration for argument in arguments if "rows" in argument.to.split()]
    stores, mirrored, clears = [], [], []
    strided = any(argument.name == "d_pitch" for argument in arguments)
    gathered = staging.swap and not staging.tma  # from the columns of a tile
    pitch = "d_pitch" if strided else "m" if gathered else "n"
    of_d = ragged in ("m", "n")
    end = "end" if ragged == "n" else "n"
    for place, (_, out) in enumerate(staging.results):
        if not of_d and staging.by_tma(out):
            continue
        size, dtype = np.dtype(out.dtype).itemsize, DTYPES[out.dtype].stored
        unit = min(staging.pitch, 16 // size)
        matrix = f"d{place} + batch * {'d_apart' if strided else 'static_cast<i64>(m) * n'} * {size}"

        def call(struct: str, slot: int, rows: str = f"store_rows<{unit}>", dtype=dtype, matrix=matrix) -> str:
            tile = f"buffer + {place_of(slot)}"
            return f"{struct}<Dtype::{dtype}>::{rows}({matrix}, m, {end}, {pitch}, {tile}, x, y, rows, thread);"

        partly = "if (!whole) " if staging.by_tma(out) else ""
        rows = f"store_columns<{unit}>" if gathered else f"store_rows<{unit}>"
        if staging.pixels:
            tile = f"buffer + {place_of(staging.result_slots[place])}"
            stores.append(
                f"Staging<Dtype::{dtype}>::store_rows_at<{unit}, Pixels::RUNS>(d{place}, n, {pitch}, apart, {tile}, x, "
                "pixel, thread);"
            )
        else:
            stores.append(partly + call(staging.tile, staging.result_slots[place], rows))
        mirror = ("Transposed",) if staging.tma else ("Staging", f"store_columns<{unit}>")
        mirrored += [call(mirror[0], slot, *mirror[1:]) for slot in staging.mirror_slots[place : place + 1]]
        # Of the transposed result, which lies in memory as it did.
        cleared = "m, m, y, x, min(end - x, BN), rows" if ragged == "n" else "n, n, x, y, rows, EPILOGUE_COLUMNS"
        clears.append(f"Staging<Dtype::{dtype}>::clear_rows<{unit}>({matrix}, {cleared}, thread);")
    if mirrored:
        stores = [
            "int right = right_of_diagonal(y, x);",
            "if (right > 0) return;",
            *stores,
            "if (right == 0) return;",
            *mirrored,
        ]

    def lines(statements: list[str]) -> str:
        return "".join("\n    " + statement for statement in statements)

    pixels = [argument.name for argument in arguments if argument.name.startswith("pixels_")]
    begin = f"""
  // Of the rows from `row` on, and of a phase.
  DEVICE void begin_rows(int row, int phase) {{
    Pixels pixels{{{", ".join(pixels)}}};
    row += threadIdx.x % 16;
    pixel = row < m ? pixels(row, phase) : -1;
    apart = pixels.apart();
  }}"""
    if not pixels:  # those of a tile, which the kernel tells
        begin = """
  Pixels pixels;
  DEVICE void begin_rows(int row) { pixel = pixels(row + threadIdx.x % 16); }"""
    placed = f"""
  int apart = 1;  // pixels from a run of a row's columns to the next
  int pixel = -1;  // where a row lies, of the 16 that a warp stores that of this lane modulo 16; -1 where there is none
  DEVICE int pixel_of(int row) const {{ return max(0, __shfl_sync(~0u, pixel, row)); }}
{begin}"""
    by_threads = not all(staging.by_tma(out) for _, out in staging.results)
    return f"""#line 1 "rows (generated)"
constexpr bool BY_THREADS = {str(by_threads).lower()};
struct Rows {{
  int m, n;{"".join(f"{chr(10)}  {x};" for x in pointers)}
  int end = 0;  // of the columns of a tile's group, where columns have groups
{placed if staging.pixels else ""}
  // So many rows, or as many as there are, of a staged chunk, to row y and column x on of a matrix of each result.
  DEVICE void store(bool whole, u32 buffer, int x, int y, int batch, int rows, int thread) const {{
    rows = min(min(rows, STAGING_ROWS), m - y);{lines(stores)}
  }}
  // Zeroes rows of the tile's columns.
  DEVICE void clear(int x, int y, int batch, int rows, int thread) const {{{lines(clears if of_d else [])}
  }}
}};
"""


def place_of(slot: int) -> str:
    """Returns the offset of a tile in a staging buffer, as device text."""
    return f"STAGING_ROWS * D_CHUNK * {slot}"
