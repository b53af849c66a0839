"""Files of tuned kernels: atomic, merged, versioned, and read whatever is in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

import cutjax
from cutjax.kernels import families, tuned
from cutjax.runtime import disk_cache, settings, tuning_file

H200 = "NVIDIA H200"
ENTRY = {"config": {"family": "sm90"}, "time_us": 10.0, "xla_us": 12.0}


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(disk_cache, "_warned", set())


def test_merge_keeps_what_is_there(tmp_path):
    path = tmp_path / "new" / "tuned.json"
    tuning_file.merge(path, {H200: {"a": ENTRY, "b": ENTRY}})
    tuning_file.merge(path, {H200: {"b": {**ENTRY, "time_us": 5.0}}, "other": {"a": ENTRY}})
    assert tuning_file.read(path) == {H200: {"a": ENTRY, "b": {**ENTRY, "time_us": 5.0}}, "other": {"a": ENTRY}}
    assert sorted(p.name for p in path.parent.iterdir()) == ["tuned.json", "tuned.json.lock"]


def test_what_a_killed_writer_left_goes(tmp_path):
    path = tmp_path / "tuned[1].json"
    part, others = tmp_path / "tuned[1].json.123.abcd.tmp", tmp_path / "tuned.json.123.abcd.tmp"
    for left in (part, others):
        left.write_text("{")
    tuning_file.merge(path, {"device": {"key": {"time_us": 1.0}}})
    assert sorted(x.name for x in tmp_path.iterdir()) == [others.name, path.name, f"{path.name}.lock"]


CHILD = """
import pathlib, sys
from cutjax.runtime import tuning_file
print(flush=True)
sys.stdin.readline()
for i in range(40):
    tuning_file.merge(pathlib.Path(sys.argv[1]), {"device": {f"{sys.argv[2]} {i}": {}}})
"""


def test_processes_and_threads_merge_into_one_file(tmp_path):
    path = tmp_path / "tuned.json"
    run = [sys.executable, "-c", CHILD, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([*run, str(i)], env={**os.environ, "JAX_PLATFORMS": "cpu"}, **pipes) for i in range(2)]
    for child in children:
        child.stdout.readline()  # all are ready

    def merge(name):
        for i in range(40):
            tuning_file.merge(path, {"device": {f"{name} {i}": {}}})

    threads = [threading.Thread(target=merge, args=(name,)) for name in (2, 3)]
    for thread in threads:
        thread.start()
    for child in children:
        child.communicate("go\n")
    for thread in threads:
        thread.join()
    assert [child.returncode for child in children] == [0, 0]
    assert tuning_file.read(path)["device"].keys() == {f"{name} {i}" for name in range(4) for i in range(40)}


def test_readers_see_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    tuning_file.merge(path, {H200: {"a": ENTRY}})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        tuning_file.merge(path, {H200: {"b": ENTRY}})
    assert tuning_file.read(path) == {H200: {"a": ENTRY}}
    assert not list(tmp_path.glob("*.tmp"))


DAMAGED = {
    "empty": b"",
    "cut off": json.dumps({"format": 1, "devices": {H200: {"a": ENTRY}}}).encode()[:-9],
    "no UTF-8": b"\xff\xfe\x00{",
    "deep": b"[" * 100_000,
    "a list": b"[1, 2]",
    "no devices": b'{"format": 1}',
    "a device of numbers": b'{"format": 1, "devices": {"NVIDIA H200": 3}}',
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damaged(tmp_path, data):
    """Ignored with one warning, and set aside by who writes next."""
    path = tmp_path / "tuned.json"
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match=r"tuned kernels in .*tuned.json are ignored: it is damaged"):
        assert tuning_file.read(path) == {}
    assert tuning_file.read(path) == {}  # a second warning would be an error
    with pytest.warns(RuntimeWarning, match=r"is set aside as tuned.json.damaged"):
        tuning_file.merge(path, {H200: {"a": ENTRY}})
    assert tuning_file.read(path) == {H200: {"a": ENTRY}}
    assert (tmp_path / "tuned.json.damaged").read_bytes() == data


@pytest.mark.parametrize("number", [0, 2])
def test_another_format(tmp_path, number):
    """Ignored with a warning, and never overwritten: another version of cutjax reads it."""
    path = tmp_path / "tuned.json"
    text = json.dumps({"format": number, "devices": {H200: {"a": ENTRY}}})
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=f"its format is {number}, this version of cutjax reads 1"):
        assert tuning_file.read(path) == {}
    for write in (tuning_file.check_writable, lambda path: tuning_file.merge(path, {})):
        with pytest.raises(ValueError, match="name another file, or remove it"):
            write(path)
    assert path.read_text() == text


def test_unreadable(tmp_path):
    with pytest.warns(RuntimeWarning, match="it cannot be read"):
        assert tuning_file.read(tmp_path) == {}


def test_where_the_users_file_is(tmp_path, monkeypatch):
    with settings.override(tuning_dir=tmp_path):
        assert tuning_file.user_path() == tmp_path / "tuned.json"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    tuning_file._user_folder.cache_clear()
    with settings.override(tuning_dir=None):
        assert str(tuning_file.user_path()) == "/data/cutjax/tuning/tuned.json"
    tuning_file._user_folder.cache_clear()


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"config": {"family": "sm90"}},
        {"config": None, "time_us": 3.0},
        {"config": {"family": "sm90"}, "time_us": "3"},
        {"config": {"family": "sm90"}, "time_us": -3.0},
        {"config": {"family": "sm90"}, "time_us": 1e999},
        {"config": {"family": ["sm90"]}, "time_us": 3.0},
        {"config": ["sm90"], "time_us": 3.0},
        {"xla_us": 0.0},
        {"xla_us": 3.0, "lead": 0.0},
        {"xla_us": 3.0, "lead": None},
        {"xla_us": None},
    ],
)
def test_damaged_entries_are_none(stored):
    assert tuned.decode(stored) is None


@pytest.mark.parametrize(
    ("times", "xla", "why"),
    [
        ((10.0, None), False, "tuned: 10.0 us"),
        ((10.0, 12.34), False, "tuned: 10.0 us, XLA 12.3 us"),
        ((13.1, 12.3), True, "tuned: XLA 12.3 us, best kernel 13.1 us"),
        ((None, 12.3), True, "tuned: XLA 12.3 us, no kernel"),
    ],
)
def test_entries(times, xla, why):
    config = () if times[0] is None else (("bn", 128), ("family", "sm90"))
    entry = tuned.Entry(config, *times)
    assert (entry.xla_wins, entry.why) == (xla, why)
    for lead in (tuned.SURE, tuned.ONCE):
        entry = tuned.Entry(config, *times, lead)
        assert tuned.decode(json.loads(json.dumps(entry.encoded(date="today")))) == entry


CONFIGS = [cutjax.Config(), cutjax.Config(64, 96, stages=5, schedule="pingpong", raster=-3)]
CONFIGS += [cutjax.MmaConfig(), cutjax.MmaConfig(4, 32, 128, 4, 32, 8, stages=1, swap=True)]


@pytest.mark.parametrize("config", CONFIGS)
def test_configs_are_stored_by_field(config):
    fields = families.fields_of(config)
    assert fields["family"] == ("mma" if isinstance(config, cutjax.MmaConfig) else "sm90")
    assert all(value != getattr(type(config)(), name) for name, value in fields.items() if name != "family")
    assert families.config_of(json.loads(json.dumps(fields))) == config


@pytest.mark.parametrize("fields", [{}, {"family": "sm70"}, {"family": "sm90", "bm": 7}, {"family": "sm90", "x": 1}])
def test_fields_of_no_config(fields):
    assert families.config_of(fields) is None


def test_what_ships_is_valid():
    """The files of the package: read without a warning, and every config in them is one."""
    paths = sorted(tuned.SHIPPED.glob("*.json"))
    assert {path.name for path in paths} == {"h100.json", "h200.json"}
    for path in paths:
        devices = tuning_file.read(path)
        table = tuned.table(path)
        assert table.count == sum(map(len, devices.values()))
        assert path.read_text() == tuning_file.encoded(devices)
        for entries in table.entries.values():
            assert all(families.config_of(dict(entry.config)) for entry in entries.values() if entry.config)
