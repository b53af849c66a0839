"""The family of Hopper's GEMM kernels (wgmma, TMA): the configs shipped, and how deep and in which order they go."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from cutjax.kernels.columns import ceil, maximum, minimum, where
from cutjax.kernels.device import Device
from cutjax.kernels.prices import Prices, one_by_one
from cutjax.kernels.problem import Problem
from cutjax.kernels.raster import band
from cutjax.kernels.sm90 import dense_cost, kernel, operands, residual, windows
from cutjax.kernels.sm90.config import FEW_OF_SLICES, MOST_BY_WARPS, MOST_OF_SLICES, Config, Configs, Some
from cutjax.kernels.sm90.facts import ARCH, Facts, Footprint, facts_of, footprint, kind_of
from cutjax.kernels.sm90.kernel import resolve
from cutjax.kernels.sm90.phases import parts
from cutjax.kernels.sm90.resolved import FEW, LONG, cluster_tile

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
    ("coop", 256): (64, 128),
}
# Of the transposed result: bn lies along m, which may be a few tokens, and any width is as good where a is K-major.
SWAPPED_TILES = {
    ("pingpong", 64): (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 208, 224, 256),
    ("pingpong", 128): (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192),
    ("coop", 64): (8, 16, 24, 32, 48, 64, 128),
    ("coop", 128): (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256),
    ("coop", 256): (64, 80, 96, 112, 128, 144, 160, 176, 192),
}
# Of weights that are decoded beside few rows, by three or four warpgroups. Beside 64 rows they took 1.4 times as long.
SLICED_TILES = {("sliced", 64): (8, 16), ("sliced", 128): (8, 16), ("sliced", 256): (8, 16)}
# Of those in 4 bits, by three, beside as many rows. Of 8 bits two took as long (experiments/gates-groups-h200.json).
OF_THREE = 24, MOST_OF_SLICES
DEEPEST_OF_THREE = 12  # stages: 9 were as fast, more were not timed
# The same by mma.sync, of weights in 4 bits beside as few rows as a tile has: of 16, two tiles took 1.15 times as long.
WARPS_TILES = {("warps", 128): (8,), ("warps", 256): (8,)}
TILES_BY_NAME = {"plain": TILES, "symmetric": SYMMETRIC_TILES, "promoted": PROMOTED_TILES, "swapped": SWAPPED_TILES}
FEW_COLUMNS = 512  # of the transposed result: up to here, widths that divide them evenly take the place of those above
CLUSTERS = ((1, 1), (2, 1), (1, 2))
# The same with stages of 128: where k is 128, one stage is the whole contraction. Elsewhere 64 won by 2 to 10%.
DEEP_TILES = {("pingpong", 64): (128, 256), ("coop", 128): (256,)}
# Beside few rows, which are a stream of weights, too: half as many barriers for the same bytes.
STREAM_TILES = {("coop", 64): (8, 16, 24, 32)}
# Of such a stream, stages in quarters of the deepest pipeline, or of the deepest beside another block on the SM: with
# more bytes on their way than the memory's latency takes, blocks get uneven shares (experiments/streams-h200.json).
STREAM_DEPTHS = 4, 2, 3, 6
# Of weights that are decoded, stages of 128 take half as many barriers, and up to 128 columns won by 1 to 20%.
DECODED_DEEP = 128
# Ways to divide k, tried where tiles are few.
CLUSTERS_K = (2, 3, 4, 5, 6, 8)
SPLITS = (2, 3, 4, 6, 8, 16, 32, 64)
LEAST_K_BLOCKS = 4  # of a part
LEAST_IDLE = 0.06  # of the time of all SMs, where tiles in parts may pay
# Long products are limited by power, and bytes through L2 take some: of kernels that are predicted this near to the
# first, the one of the fewest is taken. In bursts picks of 137 held products over 100 us became 0.2% better by it.
RANKED_BY_L2_US, NEAR = 100.0, 0.01
# Of this times the least are those that factors and the above may make the first.
FURTHEST = (1 + residual.MOST) / (1 - residual.MOST) * (1 + 2 * NEAR)
# Of "bd": b, which each band of tiles reads once, and results leave L2 first where they pass it twice. Of results, 8192
# cubed took 0.991, 8192 x 14336 x 4096 the same, scores in float32 of 4.3 GB 0.92; of b 0.993 and 0.996, of both as of
# results. An up-convolution's gradient took 1.03, so windows are left as they are.
STREAMED = "d"
SHALLOW = 512  # a contraction that stages may hold whole

# A pipeline depends on whether k is at most so many of the shallower stages; on the last two beside operands.
_DEPTHS = 1, 2, 4, 32, 64

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
    for facts, shipped in _shipped(problem):
        for row in range(len(shipped)):
            yield _made(facts, shipped, row)


def prices(problem: Problem) -> Prices:
    """Returns the predicted times of the shipped configs that serve a problem, all from columns of their fields."""
    if max(problem.flops, problem.bytes) >= 2**56 or max(problem.m, problem.n) >= 2**28:  # columns have 64 bits
        return one_by_one(problem, configs(problem), resolve)
    sides = _shipped(problem)
    given = parts(problem) if _parts(problem) else (problem, None, ())
    found, us, l2_us, factors = kernel.prices(*given, [shipped for _, shipped in sides], problem)
    new = np.repeat([bool(kernel.unmeasured(facts.problem)) for facts, _ in sides], [len(served) for served in found])

    def ranked_us(rows: np.ndarray) -> np.ndarray:
        return _least_l2(us[rows] * factors(rows), l2_us[rows])

    def config(i: int) -> Config:
        for side, served in zip(sides, found, strict=True):
            if i < len(served):
                return _made(*side, int(served[i]))
            i -= len(served)
        raise IndexError(i)

    def rows() -> list[Hashable]:
        return [row for (_, shipped), served in zip(sides, found, strict=True) for row in shipped.rows(served)]

    near = np.flatnonzero(us <= us.min(initial=np.inf) * FURTHEST)
    near = np.arange(len(us)) if new.any() else near
    return Prices(us, near, ranked_us, config, rows, new)


def _least_l2(us: np.ndarray, l2_us: np.ndarray) -> np.ndarray:
    """Returns the times by which long kernels are ranked: those near to the first by their bytes through L2."""
    if not len(us) or (best := us.min()) < RANKED_BY_L2_US or not l2_us.any():
        return us
    near = us <= best * (1 + NEAR)
    return np.where(near, best * (1 + NEAR * l2_us / l2_us[near].max()), us)


def _made(facts: Facts, shipped: Some, row: int) -> Config:
    fields, p = shipped.fields(row), facts.problem
    return _config(**fields, raster=_raster(p, types.SimpleNamespace(**fields)), evict_first=_streamed(p))


@functools.lru_cache(maxsize=16)
def _shipped(problem: Problem) -> list[tuple[Facts, Some]]:
    """Returns the shipped configs, as operands are and swapped, with what the kernels of each have in common."""
    if part := _parts(problem):
        some = _configs(part, part)
        return [(part, some.take(np.flatnonzero((some.splits == 1) & ~some.stream_k)))]
    # Nobody has timed groups with operands swapped, but of weights that are decoded. A prologue is computed so alone.
    alone = problem.a.prologue is not None or operands.decoded(problem.bs[0], problem.a)
    swaps = (False, True) if not problem.groups or alone else (False,)
    sides = [(facts_of(problem, swap), facts_of(kind_of(problem), swap)) for swap in swaps]
    return [(facts, _configs(facts, kind)) for facts, kind in sides if not facts.reasons]


def _configs(facts: Facts, kind: Facts) -> Some:
    """Returns the configs that are shipped for a problem, from a table of those of its kind."""
    problem, swap = facts.problem, facts.staging.swap
    any_width, decoded = problem.bs[0].contiguous == "k", operands.decoded(problem.a, problem.bs[0])
    name = "promoted" if facts.way.each else "plain"
    name = "symmetric" if problem.symmetric and problem.layout == "nt" else "swapped" if swap else name
    # Of groups, which are uneven, up to twice the average, and the width that holds all but few of them.
    average = -(-problem.n // groups) if (groups := problem.groups_along("n")) > 1 else 0
    columns = 2 * average or problem.n
    few = _even_widths(columns) if swap and any_width and columns <= FEW_COLUMNS else ()
    few = tuple(sorted({*few, min(-(-3 * average // 16) * 8, 256)})) if few and average else few
    sliced = SLICED_TILES | _of_three(problem, average) if decoded else {}
    warps = WARPS_TILES if decoded and problem.a.bits == 4 and problem.n <= MOST_BY_WARPS else {}
    quarters = STREAM_DEPTHS if swap and problem.transposed.streams else STREAM_DEPTHS[:1]
    whole = _whole(name, swap, any_width, tuple((sliced | warps).items()), problem.device.shared, few, quarters)
    depth, k = _config().depth(problem), problem.k * len(facts.way.pairs)
    depths = _DEPTHS if facts.staging.operands else _DEPTHS[:3]
    k = next((x for x in depths if k <= x * depth), 2 * _DEPTHS[-1]) * depth
    k_blocks = -(-problem.k // whole.depth(problem))
    if problem.divided in ("m", "n") or problem.symmetric or k_blocks.max() < 2 * LEAST_K_BLOCKS:
        return Some(_staged(whole, None, kind, k), np.arange(len(whole)), np.ones(len(whole), int))
    ways, rows = _divided(problem, whole, k_blocks)
    table, at = _staged(whole, ways, kind, k), ways.row[rows]
    if windows.view_of(problem):  # no other problem reads the table
        used, at = np.unique(at, return_inverse=True)
        table = table.take(used)
    return Some(table, at, ways.splits[rows])


def _of_three(problem: Problem, average: int) -> dict[tuple[str, int], tuple[int, ...]]:
    """Returns the tiles whose k blocks three warpgroups share, beside the narrower ones of their height.

    Those beside float8 have run on a device in groups alone, and none in parts of k, or in a cluster.

    Args:
      problem: as it is multiplied.
      average: rows of its groups; 0 where there are none.
    """
    if problem.a.bits != 4 or (operands.in_bytes(problem.a, problem.bs[0]) and not average):
        return {}
    few = average <= FEW_OF_SLICES // 2 if average else problem.n <= FEW_OF_SLICES
    widths = tuple(bn for bn in OF_THREE if not few and (average * dense_cost.OVER_AVERAGE or problem.n) <= bn)
    return {("sliced", 128): (*SLICED_TILES["sliced", 128], *widths)} if widths else {}


@functools.lru_cache(maxsize=256)
def _staged(whole: Configs, ways: _Ways | None, kind: Facts, k: int) -> Configs:
    """Returns configs as deep as suits a kind of problems, of which k says how many stages are the contraction."""
    # In groups and of symmetric ones those were measured with 8, but for warpgroups that share k blocks.
    most = where(whole.sliced, 16, 8) if kind.problem.groups or kind.problem.symmetric else 16
    stages = _stages(kind, footprint(kind, whole), whole.depth(kind.problem), k, most)
    stages = minimum(maximum(stages * whole.stages // STREAM_DEPTHS[0], minimum(stages, 3)), most)
    stages = where(whole.consumers == 3, minimum(stages, DEEPEST_OF_THREE), stages)
    stages = maximum(stages - stages % whole.slice_groups, 2 * whole.slice_groups)
    return ways.table.deep(stages[ways.of]) if ways else whole.deep(stages)


@functools.lru_cache(maxsize=256)
def _whole(
    name: str,
    swap: bool,
    any_width: bool,
    decoding: tuple[Any, ...],
    shared: bool,
    few: tuple[int, ...],
    quarters: tuple[int, ...],
) -> Configs:
    """Returns the tiles of that name in clusters, whose contraction is whole, and those that decode.

    In the place of stages they have quarters of the deepest pipeline: the first number, and alone each of them.
    """
    rows, tiles, decoded = [], TILES_BY_NAME[name] | dict(decoding), bool(decoding)
    for (schedule, bm), widths in tiles.items():
        # With ping-pong, of a block's one tile there is nothing for the other warpgroup.
        # Of weights that are decoded, one warpgroup's at a time, it took 1.09 to 1.4 times as long wherever measured.
        if schedule == "pingpong" and (shared or decoded):
            continue
        shipped = widths if schedule in ("sliced", "warps") else range(widths[-1] + 1)
        widths = [bn for bn in few if bn in shipped] if few else widths
        deep = DEEP_TILES.get((schedule, bm), ())
        if quarters == STREAM_DEPTHS:
            deep = (*deep, *(bn for bn in widths if bn in STREAM_TILES.get((schedule, bm), ())))
        if decoded:
            deep = [bn for bn in widths if bn <= DECODED_DEEP]
        for bk, bns, clusters in ((64, widths, CLUSTERS), (128, deep, CLUSTERS[:1])):
            for bn, cluster in itertools.product(bns, clusters):
                if schedule == "sliced" and bn > FEW_OF_SLICES and cluster != (1, 1):
                    continue  # none has run on a device
                if not (swap and bn % 16 and (cluster[0] > 1 or not any_width)):
                    each = quarters if cluster == (1, 1) else quarters[:1]
                    rows += [(bm, bn, bk, x, *cluster, schedule) for x in each]
    return Configs.of(rows, swap)


@functools.lru_cache(maxsize=1024)
def _even_widths(columns: int) -> tuple[int, ...]:
    """Returns the widths of tiles that divide so many columns into 1, 2, .. tiles with little left over."""
    even = {-(-columns // (8 * tiles)) * 8 for tiles in range(1, 9)} | ({16, 32} if columns <= 64 else set())
    # A width of 8 times a large prime would be stored 8 columns at a time.
    return tuple(sorted({bn + 8 if bn // 8 in (17, 19, 23, 29, 31) else bn for bn in even if 8 <= bn <= 256}))


@dataclasses.dataclass(frozen=True, eq=False)
class _Ways:
    """All ways to divide the contraction of tiles, tile by tile.

    Attributes:
      table: tiles, each followed by those that share it in other ways than by splits.
      of: the tile of each of these.
      row: of a way, its place in the table.
      splits: of a way.
      tile: of a way.
      place: of its bounds in a table [kinds of ways, tiles]: undivided, streams, clusters, splits, splits of clusters.
      number: what is bounded: CTAs of a cluster, or splits; else 1.
      clusters: how many of its clusters, where CTAs share a tile, run at once.
    """

    table: Configs
    of: np.ndarray
    row: np.ndarray
    splits: np.ndarray
    tile: np.ndarray
    place: np.ndarray
    number: np.ndarray
    clusters: np.ndarray


def _ways(tiles: Configs, splits: np.ndarray, device: Device) -> _Ways:
    """Returns all ways of tiles, told how many splits each may have."""
    first, (count, more) = np.array((1, 1, *CLUSTERS_K)), splits.shape
    of_first = np.minimum(np.arange(len(first)), 2)
    kinds = np.concatenate([of_first, np.tile((3, 4), more)])
    number = np.hstack([np.broadcast_to(first, (count, len(first))), np.repeat(splits, 2, axis=1)])
    new = np.ones(number.shape, bool)
    new[:, len(first) + 2 :] = np.repeat(splits[:, 1:] > splits[:, :-1], 2, axis=1)
    alone, shared = (tiles.cluster == 1)[:, None], tiles.coop[:, None]
    offered = new & ((kinds < 2) | alone & ((kinds == 3) | shared))
    undivided = offered[:, : len(first)]
    of, way = np.nonzero(undivided)
    table = tiles.take(of, stream_k=way == 1, cluster_k=first[way])
    tile, way = np.nonzero(offered)
    kind, number = kinds[way], number[tile, way]
    column = np.where(kind == 3, 0, np.minimum(way, len(first) - 1))  # splits of clusters are of the largest
    row = (np.cumsum(undivided) - 1).reshape(undivided.shape)[tile, column]
    at_once = np.array([device.clusters_at_once(size) for size in range(1, first[-1] + 1)])
    clusters = np.where(kind == 2, at_once[first[column] - 1], np.iinfo(int).max)
    return _Ways(table, of, row, np.where(kind > 2, number, 1), tile, kind * count + tile, number, clusters)


@functools.lru_cache(maxsize=128)
def _usual_ways(tiles: Configs, device: Device) -> _Ways:
    return _ways(tiles, np.broadcast_to(SPLITS, (len(tiles), len(SPLITS))), device)


def _divided(problem: Problem, whole: Configs, k_blocks: np.ndarray) -> tuple[_Ways, np.ndarray]:
    """Returns ways to divide the contraction of tiles among as many CTAs as SMs, about: all, and which of them."""
    rows, columns = problem.tiles(*cluster_tile(whole))
    device, deep = problem.device, k_blocks >= 2 * LEAST_K_BLOCKS
    tiles, sms = rows * columns * problem.results, device.sms // whole.cluster
    if (groups := problem.groups_along("k")) > 1:
        k_blocks = -(-k_blocks // groups)
    waves = tiles / sms
    idle = 1 - waves / ceil(waves)  # of all SMs' time, in the last wave
    streams = deep & (idle > LEAST_IDLE) & (waves > 0.3) & (k_blocks >= 16)
    # Of decoded weights parts through memory took 1.1 to 1.3 times as long as whole tiles, or clusters that share k.
    streams &= not (problem.groups or device.shared or operands.decoded(problem.a, problem.bs[0]))
    whole_k = whole.sliced & (whole.bn > FEW_OF_SLICES)  # none has run on a device in parts
    parts = deep * (whole_k == 0) * (k_blocks // LEAST_K_BLOCKS)
    # Of fewer parts those of three warpgroups beside 16 rows alone were timed: 0.89 to 0.96 of 8 parts of taller tiles.
    few = (whole.consumers == 3) & (problem.n <= FEW_OF_SLICES)
    most, least = np.minimum(parts, sms * 17 // 16 // tiles), where(few, 4, 8)
    if windows.view_of(problem):
        # Windows of weight gradients are many more than they have elements: every SM wants a part, and parts are small.
        fill = [np.minimum(np.minimum(x, parts), 128) for x in (most, sms // tiles)]
        splits = [np.full_like(tiles, x) for x in SPLITS]
        least, ways = 2, _ways(whole, np.sort([*splits, *fill], axis=0).T, device)
    else:
        ways = _usual_ways(whole, device)
    none = np.zeros_like(tiles)
    above = np.concatenate([none, none, none, most // 2, most // 16])
    up_to = np.concatenate([none + 1, streams, parts, most * (most >= least), most // 8])
    above, up_to = above[ways.place], up_to[ways.place]
    return ways, np.flatnonzero((above < ways.number) & (ways.number <= up_to) & (tiles[ways.tile] <= ways.clusters))


def _stages(facts: Facts, tile: Footprint, bk: Any, k: int, most: Any) -> Any:
    """As deep a pipeline as fits; shallower where k is so short that the result wants the memory more."""
    whole = maximum(2, tile.whole_result)
    deepest = maximum(2, minimum(tile.deepest(), most))  # where 2 do not fit, resolve says so
    stages = deepest
    if facts.staging.operands:
        # They can all be on their way before the epilogue begins: worth a stage where k is short.
        fewer = tile.deepest(whole)
        if facts.problem.divided == "m":  # a third buffer is worth one of five stages: 3 to 6% of a gated derivative
            fewer = where((fewer < deepest - 1) & (tile.deepest(3) >= 4), tile.deepest(3), fewer)
        stages = where((k <= 32 * bk) & (fewer >= 2) & (fewer == deepest - 1), fewer, deepest)
    stages = where(k <= 2 * bk, minimum(deepest, maximum(4, tile.deepest(whole))), stages)
    return where(k <= bk, minimum(deepest, where(tile.limit(2) != tile.most, 2, 3)), stages)


def _streamed(problem: Problem) -> str:
    """Returns the letters of the arrays whose lines leave L2 first: those that pass it, of what `STREAMED` says."""
    if problem.groups or problem.symmetric or problem.a.view is not None:
        return ""
    l2_bytes = problem.device.l2_bytes
    passes = {"b": problem.bytes - problem.result_bytes > 2 * l2_bytes, "d": problem.result_bytes > 2 * l2_bytes}
    return "".join(name for name in STREAMED if passes[name])


def _raster(problem: Problem, config: Any) -> int:
    """Returns the width of a band of cluster tiles; narrow where bands end at the diagonal, having fewer columns."""
    height, width = cluster_tile(config)
    rows, columns = problem.tiles(height, width)
    alone = not (problem.groups or problem.symmetric or problem.batch or problem.a.view)
    if alone and 1 < columns <= FEW and rows >= LONG and problem.k <= SHALLOW:
        return -columns  # row by row, so that a block goes on with the same columns of b, which stay in shared memory
    at_once = problem.device.sms / (config.cluster_m * config.cluster_n)
    return band(rows, at_once, height, width, 1.0 if problem.symmetric else 1.4)
