"""The kernel of a problem, or XLA, and why: the record that every operation's choice returns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from cutjax.runtime.launch import Call


class Kernel(Protocol):
    """A kernel with all that its launch takes."""

    @property
    def name(self) -> str: ...

    def call(self) -> Call: ...


class Timed(Kernel, Protocol):
    """A kernel with a predicted time, in microseconds."""

    @property
    def time_us(self) -> float: ...


P = TypeVar("P", covariant=True)
K = TypeVar("K", bound=Kernel, covariant=True)
T = TypeVar("T", bound=Timed)


@dataclasses.dataclass(frozen=True)
class Choice(Generic[P, K]):
    """The kernel of a problem, or XLA, and why.

    Attributes:
      problem: what was asked; printed in errors, and ``flops`` is 0 where there is nothing to compute.
      reasons: why XLA runs, or how the kernel came to be.
      resolved: the kernel; None where XLA runs.
      time_us: its time in microseconds, predicted or measured, where known.
      roofline: the share of the roofline at that time, 0 to 1, where known.
    """

    problem: P
    reasons: tuple[str, ...]
    resolved: K | None = dataclasses.field(default=None, repr=False)
    time_us: float | None = None
    roofline: float | None = None

    @property
    def served(self) -> bool:
        """True if a kernel runs."""
        return self.resolved is not None

    @property
    def kernel(self) -> str:
        """Name of what runs: the kernel's, or "XLA"."""
        return "XLA" if self.resolved is None else self.resolved.name

    def call(self) -> Call:
        """Returns the compiled kernel and the plan of its launch.

        Raises:
          ValueError: XLA runs.
        """
        if self.resolved is None:
            raise ValueError(f"no kernel for {self.problem}: {'; '.join(self.reasons)}")
        return self.resolved.call()


def fastest(problem: P, each: Iterable[T | tuple[str, ...]], why: str, floor_us: float) -> Choice[P, T]:
    """Returns the choice of the kernel that is predicted to be the fastest, or the reasons against the last config.

    Args:
      problem: what was asked.
      each: the kernel of each config, or every reason why it cannot serve the problem.
      why: how the kernel came to be.
      floor_us: time at the roofline, in microseconds.
    """
    against: tuple[str, ...] = ()
    best: T | None = None
    for one in each:
        if isinstance(one, tuple):
            against = one
        elif best is None or one.time_us < best.time_us:
            best = one
    if best is None:
        return Choice(problem, against)
    if not math.isfinite(best.time_us):  # of a device whose rates nobody has measured
        return Choice(problem, (why,), best)
    return Choice(problem, (why,), best, best.time_us, floor_us / best.time_us)
