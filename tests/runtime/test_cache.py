"""The kernel cache on disk: what it returns is what was written, whatever happened to the folder in between."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import random
import stat
import subprocess
import sys
import threading
import warnings

import pytest

from cutjax.runtime import disk_cache
from cutjax.runtime.disk_cache import DiskCache

META = {"log": "ptxas info", "seconds": 0.25}


def key_of(index: int) -> str:
    return hashlib.sha256(b"%d" % index).hexdigest()


KEY = key_of(0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "parent" / "cutjax"


@pytest.fixture
def cache(folder):
    return DiskCache(folder, 2**20)


def entries(folder):
    return sorted(path.name.removesuffix(".kernel") for path in folder.iterdir())


def test_round_trip(cache, folder):
    assert cache.read(KEY) is None
    payload = bytes(range(256)) * 100
    cache.write(KEY, META, payload)
    assert cache.read(KEY) == (META, payload)
    assert DiskCache(folder, 2**20).read(KEY) == (META, payload)
    assert cache.read(key_of(1)) is None
    assert entries(folder) == [KEY]  # no temporary file is left


def test_is_private_to_the_user(cache, folder):
    saved = os.umask(0)
    try:
        cache.write(KEY, META, b"cubin")
    finally:
        os.umask(saved)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / f"{KEY}.kernel").stat().st_mode) == 0o600


def test_replaces_an_entry(cache):
    cache.write(KEY, META, b"old")
    cache.write(KEY, {}, b"new")
    assert cache.read(KEY) == ({}, b"new")


def test_folder_may_vanish(cache, folder):
    cache.write(KEY, META, b"cubin")
    (folder / f"{KEY}.kernel").unlink()
    folder.rmdir()
    assert cache.read(KEY) is None
    cache.write(KEY, META, b"cubin")
    assert cache.read(KEY) == (META, b"cubin")


def test_any_damage_is_detected_and_removed(cache, folder):
    cache.write(KEY, META, b"a cubin of some length" * 20)
    path = folder / f"{KEY}.kernel"
    good = path.read_bytes()
    rng = random.Random(2)
    damaged = [b"", b"\0" * len(good), good + b"x", good[:-1], good[: len(good) // 2], b"cutjax-entry-1\n"]
    for position in [*range(120), *rng.sample(range(120, len(good)), 100)]:
        altered = bytearray(good)
        altered[position] ^= 1 << rng.randrange(8)
        damaged.append(bytes(altered))
        damaged.append(good[:position])
    for data in damaged:
        path.write_bytes(data)
        assert cache.read(KEY) is None
        assert not path.exists()
    path.write_bytes(good)
    assert cache.read(KEY) is not None


def test_entry_of_another_key_is_refused(cache, folder):
    cache.write(KEY, META, b"one kernel")
    (folder / f"{KEY}.kernel").rename(folder / f"{key_of(1)}.kernel")
    assert cache.read(key_of(1)) is None
    assert entries(folder) == []


def test_symlink_in_an_entrys_place_is_not_followed(cache, folder, tmp_path):
    cache.write(KEY, META, b"cubin")
    path = folder / f"{KEY}.kernel"
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = outside.read_bytes()
    assert cache.read(KEY) is None
    assert not path.is_symlink()
    path.symlink_to(outside)
    cache.write(KEY, META, b"another")
    assert outside.read_bytes() == before
    assert not path.is_symlink()
    assert cache.read(KEY) == (META, b"another")


def test_fifo_in_an_entrys_place_does_not_hang(cache, folder):
    cache.write(KEY, META, b"cubin")
    path = folder / f"{KEY}.kernel"
    path.unlink()
    os.mkfifo(path)
    assert cache.read(KEY) is None
    assert not path.exists()


def test_directory_in_an_entrys_place(cache, folder):
    cache.write(key_of(1), META, b"cubin")
    (folder / f"{KEY}.kernel").mkdir()
    assert cache.read(KEY) is None
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        cache.write(KEY, META, b"cubin")
    assert len(entries(folder)) == 2  # no temporary file is left


def test_entry_others_can_write_to_is_removed(cache, folder):
    cache.write(KEY, META, b"cubin")
    (folder / f"{KEY}.kernel").chmod(0o602)
    assert cache.read(KEY) is None
    assert entries(folder) == []


def use(cache):
    assert cache.read(KEY) is None
    cache.write(KEY, META, b"cubin")
    assert cache.read(KEY) is None


def expect_one_warning(cache, match):
    with pytest.warns(RuntimeWarning, match=match) as record:
        use(cache)
    assert len(record) == 1
    assert "CUTJAX_CACHE_DIR" in str(record[0].message)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_folder_others_can_write_to_is_refused(cache, folder, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    expect_one_warning(cache, rf"is refused: others can write to it \(mode {mode:04o}\); `chmod go-w")
    assert entries(folder) == []
    folder.chmod(0o755)
    cache.write(KEY, META, b"cubin")
    assert cache.read(KEY) == (META, b"cubin")


def test_folder_of_another_user_is_refused(cache, folder, monkeypatch):
    folder.mkdir(parents=True, mode=0o755)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    expect_one_warning(cache, "is refused: it belongs to user")
    assert entries(folder) == []


def test_symlink_in_the_folders_place_is_refused(cache, folder, tmp_path):
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(target)
    expect_one_warning(cache, "is refused: it is a symbolic link")
    assert entries(target) == []


def test_folder_that_is_swapped_after_the_check_is_not_used(cache, folder, tmp_path, monkeypatch):
    """What was checked is what is used, whatever stands at its name since."""
    theirs, aside = tmp_path / "theirs", tmp_path / "aside"
    theirs.mkdir(mode=0o700)
    check, swapped = disk_cache._is_private, []

    def then_swap(status):
        private = check(status)
        if not swapped:
            folder.rename(aside)
            folder.symlink_to(theirs)
            swapped.append(True)
        return private

    monkeypatch.setattr(disk_cache, "_is_private", then_swap)
    cache.write(KEY, META, b"cubin")
    assert swapped
    assert entries(theirs) == []
    assert len(entries(aside)) == 1


def test_dangling_symlink_in_the_folders_place_is_refused(cache, folder, tmp_path):
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "nowhere")
    expect_one_warning(cache, "is refused: it is a symbolic link")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("below", ["", "below"])
def test_file_in_the_folders_place(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    expect_one_warning(DiskCache(tmp_path / "file" / below, 2**20), "cannot be used")
    assert (tmp_path / "file").read_text() == "mine"


def test_relative_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # platformdirs returns "~/.cache" where there is no home
    monkeypatch.setattr(disk_cache, "_warned", set())
    expect_one_warning(DiskCache(pathlib.Path("~/.cache/cutjax"), 2**20), "not an absolute path")
    assert entries(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_folder_that_cannot_be_written(cache, folder, monkeypatch, number):
    folder.mkdir(parents=True)
    os_open = os.open

    def failing_open(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return os_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing_open)
    expect_one_warning(cache, f"cannot be used: .*{os.strerror(number)}")


def test_disk_filling_up_leaves_no_part(cache, folder, monkeypatch):
    def failing_replace(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cache.write(KEY, META, b"cubin")
    assert entries(folder) == []


def test_least_recently_used_entries_go(folder):
    payload = b"x" * 1000
    cache = DiskCache(folder, 4500)
    for index in range(4):
        cache.write(key_of(index), {}, payload)
        os.utime(folder / f"{key_of(index)}.kernel", (index, index))
    assert cache.read(key_of(0))  # now the most recently used
    cache.write(key_of(4), {}, payload)
    assert entries(folder) == sorted(map(key_of, (0, 2, 3, 4)))
    cache.write(key_of(5), {}, payload)
    assert entries(folder) == sorted(map(key_of, (0, 3, 4, 5)))


def test_eviction_spares_what_is_not_ours_and_clears_stale_parts(folder):
    cache = DiskCache(folder, 2000)
    cache.write(KEY, {}, b"x" * 1000)
    (folder / "notes.txt").write_bytes(b"x" * 5000)
    (folder / "old.kernel.1.aa.tmp").write_bytes(b"x")
    (folder / "new.kernel.1.aa.tmp").write_bytes(b"x")
    os.utime(folder / "old.kernel.1.aa.tmp", (0, 0))
    cache.write(key_of(1), {}, b"x" * 1000)
    assert sorted(os.listdir(folder)) == sorted([f"{key_of(1)}.kernel", "notes.txt", "new.kernel.1.aa.tmp"])


def test_entry_larger_than_the_bound_is_not_kept(folder):
    cache = DiskCache(folder, 2000)
    cache.write(KEY, {}, b"x" * 1000)
    cache.write(key_of(1), {}, b"x" * 2000)
    assert entries(folder) == [KEY]


def test_few_writes_scan(folder, monkeypatch):
    scans = []
    monkeypatch.setattr(DiskCache, "_evict", lambda *args: scans.append(1))
    cache = DiskCache(folder, 2**20)
    for index in range(100):
        cache.write(key_of(index), {}, b"x" * 900)
    assert len(scans) == 2  # at the first write, and once past 64 KiB


def test_what_the_reader_does_not_know_is_removed(cache, folder):
    cache.write(KEY, META, b"cubin")
    assert cache.read(KEY, lambda metadata, payload: payload.upper()) == b"CUBIN"
    assert cache.read(KEY, lambda *entry: None) is None
    assert entries(folder) == []


@pytest.mark.parametrize("text", [b"", b"{", b"{}{}", b"\xff", b"[" * 200_000, b"1" * 10_000])
def test_metadata_that_cannot_be_read_is_damage(cache, folder, text):
    cache.write(KEY, META, b"cubin")
    (folder / f"{KEY}.kernel").write_bytes(disk_cache._encode(KEY, text, b"cubin"))  # the digest is right
    assert cache.read(KEY) is None
    assert entries(folder) == []


def test_no_descriptor_leaks(cache, folder):
    cache.write(KEY, META, b"cubin")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        cache.read(KEY)
        cache.read(key_of(1))
        cache.write(KEY, META, b"cubin")
        (folder / f"{KEY}.kernel").chmod(0o602)
        cache.read(KEY)
    assert len(os.listdir("/proc/self/fd")) == before


def hammer(folder, seed, rounds):
    """Reads and writes few keys under a bound that holds half of them; whatever is read must be whole and right."""
    rng = random.Random(seed)
    cache = DiskCache(folder, 40_000)
    hits = 0
    for _ in range(rounds):
        index = rng.randrange(8)
        expected = bytes([index]) * (8000 + index)
        entry = cache.read(key_of(index))
        if entry is None or rng.random() < 0.5:
            cache.write(key_of(index), {"index": index}, expected)
        if entry is not None:
            assert entry == ({"index": index}, expected)
            hits += 1
        if rng.random() < 0.05:  # someone truncates, someone deletes
            path = folder / f"{key_of(index)}.kernel"
            with contextlib.suppress(FileNotFoundError):
                path.unlink() if rng.random() < 0.5 else os.truncate(path, 4000)
    assert hits > rounds // 10


def test_many_processes(folder):
    """Of 200 turns; four of 600 are worth it after a change."""
    program = (
        "import pathlib, sys, warnings; warnings.simplefilter('error'); sys.path.insert(0, sys.argv[1]);"
        "import test_cache; test_cache.hammer(pathlib.Path(sys.argv[2]), int(sys.argv[3]), 200)"
    )
    command = [sys.executable, "-c", program, os.path.dirname(__file__), str(folder)]
    processes = [subprocess.Popen([*command, str(seed)], stderr=subprocess.PIPE, text=True) for seed in range(2)]
    outputs = [process.communicate(timeout=1800)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 2, outputs
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 40_000


def test_many_threads(folder):
    errors = []

    def work(seed):
        try:
            hammer(folder, seed, 200)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
