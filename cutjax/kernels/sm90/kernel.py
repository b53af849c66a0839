"""Host side of ffi/device/sm90/gemm.cuh: what it serves and why not, its source, and the plan of a launch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np

from cutjax.kernels.problem import Problem, short_dtype
from cutjax.kernels.sm90 import memory as sm90_memory
from cutjax.kernels.sm90 import text as epilogue_text
from cutjax.kernels.sm90.config import MAX_ACCUMULATORS, Config
from cutjax.runtime import sources
from cutjax.runtime.compiler import Cubin, compile_kernel
from cutjax.runtime.launch import Call, Int32, Launch, Param, Pointer, TensorMap

SHARED_BYTES = 232448  # what one block may opt in to: 227 KiB
SHARED_BYTES_PER_SM = 233472  # of which each resident block reserves 1 KiB
INPUT_DTYPES = ("bf16", "f16")
OUTPUT_DTYPES = ("bf16", "f16", "f32")  # of a plain product; an epilogue's are sm90_memory.DTYPES
# Registers of a producer's and a consumer's thread: p + 2 c fit 3 warpgroups of 168. A producer that walks groups of k
# spills in 40.
REGISTERS = {"": (40, 232), "m": (40, 232), "k": (40, 232)}


def problem_reasons(problem: Problem) -> list[str]:
    """Why no kernel of this family can serve the problem; empty when one can."""
    a, b, d = (short_dtype(dtype) for dtype in (problem.a_dtype, problem.b_dtype, problem.out_dtype))
    reasons = sm90_memory.reasons(problem) if problem.epilogue else []
    if problem.groups and problem.layout[0] != ("n" if problem.ragged == "m" else "t"):
        reasons.append(f"layout {problem.layout} with groups of {problem.ragged}: kernels divide an outer axis of a")
    if problem.groups and sm90_memory.reductions(sm90_memory.of(problem)):
        reasons.append("a reduction over rows that have groups")
    if problem.arch != "sm_90a":
        reasons.append(f"architecture {problem.arch}: the kernels are for sm_90a")
    if a != b or a not in INPUT_DTYPES:
        reasons.append(f"{a} x {b}: both operands are bf16, or both f16")
    if problem.epilogue is None and d not in OUTPUT_DTYPES:
        reasons.append(f"result {d}: one of {', '.join(OUTPUT_DTYPES)}")
    if 0 in (problem.m, problem.n, problem.k, problem.batch_size) or (problem.ragged and not problem.groups):
        reasons.append("a size is 0: nothing to launch")
    if len(problem.batch_groups) > 3:
        reasons.append(f"batch {problem.batch}: operands alternate in more than 3 groups of batch axes")
    if max(problem.m, problem.n, problem.k) >= 2**31:
        reasons.append("a size is 2^31 or more: TMA coordinates have 32 bits")
    contiguous = {
        "a": ("K", problem.k) if problem.layout[0] == "n" else ("M", problem.m),
        "b": ("N", problem.n) if problem.layout[1] == "n" else ("K", problem.k),
    }
    results = [("result", dtype) for dtype in dict.fromkeys(sm90_memory.result_dtypes(problem))]
    for operand, dtype in (("a", problem.a_dtype), ("b", problem.b_dtype), *results):
        axis, size = contiguous.get(operand, ("N", problem.n))
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
            f"{config.stages} stages of {stage_bytes(config, problem)} bytes and two staging buffers a warpgroup: "
            f"{need} bytes of shared memory, at most {SHARED_BYTES}"
        )
    registers = problem.products * config.accumulator_registers
    if registers > _max_accumulators(config, problem):
        reasons.append(
            f"{problem.products} products of {config.bm}x{config.bn} with this epilogue: {registers} accumulator "
            f"registers a thread, at most {_max_accumulators(config, problem)}"
        )
    if problem.products * config.bn > 256:
        reasons.append(f"{problem.products} products of {config.bn} columns: wgmma multiplies at most 256 at once")
    if narrow := [d for d in sm90_memory.result_dtypes(problem) if sm90_memory.span(config.bn, problem, d) < 32]:
        reasons.append(f"bn={config.bn} makes staging rows of less than 32 bytes in {short_dtype(narrow[0])}")
    if _most_tiles(config, problem) >= 2**31:
        reasons.append("2^31 tiles or more: the scheduler counts with 32 bits")
    return reasons


def _most_tiles(config: Config, problem: Problem) -> int:
    """The number of cluster tiles; where there are groups, the most there may be."""
    tiles_m = -(-problem.m // (config.bm * config.cluster_m))
    tiles_n = -(-problem.n // (config.bn * config.cluster_n))
    if problem.ragged == "m":  # every group, and what is of none before and after them, may end in a tile of its own
        tiles_m = min(tiles_m + problem.groups + 1, problem.m)
    return tiles_m * tiles_n * problem.batch_size * (problem.groups if problem.ragged == "k" else 1)


def _max_accumulators(config: Config, problem: Problem) -> int:
    """Accumulator registers a thread may have, all products together, beside what its epilogue keeps in registers.

    Of every operand and every result, 8 values are held in registers; of an operand that varies along rows and columns,
    in elements too short for TMA, a chunk. Calibrated on the compiler's report (tests/test_fusion.py): no spill below.
    """
    epilogue = problem.epilogue
    if epilogue is None:
        alone = config.schedule == "pingpong" and config.cluster == 1
        return 160 if problem.ragged == "m" or (problem.ragged and not alone) else MAX_ACCUMULATORS
    if sm90_memory.reductions(epilogue):
        return 96
    varying = any(spec.row or spec.col for spec in epilogue.operands)
    several = len(epilogue.outputs) > 1 and bool(epilogue.operands)
    # Beside 192 accumulators, random bits and others that are called spill. Where there are fewer, nobody need look.
    called = config.accumulator_registers * problem.products > 128 and sm90_memory.called(epilogue)
    return 128 if varying or several or called or problem.groups else MAX_ACCUMULATORS


def stage_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of one stage: a bm x bk tile of a and a bk x bn tile of each b, in 16-bit elements."""
    return (config.bm + config.bn * problem.products) * config.bk * 2


def _shared_bytes(config: Config, problem: Problem, store_buffers: int) -> int:
    barrier = 8 if sm90_memory.tile_operands(sm90_memory.of(problem)) else 0
    staging = config.consumers * store_buffers * (sm90_memory.buffer_bytes(config.bn, problem) + barrier)
    return config.stages * (stage_bytes(config, problem) + 16) + staging


def _chunks(config: Config, problem: Problem) -> int:
    """Staging buffers that hold all that a warpgroup stores of a tile."""
    return config.m_blocks * config.bn // sm90_memory.chunk(config.bn, problem)


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
    epilogue = sm90_memory.of(problem)
    heavy = sm90_memory.reductions(epilogue) or any(spec.row and spec.col for spec in epilogue.operands)
    heavy = (
        heavy or (problem.groups and epilogue.operands) or (len(epilogue.outputs) > 1 and sm90_memory.called(epilogue))
    )
    narrow = config.consumers == 1 and config.accumulator_registers * problem.products <= 64 and not heavy
    return half if narrow and _shared_bytes(config, problem, 2) <= half else SHARED_BYTES


def blocks_per_sm(config: Config, problem: Problem) -> int:
    """Thread blocks that share an SM."""
    return 1 if _shared_limit(config, problem) == SHARED_BYTES else 2


def max_stages(config: Config, problem: Problem, *, whole_result: bool = False) -> int:
    """The deepest pipeline beside two staging tiles a warpgroup, or the whole result's; ignores ``config.stages``."""
    smallest = dataclasses.replace(config, stages=2)
    buffers = max(2, _chunks(config, problem)) if whole_result else 2
    spare = _shared_limit(smallest, problem) - _shared_bytes(smallest, problem, buffers)
    return 2 + spare // (stage_bytes(config, problem) + 16)


def source(problem: Problem, config: Config) -> str:
    """The device text of the kernel; sizes are arguments of the kernel, so one text serves every shape."""
    dtype = short_dtype(problem.a_dtype)
    a_k_major, b_k_major = problem.layout[0] == "n", problem.layout[1] == "t"
    producer, consumer = REGISTERS[problem.ragged]
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
        "PRODUCER_REGISTERS": producer,
        "CONSUMER_REGISTERS": consumer,
        "A_K_MAJOR": a_k_major,
        "B_K_MAJOR": b_k_major,
        "GROUPED": bool(problem.groups),
        "RAGGED_M": problem.ragged == "m",
        "RAGGED_K": problem.ragged == "k",
        "PRODUCTS": problem.products,
        "OUTPUTS": len(sm90_memory.tiles(sm90_memory.of(problem))),
        "D_CHUNK": sm90_memory.chunk(config.bn, problem),
        "D_BUFFER_BYTES": sm90_memory.buffer_bytes(config.bn, problem),
    }
    return sources.source(
        config.name(problem),
        constants,
        [
            "sm90/atoms.cuh",
            "common/math.cuh",
            "sm90/staging.cuh",
            "common/scheduler.cuh",
            "common/group_scheduler.cuh" if problem.groups else "common/dense_scheduler.cuh",
            sources.wgmma(config.bn * problem.products, dtype, a_k_major, b_k_major),
            "sm90/mainloop.cuh",
            epilogue_text.text(problem),
            "sm90/epilogue.cuh",
            "sm90/gemm.cuh",
        ],
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


def _tile_map(buffer: int, dtype: np.dtype, problem: Problem, config: Config, matrices: int) -> TensorMap:
    """The tensor map of a result, or an operand of its shape, as Staging in staging.cuh stores and loads it."""
    span = sm90_memory.span(config.bn, problem, dtype)
    return _matrix_map(buffer, dtype, (problem.n, problem.m, matrices), (span // dtype.itemsize, 64, 1), span)


def _steps(moves: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """How far an array's batch index moves for each of the result's three batch indices."""
    steps, stride = [], 1
    for move, size in zip(reversed(moves), reversed(sizes), strict=True):
        steps.append(stride if move else 0)
        stride *= size if move else 1
    return steps[::-1]


def launch_reasons(problem: Problem, config: Config) -> list[str]:
    """Why what both serve cannot be launched: there is a limit to what one launch is told."""
    try:
        _planned(problem, config, b"-")
    except ValueError as error:
        return [f"operands and results are too many or too large for one launch ({error})"]
    return []


def launch(problem: Problem, config: Config) -> Call:
    """The compiled kernel and the plan of its launch."""
    return _planned(problem, config, compile_config(problem, config).image)


def _planned(problem: Problem, config: Config, cubin: bytes) -> Call:
    """The plan of one launch: buffers are a, the bs, sizes of groups, the epilogue's operands and results, in order."""
    p, c, epilogue = problem, config, sm90_memory.of(problem)
    still = (1, *(False,) * (2 + len(epilogue.operands) + bool(p.groups)))
    sizes, *moves = zip(*[still] * (3 - len(p.batch_groups)), *p.batch_groups, strict=True)
    a_steps, b_steps, *other_steps = ([Int32(step) for step in _steps(move, sizes)] for move in moves)
    b_matrices = math.prod(p.b_batch) * (p.groups if p.ragged == "m" else 1)
    b_map = functools.partial(
        _operand_map, dtype=p.b_dtype, rows=p.n, k=p.k, batch=b_matrices, k_major=p.layout[1] == "t", tile=c.bn, bk=c.bk
    )
    maps = [_operand_map(0, p.a_dtype, p.m, p.k, math.prod(p.a_batch), p.layout[0] == "n", c.bm, c.bk, c.cluster_n)]
    maps += [*(b_map(1 + i, share=c.cluster_m) for i in range(p.products))]
    first_operand = 1 + p.products + bool(p.groups)
    first_result = first_operand + len(epilogue.operands)
    results = p.batch_size * (p.groups if p.ragged == "k" else 1)
    full = [(first_result + i, np.dtype(out.dtype)) for i, out in sm90_memory.tiles(epilogue)]
    maps += [_tile_map(i, dtype, p, c, results) for i, dtype in full]
    loaded = dict(sm90_memory.tile_operands(epilogue))
    operands: list[Param] = []
    for i, (spec, steps) in enumerate(zip(epilogue.operands, other_steps, strict=False)):
        if i in loaded:
            matrices = math.prod(size for size, move in zip(sizes, moves[2 + i], strict=True) if move)
            maps.append(_tile_map(first_operand + i, np.dtype(spec.dtype), p, c, matrices))
        else:
            operands.append(Pointer(first_operand + i))
        operands += steps
    operands += map(Int32, sm90_memory.place_steps(p))
    partials = [Pointer(first_result + i) for i, _ in sm90_memory.reductions(epilogue)]
    scalars = [Int32(value) for value in (p.m, p.n, p.k, c.raster, p.batch_size, *sizes[1:])]
    groups: list[Param] = []
    if p.groups:
        groups += [Pointer(1 + p.products), Int32(p.leading), *other_steps[-1][:2]]
        if p.ragged == "m":
            groups += [Pointer(i) for i, _ in full]
    launch = Launch(
        kernel=c.name(p),
        cubin=cubin,
        grid=(_most_tiles(c, p) * c.cluster, 1, 1),
        block=(128 * (1 + c.consumers), 1, 1),
        cluster=(c.cluster, 1, 1),
        shared_bytes=_shared_bytes(c, p, _store_buffers(c, p)),
        blocks_per_sm=blocks_per_sm(c, p),
        params=(*maps, *scalars, *a_steps, *b_steps, *operands, *partials, *groups),
    )
    return Call(
        (launch,),
        results=_written(p, c) if partials else (),
        finish=functools.partial(sm90_memory.finish, p) if partials else None,
        aliases=tuple((first_operand + operand, result) for operand, result in p.in_place),
    )


def _written(problem: Problem, config: Config) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What the kernel writes, where reductions are not yet what was asked."""
    p = problem
    return tuple(
        jax.ShapeDtypeStruct(
            sm90_memory.partial_shape(out, p, config.bn) if out.reduce else (*p.batch, p.m, p.n), np.dtype(out.dtype)
        )
        for out in sm90_memory.of(p).outputs
    )
