"""The kernel cache on disk: private to its user, verified on every read, bounded in size, safe with many processes.

An entry is one file: magic, sha256 of the rest, then key, metadata (JSON) and payload. Every operation opens the
folder, checks what it opened and works relative to that descriptor: a folder swapped in between is never used.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import pathlib
import secrets
import stat
import struct
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from cutjax.runtime.settings import settings

_MAGIC = b"cutjax-entry-1\n"
_HEADER = struct.Struct("<32s64sI")  # sha256 of what follows it, key, bytes of metadata
_SUFFIX = ".kernel"
_STALE_SECONDS = 3600.0

_warned: set[pathlib.Path] = set()
_warned_lock = threading.Lock()


class _Refused(OSError):
    """The folder exists but must not be used."""


def warn_once(folder: pathlib.Path, message: str) -> None:
    """Warns once per folder and process, whatever the warning filters say."""
    with _warned_lock:
        if folder in _warned:
            return
        _warned.add(folder)
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


class DiskCache:
    """Maps a sha256 in hex to metadata (a JSON object) and a payload.

    No method raises because of the disk: a folder that cannot or must not be used is told once as a warning, and the
    cache then holds nothing.
    """

    def __init__(self, folder: pathlib.Path, limit_bytes: int):
        self._folder = folder
        self._limit_bytes = limit_bytes
        # A scan costs some 2 us an entry, so not every write makes one: the first does, then one per 1/16 of the bound.
        self._unscanned_bytes = limit_bytes
        self._lock = threading.Lock()

    def read(self, key: str, parse: Callable[[Any, bytes], Any] = lambda *entry: entry) -> Any:
        """Reads an entry: returns ``parse`` of its metadata and payload (by default both), or None.

        An entry that is damaged, altered or not ours is removed, and so is one that ``parse`` makes None of: its digest
        says that it is as it was written, not that who wrote it knew the same fields. The metadata is any JSON.
        """
        try:
            folder = self._open()
        except OSError as error:
            return self._warn(error)
        try:
            data = self._read_file(folder, key + _SUFFIX)
            if data is None:
                return None
            entry = _decode(key, data)
            found = None if entry is None else parse(*entry)
            if found is None:
                _unlink(folder, key + _SUFFIX)
            return found
        finally:
            os.close(folder)

    def write(self, key: str, metadata: dict[str, Any], payload: bytes) -> None:
        """Adds or replaces an entry, then removes the least recently used ones while the cache is over its bound."""
        data = _encode(key, json.dumps(metadata).encode(), payload)
        if len(data) > self._limit_bytes:
            return
        try:
            folder = self._open()
            try:
                _write_file(folder, key + _SUFFIX, data)
                with self._lock:
                    self._unscanned_bytes += len(data)
                    scan = self._unscanned_bytes > self._limit_bytes // 16
                    if scan:
                        self._unscanned_bytes = 0
                if scan:
                    self._evict(folder)
            finally:
                os.close(folder)
        except OSError as error:
            self._warn(error)

    def _open(self) -> int:
        """Returns a descriptor of the folder, made if need be, after checking that it is ours alone."""
        folder = self._folder
        if not folder.is_absolute():  # platformdirs without a home folder
            raise _Refused("it is not an absolute path")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            descriptor = os.open(folder, flags)
        except FileNotFoundError:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            descriptor = os.open(folder, flags)
        except OSError as error:
            if folder.is_symlink():
                raise _Refused("it is a symbolic link; name the folder itself") from error
            raise
        status = os.fstat(descriptor)
        if _is_private(status):
            return descriptor
        os.close(descriptor)
        if status.st_uid != os.geteuid():
            raise _Refused(f"it belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}")
        mode = stat.S_IMODE(status.st_mode)
        raise _Refused(f"others can write to it (mode {mode:04o}); `chmod go-w '{folder}'` if you trust what is in it")

    def _warn(self, error: OSError) -> None:
        verb = "is refused" if isinstance(error, _Refused) else "cannot be used"
        warn_once(
            self._folder,
            f"cutjax: the kernel cache folder {self._folder} {verb}: {error}. Every process compiles "
            "its kernels anew; CUTJAX_CACHE_DIR names another folder, CUTJAX_CACHE_SIZE=0 turns the cache off.",
        )

    def _read_file(self, folder: int, name: str) -> bytes | None:
        """Returns the bytes of an entry; whatever stands in its place and is no private regular file is removed."""
        try:
            # Not blocking: a FIFO in the entry's place must not hang us.
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                _unlink(folder, name)
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not _is_private(status):
                _unlink(folder, name)
                return None
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read()
            os.utime(descriptor)  # most recently used
            return data
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def _evict(self, folder: int) -> None:
        entries: list[tuple[float, int, str]] = []
        with os.scandir(folder) as files:
            for file in files:
                try:
                    status = file.stat(follow_symlinks=False)
                except OSError:  # another process was faster
                    continue
                if file.name.endswith(_SUFFIX):
                    entries.append((status.st_mtime, status.st_size, file.name))
                elif file.name.endswith(".tmp") and time.time() - status.st_mtime > _STALE_SECONDS:
                    _unlink(folder, file.name)  # left by a process that was killed
        total = sum(size for _, size, _ in entries)
        for _, size, name in sorted(entries):
            if total <= self._limit_bytes:
                break
            _unlink(folder, name)
            total -= size


def _encode(key: str, text: bytes, payload: bytes) -> bytes:
    tail = _HEADER.pack(b"", key.encode(), len(text))[32:] + text + payload
    return _MAGIC + hashlib.sha256(tail).digest() + tail


def _decode(key: str, data: bytes) -> tuple[Any, bytes] | None:
    start = len(_MAGIC)
    if not data.startswith(_MAGIC) or len(data) < start + _HEADER.size:
        return None
    digest, stored_key, text_bytes = _HEADER.unpack_from(data, start)
    # The key too: an intact entry under another entry's name is another kernel.
    if hashlib.sha256(data[start + 32 :]).digest() != digest or stored_key != key.encode():
        return None
    text = start + _HEADER.size
    try:
        return json.loads(data[text : text + text_bytes]), data[text + text_bytes :]
    except (ValueError, RecursionError):  # no JSON, or some of a depth that nobody writes
        return None


def _write_file(folder: int, name: str, data: bytes) -> None:
    """Writes so that readers see the old file or the whole new one: a private temporary file takes its place."""
    temporary = f"{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _unlink(folder, temporary)
        raise


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def of_settings() -> DiskCache | None:
    """Returns the cache in the folder that the settings name; None where it is turned off."""
    limit_bytes = settings().cache_bytes
    return _at(settings().cache_dir, limit_bytes) if limit_bytes else None


@functools.lru_cache(maxsize=8)
def _at(folder: pathlib.Path | None, limit_bytes: int) -> DiskCache:
    return DiskCache(folder or user_folder(), limit_bytes)


def user_folder() -> pathlib.Path:
    """Returns the user's cache folder."""
    import platformdirs  # only now: `import cutjax` must stay fast

    return pathlib.Path(platformdirs.user_cache_dir("cutjax", appauthor=False))
