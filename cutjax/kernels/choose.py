"""The choice of a kernel: the families' configs, the reasons that rule one out, and the ranking of the rest.

Everything here is arithmetic on frozen dataclasses: no GPU, no compiler, no JAX tracing.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

from cutjax import dot_precision
from cutjax.dot_precision import Canonical
from cutjax.kernels import tuned
from cutjax.kernels.family import Family, Kernel
from cutjax.kernels.mma import family as mma
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import family as sm90
from cutjax.kernels.widened import Widened, pass_us
from cutjax.kernels.widened import xla_us as narrow_xla_us
from cutjax.runtime.launch import Call

FAMILIES: tuple[Family, ...] = (sm90, mma)
# How many times as fast as XLA's product a kernel must be predicted to be, to run under "auto". Of 1295 products of
# report6-23 the 5th percentile is 0.99 to 1.00 here and 0.96 at 1 / 1.04; the geometric mean rises by 0.002 to there.
LEAD = 1 / 1.03
# The same of batches, whose model is off by more: of 304 products of attention the 5th percentile is 0.98 with it, 0.95
# with the other, the mean 1.011 and 1.014.
BATCHED_LEAD = 1.0
Config = sm90.Config
AnyConfig = sm90.Config | mma.Config  # what pins a kernel
CONFIGS = tuple(family.Config for family in FAMILIES)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel of a problem, or XLA, and why.

    Attributes:
      problem: what was asked.
      config: the kernel's config; None when XLA runs.
      reasons: why XLA runs, or how the config came to be.
      time_us: predicted time in microseconds, the measured one where the config is tuned; None when XLA runs.
      roofline: share of the roofline at that time, 0 to 1; None when XLA runs.
      resolved: the kernel; None when XLA runs.
      xla_us: predicted time of XLA's own product in microseconds; None where nobody asked, or none is known.
    """

    problem: Problem
    config: Any
    reasons: tuple[str, ...]
    time_us: float | None = None
    roofline: float | None = None
    resolved: Kernel | None = dataclasses.field(default=None, repr=False, compare=False)
    xla_us: float | None = None

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


def reasons(config: Any, problem: Problem) -> tuple[str, ...]:
    """Returns every reason why ``config`` cannot serve ``problem``; empty when it can."""
    found = _resolve(problem, config)
    return found if isinstance(found, tuple) else ()


def supports(config: Any, problem: Problem) -> str | None:
    """Returns the `reasons` of ``config`` and ``problem`` in one string, or None. Deprecated: None said yes."""
    warnings.warn("cutjax.supports is deprecated: cutjax.reasons returns a tuple", DeprecationWarning, stacklevel=2)
    return "; ".join(reasons(config, problem)) or None


def candidates(problem: Problem) -> tuple[Any, ...]:
    """Returns all shipped configs that serve ``problem``, the predicted fastest first; empty when no kernel does."""
    return tuple(dict.fromkeys(kernel.config for kernel, _ in _ranked(problem)))


def _resolve(problem: Problem, config: Any) -> Kernel | tuple[str, ...]:
    family = next((family for family in FAMILIES if isinstance(config, family.Config)), None)
    if family is None:
        known = ", ".join(family.Config.__name__ for family in FAMILIES)
        raise TypeError(f"{config!r} is no config of a kernel; expected one of {known}")
    found = family.resolve(problem, config)
    found = found if isinstance(found, tuple) else found.unlaunchable() or found
    if isinstance(found, tuple) and problem.narrow and not isinstance(wide := _resolve(problem.wide, config), tuple):
        return Widened(problem, wide)
    return found


def _ranked(problem: Problem) -> list[tuple[Kernel, float]]:
    """Returns the kernels that serve a problem, with their predicted times, the fastest first."""
    serving = []
    for family in sorted(FAMILIES, key=lambda family: family.fallback):
        if (serving and family.fallback and not small(problem)) or family.reasons(problem):
            continue
        found = [family.resolve(problem, config) for config in family.configs(problem)]
        kernels = [kernel for kernel in found if not isinstance(kernel, tuple)]
        if kernels and not kernels[0].unlaunchable():  # the first is told least: parts of tiles take more
            serving += [(kernel, kernel.time_us(problem.device)) for kernel in kernels]
    if problem.narrow:
        more = pass_us(problem, problem.device)
        serving += [(Widened(problem, kernel), time_us + more) for kernel, time_us in _ranked(problem.wide)]
    return sorted(serving, key=lambda entry: entry[1])


def small(problem: Problem) -> bool:
    """True where families of smaller tiles compete with those of 64 rows, as was measured in float32."""
    return max(problem.m, problem.n) <= 32 and problem.a_dtype.itemsize > 2


@functools.lru_cache(maxsize=4096)
def fastest(problem: Problem) -> tuple[Kernel, float, int] | None:
    """Returns the kernel predicted fastest, its time and how many serve a problem; None where none does."""
    ranked = _ranked(problem)
    if not ranked:
        return None
    kernel, time_us = next(entry for entry in ranked if not entry[0].unlaunchable())
    return kernel, time_us, len(ranked)


@functools.lru_cache(maxsize=4096)
def in_precision(problem: Problem, precision: Canonical) -> Problem | Choice:
    """Returns the problem with its products computed as a precision says, or the choice of XLA where no kernel does."""
    both = problem.b_dtype == problem.a_dtype
    math = dot_precision.math(precision, problem.a_dtype, problem.accumulator, problem.device.tf32, both)
    if isinstance(math, tuple):
        return Choice(problem, None, (*_problem_reasons(problem), *math))
    return problem if math == problem.math else dataclasses.replace(problem, math=math)


def choose(
    problem: Problem,
    config: Any = None,
    platform: str = "cuda",
    backend: str = "auto",
    lead: float = LEAD,
) -> Choice:
    """Picks what runs: a pinned config if it serves, else a tuned one, else the cost model's first, else XLA.

    Where XLA was measured to be faster than every kernel, or is predicted to be by more than 3%, of batches at all, it
    runs, but for the backend "cuda". With a ``lead`` above 1 it also runs where a kernel is not that many times as
    fast, by either.
    """
    if platform != "cuda":
        return Choice(problem, None, (f"platform {platform}: the kernels are for cuda",))
    entries = tuned.find(problem) if config is None else ()
    lead = max(lead, BATCHED_LEAD) if problem.batch_size > 1 else lead
    return _choose(problem, config, 0.0 if backend == "cuda" else lead, entries)


@functools.lru_cache(maxsize=4096)
def _choose(problem: Problem, config: Any, lead: float, entries: tuple[tuned.Entry, ...]) -> Choice:
    if config is not None:
        kernel = _resolve(problem, config)
        if isinstance(kernel, tuple):
            return Choice(problem, None, kernel)
        return _chosen(problem, kernel, kernel.time_us(problem.device), "pinned by config=")
    for entry in entries:
        if choice := _tuned(problem, entry, lead):
            return choice
    if found := fastest(problem):
        kernel, time_us, count = found
        of_xla = xla_us(problem, kernel)
        if not leads(time_us, of_xla, lead):
            why = f"predicted: XLA {of_xla:.1f} us, the fastest of {count} kernels {time_us:.1f} us"
            return Choice(problem, None, (why, *_of_lead(lead)), xla_us=of_xla)
        return _chosen(problem, kernel, time_us, f"predicted fastest of {count} configs", of_xla)
    return Choice(problem, None, _problem_reasons(problem) or _config_reasons(problem))


def xla_us(problem: Problem, kernel: Kernel) -> float | None:
    """Returns the time that XLA may take, told of the kernel predicted fastest; None where unknown."""
    if problem.narrow and (wide := fastest(problem.wide)):
        return narrow_xla_us(problem, wide[0], problem.device)
    return kernel.xla_us(problem.device)


def _chosen(problem: Problem, kernel: Kernel, time_us: float, why: str, xla_us: float | None = None) -> Choice:
    share = min(1.0, floor_us(problem) / time_us)
    return Choice(problem, kernel.config, (why, *kernel.notes), time_us, share, kernel, xla_us)


def leads(time_us: float, xla_us: float | None, lead: float) -> bool:
    """True if a kernel is so many times as fast as XLA, or nobody knows XLA's time."""
    return xla_us is None or time_us * lead <= xla_us


def floor_us(problem: Problem) -> float:
    """Returns the time at the device's roofline: of the multiplications, or of the bytes."""
    device = problem.device
    multiplied = problem.flops / device.peak(problem.a_dtype, problem.math)
    return 1e6 * max(multiplied, problem.bytes / device.bytes_per_second)


def _of_lead(lead: float) -> tuple[str, ...]:
    """Returns the reason for a lead above 1."""
    return (f"a kernel must be {lead} times as fast: XLA may fuse its product with what is around it",) * (lead > 1)


def _tuned(problem: Problem, entry: tuned.Entry, lead: float) -> Choice | None:
    """Returns what was measured to be fastest; None where that kernel is no more, and where a kernel must run."""
    kernel = None
    if entry.config:
        config = config_of(dict(entry.config))
        kernel = None if config is None else _resolve(problem, config)
        if kernel is None or isinstance(kernel, tuple):
            return None
    if lead and entry.xla_wins:
        return Choice(problem, None, (entry.why,))
    if lead > 1 and entry.time_us and not leads(entry.time_us, entry.xla_us, lead):
        return Choice(problem, None, (entry.why, *_of_lead(lead)))
    return None if kernel is None or entry.time_us is None else _chosen(problem, kernel, entry.time_us, entry.why)


def fields_of(config: Any) -> dict[str, Any]:
    """Returns a config as a file has it: the name of its family, and the fields that are not their defaults."""
    family = next(family for family in FAMILIES if isinstance(config, family.Config))
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {"family": family.name, **{name: value for name, value in fields.items() if value != defaults[name]}}


def config_of(fields: Mapping[str, Any]) -> Any:
    """Returns the config that ``fields_of`` described; None of one that no family has."""
    fields = dict(fields)
    name = fields.pop("family", None)
    family = next((family for family in FAMILIES if family.name == name), None)
    try:
        return family and family.Config(**fields)
    except (TypeError, ValueError):
        return None


def _problem_reasons(problem: Problem) -> tuple[str, ...]:
    """Returns why no family serves a problem."""
    return tuple(dict.fromkeys(reason for family in FAMILIES for reason in family.reasons(problem)))


def _config_reasons(problem: Problem) -> tuple[str, ...]:
    """Returns why no config serves a problem that families serve: the reasons of each family's first, the smallest."""
    found = (reasons(next(iter(family.configs(problem))), problem) for family in FAMILIES)
    return tuple(dict.fromkeys(reason for of_family in found for reason in of_family))
