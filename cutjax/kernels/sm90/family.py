"""The family of Hopper's GEMM kernels (wgmma, TMA): the configs shipped, and how deep and in which order they go."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from cutjax.kernels.columns import ceil, maximum, minimum, where
from cutjax.kernels.prices import Prices, one_by_one
from cutjax.kernels.problem import Problem
from cutjax.kernels.raster import band
from cutjax.kernels.sm90 import kernel, operands, windows
from cutjax.kernels.sm90.config import Config, Configs
from cutjax.kernels.sm90.facts import ARCH, Facts, Footprint, facts_of, footprint
from cutjax.kernels.sm90.kernel import resolve
from cutjax.kernels.sm90.phases import parts
from cutjax.kernels.sm90.resolved import cluster_tile

__all__ = ["Config", "competes", "configs", "name", "prices", "reasons", "resolve", "stores_in_order"]

name = "sm90"

# (schedule, bm) -> the bn shipped. Steps of 32 fill waves; below 64 columns only small problems want a tile.
TILES = {  # where two are predicted equal, the first is taken
    ("pingpong", 64): (32, 64, 96, 128, 160, 192, 256),
    ("pingpong", 128): (32, 64, 96, 128, 160, 192),
    ("coop", 64): (16, 32, 64, 128, 256),
    ("coop", 128): (64, 128, 160, 192, 224, 256),
    ("coop", 256): (64, 96, 128, 160, 192),
}
# Symmetric products have half as many tiles: steps of 16 are worth 3.5% over 34 sizes, up to 22%, where b is K-major.
SYMMETRIC_TILES = TILES | {("coop", 128): tuple(range(64, 257, 16))}
# Of float8, whose sums are promoted: accumulators and sums share the registers, and every other width is one more wave.
PROMOTED_TILES = TILES | {
    ("pingpong", 64): (64, 96, 128, 160, 192),
    ("pingpong", 128): (64, 96),
    ("coop", 128): (64, 96, 112, 128, 144, 160, 176, 192, 256),
    ("coop", 256): (64, 96, 112, 128),
}
# Of the transposed result: bn lies along m, which may be a few tokens, and any width is as good where a is K-major.
SWAPPED_TILES = {
    ("pingpong", 64): (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 208, 224, 256),
    ("pingpong", 128): (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192),
    ("coop", 64): (8, 16, 24, 32, 48, 64, 128),
    ("coop", 128): (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256),
    ("coop", 256): (64, 80, 96, 112, 128, 144, 160, 176, 192),
}
# Of weights that are decoded beside few rows, by four warpgroups. Beside 64 rows they took 1.4 times as long.
SLICED_TILES = {("sliced", 64): (8, 16), ("sliced", 128): (8, 16), ("sliced", 256): (8, 16)}
TILES_BY_NAME = {"plain": TILES, "symmetric": SYMMETRIC_TILES, "promoted": PROMOTED_TILES, "swapped": SWAPPED_TILES}
FEW_COLUMNS = 512  # of the transposed result: up to here, widths that divide them evenly take the place of those above
CLUSTERS = ((1, 1), (2, 1), (1, 2))
# The same with stages of 128: where k is 128, one stage is the whole contraction. Elsewhere 64 won by 2 to 10%.
DEEP_TILES = {("pingpong", 64): (128, 256), ("coop", 128): (256,)}
# Of weights that are decoded, stages of 128 take half as many barriers, and up to 128 columns won by 1 to 20%.
DECODED_DEEP = 128
# Ways to divide k, tried where tiles are few.
CLUSTERS_K = (2, 3, 4, 5, 6, 8)
SPLITS = (2, 3, 4, 6, 8, 16, 32, 64)
LEAST_K_BLOCKS = 4  # of a part
LEAST_IDLE = 0.06  # of the time of all SMs, where tiles in parts may pay
# Long products are limited by power, and bytes through L2 take some: of kernels that are predicted this near to the
# first, the one of the fewest is taken. In bursts picks of 137 held products over 100 us became 0.2% better by it.
LONG_US, NEAR = 100.0, 0.01
# Of "bd": b, which each band of tiles reads once, and results leave L2 first where they pass it. Not measured yet.
STREAMED = ""

_config = functools.lru_cache(maxsize=None)(Config)


def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns the reasons against every kernel of this family for a problem; empty when one can serve it."""
    if part := _parts(problem):
        return part.reasons
    if operands.decoded(problem.bs[0], problem.a) or problem.a.prologue is not None:
        return facts_of(problem, True).reasons
    return facts_of(problem).reasons


def _parts(problem: Problem) -> Facts | None:
    """Returns the facts of what a forward convolution whose images are spread is computed as; None of any other."""
    view = windows.view_of(problem)
    if view is None or not windows.spread(view) or problem.a.contiguous == "mn" or 0 in (*view.grid, *view.image):
        return None
    part, of, _ = parts(problem)
    return facts_of(part, pixels=of is not None)


def competes(problem: Problem) -> bool:
    """Returns True: no family is before it."""
    return True


def stores_in_order(problem: Problem) -> bool:
    """True if TMA stores results in an order of their own: rows are whole units of 16 bytes."""
    full = [np.dtype(out.dtype).itemsize for out in problem.epilogue.outputs if not out.reduce]
    return problem.arch != ARCH or all(problem.n * size % 16 == 0 for size in full)


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the shipped tiles, each as deep and in the order that suits the problem, and ways to divide k."""
    for facts, table in _tables(problem):
        for row in range(len(table)):
            yield _made(facts, table, row)


def prices(problem: Problem) -> Prices:
    """Returns the predicted times of the shipped configs that serve a problem, all from columns of their fields."""
    if max(problem.flops, problem.bytes) >= 2**56 or max(problem.m, problem.n) >= 2**28:  # columns have 64 bits
        return one_by_one(problem, configs(problem), resolve)
    tables = _tables(problem)
    given = parts(problem) if _parts(problem) else (problem, None, ())
    priced = [kernel.prices(*given, table, problem) for _, table in tables]
    found = [np.flatnonzero(us < np.inf) for us, *_ in priced]
    us, ranked_us, l2_us = (
        np.concatenate([times[side][rows] for times, rows in zip(priced, found, strict=True)]) for side in range(3)
    )

    def config(i: int) -> Config:
        for side, served in zip(tables, found, strict=True):
            if i < len(served):
                return _made(*side, int(served[i]))
            i -= len(served)
        raise IndexError(i)

    def rows() -> list[Hashable]:
        return [row for (_, table), served in zip(tables, found, strict=True) for row in table.rows(served)]

    new = [bool(kernel.unmeasured(facts.problem)) for facts, _ in tables]
    return Prices(us, _least_l2(ranked_us, l2_us), config, rows, np.repeat(new, [len(served) for served in found]))


def _least_l2(us: np.ndarray, l2_us: np.ndarray) -> np.ndarray:
    """Returns the times by which long kernels are ranked: those near to the first by their bytes through L2."""
    if not len(us) or (best := us.min()) < LONG_US:
        return us
    near = us <= best * (1 + NEAR)
    return np.where(near, best * (1 + NEAR * l2_us / max(l2_us[near].max(), 1e-9)), us)


def _made(facts: Facts, table: Configs, row: int) -> Config:
    config, p = _config(**table.fields(row)), facts.problem
    return _config(**table.fields(row), raster=_raster(p, config), evict_first=_streamed(p))


@functools.lru_cache(maxsize=16)
def _tables(problem: Problem) -> list[tuple[Facts, Configs]]:
    """Returns the shipped configs, as operands are and swapped, with what the kernels of each have in common."""
    if part := _parts(problem):
        table = _configs(part, swap=False)
        return [(part, table.take((table.splits == 1) & ~table.stream_k))]
    # Nobody has timed groups with operands swapped, but of weights that are decoded. A prologue is computed so alone.
    alone = problem.a.prologue is not None or operands.decoded(problem.bs[0], problem.a)
    swaps = (False, True) if not problem.groups or alone else (False,)
    sides = [(facts_of(problem, swap), swap) for swap in swaps]
    return [(facts, _configs(facts, swap)) for facts, swap in sides if not facts.reasons]


def _configs(facts: Facts, swap: bool) -> Configs:
    problem = facts.problem
    any_width, decoded = problem.bs[0].contiguous == "k", operands.decoded(problem.a, problem.bs[0])
    name = "promoted" if facts.way.each else "plain"
    name = "symmetric" if problem.symmetric and problem.layout == "nt" else "swapped" if swap else name
    # Of groups, which are uneven, twice the average.
    columns = 2 * -(-problem.n // groups) if (groups := problem.groups_along("n")) > 1 else problem.n
    few = _even_widths(columns) if swap and any_width and columns <= FEW_COLUMNS else ()
    whole = _whole(name, swap, any_width, decoded, problem.device.shared, few)
    stages = _stages(facts, footprint(facts, whole), whole.depth(problem))
    whole_groups = maximum(stages - stages % whole.slice_groups, 2 * whole.slice_groups)
    return _divided(problem, dataclasses.replace(whole, stages=whole_groups))


@functools.lru_cache(maxsize=256)
def _whole(name: str, swap: bool, any_width: bool, decoded: bool, shared: bool, few: tuple[int, ...]) -> Configs:
    """Returns the tiles of that name in clusters, of two stages, whose contraction is whole."""
    rows = []
    for (schedule, bm), widths in (TILES_BY_NAME[name] | (SLICED_TILES if decoded else {})).items():
        # With ping-pong, of a block's one tile there is nothing for the other warpgroup.
        # Of weights that are decoded, one warpgroup's at a time, it took 1.09 to 1.4 times as long wherever measured.
        if schedule == "pingpong" and (shared or decoded):
            continue
        widths = [bn for bn in few if bn <= widths[-1]] if few else widths
        deep = DEEP_TILES.get((schedule, bm), ())
        if decoded:
            deep = [bn for bn in widths if bn <= DECODED_DEEP]
        for bk, bns, clusters in ((64, widths, CLUSTERS), (128, deep, CLUSTERS[:1])):
            for bn, cluster in itertools.product(bns, clusters):
                if not (swap and bn % 16 and (cluster[0] > 1 or not any_width)):
                    rows.append((bm, bn, bk, *cluster, schedule))
    return Configs.of(rows, swap)


@functools.lru_cache(maxsize=1024)
def _even_widths(columns: int) -> tuple[int, ...]:
    """Returns the widths of tiles that divide so many columns into 1, 2, .. tiles with little left over."""
    even = {-(-columns // (8 * tiles)) * 8 for tiles in range(1, 9)} | ({16, 32} if columns <= 64 else set())
    # A width of 8 times a large prime would be stored 8 columns at a time.
    return tuple(sorted({bn + 8 if bn // 8 in (17, 19, 23, 29, 31) else bn for bn in even if 8 <= bn <= 256}))


def _divided(problem: Problem, whole: Configs) -> Configs:
    """Returns configs, each followed by the ways to divide its tiles' contraction among as many CTAs as SMs, about."""
    k_blocks = -(-problem.k // whole.depth(problem))
    if problem.divided in ("m", "n") or problem.symmetric or k_blocks.max() < 2 * LEAST_K_BLOCKS:
        return whole
    rows, columns = problem.tiles(*cluster_tile(whole))
    device, deep = problem.device, k_blocks >= 2 * LEAST_K_BLOCKS
    tiles, sms = rows * columns * problem.results, device.sms // whole.cluster
    k_blocks = -(-k_blocks // problem.groups_along("k"))
    waves = tiles / sms
    idle = 1 - waves / ceil(waves)  # of all SMs' time, in the last wave
    streams = deep & (idle > LEAST_IDLE) & (waves > 0.3) & (k_blocks >= 16)
    # Of decoded weights parts through memory took 1.1 to 1.3 times as long as whole tiles, or clusters that share k.
    streams &= not (problem.groups or device.shared or operands.decoded(problem.a, problem.bs[0]))
    # From here on a column of configs beside a row of ways.
    deep, alone, shared, tiles = (x[:, None] for x in (deep, whole.cluster == 1, whole.coop, tiles))
    most, fewest = k_blocks[:, None] // LEAST_K_BLOCKS, tiles.min()
    clusters = np.array([size for size in CLUSTERS_K if fewest <= device.clusters_at_once(size)], int)
    at_once = np.array([device.clusters_at_once(size) for size in clusters.tolist()], int)
    clustered = deep & alone & shared & (clusters <= most) & (tiles <= at_once)
    parts, few = most, sms[:, None] // tiles
    most = np.minimum(most, sms[:, None] * 17 // 16 // tiles)
    least, splits, offered = 8, np.array([x for x in SPLITS if x <= most.max()], int), True
    if windows.view_of(problem):
        # Windows of weight gradients are many more than they have elements: every SM wants a part, and parts are small.
        fill = np.minimum(np.minimum(np.hstack([most, few]), parts), 128)
        least, splits = 2, np.array(sorted({*SPLITS, *fill.ravel().tolist()}))
        offered = np.isin(splits, SPLITS) | (splits == fill[:, :, None]).any(1)
    split = deep & alone & offered & (most >= least) & (most // 2 < splits) & (splits <= most)
    both = deep & alone & shared & offered & (most // 16 < splits) & (splits <= most // 8)
    by_splits = np.stack([split, both], -1).reshape(len(whole), 2 * len(splits))
    ways = np.hstack([np.ones_like(deep), streams[:, None], clustered, by_splits])
    stream = np.arange(ways.shape[1]) == 1
    cluster_k = np.concatenate([(1, 1), clusters, np.tile((1, 8), len(splits))])
    split_by = np.concatenate([np.ones(2 + len(clusters), int), np.repeat(splits, 2)])
    row, way = np.nonzero(ways)
    return whole.take(row, stream_k=stream[way], cluster_k=cluster_k[way], splits=split_by[way])


def _stages(facts: Facts, tile: Footprint, bk: Any) -> Any:
    """As deep a pipeline as fits; shallower where k is so short that the result wants the memory more."""
    k, whole = facts.problem.k * len(facts.way.pairs), maximum(2, tile.whole_result)
    most = 8 if facts.problem.groups or facts.problem.symmetric else 16  # those were measured with 8
    deepest = maximum(2, minimum(tile.deepest(), most))  # where 2 do not fit, resolve says so
    stages = deepest
    if facts.staging.operands:
        # They can all be on their way before the epilogue begins: worth a stage where k is short.
        fewer = tile.deepest(whole)
        stages = where((k <= 32 * bk) & (fewer >= 2) & (fewer == deepest - 1), fewer, deepest)
    stages = where(k <= 2 * bk, minimum(deepest, maximum(4, tile.deepest(whole))), stages)
    return where(k <= bk, minimum(deepest, where(tile.limit(2) != tile.most, 2, 3)), stages)


def _streamed(problem: Problem) -> str:
    """Returns the letters of the arrays whose lines leave L2 first: those that pass it, of what `STREAMED` says."""
    if problem.groups or problem.symmetric:
        return ""
    l2_bytes = problem.device.l2_bytes
    passes = {"b": problem.bytes - problem.result_bytes > 2 * l2_bytes, "d": problem.result_bytes > l2_bytes}
    return "".join(name for name in STREAMED if passes[name])


def _raster(problem: Problem, config: Config) -> int:
    """Returns the width of a band of cluster tiles; narrow where bands end at the diagonal, having fewer columns."""
    height, width = cluster_tile(config)
    rows, _ = problem.tiles(height, width)
    at_once = problem.device.sms / (config.cluster_m * config.cluster_n)
    return band(rows, at_once, height, width, 1.0 if problem.symmetric else 1.4)
