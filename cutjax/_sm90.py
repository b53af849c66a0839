"""Host side of ffi/kernels/sm90_gemm.cuh: what it serves and why not, its source, and the plan of a launch."""

from __future__ import annotations

import dataclasses

import numpy as np

from cutjax import _codegen
from cutjax._compile import Cubin, compile_kernel
from cutjax._config import Config
from cutjax._launch import Int32, Launch, TensorMap
from cutjax._problem import Problem, short_dtype

SHARED_BYTES = 232448  # what one block may opt in to: 227 KiB
SHARED_BYTES_PER_SM = 233472  # of which each resident block reserves 1 KiB
INPUT_DTYPES = ("bf16", "f16")
OUTPUT_DTYPES = ("bf16", "f16", "f32")
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # 40 + 2 * 232 fit 3 warpgroups of 168; at 24 the producer spills


def problem_reasons(problem: Problem) -> list[str]:
    """Why no kernel of this family can serve the problem; empty when one can."""
    a, b, d = (short_dtype(dtype) for dtype in (problem.a_dtype, problem.b_dtype, problem.out_dtype))
    reasons = []
    if problem.arch != "sm_90a":
        reasons.append(f"architecture {problem.arch}: the kernels are for sm_90a")
    if a != b or a not in INPUT_DTYPES:
        reasons.append(f"{a} x {b}: both operands are bf16, or both f16")
    if d not in OUTPUT_DTYPES:
        reasons.append(f"result {d}: one of {', '.join(OUTPUT_DTYPES)}")
    if 0 in (problem.m, problem.n, problem.k, problem.batch_size):
        reasons.append("a size is 0: nothing to launch")
    if len(problem.batch_groups) > 3:
        reasons.append(f"batch {problem.batch}: operands alternate in more than 3 groups of batch axes")
    if max(problem.m, problem.n, problem.k) >= 2**31:
        reasons.append("a size is 2^31 or more: TMA coordinates have 32 bits")
    contiguous = {
        "a": ("K", problem.k) if problem.layout[0] == "n" else ("M", problem.m),
        "b": ("N", problem.n) if problem.layout[1] == "n" else ("K", problem.k),
        "result": ("N", problem.n),
    }
    for operand, dtype in (("a", problem.a_dtype), ("b", problem.b_dtype), ("result", problem.out_dtype)):
        axis, size = contiguous[operand]
        if size * dtype.itemsize % 16:
            reasons.append(
                f"{axis}={size} {short_dtype(dtype)} ({operand}) is not a multiple of {16 // dtype.itemsize}: "
                "rows must be 16-byte aligned"
            )
    return reasons


def config_reasons(config: Config, problem: Problem) -> list[str]:
    """Why this config cannot serve a problem that the family serves."""
    reasons = []
    need = _shared_bytes(config, problem, 2)
    if need > SHARED_BYTES:
        reasons.append(
            f"{config.stages} stages of {config.stage_bytes} bytes and two staging tiles a warpgroup: "
            f"{need} bytes of shared memory, at most {SHARED_BYTES}"
        )
    tiles = -(-problem.m // (config.bm * config.cluster_m)) * -(-problem.n // (config.bn * config.cluster_n))
    if tiles * problem.batch_size >= 2**31:
        reasons.append("2^31 tiles or more: the scheduler counts with 32 bits")
    return reasons


def _out_span(config: Config, problem: Problem) -> int:
    """Bytes of a row of a staging tile: the widest swizzle span that divides the tile's rows."""
    row_bytes = config.bn * problem.out_dtype.itemsize
    return next(span for span in (128, 64, 32) if row_bytes % span == 0)


def _shared_bytes(config: Config, problem: Problem, store_buffers: int) -> int:
    staging = config.consumers * store_buffers * 64 * _out_span(config, problem)
    return config.stages * (config.stage_bytes + 16) + staging


def _chunks(config: Config, problem: Problem) -> int:
    """Staging tiles that hold all of a warpgroup's accumulators."""
    return config.m_blocks * config.bn * problem.out_dtype.itemsize // _out_span(config, problem)


def _store_buffers(config: Config, problem: Problem) -> int:
    """Staging tiles a warpgroup: as many as the pipeline leaves room for, up to the whole of its accumulators."""
    limit = _shared_limit(config, problem)
    fitting = (n for n in range(3, _chunks(config, problem) + 1) if _shared_bytes(config, problem, n) <= limit)
    return max(fitting, default=2)


def _shared_limit(config: Config, problem: Problem) -> int:
    """Shared memory one block may take: half an SM's where two blocks fit beside each other, else all of it.

    Two fit when registers do (256 threads of 128, half of them accumulators) and each keeps two staging tiles.
    """
    half = SHARED_BYTES_PER_SM // 2 - 1024
    narrow = config.consumers == 1 and config.accumulator_registers <= 64
    return half if narrow and _shared_bytes(config, problem, 2) <= half else SHARED_BYTES


def blocks_per_sm(config: Config, problem: Problem) -> int:
    """Thread blocks that share an SM."""
    return 1 if _shared_limit(config, problem) == SHARED_BYTES else 2


def max_stages(config: Config, problem: Problem, *, whole_result: bool = False) -> int:
    """The deepest pipeline beside two staging tiles a warpgroup, or the whole result's; ignores ``config.stages``."""
    smallest = dataclasses.replace(config, stages=2)
    buffers = max(2, _chunks(config, problem)) if whole_result else 2
    spare = _shared_limit(smallest, problem) - _shared_bytes(smallest, problem, buffers)
    return 2 + spare // (config.stage_bytes + 16)


def source(problem: Problem, config: Config) -> str:
    """The device text of the kernel; sizes are arguments of the kernel, so one text serves every shape."""
    dtype = short_dtype(problem.a_dtype)
    a_k_major, b_k_major = problem.layout[0] == "n", problem.layout[1] == "t"
    constants = {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "STAGES": config.stages,
        "CLUSTER_M": config.cluster_m,
        "CLUSTER_N": config.cluster_n,
        "CONSUMERS": config.consumers,
        "M_BLOCKS": config.m_blocks,
        "PING_PONG": config.schedule == "pingpong",
        "STORE_BUFFERS": _store_buffers(config, problem),
        "BLOCKS_PER_SM": blocks_per_sm(config, problem),
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "A_K_MAJOR": a_k_major,
        "B_K_MAJOR": b_k_major,
        "OUT": short_dtype(problem.out_dtype),
    }
    files = ["scheduler.cuh", "mainloop.cuh", "epilogue.cuh", "sm90_gemm.cuh"]
    return _codegen.source(
        config.name(problem), constants, _codegen.wgmma(config.bn, dtype, a_k_major, b_k_major), files
    )


def compile_config(problem: Problem, config: Config) -> Cubin:
    """Compiles the kernel of a config, or takes it from the cache."""
    return compile_kernel(source(problem, config), name=config.name(problem), arch=problem.arch)


def _operand_map(
    buffer: int, dtype: np.dtype, rows: int, k: int, batch: int, k_major: bool, tile: int, bk: int, share: int
):
    """The tensor map of an operand whose m or n axis is `rows` long, as Operand in mainloop.cuh loads it."""
    if k_major:
        dims, box, span = (k, rows, batch), (64, tile // share, 1), 128
    else:
        chunk = next(c for c in (64, 32, 16) if tile % c == 0)
        depth = bk if tile // chunk % share == 0 else bk // share
        dims, box, span = (rows, k, batch), (chunk, depth, 1), chunk * 2
    return _matrix_map(buffer, dtype, dims, box, span)


def _matrix_map(
    buffer: int, dtype: np.dtype, dims: tuple[int, int, int], box: tuple[int, int, int], span: int
) -> TensorMap:
    row = dims[0] * dtype.itemsize
    return TensorMap(
        buffer=buffer, dtype=dtype, dims=dims, strides=(row, row * dims[1]), box=box, swizzle=span, l2_bytes=256
    )


def _steps(moves: list[bool], sizes: list[int]) -> list[int]:
    """How far an operand's batch index moves for each of the result's three batch indices."""
    steps, stride = [], 1
    for move, size in zip(reversed(moves), reversed(sizes), strict=True):
        steps.append(stride if move else 0)
        stride *= size if move else 1
    return steps[::-1]


def launch(problem: Problem, config: Config) -> Launch:
    """The plan of one launch: buffers are a, b and the result, in this order."""
    p, c = problem, config
    groups = [(1, False, False)] * (3 - len(p.batch_groups)) + list(p.batch_groups)
    sizes = [size for size, _, _ in groups]
    a_steps, b_steps = _steps([a for _, a, _ in groups], sizes), _steps([b for _, _, b in groups], sizes)
    a_batch, b_batch = int(np.prod(p.a_batch, dtype=np.int64)), int(np.prod(p.b_batch, dtype=np.int64))
    span = _out_span(c, p)
    chunk = span // p.out_dtype.itemsize
    tiles = -(-p.m // (c.bm * c.cluster_m)) * -(-p.n // (c.bn * c.cluster_n)) * p.batch_size
    scalars = [p.m, p.n, p.k, c.raster, p.batch_size, *sizes[1:], *a_steps, *b_steps]
    return Launch(
        kernel=c.name(p),
        cubin=compile_config(p, c).image,
        grid=(tiles * c.cluster, 1, 1),
        block=(128 * (1 + c.consumers), 1, 1),
        cluster=(c.cluster, 1, 1),
        shared_bytes=_shared_bytes(c, p, _store_buffers(c, p)),
        blocks_per_sm=blocks_per_sm(c, p),
        params=(
            _operand_map(0, p.a_dtype, p.m, p.k, a_batch, p.layout[0] == "n", c.bm, c.bk, c.cluster_n),
            _operand_map(1, p.b_dtype, p.n, p.k, b_batch, p.layout[1] == "t", c.bn, c.bk, c.cluster_m),
            _matrix_map(2, p.out_dtype, (p.n, p.m, p.batch_size), (chunk, 64, 1), span),
            *(Int32(value) for value in scalars),
        ),
    )
