"""The device text of a kernel: constants, the generated wgmma, and the family's files around the generated epilogue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cutjax.dtypes import DTYPES
from cutjax.kernels.arguments import Argument
from cutjax.kernels.epilogue_text import epilogue_text
from cutjax.kernels.joined import Joined
from cutjax.kernels.operand import Gathered, Im2col, Taps
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import decode, operands, prologue, scales, windows
from cutjax.kernels.sm90.resolved import Resolved
from cutjax.kernels.sums import summands
from cutjax.kernels.wgmma import wgmma
from cutjax.runtime import sources

# Registers of a producer's and a consumer's thread: p + 2 c fit 3 warpgroups of 168, p + 3 c 4 of 128, and p + 4 c 5 of
# 96. A producer that copies scales has some of four blocks of k, one that copies rows indices and addresses of 16.
REGISTERS, OF_COPIES = (40, 232), (72, 216)
OF_SLICES, OF_SCALED_SLICES = {3: (32, 160), 4: (32, 112)}, (56, 152)
# Accumulators beside which threads stage pairs of 4 bytes element by element, in an order in which all banks are served
# at once; as pairs, those of two rows meet in a bank. More leave too few registers for its addresses. -1: never.
TURNS_BESIDE = 128


def source(kernel: Resolved, arguments: Sequence[Argument]) -> str:
    """Returns the device text of a kernel, complete: constants, the generated epilogue, and the files of ffi/device."""
    problem, config = kernel.multiplied, kernel.config
    a_k_major, b_k_major = problem.a.contiguous == "k", problem.bs[0].contiguous == "k"
    way, acc = kernel.way, DTYPES[problem.accumulator.name].carrier
    view, taps = windows.view_of(problem), isinstance(problem.bs[0].view, Taps)
    of_windows = windows.chunk(problem) if view else 0
    decoded = operands.decoded(problem.a, problem.bs[0])
    parts, scaled = kernel.sums, scales.scaled(problem)
    each = "sm90/promote_scaled.cuh" if scaled else "sm90/promote_each.cuh"
    producer, consumer = OF_COPIES if scaled or problem.a.gathered else REGISTERS
    if config.sliced:
        producer, consumer = OF_SCALED_SLICES if scaled else OF_SLICES[config.consumers]
    # Of other epilogues the text is the same whatever the sizes are, so that a kernel is compiled once.
    whole = bool(kernel.staging.reductions) and kernel.phases is None and not problem.symmetric
    a_stays, b_stays = kernel.stays
    few = decode.few_columns(config, problem)
    constants = {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.depth(problem),
        "A_BITS": problem.a.bits,
        "B_BITS": problem.bs[0].bits,
        "FACTOR_BYTES": decode.factor_bytes(config, problem),
        "SLICES": config.slices(problem),
        "UNIT": decode.unit(problem) if operands.in_bytes(problem.a, problem.bs[0]) else 1,
        "FEW_COLUMNS": min(few, default=config.bn),
        "WARP_ROWS": 32 if decoded and problem.a.bits == 4 else 16,
        "TERMS": way.terms,
        "PAIRS": len(way.pairs),
        "PAIRS_OF_A": _packed(a for a, _ in way.pairs),
        "PAIRS_OF_B": _packed(b for _, b in way.pairs),
        "PROMOTED_BLOCKS": way.promoted * 64 // config.bk,
        "COLUMN_PARTS": parts.columns,
        "SUM_BUFFERS": parts.buffers,
        "GROUP": parts.group,
        "RELEASING_WARPS": 4 if scaled or config.by_warps else 1,
        "STAGES": config.stages,
        **{f"{name.upper()}_FIRST": name in config.evict_first for name in "abd"},
        "CLUSTER_M": config.cluster_m,
        "CLUSTER_N": config.cluster_n,
        "CLUSTER_K": config.cluster_k,
        "IN_PARTS": config.splits > 1,
        "CONSUMERS": config.consumers,
        "M_BLOCKS": config.m_blocks,
        "PING_PONG": config.schedule == "pingpong",
        "BY_WARPS": config.by_warps,
        "STORE_BUFFERS": kernel.buffers,
        "BLOCKS_PER_SM": kernel.blocks_per_sm,
        "PRODUCER_REGISTERS": producer,
        "CONSUMER_REGISTERS": consumer,
        "A_K_MAJOR": a_k_major,
        "B_K_MAJOR": b_k_major,
        "A_CHUNK": of_windows or (config.decoded_chunk(problem) if decoded else problem.a.elements(128)),
        "B_CHUNK": of_windows if taps and b_k_major else config.chunk(problem.bs[0], problem.beside[1]),
        "A_STAYS": a_stays,
        "B_STAYS": b_stays,
        "STREAM_K": config.stream_k,
        "GROUPED": bool(problem.groups),
        "RAGGED_M": problem.divided == "m",
        "RAGGED_N": problem.divided == "n",
        "RAGGED_K": problem.divided == "k",
        "K_ALIGNED": problem.divided == "k" and a_k_major,
        "WHOLE_ROWS": whole and problem.divided != "m" and problem.m % config.bm == 0,
        "WHOLE_COLUMNS": whole and problem.divided != "n" and problem.n % config.bn == 0,
        "PRODUCTS": problem.products,
        "A_MATRICES": problem.beside[0],
        "B_MATRICES": problem.beside[1],
        "PHASED": kernel.phases is not None,
        "OUTPUTS": max(len(kernel.staging.results) + len(kernel.staging.mirror_slots), 1),
        "EPILOGUE_COLUMNS": config.epilogue_columns,
        "D_CHUNK": kernel.chunk,
        "PIECE": 8 if kernel.chunk % 16 else 16,
        "D_BUFFER_BYTES": kernel.buffer_bytes,
        "TAKE_TURNS": _accumulators(kernel) <= TURNS_BESIDE,
        "STAGING_ROWS": 64,
        "STAGING_THREADS": 128,
    }
    if view:
        counts = [len(axis) for axis in reversed(kernel.phases.along)] if kernel.phases else []
        constants |= {f"PHASES{i}": count for i, count in enumerate([*counts, 1, 1, 1][:3])}
        constants |= {"PIXEL_RUNS": kernel.phases.runs} if kernel.phases else {}
        constants |= {"IMAGE_AXES": len(view.image), "IMAGE_GROUPS": view.groups > 1, "WINDOW_CHUNK": of_windows}
    if joined := len(summands(problem)) > 1:
        constants |= {"SUMMANDS": len(summands(problem))}
    if scaled:
        constants |= scales.constants(kernel.given)
    scheduler = "group" if problem.groups else "triangle" if problem.symmetric else "dense"
    scheduler = "stream" if config.stream_k else scheduler
    scheduler = "sm90/phase" if kernel.phases else f"common/{scheduler}"
    return sources.source(
        kernel.name,
        constants,
        [
            "common/atoms.cuh",
            "common/tma.cuh",
            "sm90/atoms.cuh",
            f"using Acc = {acc};  // an accumulator\n",
            *sources.MATH,
            "common/elements.cuh",
            "common/staging.cuh",
            "sm90/staging.cuh",
            *(["sm90/im2col.cuh"] if view else []),
            *(["sm90/pixels.cuh"] if kernel.phases else []),
            *(decode.text(config, problem) if decoded else []),
            *(["sm90/transposed.cuh"] if problem.symmetric or config.swap else []),
            *(["common/mirror.cuh"] if problem.symmetric else []),
            "common/scheduler.cuh",
            f"{scheduler}_scheduler.cuh",
            *(
                wgmma(
                    columns,
                    problem.bs[0].dtype if decoded else problem.a.dtype,
                    problem.bs[0].dtype,
                    a_k_major,
                    b_k_major,
                    bool(decoded),
                )
                for columns in dict.fromkeys((config.bn * problem.beside[1] // parts.columns, *few))
            ),
            "sm90/tiles.cuh",
            "sm90/clear.cuh",
            "sm90/sliced.cuh",
            "sm90/load_plain.cuh",
            *(["sm90/load_scaled.cuh"] if operands.factors(problem) else []),
            *(["sm90/load_gather.cuh"] if problem.a.gathered else []),
            *(["sm90/load_im2col.cuh"] if view else []),
            *(["sm90/load_taps.cuh"] if taps else []),
            *(["sm90/load_joined.cuh"] if joined else []),
            _views(problem),
            "sm90/producer.cuh",
            "sm90/counter.cuh" if kernel.has_counter else "sm90/turns.cuh",
            *_change(problem),
            each if way.each else "sm90/promote_blocks.cuh" if way.promoted else "sm90/promote_never.cuh",
            *(["sm90/row_order.cuh", *decode.multiply(config, problem)] if decoded else ["sm90/multiply.cuh"]),
            "sm90/drain_each.cuh",
            "sm90/mainloop.cuh",
            "sm90/stream.cuh",
            epilogue_text(kernel.staging, arguments, problem.divided),
            "sm90/epilogue.cuh",
            "common/parts.cuh",
            "sm90/cluster_sum.cuh",
            "sm90/gemm.cuh",
        ],
    )


def _accumulators(kernel: Resolved) -> int:
    """Returns the accumulator registers of a thread, and those they are promoted to."""
    own = kernel.config.accumulator_registers * kernel.multiplied.products
    return own + kernel.sums.registers * bool(kernel.way.promoted)


def _views(problem: Problem) -> str:
    """Returns the names of the views that operands are loaded by, and of how k is walked."""
    views = {Gathered: "Gathered", Im2col: "Im2col", Taps: "Taps", Joined: "Joined"}
    a, b = (views.get(type(x.view), "Plain") for x in (problem.a, problem.bs[0]))
    a = "Scaled" if operands.factors(problem) else a
    walks = {"Im2col": f"Im2col::{'Elements' if problem.a.contiguous == 'k' else 'Columns'}", "Joined": "Joined::Walk"}
    walk = walks.get(a, "Depth")
    steps = ", ".join(f"{x}_step{i} = 0" for x in "ab" for i in range(3))
    still = f"constexpr int {steps};  // no batch\n" if a == "Im2col" else ""
    return f"using ViewA = {a};\nusing ViewB = {b};\nusing Walk = {walk};\n{still}"


def _change(problem: Problem) -> list[str]:
    """Returns the text that changes the columns' operand by a prologue, or does not."""
    if not prologue.is_in(problem):
        return ["sm90/change_none.cuh"]
    return ["sm90/eight.cuh", prologue.text(problem), "sm90/change.cuh"]


def _packed(terms: Iterable[int]) -> int:
    """Returns small numbers in two bits each, the first lowest."""
    return sum(term << 2 * i for i, term in enumerate(terms))
