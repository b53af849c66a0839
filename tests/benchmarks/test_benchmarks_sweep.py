"""The sweep over configs: its plan, its watchdog, its worker."""

from __future__ import annotations

import dataclasses
import sys
import time

import pytest
from fake_benchmarks import fake_clock

import cutjax
from benchmarks import cases, sweep
from benchmarks.ops import gemm, grouped


@pytest.fixture
def quick(monkeypatch):
    fake_clock(monkeypatch)


GROUPED = grouped.Grouped(4, 96, 64, 128, tags=("anchors",))
SMALL = cases.Dense(64, 48, 32, "tn", (2,), tags=("suite",), target=0.9)
PRODUCTS = grouped.PRODUCTS


WORKER = """
import json, os, sys, time
todo, path = sys.argv[1:]
with open(path, "a") as file:
    for item in json.load(open(todo)):
        key = json.dumps([item["case"], item["config"]], sort_keys=True)
        print(json.dumps({"begin": [key]}), file=file, flush=True)
        if item["config"]["bm"] == 1:
            time.sleep(3600)
        if item["config"]["bm"] == 2:
            os._exit(3)
        print(json.dumps({**item, "us": 1.0, "ratio": 1.0}), file=file, flush=True)
"""


def test_sweep_survives_a_hang_and_a_crash(tmp_path, capsys, monkeypatch):
    items = [sweep.Item("case", {"bm": bm}) for bm in range(4)]
    path = tmp_path / "sweep.jsonl"

    class Clock:
        """Time passes only while the worker hangs, so that a busy machine looks like no other hang."""

        seconds = 0
        sleep = time.sleep

        def monotonic(self):
            written = path.read_text().splitlines() if path.exists() else []
            self.seconds += bool(written) and "begin" in written[-1] and '\\"bm\\": 1}' in written[-1]
            return self.seconds

    monkeypatch.setattr(sweep, "time", Clock())
    sweep.watch(items, path, [sys.executable, "-c", WORKER], compile_s=1, step_s=1)
    rows = {line["config"]["bm"]: line for line in sweep.lines(path) if "case" in line}
    assert rows[0]["us"] == rows[3]["us"] == 1.0
    assert "hang" in rows[1]["failure"]
    assert "status 3" in rows[2]["failure"]
    sweep.show(path)
    assert "2 timed, 2 failed" in capsys.readouterr().out


def test_sweep_gives_up_when_workers_cannot_start(tmp_path):
    with pytest.raises(RuntimeError, match="measured nothing"):
        sweep.watch([sweep.Item("case", {})], tmp_path / "sweep.jsonl", [sys.executable, "-c", "raise SystemExit(1)"])


def test_sweep_plan_takes_only_configs_that_serve():
    case = cases.find(gemm.CASES, "1024x1024x1024 nn")
    named = {case.name: case.problem}
    assert len(sweep.plan(named, None, 5)) == 5
    given = [dataclasses.asdict(cutjax.Config()), dataclasses.asdict(cutjax.Config(stages=16))]
    assert [item.config for item in sweep.plan(named, given, 5)] == given[:1]


def test_sweep_problems():
    assert sweep.problems("skinny", (), "gemm") == {case.name: case.problem for case in gemm.SUITE.select("skinny")[0]}
    assert list(sweep.problems("all", ["1024x1024x1024 nn"], "gemm")) == ["1024x1024x1024 nn"]
    found = sweep.problems("qwen,dx", (), "grouped")
    assert [problem.layout for problem in found.values()] == ["nt"] * 3
    (name,) = sweep.problems("all", [f"{grouped.GROUPED[0].name} dw"], "grouped")
    assert name == f"{grouped.GROUPED[0].name} dw"


@pytest.mark.parametrize("product", ["dx", "dw"])
def test_sweep_of_a_grouped_product(product, quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(grouped, "GROUPED", (GROUPED,))
    items = [sweep.Item(f"{GROUPED.name} {product}", dataclasses.asdict(cutjax.Config(bn=bn))) for bn in (128, 256)]
    items.append(sweep.Item(f"{GROUPED.name} {product}", {"bm": 1}))
    path = tmp_path / "sweep.jsonl"
    sweep.work(items, path)
    rows = [line for line in sweep.lines(path) if "case" in line]
    assert [row.get("us", 0) > 0 for row in rows] == [False, True, True]
    assert "bm=1" in rows[0]["failure"]
    sweep.show(path)
    assert "2 timed, 1 failed" in capsys.readouterr().out


def test_sweep_of_a_dense_product(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(gemm, "CASES", (SMALL,))
    path = tmp_path / "sweep.jsonl"
    sweep.work([sweep.Item(SMALL.name, dataclasses.asdict(cutjax.Config()))], path)
    (row,) = [line for line in sweep.lines(path) if "case" in line]
    assert row["ratio"] == pytest.approx(row["xla_us"] / row["us"])
