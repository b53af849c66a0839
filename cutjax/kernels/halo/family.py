"""The halo family: convolutions of few channels, whose images are loaded once for all taps, on sm_90a."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cutjax.kernels.family import Kernel
from cutjax.kernels.halo import kernel, weights_kernel
from cutjax.kernels.halo.config import ALONG, Config
from cutjax.kernels.halo.geometry import Geometry
from cutjax.kernels.halo.operands import taken
from cutjax.kernels.prices import Prices, one_by_one
from cutjax.kernels.problem import Problem

__all__ = ["Config", "competes", "configs", "name", "prices", "reasons", "resolve", "stores_in_order"]

name = "halo"
reasons = kernel.reasons

COLUMNS = (16, 32, 48, 64, 96, 128)
STAGES = (8, 6, 4, 3, 2)
RUNS = 6  # of a warpgroup, at most: longer ones read fewer pixels twice


def competes(problem: Problem) -> bool:
    """Returns True: others load images tap by tap."""
    return True


def stores_in_order(problem: Problem) -> bool:
    """True of what it does not serve: results of convolutions are row-major."""
    return problem.arch != kernel.ARCH or bool(reasons(problem))


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel, or every reason why the config cannot serve the problem."""
    if found := reasons(problem):
        return found
    return (kernel if problem.a.contiguous == "k" else weights_kernel).resolve(problem, config)


def prices(problem: Problem) -> Prices:
    """Returns the predicted times of the shipped configs that serve a problem."""
    return one_by_one(problem, configs(problem), resolve)


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the shipped tiles, each with as many stages as fit."""
    if reasons(problem):
        return
    if problem.a.contiguous != "k":
        yield from weights_kernel.configs(problem)
        return
    view = taken(problem)
    axes, width = len(view.window), -(-(problem.n // view.groups) // 16) * 16
    for bn in sorted({min(width, bn) for bn in COLUMNS}):
        for consumers in (2, 3, 4):
            for how in ALONG[axes]:
                if isinstance(resolve(problem, Config(bn, consumers, STAGES[-1], how)), tuple):
                    continue  # nor do more stages fit
                deepest = (Config(bn, consumers, stages, how) for stages in STAGES)
                fitting = (config for config in deepest if not isinstance(resolve(problem, config), tuple))
                if config := next(fitting, None):
                    yield from _runs(problem, config)


def _runs(problem: Problem, config: Config) -> Iterator[Config]:
    """Yields the lengths of runs by which all warpgroups have about as many steps."""
    of = Geometry(problem, dataclasses.replace(config, steps=1 << 20))
    most = -(-of.view.grid[0] // of.step)
    workers = max(1, problem.device.sms // of.columns) * config.consumers
    pieces = {max(1, count * workers // of.runs) for count in range(1, RUNS + 1)}
    lengths = {min(most, max(of.stacked, -(-most // count))) for count in pieces}
    for steps in sorted(lengths):
        yield dataclasses.replace(config, steps=steps)
