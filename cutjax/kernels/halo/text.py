"""The device text of a kernel: constants, the generated wgmma, and the family's files around the generated epilogue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutjax.kernels.arguments import Argument
from cutjax.kernels.epilogue_text import epilogue_text
from cutjax.kernels.halo.resolved import Resolved
from cutjax.kernels.wgmma import wgmma
from cutjax.runtime import sources

# Of a thread that multiplies, by the warpgroups of a block that do: what they share beside 56 for those that load.
REGISTERS = {2: 224, 3: 152, 4: 104}


def source(kernel: Resolved, arguments: Sequence[Argument]) -> str:
    """Returns the device text of a kernel, complete: constants, the generated epilogue, and the files of ffi/device."""
    problem, config, of = kernel.problem, kernel.config, kernel.geometry
    a, b = problem.a, problem.bs[0]
    constants = {
        "AXES": of.axes,
        "BN": config.bn,
        "CONSUMERS": config.consumers,
        "STAGES": config.stages,
        "TAPS": of.stacked,
        "CHUNK": of.chunk,
        "N_CHUNK": of.n_chunk,
        "GROUP_AXIS": of.group_axis,
        "F16": a.dtype == np.float16,
        "PACKED": of.packing is not None,
        "GROUPED": of.view.groups > 1,
        "B_K_MAJOR": not of.of_columns,
        "PRODUCER_REGISTERS": 56,
        "CONSUMER_REGISTERS": REGISTERS[config.consumers],
        "PRODUCTS": 1,
        "RAGGED_M": False,
        "WHOLE_ROWS": False,
        "WHOLE_COLUMNS": False,
        "EPILOGUE_COLUMNS": config.bn,
        "D_CHUNK": kernel.chunk,
        "PIECE": 8 if kernel.chunk % 16 else 16,
        "D_BUFFER_BYTES": kernel.buffer_bytes,
        "OUTPUTS": len(kernel.staging.results),
        "TAKE_TURNS": False,
        "STAGING_ROWS": 16,
        "STAGING_THREADS": 32,
    }
    return sources.source(
        kernel.name,
        constants,
        [
            "using Acc = float;\n",
            "common/atoms.cuh",
            "common/tma.cuh",
            "sm90/atoms.cuh",
            *sources.MATH,
            "common/elements.cuh",
            "common/staging.cuh",
            "common/scheduler.cuh",
            wgmma(of.stacked * config.bn, a.dtype, b.dtype, True, not of.of_columns),
            "halo/pipeline.cuh",
            "halo/tile.cuh",
            "halo/atoms.cuh",
            "halo/load.cuh",
            epilogue_text(kernel.staging, arguments, ""),
            "halo/kernel.cuh",
        ],
    )
