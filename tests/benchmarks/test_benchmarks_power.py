"""Windows in which power limits the clock: what is timed, a run with a driver that records, what that says."""

from __future__ import annotations

import ctypes
import json

import pytest
from fake_driver import build, fake_cubin

import cutjax
from benchmarks import direct_bench, driver, power, timing
from benchmarks.cases import Dense
from benchmarks.direct import problem_of
from cutjax.kernels.device import named
from cutjax.runtime.compiler import Cubin, Resources

H200 = named("H200")


def test_pairs_and_tiles_that_load_little_are_timed_with_lines_that_leave_first_and_without():
    found = power.variants(problem_of(Dense(8192, 8192, 8192), H200), 8)
    sizes = {(x.bm, x.bn, x.cluster_m, x.cluster_n) for x in found}
    assert sizes.issuperset(power.TILES)
    assert {x.evict_first for x in found} == {"", "bd", "d", "ad"}
    assert sum(x.evict_first == "bd" for x in found) == 8
    first = cutjax.candidates(problem_of(Dense(8192, 8192, 8192), H200))[0]
    assert first in found
    assert {x.raster for x in found if (x.bm, x.bn, x.swap) == (first.bm, first.bn, first.swap)} >= {
        first.raster,
        -first.raster,
    }


def test_where_stores_take_time_orders_of_tiles_are_timed():
    found = power.variants(problem_of(Dense(4096, 4096, 64, "nt", (12,)), H200), 8)
    assert {x.evict_first for x in found} == {"", "d"}
    assert {x.raster for x in found} >= {1, 2, -1, -4}


def test_windows_are_as_long_as_asked():
    calls = []
    us = power.held_us(lambda: calls.append(1), lambda: calls.append(2), 100.0, 0.01)
    assert calls == [1] * 100 + [2]
    assert us > 0


def test_a_run(tmp_path, monkeypatch, capsys):
    path = str(build(tmp_path))
    ctypes.CDLL(path).fake_reset()
    monkeypatch.setattr(driver, "PATH", path)
    cubin = lambda source, *, name, arch: Cubin(fake_cubin(name.encode()), Resources(*[None] * 5), "", 0.0, False)  # noqa: E731
    monkeypatch.setattr("cutjax.kernels.base.compile_kernel", cubin)
    monkeypatch.setattr(direct_bench, "compile_kernel", cubin)
    monkeypatch.setattr(timing, "L2_BYTES", 1 << 18)
    monkeypatch.setattr(direct_bench, "RING_BYTES", 1 << 18)
    monkeypatch.setattr(power, "LEAST_US", 0.0)
    monkeypatch.setattr(power, "PAUSE_S", 0.0)
    monkeypatch.setattr(power, "held_us", lambda start, wait, us, seconds: (start(), wait(), 1e6 * seconds)[2])
    cases = [Dense(128, 192, 1024), Dense(256, 128, 64)]
    monkeypatch.setattr(power, "products", lambda *_: cases)
    out = tmp_path / "x.json"
    argv = ["--salts", "a", "--window", "0.001", "--threads", "1", "--most", "3", "--commit", "c", "--out", str(out)]
    assert power.main(argv) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["case"] for row in rows} == {case.name for case in cases}
    assert not [row["failed"] for row in rows if row["failed"]]
    for row, case in ((row, next(x for x in cases if x.name == row["case"])) for row in rows):
        assert [power.config_of(x) for x in row["configs"]] == power.variants(problem_of(case, H200), 3)
        assert [x["us"] for x in row["configs"]] == pytest.approx([1000.0] * len(row["configs"]))
    printed = capsys.readouterr().out
    assert 'evict_first="bd"' in printed
    assert "within 0.010 by L2: a pick takes 1.0000" in printed
    assert power.main(["--read", str(out)]) == 0
