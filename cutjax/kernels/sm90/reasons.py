"""The reasons why a config cannot serve a problem: memory, registers, shapes of tiles, and what 32 bits count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cutjax.dtypes import short
from cutjax.kernels import reasons as shared
from cutjax.kernels import sums
from cutjax.kernels.columns import minimum, some, where
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import operands, prologue, windows
from cutjax.kernels.sm90.config import FEW_OF_SLICES, MOST_BY_WARPS, Config, Sizes
from cutjax.kernels.sm90.facts import Facts, Footprint
from cutjax.kernels.sm90.phases import Phases
from cutjax.kernels.sm90.resolved import cluster_tile


def checks(
    asked: Problem, facts: Facts, config: Sizes, tile: Footprint, of: Phases | None
) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Yields truth values, or columns of them, of why a config cannot serve the problem, each with its reason."""
    problem = facts.problem
    products = problem.products
    columns = config.bn * problem.beside[1]
    yield (
        (config.parts > 1) & (asked.divided == "m"),
        lambda: f"cluster_k={config.cluster_k}, splits={config.splits}: the contraction of groups of rows is whole",
    )
    yield (
        (config.cluster_m * config.cluster_n > 1) & problem.a.gathered,
        lambda: "a cluster with gathered rows: threads copy to their own block",
    )
    yield (
        config.stream_k & (problem.groups is not None or problem.symmetric),
        lambda: "stream_k=True: only the tiles of a dense product are all as deep",
    )
    need = tile.bytes(config.stages)
    yield (
        need > tile.most,
        lambda: (
            f"{config.stages} stages of {tile.stage_bytes} bytes and two staging buffers a warpgroup: "
            f"{need} bytes of shared memory, at most {tile.most}"
        ),
    )
    accumulators = 4 * config.bm * config.bn * products
    yield (
        (config.cluster_k > 1) & (accumulators > config.stages * tile.stage_bytes),
        lambda: (
            f"cluster_k={config.cluster_k}: {accumulators} bytes of accumulators take the place of {config.stages} "
            f"stages of {tile.stage_bytes}"
        ),
    )
    registers, most = facts.accumulators(config), facts.max_accumulators(config)
    yield (
        registers > most,
        lambda: (
            f"{products} products of {config.bm}x{config.bn} with this epilogue: {registers} accumulator "
            f"registers a thread, at most {most}"
        ),
    )
    yield (
        columns > 256,
        lambda: f"{products} products of {config.bn} columns: wgmma multiplies at most 256 at once",
    )
    if prologue.is_in(problem):
        yield (
            prologue.refused(config, problem)[0],
            lambda: (
                f"a prologue of tiles of {config.bn} columns: a thread changes {prologue.units(config, problem)} lines "
                f"and units of 16 bytes, at most {prologue.MOST_UNITS} together, and holds "
                f"{prologue.refused(config, problem)[1]} registers of operands, at most {prologue.MOST_REGISTERS}"
            ),
        )
    if facts.integers:
        yield (
            (columns > 24) & (columns % 16 != 0),
            lambda: f"{columns} columns: wgmma of integers takes 8, 24 and multiples of 16",
        )
    if facts.way.each:
        yield (
            (config.coop == 0) & (facts.sums(config).buffers == 1),
            lambda: "pingpong of float8 with one buffer of sums: nothing is multiplied while they are added up",
        )
        yield (
            config.bk == 128,
            lambda: "bk=128 of float8: sums of 128 bytes of k are added up in f32, which are one stage of bk=64",
        )
    if some(config.sliced):
        yield (
            config.sliced & (not operands.decoded(problem.a, problem.bs[0])),
            lambda: 'schedule="sliced": it hides the latencies of decoding weights',
        )
        yield (
            config.sliced
            & ((config.consumers == 4) | (config.bn <= FEW_OF_SLICES))
            & operands.in_bytes(problem.a, problem.bs[0]),
            lambda: (
                f'schedule="{config.schedule}" of {config.bm}x{config.bn} beside float8: three warpgroups have the '
                f"registers, of 128 rows and more than {FEW_OF_SLICES} columns"
            ),
        )
        in_place = (problem.a.dtype.name, problem.bs[0].dtype.name) == ("float8_e5m2", "float16")
        yield (
            config.sliced & in_place & (config.bk == 64),
            lambda: (
                'schedule="sliced" with bk=64 of float8_e5m2 beside float16: decoding is one instruction, and wgmmas '
                "wait for registers that it writes"
            ),
        )
        yield (
            config.sliced
            & (
                prologue.is_in(problem)
                | (config.by_warps == 0) & (products > 1) & ((config.consumers != 3) | (problem.groups is not None))
                | (config.by_warps == 0) & (config.bm == 256) & (problem.groups is not None)
            ),
            lambda: (
                'schedule="sliced" of several products, with a prologue, or of 256 rows in groups: warpgroups have too '
                "few registers"
            ),
        )
        yield (
            config.sliced & ((config.stages % config.slice_groups != 0) | (config.stages < 2 * config.slice_groups)),
            lambda: (
                f"{config.stages} stages of {config.slice_groups} groups of warpgroups: each has as many of its own, "
                "at least two"
            ),
        )
    if some(config.by_warps):
        yield (
            config.by_warps & (columns > MOST_BY_WARPS),
            lambda: f'schedule="warps" of {columns} columns: wgmma is as fast beside more than {MOST_BY_WARPS}',
        )
        yield (
            config.by_warps & (problem.bs[0].contiguous != "k"),
            lambda: 'schedule="warps" of columns that do not lie along k: ldmatrix reads those that do',
        )
    if problem.a.bits == 4:
        yield (
            config.m_blocks != 2,
            lambda: f"{config.bm}x{config.bn} {config.schedule} with weights of 4 bits: a warpgroup holds 128 rows",
        )
        yield (
            bool(facts.staging.reductions),
            lambda: "reductions of a product of weights of 4 bits: two warps store 64 rows",
        )
    for reason in windows.phase_reasons(asked, of):
        yield True, lambda reason=reason: reason
    if width := windows.group_width(problem):
        beside = config.bn * config.cluster_n
        yield (
            width % beside != 0,
            lambda: f"tiles of {beside} columns of groups of {width}: a tile has channels of one group",
        )
    yield (
        (config.bn % 16 != 0) & (problem.bs[0].contiguous == "mn"),
        lambda: f"bn={config.bn} where rows in memory lie along it: the narrowest swizzle spans 16 elements",
    )
    if not config.swap:
        yield tile.chunk * facts.staging.narrowest < 32, lambda: _short_rows(facts, config, tile)
    counted = counters(facts, config, of)
    yield shared.pass_32_bits(counted), lambda: shared.of_counters(counted, ", in whole tiles")[0]


def _short_rows(facts: Facts, config: Sizes, tile: Footprint) -> str:
    narrow = next(d for d in facts.staging.result_dtypes if tile.chunk * d.itemsize < 32)
    return f"{config.epilogue_columns} columns make staging rows of less than 32 bytes in {short(narrow.name)}"


def is_small(facts: Facts, of: Phases | None) -> bool:
    """True of a problem so small that no config's counters are near to what 32 bits hold."""
    most = counters(facts, _MOST_COUNTED, of)
    return facts.problem.k < 1 << 24 and max(most.values()) < 1 << 29


_MOST_COUNTED = Config(bm=64, bn=8, cluster_k=8, splits=128)


def sized(facts: Facts, config: Sizes, of: Phases | None) -> dict[str, Any]:
    """Returns the fields of a kernel's record that count tiles."""
    tile = cluster_tile(config)
    rows, columns = facts.problem.tiles(*tile)
    p, tiles = facts.problem, rows * columns * facts.problem.results
    if p.symmetric or p.divided in ("m", "n"):
        tiles = p.most_tiles(*tile)
    return {"tiles": tiles * (of.count if of else 1), "rows": rows, "columns": columns}


def counters(facts: Facts, config: Sizes, of: Phases | None) -> dict[str, Any]:
    """Returns the most that a kernel counts in 32 bits, by name."""
    p, depth, tiles = facts.problem, config.depth(facts.problem), sized(facts, config, of)["tiles"]
    # Of the tiles that are computed in parts, two waves at most.
    of_waves = minimum(tiles, 4 * p.device.sms) * (sums.blocks(p, depth) + 1)
    more = {"k_blocks_of_two_waves": where(config.stream_k, of_waves, 0)}
    if p.a.gathered:
        along = p.k + (config.parts + 1) * depth if p.a.contiguous == "k" else p.m + 2 * config.bm
        more["bytes_of_rows"] = p.a.bytes(along)
    tile = *cluster_tile(config), depth
    counted = {"tiles": tiles * config.splits, "raster": config.raster, "parts": config.parts}
    return shared.counters(p, tile, **counted, **more)
