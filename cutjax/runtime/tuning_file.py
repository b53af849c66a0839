"""Files of tuned kernels: JSON, read whatever is in them, merged under a lock, and replaced at once.

{"format": 1, "devices": {"NVIDIA H200": {"<key of a Problem>": {an entry: a JSON object}}}}
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import json
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cutjax.runtime import disk_cache
from cutjax.runtime.settings import settings

FORMAT = 1
NAME = "tuned.json"

Devices = dict[str, dict[str, dict[str, Any]]]  # device name -> problem key -> entry


class Content(NamedTuple):
    """The content of a file.

    Attributes:
      devices: its entries.
      problem: why there are none though there is a file; "" otherwise.
      damaged: whether that is because it is damaged: not JSON, or not of the shape.
    """

    devices: Devices
    problem: str = ""
    damaged: bool = False


def user_path() -> pathlib.Path:
    """Returns the file of this user's own measurements."""
    return _file(settings().tuning_dir or _user_folder())


@functools.lru_cache(maxsize=8)
def _file(folder: pathlib.Path) -> pathlib.Path:  # one object, which is hashed once: each price asks for it
    return folder / NAME


@functools.cache
def _user_folder() -> pathlib.Path:
    import platformdirs  # only now: `import cutjax` must stay fast

    return pathlib.Path(platformdirs.user_data_dir("cutjax", appauthor=False)) / "tuning"


def read(path: pathlib.Path) -> Devices:
    """Returns the entries of a file; none where there is no file, and, with one warning, none of one it cannot read."""
    content = examine(path)
    if content.problem:
        disk_cache.warn_once(path, f"cutjax: tuned kernels in {path} are ignored: {content.problem}")
    return content.devices


def examine(path: pathlib.Path) -> Content:
    """Returns the content of a file; raises nothing and warns of nothing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Content({})
    except OSError as error:
        return Content({}, f"it cannot be read: {error}")
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Content({}, f"it is damaged: {type(error).__name__}: {error}", damaged=True)
    match parsed:
        case {"format": int() as number} if number != FORMAT:
            return Content({}, f"its format is {number}, this version of cutjax reads {FORMAT}")
        case {"format": int(), "devices": dict() as devices} if all(isinstance(x, dict) for x in devices.values()):
            entries = {
                device: {key: entry for key, entry in found.items() if isinstance(entry, dict)}
                for device, found in devices.items()
            }
            return Content(entries)
    return Content({}, "it is damaged: not what cutjax writes", damaged=True)


def check_writable(path: pathlib.Path) -> None:
    """Raises unless entries can be added to a file: before hours of measuring, not after.

    Raises:
      ValueError: it has another format, which another version of cutjax reads.
      OSError: the file or its folder cannot be written.
    """
    with _locked(path):
        _checked(path)


def _checked(path: pathlib.Path) -> Content:
    content = examine(path)
    if content.problem and not content.damaged:
        raise ValueError(f"{path}: {content.problem}; name another file, or remove it")
    return content


def merge(path: pathlib.Path, devices: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds entries to a file, over those of the same device and key; what other processes wrote there stays.

    Readers see the old file or the whole new one. A damaged file is set aside, as ``<name>.damaged``.

    Raises:
      ValueError, OSError: as ``check_writable``.
    """
    with _locked(path):
        content = _checked(path)
        if content.damaged:
            aside = path.with_name(path.name + ".damaged")
            os.replace(path, aside)
            disk_cache.warn_once(aside, f"cutjax: {path} is set aside as {aside.name}: {content.problem}")
        merged = content.devices
        for part in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
            part.unlink(missing_ok=True)  # of a writer that was killed: who holds the lock is the only one
        for device, entries in devices.items():
            merged.setdefault(device, {}).update(entries)
        _replace(path, encoded(merged))


def encoded(devices: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the text of a file: sorted, an entry a line, so that versions of it compare well."""
    blocks = []
    for device, entries in sorted(devices.items()):
        lines = [f"   {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(entries.items())]
        blocks.append(f"  {json.dumps(device)}: {{\n" + ",\n".join(lines) + "\n  }")
    return f'{{\n "format": {FORMAT},\n "devices": {{\n' + ",\n".join(blocks) + "\n }\n}\n"


def _replace(path: pathlib.Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine may leave an empty file under the name
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Holds the file's lock, ``<name>.lock``: one writer at a time; readers need none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
