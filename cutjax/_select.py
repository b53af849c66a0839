"""Which kernel serves a problem: candidates, the reasons that rule one out, and a cost model that ranks the rest.

Everything here is arithmetic on frozen dataclasses: no GPU, no compiler, no JAX tracing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from cutjax import _sm90
from cutjax._config import Config
from cutjax._problem import Problem

# One H200, measured (docs/results.md): what the model's times and the roofline are relative to.
SMS = 132
PEAK_FLOPS = 830e12
COPY_BYTES_PER_SECOND = 4.3e12

# (schedule, bm) -> the bn shipped. Steps of 32 fill waves; below 64 columns only small problems want a tile.
TILES = {
    ("coop", 64): (16, 32, 64, 128, 256),
    ("coop", 128): (64, 128, 160, 192, 224, 256),
    ("coop", 256): (64, 96, 128, 160, 192),
    ("pingpong", 64): (32, 64, 96, 128, 160, 192, 256),
    ("pingpong", 128): (32, 64, 96, 128, 160, 192),
}
CLUSTERS = ((1, 1), (2, 1), (1, 2))


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
    def kernel(self) -> str:
        """Name of what runs: the kernel's, or "XLA"."""
        return "XLA" if self.config is None else self.config.name(self.problem)


def supports(config: Config, problem: Problem) -> str | None:
    """Says why ``config`` cannot serve ``problem``: every reason in one string, or None when it can."""
    return "; ".join(_sm90.problem_reasons(problem) + _sm90.config_reasons(config, problem)) or None


def candidates(problem: Problem) -> tuple[Config, ...]:
    """All shipped configs that serve ``problem``, the predicted fastest first; empty when no kernel does."""
    if _sm90.problem_reasons(problem):
        return ()
    return tuple(sorted(_candidates(problem), key=lambda config: predict(config, problem)))


def _candidates(problem: Problem) -> Iterator[Config]:
    for (schedule, bm), widths in TILES.items():
        for bn in widths:
            for cluster_m, cluster_n in CLUSTERS:
                config = Config(bm, bn, 64, 2, cluster_m, cluster_n, schedule, 1)
                stages = min(_sm90.max_stages(config, problem), 8)
                if problem.k <= config.bk:
                    stages = min(stages, 3)  # one k block a tile: shared memory serves the result better than the loads
                raster = _raster(config, problem)
                yield dataclasses.replace(config, stages=stages, raster=raster)


def _grid(config: Config, problem: Problem) -> tuple[int, int]:
    """Work items along m and n: cluster tiles."""
    return (
        -(-problem.m // (config.bm * config.cluster_m)),
        -(-problem.n // (config.bn * config.cluster_n)),
    )


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


def predict(config: Config, problem: Problem) -> float:
    """Predicted time in microseconds of one launch on an H200."""
    rows, columns = _grid(config, problem)
    items = rows * columns * problem.batch_size
    waves = -(-items // (SMS // config.cluster))
    k_blocks = -(-problem.k // config.bk)
    flops = 2 * config.bm * config.bn * config.bk
    mainloop = k_blocks * flops / (PEAK_FLOPS / SMS) / _efficiency(config)
    epilogue = 1e-6 * config.bm * config.bn / 32768
    hidden = 0.7 if config.schedule == "pingpong" else 0.0
    compute = waves * (mainloop + (1 - hidden) * epilogue) + hidden * epilogue
    memory = problem.bytes / COPY_BYTES_PER_SECOND
    return (max(compute, memory) + 2.5e-6) * 1e6


def _efficiency(config: Config) -> float:
    """Share of the peak rate a mainloop reaches: bytes through shared memory and L2 for each FLOP slow it down."""
    bytes_per_flop = (1 / (config.bm * config.cluster_m) + 1 / (config.bn * config.cluster_n)) * 128
    return 1 / (0.95 + 0.07 * bytes_per_flop)


def choose(problem: Problem, config: Config | None = None, platform: str = "cuda") -> Choice:
    """Picks what runs for a problem: a pinned config if it serves, else the cost model's first, else XLA with reasons."""
    if platform != "cuda":
        return Choice(problem, None, (f"platform {platform}: the kernels are for cuda",))
    return _choose(problem, config)


@functools.lru_cache(maxsize=4096)
def _choose(problem: Problem, config: Config | None) -> Choice:
    reasons = tuple(_sm90.problem_reasons(problem))
    if config is not None:
        reasons += tuple(_sm90.config_reasons(config, problem))
    if reasons:
        return Choice(problem, None, reasons)
    why = "pinned by config="
    if config is None:
        served = candidates(problem)
        config = served[0]
        why = f"predicted fastest of {len(served)} configs"
    time_us = predict(config, problem)
    floor_us = 1e6 * max(problem.flops / PEAK_FLOPS, problem.bytes / COPY_BYTES_PER_SECOND)
    return Choice(problem, config, (why,), time_us, floor_us / time_us)
