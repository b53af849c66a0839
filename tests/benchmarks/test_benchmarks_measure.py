"""The measurement of a case, of functions that compile at once."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fake_benchmarks import fake_clock, measured

import cutjax
from benchmarks import report, run, suite, timing
from benchmarks.record import Roofline


@pytest.fixture
def quick(monkeypatch):
    fake_clock(monkeypatch)


@dataclasses.dataclass(frozen=True)
class Tiny:
    name: str = "tiny"
    tags: tuple[str, ...] = ("suite",)


def twice(config=None):
    if config == cutjax.Config(bm=64):
        raise NotImplementedError("no such kernel\nat all")
    return lambda x: (2 if config is None else 2.5) * x


def tiny(peers=None, ours=twice, case=None, **fields):
    def look(args, out, theirs):
        return out - 2 * args[0], out if theirs is None else theirs

    def judge(seen):
        error = float(jnp.max(jnp.abs(seen[0])))
        return error, f"wrong by {error:.2f}" if error > 0 else ""

    def products(case):
        if case.name == "broken":
            raise ValueError("broken")
        targets = {"xla": 1.5, "dense": 0.1}
        return [suite.Product("p", 8, 8, ours, beside, look, judge, targets=targets, yardsticks=("dense",), **fields)]

    beside: dict[str, Any] = {"xla": suite.Peer(twice)} if peers is None else peers
    yardsticks = {"dense": lambda x: x}
    return suite.Suite("tiny", (Tiny(),), lambda case, seed: (jnp.arange(4.0) + seed,), products, lambda _: yardsticks)


def test_a_row(quick):
    (row,) = measured(tiny(), Tiny())
    assert (row.name, row.us, row.error, row.failure) == ("tiny p", len("ours p"), 0, "")
    assert row.ratios == {"xla": 5 / 6, "dense": 5 / 6, "copy": pytest.approx(8 / 6e3 / 4000)}
    assert row.missed == ("xla",)
    assert row.kernel == "ours p"


def test_wrong_and_missing_results_are_not_timed(quick):
    configs = ({"bm": 128}, {"bm": 64}, {"bm": 1})
    right, *others = measured(tiny(), Tiny(), configs=configs)
    assert right.us > 0
    assert [row.variant for row in others] == [json.dumps(config) for config in configs]
    for row, why in zip(
        others, ("wrong by 2", "NotImplementedError: no such kernel", "ValueError: Config"), strict=True
    ):
        assert row.failure.startswith(why)
        assert "\n" not in row.failure
        assert math.isnan(row.us)
        assert row.targets == {}
        assert row.peers["xla"].us > 0
    peers = {"xla": suite.Peer(lambda: lambda x: 3 * x), "standard": suite.Peer(lambda: lambda x: 3 * x, check=False)}
    (row,) = measured(tiny(peers), Tiny())
    assert row.peers["xla"].failure.startswith("wrong by")
    assert row.ratios["peers"] == row.ratios["standard"]


def test_a_result_is_checked_beside_a_peers(quick):
    def broken():
        raise ZeroDivisionError("division by zero")

    (row,) = measured(tiny(beside="xla"), Tiny(), peers=())
    assert row.us > 0
    (row,) = measured(tiny({"xla": suite.Peer(broken)}, beside="xla"), Tiny())
    assert row.failure == "cannot be checked: ZeroDivisionError: division by zero"
    (row,) = measured(tiny({"xla": suite.Peer(lambda: lambda x: 3 * x)}, beside="xla"), Tiny())
    assert row.failure.startswith("cannot be checked: xla p: wrong by")


def test_peers_with_configs(quick):
    def made(factor, name=""):
        return lambda x: factor * x

    configs = [{"factor": 3}, {"factor": 2}, {"factor": 2, "name": "not timed: the name of the first is no longer"}]
    swept = {name: suite.Peer(made, found) for name, found in (("a", configs), ("b", []), ("c", configs[:1]))}
    (row,) = measured(tiny(swept), Tiny())
    assert json.loads(row.peers["a"].kernel) == configs[2]
    assert row.peers["a"].us == len("a p 2")
    assert row.peers["b"].failure == "no config of b divides this problem"
    assert row.peers["c"].failure.startswith("wrong by")
    assert row.fastest == "a"


def test_peers_that_are_run_apart(quick):
    def refuse(roofline):
        return "too long" if roofline.tflops < 1 else ""

    apart = tiny({"xla": suite.Peer(twice, runs=2, refuse=refuse)})
    (row,) = measured(apart, Tiny())
    assert row.peers["xla"].us > 0
    (row,) = measured(apart, Tiny(), roofline=Roofline(1e-9, 4000))
    assert row.peers["xla"].failure == "too long"
    assert row.fastest == ""
    assert row.missed == ()
    assert "xla" not in row.ratios


def test_a_function_that_cannot_be_timed_does_not_end_the_others(quick, monkeypatch):
    fake = timing.measure

    def failing(functions, *args):
        if "xla p" in functions or "dense" in functions:
            raise RuntimeError("the profiler saw something else")
        return fake(functions, *args)

    monkeypatch.setattr(timing, "measure", failing)
    (row,) = measured(tiny(), Tiny())
    assert row.us == len("ours p")
    assert row.peers["xla"].failure.startswith("not timed: RuntimeError: the profiler saw")
    assert "dense" not in row.ratios


def test_a_foreign_library(monkeypatch):
    """Each call of one measurement ends before the next begins, whosever stream it is on, at one clock."""
    ended, together = [], []

    def records(calls):
        together.append({function for function, _ in calls})
        found = []
        for function, args in calls:
            out = function(*args)
            ended.append(not isinstance(out, jax.Array) or out.is_ready())  # pyright: ignore
            found.append(("kernel", 1.0))
        return found

    def library(case, sets):
        return {"p": lambda x: types.SimpleNamespace(contiguous=lambda: 2 * x)}

    monkeypatch.setattr(timing, "input_sets", lambda make: [make(0), make(1)])
    monkeypatch.setattr(timing, "records", records)
    both = tiny({"torch": suite.Peer(None), "xla": suite.Peer(twice)})
    both = dataclasses.replace(both, foreign={"torch": library})
    (row,) = measured(both, Tiny())
    assert row.peers["torch"].us == row.peers["xla"].us == row.us == 1.0
    assert len(together[-1]) == 4
    assert len(ended) > 20
    assert all(ended)
    (row,) = measured(dataclasses.replace(both, foreign={"torch": lambda *_: 1 / 0}), Tiny())
    assert row.peers["torch"].failure == "ZeroDivisionError: division by zero"
    assert row.us == 1.0
    (row,) = measured(both, Tiny(), method="host")
    assert row.peers["torch"].failure.startswith("RuntimeError: torch is timed by its kernels only")
    assert row.ratios["xla"] == row.peers["xla"].us / row.us > 0  # by the clock


def test_a_case_that_fails_does_not_end_the_others(quick, monkeypatch, tmp_path, capsys):
    both = dataclasses.replace(tiny(), cases=(Tiny("broken"), Tiny(), Tiny("untagged", ())))
    monkeypatch.setitem(run.SUITES, "gemm", both)
    path, configs = tmp_path / "out.json", tmp_path / "configs.json"
    configs.write_text('[{"bm": 64}]')
    arguments = ["--out", str(path), "--method", "cupti", "--configs", str(configs)]
    assert run.main(arguments) == 1
    failed, right, pinned = report.read(path)[1]
    assert (failed.case, failed.failure) == ("broken", "ValueError: broken")
    assert right.us > 0
    assert pinned.failure
    assert "p: ratio to xla: geometric mean" not in capsys.readouterr().out  # of one there is none


def test_a_run_is_drawn(quick, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(run.SUITES, "gemm", tiny())
    assert run.main(["--out", str(tmp_path / "out.json"), "--method", "cupti", "--plot"]) == 0
    assert f"wrote {tmp_path / 'out.png'}" in capsys.readouterr().out
    assert (tmp_path / "out.png").stat().st_size > 1000
