"""The cost model: the predicted time of a resolved kernel on a device. It reads fields, and computes no geometry.

Dense products have a model of their own (dense_cost.py), which convolutions take longer than (windows_cost.py), and
which those of groups are told by where operands are swapped; here are others of groups, and symmetric ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cutjax.kernels.columns import ceil, floats, hypot, log2, maximum, minimum, where
from cutjax.kernels.device import Device
from cutjax.kernels.sm90 import dense_cost, residual, windows, windows_cost
from cutjax.kernels.sm90.constants import CONSTANTS
from cutjax.kernels.sm90.operands import row_bytes
from cutjax.kernels.sm90.resolved import Resolved
from cutjax.kernels.sums import summands

# Of several products of one a in groups of k, beside one; and what tiles of 64 rows take less of sums so deep or deeper
# (benchmarks/results/experiments/sums-h200.json).
SEVERAL, SHORT_OF_SUMS, DEEP_SUM = 0.94, 0.1, 2048
READ_BYTES_PER_US, WRITTEN_BYTES_PER_US = 5.0e6, 3.8e6  # reads partly of L2
# Not fitted yet: of an SM, through distributed shared memory; of XLA, which adds up what splits leave.
SHARED_BYTES_PER_US, ADDED_BYTES_PER_US = 1e6, 3.5e6


@dataclasses.dataclass(frozen=True)
class _Fit:
    """The fitted numbers of the cost model: one set for each way to divide a problem in groups, and for symmetric ones.

    Attributes:
      load: bytes a nanosecond that enter one SM.
      shared: how much of what a cluster multicasts is saved.
      blend: the exponent with which loading and multiplying add up: infinite where the slower hides the other.
      coop, narrow: what a cooperative schedule, and column chunks narrower than a swizzle, add to the cycles of wgmma.
      cluster: microseconds that a cluster costs.
      latency: of a load under load, in microseconds.
      twins, short: what two blocks on an SM, and tiles of 64 rows, add to the time of memory.
      last: how much of a tile the last one of a group takes more than its share, where rows have groups.
      tall: what each doubling of a tile's rows adds, where rows have groups.
      scale: of the whole.
      rows: whether loads count as rows of 128 bytes: shorter ones as whole ones, those off the lines of memory as two.
      tile: microseconds that storing 128 x 256 accumulators as they are takes.
      halves: the part of a last tile's epilogue that is left where two warpgroups share it.
      paired: microseconds of a k block that a pair of tiles costs.
      behind, awaited: how much less of an epilogue is hidden beside two staging buffers than beside more, and how much
        less still where it loads operands.
    """

    load: float
    shared: float
    blend: float
    coop: float
    narrow: float
    cluster: float
    latency: float
    twins: float = 0
    short: float = 0
    last: float = 0.5
    tall: float = 0
    scale: float = 1
    rows: bool = False
    tile: float = 2
    halves: float = 1
    paired: float = 0
    behind: float = 0
    awaited: float = 0


_FITS = {
    # "m" to 87 products of experts, in step: benchmarks/results/sweeps, grouped and experts, and the salt s50g5 of
    # experiments/experts-in-step-h200.json.
    "m": _Fit(
        *(98, 0, 2.02, 0.094, 0.614, 0, 1.96, 0, -0.15),
        last=0.47,
        tall=0.029,
        scale=0.796,
        paired=0.0625,
        behind=0.22,
        awaited=0.12,
    ),
    "k": _Fit(74, 0, 1.33, 0.2, 0.223, 1.6, 2, 0.04, -0.02, scale=0.67),
    # On an H200, 50 problems of 20 to 30 configs each: picks are 1% slower than the fastest, give or take the order.
    "symmetric": _Fit(95, 0.7, math.inf, 0.02, 0, 1, 1.8, rows=True, tile=4.5, halves=0.7),
}


def predict(kernel: Resolved, device: Device) -> Any:
    """Returns the predicted microseconds of one call, or a column of those of many kernels' calls.

    Where there are groups, their sizes are taken to be uneven.

    The SMs walk the tiles in waves; a wave costs its mainloop and what of its epilogue is not hidden behind another.
    Beside that runs the memory, and the slower of the two decides. The constants were fitted to sweeps of the shipped
    configs (benchmarks/results/sweeps, see docs/kernel-selection.md), so they mean what is written here only roughly:
    what they are good for is ranking, and tests/kernels/test_select.py holds them to that.
    """
    c, p = kernel.config, kernel.multiplied
    if not (p.groups or p.symmetric) or p.divided == "n":
        us = dense_cost.time_us(dense_cost.features(kernel, device))
        if windows.view_of(kernel.asked) is None:
            return us
        us *= windows_cost.over(kernel)
        if kernel.phases is not None:
            return windows_cost.of_phases(kernel, us, device)
        return maximum(us, windows_cost.reread_us(kernel, device))
    fit, sms = _FITS["symmetric" if p.symmetric else p.divided], device.sms
    resident, rows, tiles = kernel.blocks_per_sm, kernel.rows, kernel.columns
    items, k = 1.0 * (kernel.tiles if p.symmetric else rows * tiles * p.batch_size), float(p.k)
    if p.divided == "m":  # a group's last tile is half full
        groups = p.groups_along("m")
        average, height = p.m / groups, c.bm * c.cluster_m
        rows = groups * maximum(1.0, average / height + fit.last)
        items = rows * tiles * p.batch_size
    elif p.divided == "k":
        groups = p.groups_along("k")
        items, k = items * groups, p.k / groups + c.depth(p) / 2
    items = items * c.splits
    in_flight = maximum(1, sms * resident // c.cluster)
    waves = ceil(items / in_flight)
    sharing = minimum(resident, ceil(items * c.cluster / sms))  # blocks that really share an SM

    k_blocks = ceil(ceil(k / c.depth(p)) * len(kernel.way.pairs) / c.parts)
    tile_bytes = kernel.stage_bytes
    columns = c.bn * p.products
    read_bytes = (c.bm + c.bm // 64 * columns) * c.bk * 2  # wgmma reads b once for each 64 rows of a
    cycles_share = 0.97 + 0.2 * 16 * (tile_bytes + read_bytes) / (c.bm * columns * c.bk)
    cycles_share = cycles_share + fit.coop * c.coop
    cycles_share = cycles_share + 0.04 * (c.bk == 128)
    # A warpgroup by itself does not multiply while it adds up (experiments/fp8-scaled-h200.json: 1.4 times as long).
    cycles_share = cycles_share + CONSTANTS.promoted * kernel.way.each * (c.coop & (c.consumers == 1))
    narrow = (c.bn % 64 != 0) & (p.bs[0].contiguous == "mn")  # narrower swizzle, so more bank conflicts
    cycles_share = cycles_share + fit.narrow * narrow
    flop_us = dense_cost.flop_us(p, kernel.stored, kernel.way, device)
    multiply = sharing * cycles_share * 2 * c.bm * columns * c.bk / flop_us
    a_rows, b_rows = _short_rows(kernel) if fit.rows else (1, 1)
    saved = a_rows * c.bm * (c.cluster_n - 1) / c.cluster_n + b_rows * columns * (c.cluster_m - 1) / c.cluster_m
    loaded = (a_rows * c.bm + b_rows * columns) * c.bk * 2
    load = sharing * (loaded - fit.shared * saved * c.bk * 2) / (fit.load * 1e3)
    both = maximum(multiply, load)
    if fit.blend != math.inf:
        both = (multiply**fit.blend + load**fit.blend) ** (1 / fit.blend)
    refill = (fit.latency + multiply) / c.stages  # a stage's load, and its turn to be read
    mainloop = k_blocks * (maximum(both, refill) + fit.paired * (c.cluster > c.cluster_k))

    tile_us = fit.tile + (0.0 if p.plain or (p.divided == "k" and p.epilogue.identities) else 4.0)
    epilogue = sharing * (0.22 + tile_us * c.bm * columns * c.epilogue_columns / c.bn / 32768)
    behind = fit.behind * (kernel.buffers == 2)
    if kernel.staging.operands:
        behind = (fit.behind + fit.awaited) * ((kernel.buffers == 2) | (c.bn % 64 != 0))  # or buffers are half as wide
    hidden = (0.83 - behind) * epilogue
    waiting = mainloop + epilogue - where(resident == 2, hidden, 0)
    wave = where(c.coop, waiting, maximum(mainloop + epilogue - hidden, (mainloop + epilogue) / 2))
    last = epilogue * where(c.coop & (c.consumers == 2), fit.halves, 1)
    compute = (waves - 1) * wave + mainloop + last + fit.cluster * (c.cluster > c.cluster_k)
    exchange = 2 + (c.cluster_k - 1) / c.cluster_k * 4 * c.bm * columns / SHARED_BYTES_PER_US
    compute = compute + (c.cluster_k > 1) * (waves * exchange)
    if p.divided == "m":
        compute = compute * (1 + fit.tall * log2(c.bm * c.cluster_m / 64))

    ragged = where(c.bn * p.out_dtype.itemsize % 128 != 0, 1.1, 1.0)  # stores of less than a cache line
    speed = device.bytes_per_second / dense_cost.FITTED_ON.bytes_per_second
    reads = (p.bytes - p.result_bytes) * kernel.way.terms / (READ_BYTES_PER_US * speed)
    writes = ragged * c.splits * p.result_bytes / (WRITTEN_BYTES_PER_US * speed)
    twins = fit.twins if p.groups else -0.04 * (p.k <= 64)
    memory = (reads + writes) * (1 + 0.11 * c.bm * c.bn / 32768 + twins * (resident == 2) + fit.short * (c.bm == 64))
    time_us = fit.scale * hypot(compute**3, memory**3) ** (1 / 3) + 1.2  # a smooth maximum, and the launch
    time_us = time_us * (SEVERAL if p.divided == "k" and p.products > 1 else 1)
    if p.divided == "m" and len(summands(p)) > 1:
        time_us = time_us * (1 - SHORT_OF_SUMS * min(1.0, p.k / DEEP_SUM) * (c.bm == 64))
    copied = sum(operand.moved for operand in kernel.prepared)  # in launches of their own
    time_us = time_us + (copied / (WRITTEN_BYTES_PER_US * speed) + 2 * len(kernel.prepared))
    outside = kernel.asked.bytes - kernel.problem.bytes + p.result_bytes  # what XLA moves, beside the parts
    added = 3 + (c.splits * p.result_bytes + outside) / (ADDED_BYTES_PER_US * speed)
    return time_us + (c.splits > 1) * added


def times(kernel: Resolved, device: Device) -> tuple[Any, Any, Any]:
    """Returns the predicted microseconds of one call, or a column of them, and what else kernels are ranked by.

    That is their corrected times, and what their bytes take through L2 alone; 0 where they are not ranked by it.
    """
    if not residual.serves(kernel, device):
        return (us := predict(kernel, device)), us, 0 * us
    features = dense_cost.Features._make(map(floats, dense_cost.features(kernel, device)))  # converted once, for all
    costs = dense_cost.costs(features)
    return costs.whole, costs.whole * residual.factor(residual.product(kernel), features, costs), costs.l2


Factors = Callable[[np.ndarray], Any]  # of some rows


def of_columns(
    kernels: Sequence[Resolved], fixed: Sequence[dense_cost.Fixed | None], device: Device
) -> tuple[np.ndarray, np.ndarray, Factors]:
    """Returns the `times` of the kernels of several records, of one problem, of all: by factors, where corrected.

    Args:
      kernels: records of many kernels each.
      fixed: what is known of each beside its problem; None where it is no dense product.
      device: what they run on.

    Returns:
      Their times, what their bytes take through L2, and what makes the factors of some, by which they are ranked.
    """
    dense = [x for x in fixed if x]
    if len(dense) < len(kernels):
        us = np.concatenate([predict(kernel, device) for kernel in kernels])
        return us, 0 * us, np.ones_like
    features = dense_cost.joined(kernels, dense, device)
    costs = dense_cost.costs(features)
    if not residual.serves(kernels[0], device):
        return costs.whole, 0 * costs.whole, np.ones_like
    counts = [x.columns.shape[1] for x in dense]
    product = residual.Product(*dense_cost.spread([*map(residual.product, kernels)], counts))
    values = residual.values(product, features, costs)
    return costs.whole, costs.l2, lambda rows: residual.factors(values[:, rows])


def is_dense(kernel: Resolved) -> bool:
    """True if all of a kernel's time is that of the model of dense products."""
    p = kernel.multiplied
    return not (p.groups or p.symmetric) and windows.view_of(kernel.asked) is None


def _short_rows(kernel: Resolved) -> tuple[int, Any]:
    """Returns the rows of 128 bytes that the loads of a and of b take for each that they bring."""
    problem = kernel.multiplied
    lines = 1 if all(row_bytes(of.a, of.m, of.k) % 128 == 0 for of in summands(problem)) else 2
    chunk = kernel.config.chunk(problem.bs[0], problem.products)
    return lines, lines * 128 // problem.bs[0].bytes(chunk)
