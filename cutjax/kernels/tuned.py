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
from collections.abc import Mapping
from typing import Any

import jax

from cutjax.kernels import keys
from cutjax.kernels.problem import Problem
from cutjax.runtime import tuning_file

SHIPPED = pathlib.Path(__file__).parent / "data"
# How many times as fast as XLA a kernel was, at least, where it runs. Of 798 products measured twice, those that led by
# less did not lead the second time: the fastest of many kernels is one that a measurement flatters.
SURE = 1.02


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured problem.

    Attributes:
      config: fields of the fastest kernel's config, with the name of its family, as pairs; empty where none ran.
      time_us: its time.
      xla_us: XLA's time for the same; None where it was not measured.
    """

    config: tuple[tuple[str, Any], ...]
    time_us: float | None
    xla_us: float | None

    @property
    def xla_wins(self) -> bool:
        """True unless a kernel was surely faster than XLA."""
        return self.xla_us is not None and (self.time_us is None or self.xla_us < SURE * self.time_us)

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
        return {"runs": runs, "config": dict(self.config) or None, "time_us": time_us, "xla_us": xla_us, **more}


def decode(stored: Mapping[str, Any]) -> Entry | None:
    """Returns the entry of a file's; None of one that is damaged."""
    config = stored.get("config") or {}
    times = stored.get("time_us"), stored.get("xla_us")
    if not isinstance(config, dict) or not all(isinstance(x, str | int | float) for x in config.values()):
        return None
    if not all(x is None or (isinstance(x, int | float) and 0 < x < math.inf) for x in times):
        return None
    entry = Entry(tuple(sorted(config.items())), *times)
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


def use_tuning(path: str | os.PathLike[str] | None) -> contextlib.AbstractContextManager[None]:
    """Chooses kernels in a ``with`` block by a file of measured ones too, before all other files.

    A file is what ``cutjax.autotune(fn, path=path)`` writes. It is read when this function is called. The choice holds
    for the current thread, may be nested, and is part of ``jax.jit``'s cache key: a function that was jitted before is
    compiled again.

    Args:
      path: the file. None: the cost model alone chooses, whatever was measured.

    Returns:
      A context manager.

    Raises:
      FileNotFoundError: if there is no such file.

    Example:
      >>> import cutjax
      >>> problem = cutjax.Problem(4096, 4096, 4096)
      >>> with cutjax.use_tuning(None):
      ...     kernel = cutjax.candidates(problem)[0]
    """
    if path is None:
        return _scope((None,))
    file = pathlib.Path(path).expanduser().absolute()
    if not file.exists():
        raise FileNotFoundError(f"use_tuning: expected a file that cutjax.autotune(fn, path=...) wrote, {file} is none")
    return _scope((*_scope.value, table(file)))


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
