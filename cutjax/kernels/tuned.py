"""Tuned kernels: the measured choices that go before the cost model's, from files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from cutjax.kernels import keys
from cutjax.kernels.problem import Problem
from cutjax.runtime import tuning_file
from cutjax.runtime.settings import settings

SHIPPED = pathlib.Path(__file__).parent / "data"
# How many times as fast as XLA a kernel was, at least, where it runs. Of 798 products measured twice, those that led by
# less did not lead the second time: the fastest of many kernels is one that a measurement flatters.
SURE = 1.02
# The same of what a user's process measured where XLA ran before: XLA tunes its own product anew in each process, and
# the fastest of several kernels is flattered. Judged in another one, eight that led by 1.02 to 1.08 were at 0.954 to
# 1.042 of XLA, a mean of 1.004; of 26 that led by more none was under 0.997 (docs/performance.md).
ONCE = 1.08


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured problem.

    Attributes:
      config: fields of the fastest kernel's config, with the name of its family, as pairs; empty where none ran.
      time_us: its time.
      xla_us: XLA's time for the same; None where it was not measured.
      lead: how many times as fast as XLA the kernel must have been to run.
    """

    config: tuple[tuple[str, Any], ...]
    time_us: float | None
    xla_us: float | None
    lead: float = SURE

    @property
    def xla_wins(self) -> bool:
        """True unless a kernel was surely faster than XLA."""
        return self.xla_us is not None and (self.time_us is None or self.xla_us < self.lead * self.time_us)

    @property
    def why(self) -> str:
        """The measurement, as a reason."""
        if self.xla_wins:
            best = "no kernel" if self.time_us is None else f"best kernel {self.time_us:.1f} us"
            return f"tuned: XLA {self.xla_us:.1f} us, {best}"
        return f"tuned: {self.time_us:.1f} us" + ("" if self.xla_us is None else f", XLA {self.xla_us:.1f} us")

    def encoded(self, **more: Any) -> dict[str, Any]:
        """Returns the entry as it stands in a file, with more that is there for people."""
        runs = "XLA" if self.xla_wins else "kernel"
        time_us, xla_us = (us and round(us, 3) for us in (self.time_us, self.xla_us))
        more = {"lead": self.lead, **more} if self.lead != SURE else more
        return {"runs": runs, "config": dict(self.config) or None, "time_us": time_us, "xla_us": xla_us, **more}


def decode(stored: Mapping[str, Any]) -> Entry | None:
    """Returns the entry of a file's; None of one that is damaged."""
    config = stored.get("config") or {}
    times, lead = (stored.get("time_us"), stored.get("xla_us")), stored.get("lead", SURE)
    if not isinstance(config, dict) or not all(isinstance(x, str | int | float) for x in config.values()):
        return None
    numbers = (lead, *(x for x in times if x is not None))
    if not all(isinstance(x, int | float) and 0 < x < math.inf for x in numbers):
        return None
    entry = Entry(tuple(sorted(config.items())), *times, lead)
    # A kernel has its time, a time its kernel, and something ran.
    return entry if bool(entry.config) == (entry.time_us is not None) and times != (None, None) else None


@dataclasses.dataclass(frozen=True)
class Table:
    """One file of entries, as it was when it was read.

    Attributes:
      path: the file.
      digest: of its entries: tables of equal entries are equal.
      entries: by device and key of the problem.
    """

    path: pathlib.Path
    digest: str
    entries: Mapping[str, Mapping[str, Entry]] = dataclasses.field(repr=False, compare=False)

    @property
    def count(self) -> int:
        """The number of entries."""
        return sum(map(len, self.entries.values()))


def table(path: pathlib.Path) -> Table:
    """Reads a file; entries that are damaged are left out."""
    devices = tuning_file.read(path)
    entries = {
        device: {keys.recorded(key): entry for key, stored in found.items() if (entry := decode(stored))}
        for device, found in devices.items()
    }
    digest = hashlib.sha256(json.dumps(devices, sort_keys=True).encode()).hexdigest()
    return Table(path, digest, entries)


# A JAX user context, as use_backend's: thread-local, part of jit's cache key, made once at import. The tables that
# scopes add, the innermost last; None among them hides all before it.
_scope = jax.make_user_context(())
# How many kernels are timed for a new problem; None is what the environment says.
_measured = jax.make_user_context(None)
_NO_FILE = object()


def use_tuning(
    path: str | os.PathLike[str] | None = _NO_FILE,  # pyright: ignore[reportArgumentType]  # None hides files
    *,
    measure: int | None = None,
    frozen: str | os.PathLike[str] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Chooses in a ``with`` block by which measurements kernels are chosen.

    The choice is that of programs that are lowered in the block: around the call of a jitted function, not within one.
    It holds for the current thread, may be nested, and is part of ``jax.jit``'s cache key: a function that was jitted
    before is compiled again.

    Args:
      path: a file that ``cutjax.autotune(fn, path=path)`` wrote, which goes before all others. It is read when this
        function is called. None: the cost model alone chooses, whatever was measured.
      measure: how many kernels are timed, beside XLA, when a problem is first lowered for this process's GPU; 0 is
        none. They are those that the cost model expects to be fastest. What won goes to the user's file and is kept;
        where a scope hides that, nothing is timed. Programs for several devices, and jobs of several processes, time
        nothing. ``CUTJAX_MEASURE`` is the default.
      frozen: a file as ``path``, by which alone kernels are chosen, and by the cost model where it has no entry:
        whatever else was tuned or is tuned later, a program gets the same kernels of this version of cutjax.

    Returns:
      A context manager.

    Raises:
      FileNotFoundError: if there is no such file.
      TypeError: if nothing is asked, ``frozen`` with either of the others, or measurements that ``None`` hides.
      ValueError: if ``measure`` is no number of kernels, or if ``frozen`` is damaged or of another version's format.

    Examples:
      >>> import cutjax
      >>> problem = cutjax.Problem(4096, 4096, 4096)
      >>> with cutjax.use_tuning(None):
      ...     kernel = cutjax.candidates(problem)[0]
    """
    named = path is not _NO_FILE
    if frozen is not None:
        if named or measure is not None:
            raise TypeError("use_tuning: frozen= names the file that alone counts, without path and measure=")
        return _scopes((None, _existing(frozen, whole=True)))
    if not named and measure is None:
        raise TypeError("use_tuning: expected a file (None hides all), measure= or frozen=")
    if path is None and measure:
        raise TypeError("use_tuning: path=None hides what was measured, also by measure=")
    if measure is not None and (isinstance(measure, bool) or not isinstance(measure, int) or measure < 0):
        raise ValueError(f"use_tuning: measure must be a number of kernels, 0 or more, got {measure!r}")
    if path is None:
        return _scopes((None,))
    return _scopes((_existing(path),) if named else (), measure)


@contextlib.contextmanager
def _scopes(added: tuple[Table | None, ...], measure: int | None = None) -> Iterator[None]:
    """Adds tables to those of the scopes around, None among them to hide these, and says how many kernels are timed."""
    with contextlib.ExitStack() as stack:
        if added:
            stack.enter_context(_scope(added if None in added else (*_scope.value, *added)))
        if measure is not None:
            stack.enter_context(_measured(measure))
        yield


def _existing(path: str | os.PathLike[str], *, whole: bool = False) -> Table:
    file = pathlib.Path(path).expanduser().absolute()
    if not file.is_file():
        raise FileNotFoundError(f"use_tuning: expected a file that cutjax.autotune(fn, path=...) wrote, {file} is none")
    if whole and (problem := tuning_file.examine(file).problem):
        raise ValueError(f"use_tuning: frozen= names {file}, by which nothing can be chosen: {problem}")
    return table(file)


def measured() -> int:
    """Returns the number of kernels that are timed here for a problem that is new; 0 is none."""
    if None in _scope.value:  # what won would go to a file that is hidden
        return 0
    return settings().measure if _measured.value is None else _measured.value


def tables() -> tuple[Table, ...]:
    """Returns the files that count here: what ships, the user's, those of scopes. Later ones go before earlier ones."""
    found = _scope.value
    if None in found:
        return found[len(found) - found[::-1].index(None) :]
    return (*_standing(tuning_file.user_path()), *found)


@functools.lru_cache(maxsize=8)
def _standing(user: pathlib.Path) -> tuple[Table, ...]:
    return (*(table(path) for path in sorted(SHIPPED.glob("*.json"))), table(user))


def read_again() -> None:
    """Forgets what was read of the files outside of scopes; functions jitted before keep their kernels."""
    _standing.cache_clear()


def find(problem: Problem) -> tuple[Entry, ...]:
    """Returns the entries of a problem on its device, the one that counts most first."""
    if problem.device.shared:
        return ()  # kernels were measured with all SMs
    device = problem.device.name
    of_device = [x.entries[device] for x in tables() if x.entries.get(device)]
    if not of_device:
        return ()
    named = keys.key(problem)
    return tuple(entries[named] for entries in reversed(of_device) if named in entries)
