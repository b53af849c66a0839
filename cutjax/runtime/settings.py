"""The environment variables of cutjax, read once and only here."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cutjax.runtime import architectures

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FOLDERS = {"cache_dir": "CUTJAX_CACHE_DIR", "dump_dir": "CUTJAX_DUMP_DIR", "tuning_dir": "CUTJAX_TUNING_DIR"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that the environment gives.

    Attributes:
      cache_dir: folder of the kernel cache (``CUTJAX_CACHE_DIR``); None is the user's cache folder.
      cache_bytes: bound on the kernel cache (``CUTJAX_CACHE_SIZE``, e.g. "512M"); 0 turns it off.
      dump_dir: where source, cubin and resource report of every kernel go (``CUTJAX_DUMP_DIR``); None is nowhere.
      target_arch: architecture when a program is lowered for CUDA without a device (``CUTJAX_TARGET_ARCH``).
      tuning_dir: folder of the tuned kernels (``CUTJAX_TUNING_DIR``); None is in the user's data folder.
      measure: how many kernels are timed for a problem that is new (``CUTJAX_MEASURE``); 0 are by default.
    """

    cache_dir: pathlib.Path | None = None
    cache_bytes: int = 2**30
    dump_dir: pathlib.Path | None = None
    target_arch: str = architectures.DEFAULT
    tuning_dir: pathlib.Path | None = None
    measure: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Settings:
        """Returns the settings of an environment; an empty variable counts as unset."""
        fields: dict[str, Any] = {}
        for field, name in _FOLDERS.items():
            if value := environ.get(name):
                fields[field] = pathlib.Path(value).expanduser().absolute()
        if value := environ.get("CUTJAX_CACHE_SIZE"):
            match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
            if match is None:
                raise ValueError(f"CUTJAX_CACHE_SIZE: expected bytes as in 1073741824, 512M or 1GiB, got {value!r}")
            fields["cache_bytes"] = int(match[1]) * _UNITS[match[2].upper()]
        if value := environ.get("CUTJAX_TARGET_ARCH"):
            try:
                fields["target_arch"] = architectures.canonical(value)
            except ValueError as error:
                raise ValueError(f"CUTJAX_TARGET_ARCH: {error}") from None
        if value := environ.get("CUTJAX_MEASURE"):
            if not value.isdecimal():
                raise ValueError(f"CUTJAX_MEASURE: expected a number of kernels, 0 or more, got {value!r}")
            fields["measure"] = int(value)
        return cls(**fields)


_current: Settings | None = None


def settings() -> Settings:
    """Returns the settings of this process: the environment as it was at the first call."""
    global _current
    if _current is None:
        _current = Settings.of(os.environ)
    return _current


@contextlib.contextmanager
def override(**fields: Any) -> Iterator[Settings]:
    """Replaces fields of the settings in all threads for the length of a ``with`` block (for tests and tools)."""
    global _current
    saved = settings()
    _current = dataclasses.replace(saved, **fields)
    try:
        yield _current
    finally:
        _current = saved
