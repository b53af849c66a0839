"""The device text that stores a kernel's results, by TMA or by threads, from where the epilogue has staged them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.kernels.arguments import Argument
from cutjax.kernels.staging import Staging


def by_tma(staging: Staging) -> str:
    """Returns the function by which TMA stores a chunk."""
    maps, last = ("map_d + {} * PHASES", "z, extras.pixels") if staging.pixels else ("map_d[{}]", "z")

    def calls(struct: str, slots: Sequence[int], first: int) -> str:
        store = "{}<Dtype::{}>::store({}, buffer + {}, x, y, {});"
        return "\n  ".join(
            store.format(struct, DTYPES[out.dtype].stored, maps.format(place), place_of(slot), last)
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
    """The struct that stores without TMA: where rows have groups, or are of no whole units of 16 bytes."""
    pointers = [argument.declaration for argument in arguments if argument.to == "rows"]
    stores, mirrored, clears = [], [], []
    strided = any(argument.name == "d_pitch" for argument in arguments)
    gathered = staging.swap and not staging.tma  # from the columns of a tile
    pitch = "d_pitch" if strided else "m" if gathered else "n"
    for place, (_, out) in enumerate(staging.results):
        if ragged != "m" and staging.by_tma(out):
            continue
        size, dtype = np.dtype(out.dtype).itemsize, DTYPES[out.dtype].stored
        unit = min(staging.pitch, 16 // size)
        matrix = f"d{place} + batch * {'d_apart' if strided else 'static_cast<i64>(m) * n'} * {size}"

        def call(struct: str, slot: int, rows: str = f"store_rows<{unit}>", dtype=dtype, matrix=matrix) -> str:
            tile = f"buffer + {place_of(slot)}"
            return f"{struct}<Dtype::{dtype}>::{rows}({matrix}, m, n, {pitch}, {tile}, x, y, rows, thread);"

        partly = "if (!whole) " if staging.by_tma(out) else ""
        rows = f"store_columns<{unit}>" if gathered else f"store_rows<{unit}>"
        if staging.places:
            tile = f"buffer + {place_of(staging.result_slots[place])}"
            stores.append(
                f"Staging<Dtype::{dtype}>::store_rows_at<{unit}>({matrix}, n, {pitch}, {tile}, x, y, rows, thread, "
                "[this](int row) { return place(row); });"
            )
        else:
            stores.append(partly + call(staging.tile, staging.result_slots[place], rows))
        mirror = ("Transposed",) if staging.tma else ("Staging", f"store_columns<{unit}>")
        mirrored += [call(mirror[0], slot, *mirror[1:]) for slot in staging.mirror_slots[place : place + 1]]
        clears.append(
            f"Staging<Dtype::{dtype}>::clear_rows<{unit}>({matrix}, n, n, x, y, rows, EPILOGUE_COLUMNS, thread);"
        )
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
    placed = f"""
  // Where a row lies; of those past the last one, that.
  DEVICE int place(int row) const {{ return Pixels{{{{{", ".join(pixels)}}}}}(min(row, m - 1)); }}"""
    if not pixels:  # those of a tile, which the kernel tells
        placed = """
  Pixels pixels;
  DEVICE int place(int row) const { return pixels(row); }"""
    by_threads = not all(staging.by_tma(out) for _, out in staging.results)
    return f"""#line 1 "rows (generated)"
constexpr bool BY_THREADS = {str(by_threads).lower()};
struct Rows {{
  int m, n;{"".join(f"{chr(10)}  {x};" for x in pointers)}
{placed if staging.places else ""}
  // So many rows, or as many as there are, of a staged chunk, to row y and column x on of a matrix of each result.
  DEVICE void store(bool whole, u32 buffer, int x, int y, int batch, int rows, int thread) const {{
    rows = min(min(rows, STAGING_ROWS), m - y);{lines(stores)}
  }}
  // Zeroes rows of the tile's columns.
  DEVICE void clear(int x, int y, int batch, int rows, int thread) const {{{lines(clears if ragged == "m" else [])}
  }}
}};
"""


def place_of(slot: int) -> str:
    """Returns the offset of a tile in a staging buffer, as device text."""
    return f"STAGING_ROWS * D_CHUNK * {slot}"
