"""The mma family: kernels of ffi/device/mma/gemm.cuh for every architecture from sm_75 on, and the configs it ships."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from cutjax.kernels.mma import slim
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.kernel import most_tiles, reasons, resolve, tiles_of
from cutjax.kernels.mma.math import math_of
from cutjax.kernels.problem import Problem

__all__ = ["Config", "configs", "name", "reasons", "resolve"]

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
    (32, 32, 16, 16, 1, 4),
    (16, 64, 16, 16, 1, 4),
    (16, 128, 16, 32, 1, 4),
    (64, 16, 16, 16, 1, 4),
)
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
LEAST_K_BLOCKS = 8  # of a part

_config = functools.lru_cache(maxsize=None)(Config)


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the shipped tiles, each as deep and in the order that suits the problem, and ways to divide k."""
    how = math_of(problem)
    if how is None:
        return
    size, device = problem.a_dtype.itemsize, problem.device
    for bm, bn, wm, wn, sliced_k, blocks in TILES:
        for bk_bytes in (64, 128):
            bk = bk_bytes // size
            slices = bk // how.k // sliced_k
            if slices < 2 or slices % 2:
                continue
            stage = (bm + problem.products * bn) * bk_bytes
            limit = min(device.shared_bytes, device.shared_bytes_per_sm // blocks - 1024)
            staging = (bm // wm) * (bn // wn) * 16 * min(64, wn) * 4
            stages = max(2, min(6, (limit - staging) // stage, max(2, -(-problem.k // bk) + 1)))
            whole = _config(bm, bn, bk, wm, wn, sliced_k, stages, 1, 1, blocks)
            whole = dataclasses.replace(whole, raster=_raster(problem, whole))
            yield whole
            yield from _divided(problem, whole)
    for whole in slim.configs(problem):
        yield whole
        yield from _divided(problem.transposed if whole.swap else problem, whole)


def _divided(problem: Problem, config: Config) -> Iterator[Config]:
    """Yields the ways to divide the contraction among as many blocks as run at once, about."""
    groups = problem.groups if problem.ragged == "k" else 1
    k_blocks = -(-problem.k // (config.bk * groups))
    rows, columns = tiles_of(problem, config)
    tiles = rows * columns * problem.batch_size * groups if not problem.symmetric else most_tiles(problem, config)
    slots = problem.device.sms * config.blocks
    if problem.ragged == "m" or tiles >= slots:
        return
    most = min(k_blocks // LEAST_K_BLOCKS, slots // tiles)
    for splits in SPLITS:
        if most // 2 < splits <= most:
            yield dataclasses.replace(config, splits=splits)


def _raster(problem: Problem, config: Config) -> int:
    """Returns the width of a band of tiles for which those in flight read the fewest bytes through L2."""
    rows, _ = tiles_of(problem, config)
    best = math.sqrt(problem.device.sms * config.blocks * config.bn / config.bm)
    near = range(max(1, round(best * 0.7)), max(1, round(best * 1.4)) + 1)
    return min(near, key=lambda width: (-(-rows // width) * width - rows, abs(width - best)))
