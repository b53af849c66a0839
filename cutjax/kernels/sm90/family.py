"""The family of Hopper's GEMM kernels (wgmma, TMA): the configs shipped, and how deep and in which order they go."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from cutjax.kernels.problem import Problem
from cutjax.kernels.raster import band
from cutjax.kernels.sm90 import operands, windows
from cutjax.kernels.sm90.config import Config
from cutjax.kernels.sm90.facts import ARCH, Facts, Footprint, facts_of, footprint
from cutjax.kernels.sm90.kernel import resolve
from cutjax.kernels.sm90.phases import parts
from cutjax.kernels.sm90.resolved import cluster_tile

__all__ = ["Config", "competes", "configs", "name", "reasons", "resolve", "stores_in_order"]

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

_config = functools.lru_cache(maxsize=None)(Config)
_divide = functools.lru_cache(maxsize=1 << 14)(dataclasses.replace)


def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns the reasons against every kernel of this family for a problem; empty when one can serve it."""
    unmeasured = ("gathered rows by cp.async are not measured yet: a kernel is pinned by config=",)
    if part := _parts(problem):
        return part.reasons
    if operands.decoded(problem.bs[0], problem.a):
        return facts_of(problem, True).reasons
    return facts_of(problem).reasons + unmeasured * problem.a.gathered


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
    if part := _parts(problem):
        found = _configs(part, swap=False)
        yield from (config for config in found if config.splits == 1 and not config.stream_k)
        return
    if not (own := facts_of(problem)).reasons:
        yield from _configs(own, swap=False)
    if problem.groups and not operands.decoded(problem.bs[0], problem.a):
        return  # nobody has timed groups of others with operands swapped
    if not (swapped := facts_of(problem, True)).reasons:
        yield from _configs(swapped, swap=True)


def _configs(facts: Facts, swap: bool) -> Iterator[Config]:
    problem = facts.problem
    tiles = PROMOTED_TILES if facts.way.each else TILES
    tiles = SYMMETRIC_TILES if problem.symmetric and problem.layout == "nt" else SWAPPED_TILES if swap else tiles
    any_width = problem.bs[0].contiguous == "k"
    decoded = operands.decoded(problem.a, problem.bs[0])
    # Of groups, which are uneven, twice the average.
    columns = 2 * -(-problem.n // groups) if (groups := problem.groups_along("n")) > 1 else problem.n
    few = _even_widths(columns) if swap and any_width and columns <= FEW_COLUMNS else ()
    for (schedule, bm), widths in tiles.items():
        # With ping-pong, of a block's one tile there is nothing for the other warpgroup.
        # Of weights that are decoded, one warpgroup's at a time, it took 1.09 to 1.4 times as long wherever measured.
        if schedule == "pingpong" and (problem.device.shared or decoded):
            continue
        widths = [bn for bn in few if bn <= widths[-1]] if few else widths
        deep = DEEP_TILES.get((schedule, bm), ())
        if decoded:
            deep = [bn for bn in widths if bn <= DECODED_DEEP]
        for bk, bns, clusters in ((64, widths, CLUSTERS), (128, deep, CLUSTERS[:1])):
            for bn in bns:
                if swap and not any_width and bn % 16:
                    continue
                thin = _config(bm, bn, bk, 2, 1, 1, schedule, 1, swap)
                stages = _stages(facts, footprint(facts, thin), thin.depth(problem))
                for cluster in clusters:
                    if swap and bn % 16 and cluster[0] > 1:
                        continue
                    tile = _config(bm, bn, bk, 2, *cluster, schedule, 1, swap)
                    whole = _config(bm, bn, bk, stages, *cluster, schedule, _raster(problem, tile), swap)
                    yield whole
                    yield from _divided(problem, whole)


@functools.lru_cache(maxsize=1024)
def _even_widths(columns: int) -> tuple[int, ...]:
    """Returns the widths of tiles that divide so many columns into 1, 2, .. tiles with little left over."""
    even = {-(-columns // (8 * tiles)) * 8 for tiles in range(1, 9)} | ({16, 32} if columns <= 64 else set())
    # A width of 8 times a large prime would be stored 8 columns at a time.
    return tuple(sorted({bn + 8 if bn // 8 in (17, 19, 23, 29, 31) else bn for bn in even if 8 <= bn <= 256}))


def _divided(problem: Problem, config: Config) -> Iterator[Config]:
    """Yields the ways to divide the contraction of a config's tiles among as many CTAs as there are SMs, about."""
    k_blocks = -(-problem.k // config.depth(problem))
    if problem.divided in ("m", "n") or problem.symmetric or k_blocks < 2 * LEAST_K_BLOCKS:
        return
    rows, columns = problem.tiles(*cluster_tile(config))
    groups = problem.groups_along("k")
    tiles, sms = rows * columns * problem.results, problem.device.sms // config.cluster
    k_blocks = -(-k_blocks // groups)
    waves = tiles / sms
    idle = 1 - waves / math.ceil(waves)  # of all SMs' time, in the last wave
    if not problem.groups and idle > LEAST_IDLE and waves > 0.3 and k_blocks >= 16 and not problem.device.shared:
        yield _divide(config, stream_k=True)
    most = k_blocks // LEAST_K_BLOCKS
    if config.schedule == "coop" and config.cluster == 1:
        for size in CLUSTERS_K:
            if size <= most and tiles <= problem.device.clusters_at_once(size):
                yield _divide(config, cluster_k=size)
    most = min(most, sms * 17 // 16 // tiles)
    # Windows of weight gradients are many more than they have elements: every SM wants a part, and parts are small.
    windowed = windows.view_of(problem) is not None
    fill = {min(splits, k_blocks // LEAST_K_BLOCKS, 128) for splits in (most, int(sms // tiles))} if windowed else set()
    least = 2 if windowed else 8
    for splits in sorted({*SPLITS, *fill}):
        if most >= least and most // 2 < splits <= most and config.cluster == 1:
            yield _divide(config, splits=splits)
        if config.schedule == "coop" and config.cluster == 1 and most // 16 < splits <= most // 8:
            yield _divide(config, cluster_k=8, splits=splits)


def _stages(facts: Facts, tile: Footprint, bk: int) -> int:
    """As deep a pipeline as fits; shallower where k is so short that the result wants the memory more."""
    k, whole = facts.problem.k * len(facts.way.pairs), max(2, tile.whole_result)
    most = 8 if facts.problem.groups or facts.problem.symmetric else 16  # those were measured with 8
    deepest = max(2, min(tile.deepest(), most))  # where 2 do not fit, resolve says so
    if k <= bk:
        two_blocks = tile.limit(2) != tile.most
        return min(deepest, 2 if two_blocks else 3)
    if k <= 2 * bk:
        return min(deepest, max(4, tile.deepest(whole)))
    if k <= 32 * bk and facts.staging.operands:
        # They can all be on their way before the epilogue begins: worth a stage where k is short.
        fewer = tile.deepest(whole)
        return fewer if 2 <= fewer == deepest - 1 else deepest
    return deepest


def _raster(problem: Problem, config: Config) -> int:
    """Returns the width of a band of cluster tiles; narrow where bands end at the diagonal, having fewer columns."""
    height, width = cluster_tile(config)
    rows, _ = problem.tiles(height, width)
    return band(rows, problem.device.sms / config.cluster, height, width, 1.0 if problem.symmetric else 1.4)
