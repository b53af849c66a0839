"""The families of kernels there are, and the kernels that serve a problem, the predicted fastest first."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cutjax.kernels import remembered
from cutjax.kernels.direct import family as direct
from cutjax.kernels.family import Family, Kernel
from cutjax.kernels.halo import family as halo
from cutjax.kernels.mma import family as mma
from cutjax.kernels.operand import Im2col, Order
from cutjax.kernels.prepared import Prepared, converted_us, wide, widened
from cutjax.kernels.prices import Prices
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import family as sm90

FAMILIES: tuple[Family, ...] = (sm90, mma, direct, halo)  # those that serve a problem the best first
CONFIGS = tuple(family.Config for family in FAMILIES)
Config = sm90.Config  # the public one
SAME = 1e-12  # share of a time, by which rounding may have made it more
AnyConfig = sm90.Config | mma.Config | direct.Config | halo.Config  # what pins a kernel


def concerned(problem: Problem) -> tuple[Family, ...]:
    """Returns the families whose reasons say something of a problem: some are of convolutions alone."""
    of_windows = isinstance(problem.a.view, Im2col)
    return tuple(family for family in FAMILIES if of_windows or family not in (direct, halo))


def resolve(problem: Problem, config: Any) -> Kernel | tuple[str, ...]:
    """Returns the kernel of a config that can be launched, or every reason why there is none."""
    family = next((family for family in FAMILIES if isinstance(config, family.Config)), None)
    if family is None:
        known = "cutjax.Config, MmaConfig, DirectConfig or HaloConfig"
        raise TypeError(f"{config!r} is no config of a kernel; expected a {known}")
    found = family.resolve(problem, config)
    found = found if isinstance(found, tuple) else found.unlaunchable() or found
    if isinstance(found, tuple) and (into := wide(problem)):
        kernel = resolve(into, config)
        found = found if isinstance(kernel, tuple) else kernel.after(widened(problem, into))
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Offer:
    """The configs of a family that serve a problem, or, where operands are converted before, the wide one.

    Attributes:
      family: whose.
      problem: that its kernels multiply.
      prices: of the configs, with those of conversions.
      converted: operands that are converted before.
      kernels: those resolved so far, and whether each can be launched.
    """

    family: Family
    problem: Problem
    prices: Prices
    converted: tuple[Prepared, ...] = ()
    kernels: dict[int, tuple[Kernel, bool]] = dataclasses.field(default_factory=dict, repr=False)

    def kernel(self, i: int) -> tuple[Kernel, bool]:
        """Returns the kernel of the i-th config, and whether it can be launched."""
        if i not in self.kernels:
            found = self.family.resolve(self.problem, self.prices.config(i))
            assert not isinstance(found, tuple)
            found = found.after(self.converted) if self.converted else found
            self.kernels[i] = found, not found.unlaunchable()
        return self.kernels[i]

    @property
    def serves(self) -> bool:
        """True if some kernel can be launched: that of the fastest, or of the first, which is told least."""
        us = self.prices.near_us
        return any(self.kernel(i)[1] for i in ([int(us.argmin()), 0] if len(us) else ()))

    def time_us(self, i: int) -> float:
        """Returns the predicted time of that kernel, as it is priced by itself."""
        return self.kernel(i)[0].time_us(self.problem.device)


@functools.lru_cache(maxsize=16)
def offers(problem: Problem) -> tuple[Offer, ...]:
    """Returns the configs that serve a problem, family by family."""
    found = []
    for family in FAMILIES:
        if (found and not family.competes(problem)) or family.reasons(problem):
            continue
        offer = Offer(family, problem, family.prices(problem))
        found += [offer] if offer.serves else []
    if into := wide(problem):
        converted = widened(problem, into)
        more = converted_us(converted, problem.device)
        # Of these a config means the kernel that converts nothing.
        served = (zip(offer.prices.rows(), offer.prices.new.tolist(), strict=True) for offer in found)
        narrow = {row for row, new in itertools.chain(*served) if not new}
        for offer in offers(into):
            prices = offer.prices.without(narrow).after(more)
            found.append(Offer(offer.family, into, prices, converted))
    return tuple(found)


def ranked(problem: Problem, unmeasured: bool = False) -> Iterator[tuple[Offer, int]]:
    """Yields the configs that serve a problem, as places in offers, the predicted fastest first.

    Those of kernels that have not run on a device yet are left out, unless asked for.

    In columns the last bit of a time depends on the processor, so those that are as good as equal are priced again, one
    by one: of equal ones the first is taken, everywhere.
    """
    found = offers(problem)
    yield from next(_groups(found, [offer.prices.near_us for offer in found], unmeasured), ())
    for group in itertools.islice(_groups(found, [offer.prices.ranked_us for offer in found], unmeasured), 1, None):
        yield from group


Places = list[tuple[Offer, int]]


def _groups(found: Sequence[Offer], times: Sequence[np.ndarray], unmeasured: bool) -> Iterator[Places]:
    """Yields those that are as good as equal, told the times by which each offer's are ranked, in their order."""
    us = np.concatenate([np.empty(0), *times])
    if not unmeasured:
        us[np.concatenate([np.empty(0, bool), *(offer.prices.new for offer in found)])] = np.inf
    firsts = np.cumsum([0, *map(len, times)])
    finite = np.flatnonzero(us < np.inf)
    order = finite[np.argsort(us[finite], kind="stable")]
    apart = np.flatnonzero(us[order][1:] > us[order][:-1] * (1 + SAME)) + 1
    for first, last in itertools.pairwise([0, *apart.tolist(), len(order)] if len(order) else []):
        rows = np.sort(order[first:last])
        of = np.searchsorted(firsts, rows, "right") - 1
        equal = [(found[i], row) for i, row in zip(of.tolist(), (rows - firsts[of]).tolist(), strict=True)]
        yield sorted(equal, key=lambda place: place[0].time_us(place[1])) if len(equal) > 1 else equal


Found = tuple[Kernel, float, int]  # its time, and how many serve the problem


def fastest(problem: Problem, unmeasured: bool = False) -> Found | None:
    """Returns the kernel predicted fastest, its time and how many serve a problem; None where none does.

    Those that have not run on a device yet are left out, unless asked for.
    """
    return _fastest(problem)[unmeasured]


@functools.lru_cache(maxsize=4096)
def _fastest(problem: Problem) -> tuple[Found | None, Found | None]:
    """Returns the fastest of those that have run on a device, and of all: as a process before did, or priced now."""
    if (entries := remembered.read(problem)) is not None:
        kept = {entry: _remembered(problem, entry) for entry in entries if entry}
        if all(kept.values()):
            first, second = (entry and kept[entry] for entry in entries)
            return first, second
    measured = _priced(problem, False)
    new = any(bool(offer.prices.new.any()) for offer in offers(problem))
    any_ = _priced(problem, True) if new else measured
    remembered.write(problem, lambda: tuple(x and _entry(*x) for x in (measured, any_)))
    return measured, any_


def _priced(problem: Problem, unmeasured: bool) -> Found | None:
    for offer, i in ranked(problem, unmeasured):
        kernel, launchable = offer.kernel(i)
        if launchable:
            count = sum(len(x.prices.new) if unmeasured else int((~x.prices.new).sum()) for x in offers(problem))
            return kernel, kernel.time_us(problem.device), count
    return None


def _entry(kernel: Kernel, time_us: float, count: int) -> remembered.Entry:
    fields = tuple(fields_of(kernel.config).items())
    return remembered.Entry(fields, bool(kernel.converted), kernel.name, time_us, count)


def _remembered(problem: Problem, entry: remembered.Entry) -> Found | None:
    """Returns the kernel that an entry names; None if it is no more."""
    config, into = config_of(dict(entry.config)), wide(problem) if entry.converted else problem
    if config is None or into is None:
        return None
    found = next(family for family in FAMILIES if isinstance(config, family.Config)).resolve(into, config)
    if isinstance(found, tuple) or found.name != entry.name:
        return None
    return found.after(widened(problem, into)) if entry.converted else found, entry.time_us, entry.count


def in_order(problem: Problem, orders: Sequence[Order]) -> Problem:
    """Returns the problem of arrays in these orders of memory, as far as kernels read and write them so.

    Axes of size 1 lie anywhere, and orders are of the last axes. Results stay row-major where an operand of their size
    is, and where the architecture's kernels do not store them otherwise.
    """
    rank, found = len(problem.batch) + 2, []
    for order, shape in zip(orders, problem.shapes, strict=True):
        before = rank - len(order)
        order = (*range(before), *(before + axis for axis in order))
        moving = [axis for axis in order if shape[axis] != 1]
        found.append(() if moving == sorted(moving) else order)
    of_a, of_b, of_results = found
    a = dataclasses.replace(problem.a, order=of_a)
    bs = tuple(dataclasses.replace(b, order=of_b) for b in problem.bs)
    beside = any(spec.row and spec.col for spec in problem.epilogue.operands)
    stored = not beside and all(family.stores_in_order(problem) for family in FAMILIES)
    return dataclasses.replace(problem, a=a, bs=bs, order=of_results if stored else ())


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
