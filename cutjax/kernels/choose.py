"""Which kernel serves a problem: candidates, the reasons that rule one out, and a cost model that ranks the rest.

Everything here is arithmetic on frozen dataclasses: no GPU, no compiler, no JAX tracing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from cutjax import dot_precision
from cutjax.dot_precision import Canonical
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90 import memory as sm90_memory
from cutjax.kernels.sm90.config import Config
from cutjax.runtime.launch import Call

# One H200, measured (docs/results.md): what the model's times and the roofline are relative to.
SMS = 132
PEAK_FLOPS = 830e12
COPY_BYTES_PER_SECOND = 4.3e12

# (schedule, bm) -> the bn shipped. Steps of 32 fill waves; below 64 columns only small problems want a tile.
TILES = {  # where two are predicted equal, the first is taken
    ("pingpong", 64): (32, 64, 96, 128, 160, 192, 256),
    ("pingpong", 128): (32, 64, 96, 128, 160, 192),
    ("coop", 64): (16, 32, 64, 128, 256),
    ("coop", 128): (64, 128, 160, 192, 224, 256),
    ("coop", 256): (64, 96, 128, 160, 192),
}
CLUSTERS = ((1, 1), (2, 1), (1, 2))
# The same with stages of 128: where k is 128, one stage is the whole contraction. Elsewhere 64 won by 2 to 10%.
DEEP_TILES = {("pingpong", 64): (128, 256), ("coop", 128): (256,)}


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs for a problem, and why.

    Attributes:
      problem: what was asked.
      config: the kernel's config; None when XLA runs.
      reasons: why XLA runs, or how the config came to be.
      time_us: predicted time in microseconds; None when XLA runs.
      roofline: predicted share of the roofline, 0 to 1; None when XLA runs.
    """

    problem: Problem
    config: Config | None
    reasons: tuple[str, ...]
    time_us: float | None = None
    roofline: float | None = None

    @property
    def served(self) -> bool:
        """True if a kernel runs."""
        return self.config is not None

    def call(self) -> Call:
        """Compiles the kernel; returns what is launched."""
        assert self.config is not None
        return sm90.launch(self.problem, self.config)

    @property
    def kernel(self) -> str:
        """Name of what runs: the kernel's, or "XLA"."""
        return "XLA" if self.config is None else self.config.name(self.problem)


def supports(config: Config, problem: Problem) -> str | None:
    """Says why ``config`` cannot serve ``problem``: every reason in one string, or None when it can."""
    return "; ".join(_reasons(problem, config)) or None


def _reasons(problem: Problem, config: Config) -> list[str]:
    """Every reason why a config cannot serve a problem."""
    found = sm90.problem_reasons(problem) + sm90.config_reasons(config, problem)
    return found or sm90.launch_reasons(problem, config)


def candidates(problem: Problem) -> tuple[Config, ...]:
    """All shipped configs that serve ``problem``, the predicted fastest first; empty when no kernel does."""
    if sm90.problem_reasons(problem):
        return ()
    serving = [config for config in _candidates(problem) if not sm90.config_reasons(config, problem)]
    if serving and sm90.launch_reasons(problem, serving[0]):  # what one launch is told is as much for every config
        return ()
    return tuple(sorted(serving, key=lambda config: predict(config, problem)))


def _candidates(problem: Problem) -> Iterator[Config]:
    for (schedule, bm), widths in TILES.items():
        for bn in widths:
            for cluster_m, cluster_n in CLUSTERS:
                config = Config(bm, bn, 64, 2, cluster_m, cluster_n, schedule, 1)
                yield dataclasses.replace(config, stages=_stages(config, problem), raster=_raster(config, problem))
        for bn in DEEP_TILES.get((schedule, bm), ()):
            config = Config(bm, bn, 128, 2, 1, 1, schedule, 1)
            yield dataclasses.replace(config, stages=_stages(config, problem), raster=_raster(config, problem))


def _stages(config: Config, problem: Problem) -> int:
    """As deep a pipeline as fits, up to 8; shallower where k is so short that the result wants the memory more."""
    deepest = max(2, min(sm90.max_stages(config, problem), 8))  # where 2 do not fit, config_reasons says so
    if problem.k <= config.bk:
        two_blocks = sm90.blocks_per_sm(dataclasses.replace(config, stages=2), problem) == 2
        return min(deepest, 2 if two_blocks else 3)
    if problem.k <= 2 * config.bk:
        return min(deepest, max(4, sm90.max_stages(config, problem, whole_result=True)))
    if problem.k <= 32 * config.bk and sm90_memory.tile_operands(sm90_memory.of(problem)):
        # They can all be on their way before the epilogue begins: worth a stage where k is short.
        whole = sm90.max_stages(config, problem, whole_result=True)
        return whole if 2 <= whole == deepest - 1 else deepest
    return deepest


def _grid(config: Config, problem: Problem) -> tuple[int, int]:
    """Work items along m and n: cluster tiles. Where rows have groups, those along m of a group of average size."""
    m = -(-problem.m // problem.groups) if problem.ragged == "m" else problem.m
    return -(-m // (config.bm * config.cluster_m)), -(-problem.n // (config.bn * config.cluster_n))


def _raster(config: Config, problem: Problem) -> int:
    """The width of a band of tiles for which those in flight read the fewest bytes through L2.

    With C clusters in flight, a band of w rows spans C / w columns and reads w * height + C / w * width: least at
    w = sqrt(C * width / height). Near there, the width that leaves the least ragged last band is taken.
    """
    rows, _ = _grid(config, problem)
    clusters = SMS / config.cluster
    best = math.sqrt(clusters * (config.bn * config.cluster_n) / (config.bm * config.cluster_m))
    near = range(max(1, round(best * 0.7)), max(1, round(best * 1.4)) + 1)
    return min(near, key=lambda width: (-(-rows // width) * width - rows, abs(width - best)))


@dataclasses.dataclass(frozen=True)
class _Fit:
    """What of the cost model was fitted, for each way in which a problem is divided in groups.

    Attributes:
      load: bytes a nanosecond that enter one SM.
      shared: how much of what a cluster multicasts is saved.
      blend: the exponent with which loading and multiplying add up: infinite where the slower hides the other.
      coop, narrow: what a cooperative schedule, and column chunks narrower than a swizzle, add to the cycles of wgmma.
      cluster: microseconds that a cluster costs.
      latency: of a load under load, in microseconds.
      twins, short: what two blocks on an SM, and tiles of 64 rows, add to the time of memory.
      last: how much of a tile the last one of a group takes more than its share, where rows have groups.
      idle: how much of the time that skipped blocks of 64 rows would take is lost all the same.
      tall: what each doubling of a tile's rows adds, where groups have few: fewer tiles then read the same weights.
      scale: of the whole.
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
    idle: float = 0
    tall: float = 0
    scale: float = 1


_FITS = {
    "": _Fit(85, 0, math.inf, 0.053, 0.032, 4, 1.2),
    "m": _Fit(110, 0, 2, 0.039, 0.243, 1.9, 1.8, 0.12, 0.02, last=0.45, idle=0.34, tall=0.275, scale=0.86),
    "k": _Fit(74, 0, 1.33, 0.2, 0.223, 1.6, 2, 0.04, -0.02, scale=0.67),
}


def predict(config: Config, problem: Problem) -> float:
    """Predicted time in microseconds of one launch on an H200, for groups of uneven sizes where there are groups.

    The SMs walk the tiles in waves; a wave costs its mainloop and what of its epilogue is not hidden behind another.
    Beside that runs the memory, and the slower of the two decides. The constants were fitted to sweeps of the shipped
    configs (benchmarks/results/sweeps, see docs/kernel-selection.md), so they mean what is written here only roughly:
    what they are good for is ranking, and tests/test_select.py holds them to that.
    """
    c, p = config, problem
    fit = _FITS[p.ragged]
    resident = sm90.blocks_per_sm(c, p)
    rows, tiles = _grid(c, p)
    items, k, filled = float(rows * tiles * p.batch_size), float(p.k), 1.0
    if p.ragged == "m":  # a group's last tile is half full; of it, blocks of 64 rows without any are skipped
        average, height = p.m / p.groups, c.bm * c.cluster_m
        rows = p.groups * max(1.0, average / height + fit.last)
        filled = p.groups * max(1.0, average / 64 + 0.5) * 64 / (rows * height)
        filled += (1 - filled) * fit.idle
        items = rows * tiles * p.batch_size
    elif p.ragged == "k":
        items, k = items * p.groups, p.k / p.groups + c.bk / 2
    in_flight = SMS * resident // c.cluster
    waves = math.ceil(items / in_flight)
    sharing = min(resident, math.ceil(items * c.cluster / SMS))  # blocks that really share an SM

    k_blocks = math.ceil(k / c.bk)
    tile_bytes = sm90.stage_bytes(c, p)
    columns = c.bn * p.products
    read_bytes = (c.bm + c.bm // 64 * columns) * c.bk * 2  # wgmma reads b once for each 64 rows of a
    cycles_share = 0.97 + 0.2 * 16 * (tile_bytes + read_bytes) / (c.bm * columns * c.bk)
    cycles_share += fit.coop * (c.schedule == "coop")
    cycles_share += 0.04 * (c.bk == 128)
    cycles_share += fit.narrow * (p.layout[1] == "n" and c.bn % 64 != 0)  # narrower swizzle, so more bank conflicts
    multiply = sharing * cycles_share * 2 * c.bm * columns * c.bk / (PEAK_FLOPS / SMS) * 1e6 * filled
    saved = c.bm * (c.cluster_n - 1) / c.cluster_n + columns * (c.cluster_m - 1) / c.cluster_m
    load = sharing * (tile_bytes - fit.shared * saved * c.bk * 2) / (fit.load * 1e3)
    both = max(multiply, load)
    if fit.blend != math.inf:
        both = (multiply**fit.blend + load**fit.blend) ** (1 / fit.blend)
    refill = (fit.latency + multiply) / c.stages  # a stage's load, and its turn to be read
    mainloop = k_blocks * max(both, refill)

    tile_us = 6.0 if p.epilogue else 2.0  # of 128 x 256 accumulators, stored as they are or not
    epilogue = sharing * (0.22 + tile_us * c.bm * columns / 32768)
    hidden = 0.83 * epilogue
    if c.schedule == "pingpong":
        wave = max(mainloop + epilogue - hidden, (mainloop + epilogue) / 2)
    else:
        wave = mainloop + epilogue - (hidden if resident == 2 else 0)
    compute = (waves - 1) * wave + mainloop + epilogue + fit.cluster * (c.cluster > 1)
    if p.ragged == "m":
        compute *= 1 + fit.tall * math.log2(c.bm * c.cluster_m / 64) / (1 + p.m / p.groups / 512)

    ragged = 1.1 if c.bn * p.out_dtype.itemsize % 128 else 1.0  # stores of less than a cache line
    reads, writes = (p.bytes - p.result_bytes) / 5.0e6, ragged * p.result_bytes / 3.8e6  # at 5.0 (partly L2), 3.8 TB/s
    twins = fit.twins if p.ragged else -0.04 * (p.k <= 64)
    memory = (reads + writes) * (1 + 0.11 * c.bm * c.bn / 32768 + twins * (resident == 2) + fit.short * (c.bm == 64))
    return fit.scale * math.hypot(compute**3, memory**3) ** (1 / 3) + 1.2  # a smooth maximum, and the launch


def choose(
    problem: Problem, config: Config | None = None, platform: str = "cuda", precision: Canonical = None
) -> Choice:
    """Picks what runs: a pinned config if it serves, else the cost model's first, else XLA with the reasons."""
    if platform != "cuda":
        return Choice(problem, None, (f"platform {platform}: the kernels are for cuda",))
    return _choose(problem, config, precision)


@functools.lru_cache(maxsize=4096)
def _choose(problem: Problem, config: Config | None, precision: Canonical) -> Choice:
    if refused := dot_precision.reasons(precision, problem.a_dtype):
        return Choice(problem, None, (*sm90.problem_reasons(problem), *refused))
    reasons, why = [], "pinned by config="
    if config is None and not (reasons := sm90.problem_reasons(problem)):
        served = candidates(problem)
        why = f"predicted fastest of {len(served)} configs"
        config = served[0] if served else next(_candidates(problem))  # where none serves, the smallest says why
    if config is not None:
        reasons = _reasons(problem, config)
    if config is None or reasons:
        return Choice(problem, None, tuple(reasons))
    time_us = predict(config, problem)
    floor_us = 1e6 * max(problem.flops / PEAK_FLOPS, problem.bytes / COPY_BYTES_PER_SECOND)
    return Choice(problem, config, (why,), time_us, min(1.0, floor_us / time_us))
