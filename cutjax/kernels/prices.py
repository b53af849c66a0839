"""The predicted times of the configs of a family that serve a problem."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Any

import numpy as np

from cutjax.kernels.problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Prices:
    """The predicted times of the shipped configs that serve a problem, in the order in which they are shipped.

    Attributes:
      us: in microseconds.
      near: those that can be the first.
      ranks: makes the times by which some are ranked, beside each other: what was recorded of others like them says
        more of which is the fastest than of the time it takes.
      config: makes the i-th of them.
      rows: makes what tells them apart, of each: that of a config is the same in another problem of the same sizes.
      new: whether each has parts that have not run on a device yet.
    """

    us: np.ndarray
    near: np.ndarray
    ranks: Callable[[np.ndarray], np.ndarray]
    config: Callable[[int], Any]
    rows: Callable[[], Sequence[Hashable]]
    new: np.ndarray

    @functools.cached_property
    def ranked_us(self) -> np.ndarray:
        """The times by which all are ranked."""
        return self.ranks(np.arange(len(self.us)))

    @functools.cached_property
    def near_us(self) -> np.ndarray:
        """The times by which those are that can be the first; others' are infinite."""
        found = np.full(len(self.us), np.inf)
        found[self.near] = self.ranks(self.near)
        return found

    def without(self, rows: Set[Hashable]) -> Prices:
        """Returns those of other configs than these rows say."""
        if not rows:
            return self
        own = self.rows()
        kept = np.array([i for i, row in enumerate(own) if row not in rows], int)
        return Prices(
            self.us[kept],
            np.arange(len(kept)),
            lambda some: self.ranked_us[kept[some]],
            lambda i: self.config(int(kept[i])),
            lambda: [own[i] for i in kept.tolist()],
            self.new[kept],
        )

    def after(self, us: float) -> Prices:
        """Returns those of kernels before which others take so long."""
        return dataclasses.replace(self, us=self.us + us, ranks=lambda rows: self.ranks(rows) + us)


def one_by_one(problem: Problem, configs: Iterable[Any], resolve: Callable[[Problem, Any], Any]) -> Prices:
    """Returns the prices of configs by their kernels, each resolved for itself."""
    resolved = ((config, resolve(problem, config)) for config in configs)
    kernels = [(config, kernel) for config, kernel in resolved if not isinstance(kernel, tuple)]
    served = [config for config, _ in kernels]
    us = np.array([kernel.time_us(problem.device) for _, kernel in kernels], float)
    new = np.array([bool(kernel.unmeasured) for _, kernel in kernels], bool)
    return Prices(us, np.arange(len(us)), us.__getitem__, served.__getitem__, lambda: served, new)
