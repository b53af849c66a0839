"""The kernels that were predicted to be the fastest, in the folder of the kernel cache.

Choosing among some hundred configs takes milliseconds, and a process that lowers a program asks for the choices that
the one before it made. A prediction is kept under the problem, its device, and the modules that predict.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

from cutjax.kernels.keys import key
from cutjax.kernels.problem import Problem
from cutjax.runtime import disk_cache

ON = True
_PREDICT = ("kernels", "epilogue")  # folders of the package


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kernel that was predicted to be the fastest.

    Attributes:
      config: pairs of what `families.fields_of` has.
      converted: whether operands are converted before it.
      name: of the kernel.
      time_us: predicted.
      count: configs that serve the problem.
    """

    config: tuple[tuple[str, Any], ...]
    converted: bool
    name: str
    time_us: float
    count: int


def read(problem: Problem) -> tuple[Entry | None, Entry | None] | None:
    """Returns the entries that `write` was told; None where nobody has priced the problem, or nothing is kept."""
    cache = disk_cache.of_settings() if ON else None
    return cache.read(_name(problem), _parsed) if cache else None


def write(problem: Problem, fastest: Callable[[], tuple[Entry | None, ...]]) -> None:
    """Keeps the fastest kernel of those that have run on a device, and of all; None where there is none."""
    if ON and (cache := disk_cache.of_settings()):
        fields = [entry and dataclasses.asdict(entry) for entry in fastest()]
        cache.write(_name(problem), {"fastest": fields}, b"")


def _parsed(metadata: Any, payload: bytes) -> tuple[Entry | None, Entry | None] | None:
    try:
        measured, any_ = (x and Entry(**{**x, "config": tuple(map(tuple, x["config"]))}) for x in metadata["fastest"])
    except (TypeError, KeyError, ValueError):  # of another version
        return None
    return measured, any_


def _name(problem: Problem) -> str:
    parts = "prediction", _modules(), key(problem), repr(problem.device)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def _modules() -> str:
    """Returns the digest of the files that predict, by their sizes and times: the package may be worked on."""
    package, found = pathlib.Path(__file__).parent.parent, []
    for name in _PREDICT:
        for folder, _, files in os.walk(package / name):
            for file in files:
                if file.endswith((".py", ".json")):
                    status = os.stat(os.path.join(folder, file))
                    found.append(f"{folder}/{file} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()
