"""The device text of a kernel: constants, and the family's files around the generated epilogue."""

from __future__ import annotations

from collections.abc import Sequence

from cutjax.dtypes import DTYPES
from cutjax.kernels.arguments import Argument
from cutjax.kernels.epilogue_text import epilogue_text
from cutjax.kernels.joined import Joined
from cutjax.kernels.mma import prologue, views
from cutjax.kernels.mma.resolved import Resolved
from cutjax.kernels.operand import Gathered, Im2col, Taps
from cutjax.kernels.sums import summands
from cutjax.runtime import sources

# The files of each way to read fragments and multiply them, behind those of tiles.
_LANES = ("mma/words.cuh", "mma/lanes.cuh")
FRAGMENTS = {
    "fma": ("mma/planes.cuh", "mma/fma.cuh"),
    "fma units": ("mma/units.cuh", "mma/fma.cuh"),
    "double": ("mma/words.cuh", "mma/double.cuh"),
    "tensor": (*_LANES, "mma/decode_none.cuh", "mma/tensor.cuh"),
    "terms": (*_LANES, "mma/terms.cuh"),
    "decode": (*_LANES, "mma/narrow.cuh", "mma/decode_bytes.cuh", "mma/tensor.cuh"),
}

_FILES = {Gathered: "gather", Im2col: "im2col", Taps: "taps", Joined: "joined"}  # of the views that are not plain


def source(kernel: Resolved, arguments: Sequence[Argument]) -> str:
    """Returns the device text of a kernel, complete: constants, the generated epilogue, and the files of ffi/device."""
    problem, config, way = kernel.multiplied, kernel.config, kernel.way
    m, n, k = config.warps
    constants = {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "WM": config.wm,
        "WN": config.wn,
        "WARPS_M": m,
        "WARPS_N": n,
        "WARPS_K": k,
        "THREADS": config.threads,
        "BLOCKS_PER_SM": config.blocks,
        "M_FRAGMENTS": max(1, config.wm // 16),
        "N_FRAGMENTS": config.wn // 8,
        "STAGES": config.stages,
        "SLIM": config.slim,
        "SLICE": way.slice(config, problem.arch),
        "LOAD_TURNS": kernel.load_turns,
        "SLICES_AT_ONCE": kernel.slices_at_once,
        "ELEMENT": problem.a.bytes(1),
        "ELEMENT_B": problem.bs[0].bytes(1),
        "A_K_MAJOR": problem.a.contiguous == "k",
        "B_K_MAJOR": problem.bs[0].contiguous == "k",
        "A_UNIT": kernel.units[0],
        "B_UNIT": kernel.units[1],
        "NUMBERS": kernel.numbers,
        "PRODUCTS": problem.products,
        "CLUSTER_M": 1,
        "CLUSTER_N": 1,
        "CLUSTER_K": 1,
        "IN_PARTS": config.splits > 1,
        "RAGGED_M": problem.divided == "m",
        "RAGGED_K": problem.divided == "k",
        "RAGGED_N": False,
        "K_ALIGNED": False,
        "WHOLE_ROWS": False,
        "WHOLE_COLUMNS": False,
        "AXES": views.axes(problem),
        "COLUMN_GROUPS": views.groups(problem) > 1,
        "SPREAD": views.spread(problem),
        **views.constants(problem),
        "EPILOGUE_COLUMNS": config.wn,
        "D_CHUNK": kernel.chunk,
        "PIECE": 8 if kernel.chunk % 16 else 16,
        "D_BUFFER_BYTES": kernel.buffer_bytes,
        "OUTPUTS": len(kernel.staging.results),
        "TAKE_TURNS": False,
        "STAGING_ROWS": 16,
        "STAGING_THREADS": 32,
    }
    if len(summands(problem)) > 1:
        constants |= {"SUMMANDS": len(summands(problem))}
    scheduler = "group" if problem.groups else "triangle" if problem.symmetric else "dense"
    carrier = DTYPES[way.accumulator].carrier
    accumulator = f"#define F16_ACCUMULATORS {int(way.name == 'f16_f16')}\n#define ACCUMULATOR {carrier}\n"
    accumulator += f"#define TMA {int(config.tma)}\n"
    accumulator += f"#define COLUMNS {'columns' if views.groups(problem) > 1 else 'n'}\n"
    return sources.source(
        kernel.name,
        constants,
        [
            "common/atoms.cuh",
            *(["common/tma.cuh"] if config.tma else []),
            "mma/atoms.cuh",
            *sources.MATH,
            "common/elements.cuh",
            "common/staging.cuh",
            *(["common/mirror.cuh"] if problem.symmetric else []),
            "common/scheduler.cuh",
            f"common/{scheduler}_scheduler.cuh",
            "common/parts.cuh",
            accumulator,
            "mma/accumulators.cuh",
            "mma/math.cuh",
            "mma/instruction.cuh",
            *_multiply(kernel),
            *["mma/pixels.cuh"] * kernel.staging.pixels,
            epilogue_text(kernel.staging, arguments, problem.divided),
            "mma/epilogue.cuh",
            "mma/gemm.cuh",
        ],
    )


def _multiply(kernel: Resolved) -> list[str]:
    """Returns the files that load and multiply, and the constants they read."""
    problem, fragments = kernel.multiplied, kernel.way.fragments
    constant = f'#line 1 "math (generated)"\nconstexpr Math MATH = Math::{kernel.way.name};\n'
    narrow = problem.bs[0].narrow_beside(problem.a)
    if narrow:
        constant += f"constexpr Dtype NARROW = Dtype::{DTYPES[problem.bs[0].dtype.name].stored};\n"
    if kernel.config.slim:
        constant += f"#define NARROW_B {int(narrow)}\n"
        constant += f"constexpr Dtype OPERAND = Dtype::{DTYPES[problem.a.dtype.name].stored};\n"
        slim = ["mma/layout.cuh", "mma/tile.cuh", "mma/operands.cuh", *["mma/narrow.cuh"] * narrow]
        slim += ["mma/promote_never.cuh", "mma/slim.cuh"]
        return [constant, *_views(kernel), *slim]
    tma = kernel.config.tma
    tiles = [] if fragments == "fma" else ["mma/layout.cuh", "mma/boxes.cuh" if tma else "mma/tile.cuh"]
    operands = f"mma/operands{'_joined' * (len(summands(problem)) > 1)}.cuh"
    feed = ["mma/tma_feed.cuh"] if tma else [operands, "mma/feed.cuh"]
    multiply = [*FRAGMENTS[fragments + " units" * kernel.in_units], *feed, "mma/promote_never.cuh", "mma/mainloop.cuh"]
    return [constant, *_views(kernel), *tiles, *multiply]


def _views(kernel: Resolved) -> list[str]:
    """Returns the files of the operands' views, and which is whose."""
    plain = f"mma/load_plain{'_tma' * kernel.config.tma}.cuh"
    found = [type(operand.view) for operand in (kernel.multiplied.a, kernel.multiplied.bs[0])]
    files = ["mma/digits.cuh"] if views.axes(kernel.multiplied) else []
    files += [f"mma/load_{_FILES[view]}.cuh" for view in dict.fromkeys(found) if view in _FILES]
    names = [view.__name__ if view in _FILES else "Plain" for view in found]
    if kernel.multiplied.a.prologue is not None:
        files += [prologue.text(kernel.multiplied), "mma/load_changed.cuh"]
        names[0] = "Changed"
    return [plain, *files, f"using ViewA = {names[0]};\nusing ViewB = {names[1]};\n"]
