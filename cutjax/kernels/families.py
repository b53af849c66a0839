"""The families of kernels there are, and the kernels that serve a problem, the predicted fastest first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from cutjax.kernels.direct import family as direct
from cutjax.kernels.family import Family, Kernel
from cutjax.kernels.halo import family as halo
from cutjax.kernels.mma import family as mma
from cutjax.kernels.operand import Im2col, Order
from cutjax.kernels.prepared import converted_us, wide, widened
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import family as sm90

FAMILIES: tuple[Family, ...] = (sm90, mma, direct, halo)  # those that serve a problem the best first
CONFIGS = tuple(family.Config for family in FAMILIES)
Config = sm90.Config  # the public one
AnyConfig = sm90.Config | mma.Config | direct.Config | halo.Config  # what pins a kernel


def concerned(problem: Problem) -> tuple[Family, ...]:
    """Returns the families whose reasons say something of a problem: some are of convolutions alone."""
    of_windows = isinstance(problem.a.view, Im2col)
    return tuple(family for family in FAMILIES if of_windows or family not in (direct, halo))


def resolve(problem: Problem, config: Any) -> Kernel | tuple[str, ...]:
    """Returns the kernel of a config that can be launched, or every reason why there is none."""
    family = next((family for family in FAMILIES if isinstance(config, family.Config)), None)
    if family is None:
        known = ", ".join(family.Config.__name__ for family in FAMILIES)
        raise TypeError(f"{config!r} is no config of a kernel; expected one of {known}")
    found = family.resolve(problem, config)
    found = found if isinstance(found, tuple) else found.unlaunchable() or found
    if isinstance(found, tuple) and (into := wide(problem)):
        kernel = resolve(into, config)
        found = found if isinstance(kernel, tuple) else kernel.after(widened(problem, into))
    return found


@functools.lru_cache(maxsize=16)
def ranked(problem: Problem) -> tuple[tuple[Kernel, float], ...]:
    """Returns the kernels that serve a problem, with their predicted times, the fastest first."""
    serving = []
    for family in FAMILIES:
        if (serving and not family.competes(problem)) or family.reasons(problem):
            continue
        found = [family.resolve(problem, config) for config in family.configs(problem)]
        kernels = [kernel for kernel in found if not isinstance(kernel, tuple)]
        if kernels and not kernels[0].unlaunchable():  # the first is told least: parts of tiles take more
            serving += [(kernel, kernel.time_us(problem.device)) for kernel in kernels]
    if into := wide(problem):
        converted = widened(problem, into)
        more = converted_us(converted, problem.device)
        # Of these a config means the kernel that converts nothing.
        narrow = {kernel.config for kernel, _ in serving if not kernel.unmeasured}
        of_wide = [entry for entry in ranked(into) if entry[0].config not in narrow]
        serving += [(kernel.after(converted), time_us + more) for kernel, time_us in of_wide]
    return tuple(sorted(serving, key=lambda entry: entry[1]))


@functools.lru_cache(maxsize=4096)
def fastest(problem: Problem, unmeasured: bool = False) -> tuple[Kernel, float, int] | None:
    """Returns the kernel predicted fastest, its time and how many serve a problem; None where none does.

    Those that have not run on a device yet are left out, unless asked for.
    """
    found = [entry for entry in ranked(problem) if unmeasured or not entry[0].unmeasured]
    if not found:
        return None
    kernel, time_us = next(entry for entry in found if not entry[0].unlaunchable())
    return kernel, time_us, len(found)


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
