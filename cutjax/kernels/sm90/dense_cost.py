"""The predicted time of a dense product's kernel: what the model reads of it, and the time as a formula of that.

Both take one kernel's numbers or columns of those of many, so that a choice is made, and the constants are fitted
(benchmarks/fit.py), by the same code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cutjax.kernels import staging
from cutjax.kernels.columns import ceil, each, maximum, minimum, some
from cutjax.kernels.device import Device, reference
from cutjax.kernels.operand import Operand
from cutjax.kernels.prepared import COPIED_BYTES_PER_US, Prepared
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import decode, prologue, scales, windows
from cutjax.kernels.sm90.arguments import matrices_of
from cutjax.kernels.sm90.constants import CONSTANTS, STREAMS, Constants
from cutjax.kernels.sm90.operands import Way, decoded
from cutjax.kernels.sm90.resolved import Resolved
from cutjax.kernels.sums import summands

FITTED_ON = reference("sm_90a")  # an H200: bandwidths of memory scale from there, those within an SM do not


# Of a change of a k block beside its instructions, one after the other: the end of a wait, a load, a store, a fence, a
# barrier and the first wgmma. Some 200 cycles, counted and not measured. It adds up with multiplying as decoding does.
CHANGE_US = 0.114
# A line of L2 serves so many requests a microsecond: a thin operand of a long product is a few lines, which every tile
# asks for. 3211264 x 16 x 32 took 262 us, and 100 once b stayed in shared memory, 173 where two blocks shared what they
# loaded; 3211264 x 96 x 16 295, and 204; 802816 x 144 x 24 139, and 106.
REQUESTS_PER_US = 625.0
# Rows that are shorter than a line take requests of their own, so many an SM and microsecond: 802816 x 144 x 24 took
# 138 us where each of three tiles along m loaded its rows of b, and 84 where a pair of blocks shared them.
PARTS_PER_US = 800.0
# How many times as long as of 2 bytes the bytes of results of 4 take: the scores in float32 that attention has, 4.3 and
# 0.5 GB of them, beside those in bfloat16. Their parts, where k is divided, were fitted as they are.
WIDE = 1.25


class Features(NamedTuple):
    """Everything that the model reads of a kernel, as numbers; truths are 0 or 1.

    Attributes:
      ideal: microseconds of the flops.
      flop_us: flops a microsecond of one SM.
      speed: bandwidth of memory, over that of the device fitted on.
      sms: of the device.
      asked_for: how often each line of an operand is asked for, of both, unless shared memory keeps it.
      partial: how many parts of lines are asked for again, of rows of k that are shorter than one.
      items, in_flight: cluster tiles, and how many run at one time.
      spread: the share of the tiles by which those of uneven groups are more, and of equal ones less, where few groups
        have two.
      resident: blocks on an SM.
      multicasts: the cluster is one that multicasts.
      cluster, cluster_m, cluster_n, cluster_k, splits, stream: of the config.
      bm, bn, bk, stages, pingpong, halves: of the config; bn of all products (bm where operands are swapped), `halves`
        where warpgroups share one.
      k_blocks: of a part; of each pair of terms of the operands as many.
      stage_bytes: of one stage.
      own: the part of a tile's columns that one CTA stores.
      a_off, b_off: rows in memory are off its lines.
      packed: bytes of an element of a over those of one of b: less than 1 where it is decoded.
      b_columns: loaded of b, of all products.
      b_short: how many more times than 1 its rows in shared memory are shorter than 64 elements.
      ragged, threads, swap: of the result.
      wide: it has 4 bytes, where operands have 2.
      fused: instructions of the epilogue, an accumulator; 0 of the identity.
      few_rows, streams: it is a product of up to 64 rows; and a stream of weights (`Problem.streams`).
      steps: in which a warpgroup decodes a k block; 0 where it decodes none.
      factors: by which elements are multiplied as they are decoded: 0 by none, or where they multiply sums, 1 by those
        of 16 bits, 2 by others, which are multiplied in float32.
      rescaled: sums of a thread that are multiplied by factors, in a k block.
      sliced, by_three: four warpgroups decode, and share k blocks; or three.
      by_warps: warps multiply by themselves.
      promoted, scaled: the sums of each k block are added up apart; times scales.
      by_column: each column of a tile has a scale of its own.
      a_reads: how often a is read from shared memory, once for each part of the columns.
      sum_parts: of a tile of a warpgroup, whose sums are promoted one after the other.
      change: microseconds in which a block's threads change the columns of a k block by a prologue.
      reads, result, asked: bytes of the operands, of the results the kernel writes, and of those asked.
      copied, copies: bytes read and written, and number, of operands copied before the launch.
    """

    ideal: Any
    flop_us: Any
    speed: Any
    sms: Any
    asked_for: Any
    partial: Any
    items: Any
    spread: Any
    in_flight: Any
    resident: Any
    multicasts: Any
    cluster: Any
    cluster_m: Any
    cluster_n: Any
    cluster_k: Any
    splits: Any
    stream: Any
    bm: Any
    bn: Any
    bk: Any
    stages: Any
    pingpong: Any
    halves: Any
    k_blocks: Any
    stage_bytes: Any
    own: Any
    a_off: Any
    packed: Any
    b_off: Any
    b_columns: Any
    b_short: Any
    ragged: Any
    threads: Any
    swap: Any
    wide: Any
    fused: Any
    few_rows: Any
    streams: Any
    steps: Any
    factors: Any
    rescaled: Any
    sliced: Any
    by_three: Any
    by_warps: Any
    promoted: Any
    scaled: Any
    by_column: Any
    a_reads: Any
    sum_parts: Any
    change: Any
    reads: Any
    result: Any
    asked: Any
    copied: Any
    copies: Any


# Of tiles with so many columns for each row of an average group few groups have two.
OVER_AVERAGE = 1.25
# How much of the time of an epilogue's instructions is left beside float8, whose sums are promoted: of rows' scales,
# three products of experiments/fp8-promoted-h200.json.
FUSED_FLOAT8 = 0.3
# What three warpgroups save of decoding of several products, of what they save of one's: 5 kernels of
# experiments/decoded-by-three-h200.json.
OF_SEVERAL = 0.46
# How many times as long as by words of 4 bytes threads store results of 16 bits one by one: their rows are odd. Of five
# products of report12-17.
PAIRLESS = 1.6


def features(kernel: Resolved, device: Device) -> Features:
    """Returns the features of a kernel, or columns of those of many: the inputs of the model."""
    return Features(**_of_kernel(kernel, device), **_of_both(kernel, device), **_of_config(kernel, device))


@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """The features of many kernels that do not depend on the sizes of their problem.

    Attributes:
      same: those that all have in common.
      columns: of all, [features, kernels], in the order of ``names``.
    """

    names: tuple[str, ...]
    same: dict[str, float]
    columns: np.ndarray

    @classmethod
    def of(cls, kernels: Resolved, device: Device) -> Fixed:
        """Reads them of a record of many."""
        found = _of_config(kernels, device)
        columns = np.empty((len(found), len(kernels.config)))
        for column, x in zip(columns, found.values(), strict=True):
            column[:] = x
        return cls(tuple(found), {name: float(x) for name, x in found.items() if np.ndim(x) == 0}, columns)

    def take(self, rows: np.ndarray) -> Fixed:
        """Returns the features of some kernels."""
        return Fixed(self.names, self.same, self.columns[:, rows])


def joined(kernels: Sequence[Resolved], fixed: Sequence[Fixed], device: Device) -> Features:
    """Returns the features of the kernels of several records, one after the other, as columns of float64."""
    counts, problems = [x.columns.shape[1] for x in fixed], [_of_kernel(kernel, device) for kernel in kernels]
    found: dict[str, Any] = dict(zip(fixed[0].names, np.hstack([x.columns for x in fixed]), strict=True))
    found |= {name: x for name, x in fixed[0].same.items() if all(other.same.get(name) == x for other in fixed)}
    both = [_of_both(kernel, device) for kernel in kernels]
    found |= {name: np.concatenate([x[name] for x in both], dtype=float) for name in both[0]}
    of_problems = spread([tuple(x.values()) for x in problems], counts)
    return Features(**found, **dict(zip(problems[0], of_problems, strict=True)))


def spread(rows: Sequence[Sequence[float]], counts: Sequence[int]) -> list[Any]:
    """Returns a column of each place, with so many of each row's number; the number itself where all are equal."""
    table = np.array(rows, float).T
    columns, alike = np.repeat(table, counts, axis=1), (table == table[:, :1]).all(axis=1)
    return [float(row[0]) if same else column for row, column, same in zip(table, columns, alike.tolist(), strict=True)]


def _of_both(kernel: Resolved, device: Device) -> dict[str, Any]:
    """Returns the features that depend on a config and on sizes."""
    c = kernel.config
    columns, spread = _columns(kernel)
    items = kernel.rows * columns * (kernel.multiplied.batch_size * kernel.matrices) * c.splits
    found = {"items": items, "spread": spread, "k_blocks": ceil(kernel.k_blocks / c.parts), "splits": c.splits}
    return found | {"asked_for": _asked_for(kernel, device), "partial": _partial(kernel)}


def _asked_for(kernel: Resolved, device: Device) -> Any:
    """Returns the times that each line of memory of an operand is asked for, of both, where tiles share these."""
    p = kernel.multiplied
    if p.batch or p.groups or p.a.view:
        return 0 * kernel.columns

    def requests(operand: Operand, rows: int) -> float:  # for a line, of a row that is asked for by parts of lines
        row = operand.bytes(p.k if operand.contiguous == "k" else rows)
        return -(-row // 128) * 128 / max(row, 1)

    # A block goes on with the same rows of an operand if their tiles divide those in flight.
    at_once = maximum(1, each(device.clusters_at_once, kernel.config.cluster) * kernel.blocks_per_sm)
    keeps_a, keeps_b = kernel.stays
    keeps_a, keeps_b = keeps_a & (at_once % kernel.rows == 0), keeps_b & (at_once % kernel.columns == 0)
    of_a = (1 - keeps_a) * kernel.columns * requests(p.a, p.m)
    return of_a + (1 - keeps_b) * kernel.rows * requests(p.bs[0], p.n)


def _of_config(kernel: Resolved, device: Device) -> dict[str, Any]:
    """Returns the features that do not depend on sizes."""
    p, c = kernel.multiplied, kernel.config
    (of_a, of_b), b = p.beside, p.bs[0]
    return {
        "in_flight": maximum(1, each(device.clusters_at_once, c.cluster) * kernel.blocks_per_sm),
        "resident": kernel.blocks_per_sm,
        "multicasts": c.cluster > c.cluster_k,
        "cluster": c.cluster,
        "cluster_m": c.cluster_m,
        "cluster_n": c.cluster_n,
        "cluster_k": c.cluster_k,
        "stream": c.stream_k,
        "bm": c.bm * of_a,
        "bn": c.bn * of_b,
        "bk": c.bk,
        "stages": c.stages,
        "steps": c.bk // 16 // c.slices(p) * of_a if decoded(p.a, b) else 0,
        "factors": decode.factor_kind(c, p),
        "rescaled": decode.rescaled(c, p),
        "sliced": c.sliced & (c.by_warps == 0) & (c.consumers == 4),
        "by_three": (c.sliced & (c.consumers == 3)) * (OF_SEVERAL if of_a > 1 else 1),
        "by_warps": c.by_warps,
        "promoted": kernel.way.each,
        "scaled": kernel.way.each and scales.scaled(p),
        "by_column": kernel.way.each and scales.scaled(p) and scales.by_column(p, c),
        "a_reads": kernel.sums.columns,
        "sum_parts": kernel.sums.columns * c.m_blocks,
        "change": prologue.change_us(c, p),
        "pingpong": 1 - c.coop,
        "halves": c.coop & (c.consumers > 1),
        "stage_bytes": kernel.stage_bytes,
        "own": c.epilogue_columns / c.bn,
        "b_columns": c.loaded(b, of_b) * of_b,
        "b_short": 128 // b.bytes(c.chunk(b, of_b)) - 1,
        "ragged": (c.bm if c.swap else c.bn) * p.out_dtype.itemsize % 128 != 0,
        "swap": c.swap,
    }


def _partial(kernel: Resolved) -> Any:
    """Returns the number of parts of lines that tiles ask for again, where rows of k are shorter than a line."""
    p, found = kernel.multiplied, 0 * kernel.rows
    for operand, size, times in ((p.a, p.m, kernel.columns), (p.bs[0], p.n, kernel.rows)):
        row = operand.bytes(p.k)
        if operand.contiguous == "k" and 0 < row < 128 and not operand.view:
            found = found + p.batch_size * size * (times - 1) * 128 / row
    return found


def _columns(kernel: Resolved) -> tuple[Any, Any]:
    """Returns the tiles along n, of groups those of all, and their `spread`.

    That is the mean of equal groups, and of uneven ones, whose last tile is half full.
    """
    if (groups := kernel.multiplied.groups_along("n")) == 1:
        return kernel.columns, 0 * kernel.columns
    tiles = kernel.multiplied.n / groups / (kernel.config.bn * kernel.config.cluster_n)
    equal, uneven = ceil(tiles), maximum(1.0, tiles + 0.5)
    return groups * (equal + uneven) / 2, (uneven - equal) / (uneven + equal) * (tiles * OVER_AVERAGE <= 1)


def _of_kernel(kernel: Resolved, device: Device) -> dict[str, Any]:
    """Returns the features that all kernels of a problem have in common."""
    p = kernel.multiplied
    return _of_problem(
        kernel.asked, kernel.problem, p, kernel.stored, kernel.way, kernel.staging, kernel.prepared, device
    )


@functools.lru_cache(maxsize=64)
def _of_problem(
    asked: Problem,
    problem: Problem,
    multiplied: Problem,
    stored: Problem,
    way: Way,
    staged: staging.Staging,
    prepared: tuple[Prepared, ...],
    device: Device,
) -> dict[str, Any]:
    """Returns the features that all kernels of a problem have in common, told what of a kernel they depend on."""

    def off(i: int, rows: int) -> bool:
        operands = ((of, (of.a, *of.bs)[i]) for of in summands(multiplied))
        return not all(matrices_of(of, operand, rows).on_lines for of, operand in operands)

    result_row = stored.n * multiplied.out_dtype.itemsize
    phased = (view := windows.view_of(asked)) is not None and windows.spread(view)
    whole = asked if phased else multiplied  # and not one phase
    read = asked if phased else problem if view else multiplied  # windows may share more than their views say
    return {
        "ideal": 1e6 * multiplied.flops / device.peak(stored.a.dtype, stored.math),
        "flop_us": flop_us(multiplied, stored, way, device),
        "speed": device.bytes_per_second / FITTED_ON.bytes_per_second,
        "sms": device.sms,
        "a_off": off(0, multiplied.m),
        "packed": multiplied.a.bits / multiplied.bs[0].bits,
        "b_off": off(1, multiplied.n),
        "threads": 0 if result_row % 16 == 0 else 1 if result_row % 4 == 0 else PAIRLESS,
        "wide": multiplied.a.bits == 16 and multiplied.out_dtype.itemsize == 4,
        "fused": _instructions(multiplied, staged) * (FUSED_FLOAT8 if way.each else 1),
        "few_rows": asked.few_rows,
        "streams": asked.streams,
        "reads": (read.bytes - read.result_bytes) * way.terms,
        "result": whole.result_bytes,
        "asked": asked.bytes - problem.bytes + 2 * multiplied.result_bytes,
        "copied": sum(operand.moved for operand in prepared),
        "copies": len(prepared),
    }


def flop_us(multiplied: Problem, stored: Problem, way: Way, device: Device) -> float:
    """Returns the flops a microsecond of one SM, of as many elements of 16 bits as the operands' are long.

    A stage has so many bytes of k, whatever the dtype, which multiply in about the same time.
    """
    peak = device.peak(stored.a.dtype, stored.math) * len(way.pairs)
    return peak / device.sms / 1e6 * max(multiplied.a.bits, multiplied.bs[0].bits) / 16


def _instructions(p: Problem, staged: staging.Staging) -> float:
    """Returns the instructions of an epilogue for an accumulator, loads of operands and stores included."""
    if p.plain:
        return 0
    epilogue, most = p.epilogue, 60
    computed = 9 if staged.called else min(staging.instructions(epilogue), most)
    wide = lambda array: np.dtype(array.dtype).itemsize / 2  # noqa: E731
    loaded = sum(wide(spec) for spec in epilogue.operands if spec.row and spec.col)
    stored = sum(wide(out) for out in epilogue.outputs if not out.axes)
    # Sums along a row are of what registers hold: with two of them 3211264 x 96 x 16 took 214 us, and 207 without.
    along = 2.25 * sum(out.axes == ("col",) for out in epilogue.outputs)
    return max(0.5, 1 + computed - along + 5 * loaded + 3 * max(stored - 1, 0)) / p.products


class Costs(NamedTuple):
    """The parts of a predicted time, in microseconds, and its number of waves.

    Attributes:
      multiply, load, refill: of a k block of a tile: multiplying it, loading it, and waiting for a load.
      mainloop, epilogue: of a tile.
      waves: of tiles, the last one as a part.
      exchange: of accumulators through distributed shared memory, of all waves.
      compute, memory, l2: of all tiles, and what the bytes take beside that.
      sum: of adding up splits.
      whole: one call, and all that is launched for it.
    """

    multiply: Any
    load: Any
    refill: Any
    mainloop: Any
    epilogue: Any
    waves: Any
    exchange: Any
    compute: Any
    memory: Any
    l2: Any
    sum: Any
    whole: Any


def time_us(f: Features) -> Any:
    """Returns the predicted microseconds of one call."""
    return costs(f).whole


def constants_of(f: Features) -> Constants:
    """Returns the constants of kernels of one problem."""
    return STREAMS if f.streams else CONSTANTS


def costs(f: Features) -> Costs:
    """Returns the parts of the predicted time of one call."""
    c = constants_of(f)
    # One k block of one tile: multiplying, loading, or waiting for a load.
    sharing = maximum(1.0, f.resident * (f.items * f.cluster > f.sms))  # blocks that really share an SM
    flops = 2 * f.bm * f.bn * f.bk / f.flop_us * (1 + c.hot * f.ideal / (f.ideal + 800))
    slower = c.coop * (1 - f.pingpong) + c.deep * (f.bk == 128) * (f.steps == 0) + c.narrow * (f.b_short > 0)
    slower = slower + c.multicast * (1 - f.promoted) * f.multicasts
    if some(f.promoted):
        alone = (1 - f.halves) * (1 - f.scaled)
        slower = slower + f.promoted * (c.promoted + c.reread * (f.sum_parts - 1) * alone)
    # Written, and read: b once for each 64 rows of a.
    operands = f.stage_bytes + (f.bm * f.a_reads + f.bm / 64 * f.bn) * f.bk * 2
    own = c.by_column * f.bm * f.bn / 32768 * (f.steps == 0) + c.decoded_by_column * (f.steps > 0)
    of_columns = own * f.by_column
    multiply = sharing * (
        c.multiply * flops * (1 + slower)
        + c.shared * operands / 225e3
        + c.k_block
        + (c.scaled * f.scaled + of_columns) / (1 + 5 * f.by_three)
    )
    if some(f.steps) or some(f.change):
        more = c.unpacked * (f.packed < 0.5) + c.factor * minimum(f.factors, 1) + c.factor_f32 * (f.factors > 1)
        fragments = f.bm * f.bk / 1024 * (f.steps > 0) * (1 + more)
        decode = c.step * f.steps + c.fragment * fragments + c.rescale * f.rescaled
        decode = decode * (1 - (1 - c.sliced) * f.sliced - (1 - c.by_three) * f.by_three - (1 - c.warps) * f.by_warps)
        decode = decode + (f.change > 0) * CHANGE_US + sharing * f.change
        power = 1 + (c.beside - 1) * f.halves
        multiply = multiply * (1 + (decode / multiply) ** power) ** (1 / power)
    a_rows = f.packed * f.bm * (1 + c.off * f.a_off) * (1 - c.saved * (f.cluster_n - 1) / f.cluster_n)
    b_rows = f.b_columns * (1 + c.off * f.b_off) * (1 + c.short * f.b_short)
    loaded = (a_rows + b_rows * (1 - c.saved * (f.cluster_m - 1) / f.cluster_m)) * f.bk * 2
    load = sharing * loaded / (c.load * 1e3)
    refill = (c.latency + c.turn * multiply) / f.stages
    mainloop = f.k_blocks * maximum(maximum(maximum(multiply, load), refill), c.least)

    # A tile, a wave of them, all waves.
    stored = f.bm * f.bn * f.own / 32768
    epilogue = c.element * stored * (1 + c.fused * f.fused + c.threads * f.threads + c.transposed * f.swap)
    epilogue = sharing * (c.start + epilogue)
    hidden = maximum(mainloop, (mainloop + epilogue) / 2)
    waiting = mainloop + epilogue * (1 + (c.twin - 1) * (f.resident == 2))
    wave = f.pingpong * hidden + (1 - f.pingpong) * waiting
    waves = f.items / f.in_flight
    whole_waves = minimum(ceil(waves), (ceil(waves * (1 - f.spread)) + ceil(waves * (1 + f.spread))) / 2)
    in_turn = (whole_waves - 1) * wave + mainloop + epilogue
    in_parts = waves * wave + epilogue + c.join + 8 * f.bm * f.bn / (c.joined * 1e3)
    others = (f.cluster_k - 1) / f.cluster_k * 4 * f.bm * f.bn  # bytes
    # Of decoded tiles a low one takes as long as a high one (experiments/decoded-sums-h200.json).
    height = f.bm / 128 * (f.steps == 0) + 2 * (f.steps > 0)
    exchange = c.exchange * (1 + c.height * f.few_rows * (height - 1)) + others / (c.exchanged * 1e3)
    exchange = (f.cluster_k > 1) * ceil(waves) * exchange
    compute = (1 - f.stream) * in_turn + f.stream * in_parts + c.cluster * f.multicasts + exchange

    # Beside that, L2 and memory.
    all_loaded = f.items * f.cluster * f.k_blocks * loaded
    reads, writes = f.reads / c.read, f.splits * f.result / c.write * (1 + c.ragged * f.ragged)
    if c.crowd:  # blocks get uneven shares of the memory
        on_their_way = minimum(f.items, f.in_flight) * f.cluster * f.stages * f.stage_bytes / 1e6
        reads = reads * (1 + c.crowd * minimum(maximum(on_their_way / c.enough - 1, 0.0), 1.0))
    writes = writes * (1 + (WIDE - 1) * f.wide * (f.splits == 1))
    streamed = (waves - maximum(waves // 1 - 1, 0.0)) / waves  # the part of the tiles
    memory = (reads + writes + f.stream * c.apart * streamed * all_loaded / 4.3) / (1e6 * f.speed)
    l2 = all_loaded / (c.l2 * 1e3) + f.partial / f.sms / PARTS_PER_US
    us = (compute**c.power + memory**c.power + l2**c.power) ** (1 / c.power)
    us = c.launch + us * (1 + c.few_rows * f.few_rows) + maximum(0.0, f.asked_for - 1000) / REQUESTS_PER_US
    added = (f.splits > 1) * (c.sum + (f.splits * f.result + f.asked) / (c.summed * 1e6 * f.speed))
    copied = f.copied / (COPIED_BYTES_PER_US * f.speed) + f.copies  # each in a launch of its own
    whole = us + added + copied
    return Costs(multiply, load, refill, mainloop, epilogue, waves, exchange, compute, memory, l2, added, whole)
