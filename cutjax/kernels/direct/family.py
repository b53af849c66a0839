"""The direct family: convolutions of each channel by itself, for every architecture from sm_75 on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cutjax.kernels.direct import slide, toeplitz
from cutjax.kernels.direct.config import Config
from cutjax.kernels.direct.cost import Shape
from cutjax.kernels.direct.geometry import Geometry, geometry_of
from cutjax.kernels.direct.kernel import reasons, resolve
from cutjax.kernels.prices import Prices, one_by_one
from cutjax.kernels.problem import Problem

__all__ = ["Config", "competes", "configs", "name", "prices", "reasons", "resolve", "stores_in_order"]

name = "direct"
WORTH = 3  # windows from which on both axes Toeplitz matrices are tried
MOST_PARTS = 4096  # of a config

STRIPS = (1, 2, 4, 7, 8)
BEGUN = 2  # rows that take as long as a chunk to begin
# Of a block. Of results it is so few that an SM has several, of which one begins while others end.
THREADS, OF_WEIGHTS = 128, 256


def competes(problem: Problem) -> bool:
    """Returns True: of what it serves others multiply zeros."""
    return True


def stores_in_order(problem: Problem) -> bool:
    """True of what it does not serve: results of convolutions are row-major."""
    return geometry_of(problem) is None


def prices(problem: Problem) -> Prices:
    """Returns the predicted times of the shipped configs that serve a problem."""
    return one_by_one(problem, configs(problem), resolve)


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the shipped ways to divide a problem among threads."""
    geometry = geometry_of(problem)
    if geometry is None:
        return
    size = problem.a.dtype.itemsize
    if geometry.slides and problem.accumulator.itemsize == 4:
        yield from slide.configs(problem, geometry)
        return
    yield from _toeplitz(problem, geometry)
    for pairs in (8, 4, 2, 1):
        pairs *= geometry.channels
        if pairs > 32 or pairs * size > 16 * geometry.channels or geometry.pairs % pairs:
            continue
        if pairs % geometry.multiplier and geometry.multiplier % pairs:
            continue
        for strip in _strips(geometry):
            yield from _configs(problem, geometry, pairs, strip)


def _strips(geometry: Geometry) -> Iterator[int]:
    axis = geometry.columns
    unit = axis.steps[1]
    for strip in dict.fromkeys(-(-strip // unit) * unit for strip in STRIPS):
        if strip == unit or strip < axis.places + max(1, strip // 4):
            yield strip


def _configs(problem: Problem, geometry: Geometry, pairs: int, strip: int) -> Iterator[Config]:
    """Yields the kernels of a thread's products and places: as many blocks on an SM as its registers let."""
    device, done = problem.device, geometry.rows.steps[1]
    threads = OF_WEIGHTS if geometry.gradient else THREADS
    lanes = max(8, min(64, 512 // (pairs * problem.a.dtype.itemsize)))
    aheads = (1, 2, 4) if geometry.columns.window == 1 and not geometry.gradient else (1,)
    for ahead in aheads:
        config = Config(pairs, strip, done, lanes, threads, ahead, 1, int(geometry.gradient))
        shape = Shape(problem, config, geometry)
        limits = {b: device.registers_per_sm // (threads * b) // 8 * 8 for b in (12, 10, 8, 7, 6, 5, 4, 3, 2, 1)}
        fitting = [b for b, limit in limits.items() if limit >= shape.registers]
        blocks = next(iter(fitting), 1)
        if geometry.gradient:
            parts = max(1, min(device.sms * blocks // (shape.tiles * shape.slices), 2048))
            rows = _rows(geometry, strip, parts * shape.across)
            parts = max(1, min(parts, -(-geometry.items(strip, rows) // shape.across)))
            yield Config(pairs, strip, -(-rows // done) * done, lanes, threads, ahead, blocks, parts)
            continue
        # Rows in chunks that let all SMs have blocks, about four times; those at a chunk's ends are read twice.
        others = geometry.items(strip, 1 << 20) // geometry.rows.every * shape.tiles
        wanted = 4 * device.sms * blocks * shape.across
        chunks = max(1, min(-(-wanted // max(1, others * geometry.rows.every)), geometry.rows.places))
        rows = max(-(-geometry.rows.places // chunks), min(2 * geometry.rows.open[1], geometry.rows.places))
        yield Config(pairs, strip, -(-rows // done) * done, lanes, threads, ahead, blocks)


def _rows(geometry: Geometry, strip: int, threads: int) -> int:
    """Returns the rows of a chunk with which the last of so many threads of a weight gradient is done first."""
    least = 4 if geometry.rows.window > 1 else 1  # others read the same rows of pixels
    most = min(max(least, geometry.lines(strip)), 64)

    def took(rows: int) -> float:
        return -(-geometry.items(strip, rows) // threads) * (rows + BEGUN)

    return min(range(min(least, most), most + 1), key=took)


def _toeplitz(problem: Problem, geometry: Geometry) -> Iterator[Config]:
    """Yields kernels on the tensor cores: images whole, or chunks of their rows, of which all SMs have some."""
    if min(geometry.rows.window, geometry.columns.window) < WORTH:
        return
    device, grid = problem.device, geometry.rows.grid
    for warps, blocks, stages in ((8, 2, 4), (16, 1, 4), (8, 3, 3)):
        for ahead in range(stages, 1, -1):  # as many as there is room for
            config = Config(2, 8, grid, warps, 32 * warps, ahead, blocks, 1, True)
            whole = toeplitz.Shape(problem, config, geometry)
            if whole.shared_bytes <= whole.most_bytes:
                break
        if blocks > 2 and whole.subs == 16:  # of images of 7 x 7: 37 us, where two blocks took 32 and XLA 33
            continue
        slots = max(1, device.sms * blocks // whole.tiles)  # of the same channels
        wanted = min(-(-slots // (whole.groups * whole.pieces)), -(-grid // (2 * geometry.rows.window)))
        for rows in dict.fromkeys(-(-grid // chunks) for chunks in (1, 2, 4, max(1, wanted))):
            kinds = whole.pieces * -(-grid // rows)
            rounds = [-(-whole.groups * kinds // (waves * slots)) for waves in (1, 2, 3)]
            even = [-(-whole.groups // each) for each in rounds]  # of blocks with as many groups, none waits for others
            for parts in dict.fromkeys([*even, min(max(1, slots // kinds), whole.groups)]):
                yield dataclasses.replace(config, rows=rows, parts=min(kinds * parts, MOST_PARTS))
