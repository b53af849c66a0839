"""The mma family: kernels of ffi/device/mma/gemm.cuh for every architecture from sm_75 on, and the configs it ships."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from cutjax.kernels.mma import slim, views
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.kernel import BARRIER_BYTES, chunk_of, reasons, resolve, staging_of, tma_reasons, units_of
from cutjax.kernels.mma.math import Math, math_of
from cutjax.kernels.mma.resolved import in_units
from cutjax.kernels.prepared import along_k
from cutjax.kernels.prices import Prices, one_by_one
from cutjax.kernels.problem import Problem
from cutjax.kernels.raster import band

__all__ = ["Config", "competes", "configs", "name", "prices", "reasons", "resolve", "stores_in_order"]

name = "mma"

# (bm, bn, wm, wn, sliced_k, blocks): from large products to small ones.
TILES = (
    (128, 256, 64, 64, 1, 1),
    (256, 128, 64, 64, 1, 1),
    (128, 128, 64, 64, 1, 2),
    (128, 128, 64, 32, 1, 1),
    (128, 64, 64, 32, 1, 2),
    (64, 128, 32, 64, 1, 2),
    (64, 64, 32, 32, 1, 3),
    (64, 64, 32, 32, 2, 2),
    (32, 64, 32, 32, 2, 3),
    (64, 32, 32, 32, 2, 3),
    (32, 32, 32, 16, 1, 8),
    (32, 32, 16, 16, 1, 4),
    (16, 64, 16, 16, 1, 4),
    (16, 128, 16, 32, 1, 4),
    (64, 16, 16, 16, 1, 4),
)
# The same of elements that are multiplied one by one, by FMA: a thread has 128, 64 or 16 of the result.
ELEMENT_TILES = (
    (128, 128, 64, 64, 1, 2),
    (128, 256, 64, 64, 1, 1),
    (256, 128, 64, 64, 1, 1),
    (128, 128, 64, 32, 1, 1),
    (128, 64, 64, 32, 1, 2),
    (64, 128, 32, 64, 1, 2),
    (64, 64, 32, 32, 1, 4),
    (64, 64, 32, 32, 2, 2),
    (32, 64, 32, 32, 2, 4),
    (64, 32, 32, 32, 2, 4),
    (32, 32, 32, 16, 1, 8),
    (32, 32, 16, 16, 1, 4),
    (16, 64, 16, 16, 1, 4),
    (64, 16, 16, 16, 1, 4),
)
# Of fragments that are decoded, which takes registers: the same, and with fewer blocks for products of several b.
NARROW_TILES = (
    *TILES,
    (128, 64, 32, 32, 1, 1),
    (64, 128, 32, 32, 1, 1),
    (64, 64, 32, 32, 1, 2),
    (64, 64, 32, 32, 2, 1),
    (32, 64, 32, 32, 2, 2),
    (64, 32, 32, 32, 2, 2),
    (16, 128, 16, 32, 1, 3),
)
# Of fragments in terms, which take the room of accumulators.
TERM_TILES = (
    (128, 64, 64, 32, 1, 2),
    (64, 64, 32, 32, 1, 2),
    (128, 64, 32, 32, 1, 1),
    (64, 128, 32, 32, 1, 1),
    (64, 64, 32, 32, 2, 1),
    (32, 64, 32, 32, 2, 2),
    (64, 32, 32, 32, 2, 2),
    (32, 32, 16, 16, 1, 4),
    (16, 64, 16, 16, 1, 4),
    (64, 16, 16, 16, 1, 4),
)
# Of accumulators of 64 bits.
WIDE_TILES = (
    (128, 64, 64, 32, 1, 2),
    (64, 128, 32, 64, 1, 2),
    (64, 64, 32, 32, 1, 2),
    (128, 64, 32, 32, 1, 1),
    (64, 128, 32, 32, 1, 1),
    (64, 64, 32, 32, 2, 1),
    (64, 32, 32, 16, 1, 2),
    (32, 64, 32, 32, 2, 2),
    (64, 32, 32, 32, 2, 2),
    (32, 32, 16, 16, 1, 4),
    (16, 64, 16, 16, 1, 4),
    (64, 16, 16, 16, 1, 4),
)
# Of float64 by DMMA: there is room for warp tiles of 64 x 32 where TMA loads.
DMMA_TILES = ((128, 128, 64, 32, 1, 1), *WIDE_TILES)
# Of 128 bits.
WIDEST_TILES = (
    (64, 64, 32, 16, 1, 1),
    (64, 32, 32, 16, 1, 2),
    (32, 64, 16, 32, 1, 2),
    (32, 32, 16, 16, 1, 2),
    (16, 64, 16, 16, 1, 2),
    (64, 16, 16, 16, 1, 2),
)
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_SPLITS = 128
LEAST_K_BLOCKS = 8  # of a part

_config = functools.lru_cache(maxsize=None)(Config)
_divide = functools.lru_cache(maxsize=1 << 14)(dataclasses.replace)


def competes(problem: Problem) -> bool:
    """True where smaller tiles compete with those of 64 rows, as was measured in float32."""
    return max(problem.m, problem.n) <= 32 and problem.a.bits > 16


def stores_in_order(problem: Problem) -> bool:
    """Returns True: threads store results, in any order of memory."""
    return True


def tiles_for(way: Math) -> tuple[tuple[int, ...], ...]:
    """Returns the tiles of a way to multiply."""
    if way.words == 8 and way.name == "dmma":
        return DMMA_TILES
    if way.words > 4:
        return WIDE_TILES if way.words == 8 else WIDEST_TILES
    return {"fma": ELEMENT_TILES, "terms": TERM_TILES, "decode": NARROW_TILES}.get(way.fragments, TILES)


def prices(problem: Problem) -> Prices:
    """Returns the predicted times of the shipped configs that serve a problem."""
    return one_by_one(problem, configs(problem), resolve)


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the shipped tiles, each as deep and in the order that suits the problem, and ways to divide k."""
    way = math_of(problem)
    if way is None:
        return
    size, device, staged = problem.a.bytes(1), problem.device, staging_of(problem)
    units = units_of(problem)
    by_tma = not tma_reasons(along_k(problem) if way.along_k else problem, way)
    for bm, bn, wm, wn, sliced_k, blocks in tiles_for(way):
        for bk in way.depths:
            slices = bk // way.k // sliced_k
            if slices < 2 or slices % 2:
                continue
            stage = way.stage_bytes(bm, bn, bk, problem.products, size, in_units(problem, way, units, wm, wn))
            staging = (bm // wm) * (bn // wn) * 16 * chunk_of(staged, wn) * staged.column_bytes
            # As many blocks as an SM has room for with two stages each, which on some is less than on others.
            fitting = min(blocks, device.shared_bytes_per_sm // (staging + 2 * stage + 1024)) or 1
            limit = min(device.shared_bytes, device.shared_bytes_per_sm // fitting - 1024)
            stages = max(2, min(6, (limit - staging) // stage, max(2, -(-problem.k // bk) + 1)))
            raster = band(views.tiles(problem, bm, bn)[0], device.sms * fitting, bm, bn)
            whole = _config(bm, bn, bk, wm, wn, sliced_k, stages, 1, raster, fitting)
            yield whole
            yield from _divided(problem, whole)
            if by_tma and (stages := min(stages, (limit - staging) // (stage + BARRIER_BYTES))) > 1:
                yield _config(bm, bn, bk, wm, wn, sliced_k, stages, 1, raster, fitting, False, True)
    for whole in slim.configs(problem):
        yield whole
        yield from _divided(problem.transposed if whole.swap else problem, whole)


def _divided(problem: Problem, config: Config) -> Iterator[Config]:
    """Yields the ways to divide the contraction among as many blocks as run at once, about."""
    groups = problem.groups_along("k")
    k_blocks = -(-problem.k // (config.bk * groups))
    slots = problem.device.sms * config.blocks
    whole = problem.divided == "m" or views.phases(problem)
    if whole or (tiles := views.most_tiles(problem, config.bm, config.bn)) >= slots:
        return
    most = min(k_blocks // LEAST_K_BLOCKS, slots // tiles)
    # Weights of a convolution are few, and the pixels that are added up many.
    of_pixels = bool(views.axes(problem)) and most > SPLITS[-1]
    for splits in (*SPLITS, *[min(most, MOST_SPLITS)] * of_pixels):
        if most // 2 < splits <= most or splits == MOST_SPLITS:
            yield _divide(config, splits=splits)
