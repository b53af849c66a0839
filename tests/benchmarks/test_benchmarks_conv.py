"""Convolutions of networks that benchmarks measure: their sizes, what is computed, how a run is watched and told."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import conv_programs, conv_report, conv_worker, convolutions, networks, report, sweep, timing
from benchmarks.ops import conv

ONE = networks.Conv("net 3x3 n2 fwd", "fwd", 2, (6, 7), 4, 8, (3, 3), (2, 2), "SAME", (1, 1), 1, False)
UP = dataclasses.replace(ONE, name="net up n2 fwd", kernel=(4, 4), padding="SAME", transposed=True)
DEEP = dataclasses.replace(ONE, name="net dw n2 fwd", groups=4, strides=(1, 1))


def of_kind(case, kind):
    return dataclasses.replace(case, kind=kind, name=case.name.replace("fwd", kind))


CASES = [of_kind(case, kind) for case in (ONE, UP, DEEP) for kind in ("fwd", "dx", "dw")]


def test_a_sample_is_the_same_for_a_salt_and_names_are_unique():
    cases = list(networks.convolutions())
    assert len({case.name for case in cases}) == len(cases) == 651
    assert [case.name for case in networks.sample(2, "public")] == [case.name for case in networks.sample(9, "public")][
        :2
    ]
    assert networks.sample(9, "public") != networks.sample(9, "other")


def test_sizes_are_those_of_jax():
    for case in cases_of_layers():
        x, w = (jax.ShapeDtypeStruct(case.shapes[name], jnp.bfloat16) for name in "xw")
        assert jax.eval_shape(conv_programs.product(case, lax.conv_general_dilated), x, w).shape == case.shapes["y"], (
            case.name
        )
    ways = {(case.padding, case.strides, case.kernel) for case in cases_of_layers() if case.transposed}
    for padding, strides, kernel in ways:
        found = {"spatial": (5,) * len(kernel), "padding": padding, "strides": strides, "kernel": kernel}
        case = dataclasses.replace(UP, **found, dilation=(1,) * len(kernel))
        x, w = (jax.ShapeDtypeStruct(case.shapes[name], jnp.bfloat16) for name in "xw")
        numbers = case.options["dimension_numbers"]
        transpose = functools.partial(lax.conv_transpose, strides=strides, padding=padding, dimension_numbers=numbers)
        assert jax.eval_shape(transpose, x, w).shape == case.shapes["y"]


def cases_of_layers():
    return [case for case in networks.convolutions() if case.kind == "fwd"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_product_is_that_of_its_kind(case):
    forward = of_kind(case, "fwd")
    rng = np.random.default_rng(0)
    x, w, y = (rng.integers(-2, 3, case.shapes[name]).astype(np.float32) for name in "xwy")
    product = conv_programs.product(case, lax.conv_general_dilated, jnp.float32)
    given = {"x": x, "w": w, "y": y}
    got = product(*(given[name] for name in case.operands))
    assert got.shape == case.shapes[case.result]
    out, pull = jax.vjp(conv_programs.product(forward, lax.conv_general_dilated, jnp.float32), x, w)
    np.testing.assert_array_equal(got, {"y": out, "x": pull(y)[0], "w": pull(y)[1]}[case.result])


def fake(monkeypatch, us):
    """Kernels of made-up names and times: XLA's takes ``us``, others half as long."""
    monkeypatch.setattr(conv_programs.cutjax, "conv_general_dilated", lax.conv_general_dilated, raising=False)
    monkeypatch.setattr(conv_programs, "ways", lambda case, most: ways_of(case, doubled(case)))
    monkeypatch.setattr(conv_programs, "predicted", lambda case: {"kernel_us": 1.0, "xla_us": 2.0})
    monkeypatch.setattr(timing, "input_sets", lambda make: [make(0), make(1)])

    def records(calls, warm_up=None):
        made = []
        for function, args in calls:
            jax.block_until_ready(function(*args))
            doubles = "multiply" in function.as_text()
            made.append(("sm90_x" if doubles else "cudnn", us / 2 if doubles else us))
        return made

    monkeypatch.setattr(timing, "records", records)


def ways_of(case, kernel):
    fn = conv_programs.ours(case)
    return {"xla": conv_programs.Way(fn), "auto": conv_programs.Way(fn), "kernel": conv_programs.Way(kernel)}


def doubled(case, by=2):
    """The same product, told apart from XLA's by its text."""
    fn = conv_programs.ours(case)
    return lambda *arrays: fn(arrays[0] * by, arrays[1]) * (0.5 if by == 2 else 1)


def test_worker_and_report(monkeypatch, tmp_path):
    fake(monkeypatch, 10.0)
    monkeypatch.setattr(networks, "sample", lambda count, salt: tuple(CASES))
    monkeypatch.setattr(conv_worker, "FIRST", 2)
    path = tmp_path / "rows.jsonl"
    plan = conv_worker.Plan("s", 9, tuple(case.name for case in CASES), {CASES[0].name: ["kernel"]}, math.inf, 2, 2)
    conv_worker.work(plan, conv_worker.Log(path))
    rows = convolutions.rows(path, CASES)
    assert [row.case for row in rows] == [case.name for case in CASES]
    assert convolutions.progress(path) == ({case.name for case in CASES}, {})
    skipped, *rest = rows
    assert skipped.peers["kernel"].failure == conv_programs.ENDED
    assert skipped.peers["tuned"].us == 10
    for row in rest:
        assert (row.us, row.peers["xla"].us, row.peers["kernel"].us, row.peers["tuned"].us) == (10, 10, 5, 5)
        assert row.figures["runs"] == "XLA"
        assert not row.failure
    out = tmp_path / "out.json"
    assert convolutions.blame(path) == []
    args = convolutions.arguments(["--count", "9", "--salt", "s", "--commit", "abc"])
    convolutions.write(out, path, CASES, args)
    content, read = report.read(out)
    assert content["commit"] == "abc"
    assert len(read) == 9
    text = conv_report.text(read, {case.name: case for case in CASES})
    assert "| weight gradient (4.5) | 3 |" in text
    assert "9 of 9 measured" in text
    names = {case.name for case in CASES}
    (given,) = convolutions.arguments(["--except", str(out)]).without
    sample = networks.sample(400, "s")
    left = convolutions.unseen(400, "s", [given])
    assert left == [case for case in sample if case.name not in names]
    assert conv_report.draw(out).stat().st_size > 10_000


def test_a_wrong_result_is_not_timed(monkeypatch):
    fake(monkeypatch, 10.0)
    monkeypatch.setattr(conv_programs, "ways", lambda case, most: ways_of(case, doubled(case, 3)))
    (row,) = conv.measure_case(of_kind(ONE, "dw"), None)  # pyright: ignore
    assert row.us == 10
    assert row.peers["kernel"].failure.startswith("wrong: ")
    assert row.peers["tuned"].us == 10


def test_cudnn_s_kernels_are_not_taken_for_ours():
    theirs = "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32"
    for names, ran in (([theirs], "XLA"), ([theirs, "sm90_bf16_nn_128x64x64_s8"], "kernel"), ([], "")):
        assert conv.runs({"kernels": names}) == ran


def test_the_fastest_kernel_must_surely_lead():
    def results(kernel):
        return {"xla": {"us": 10.0}, "auto": {"us": 1.0}, "kernel": {"us": 11.0}, "kernel 1": {"us": kernel}}

    assert [conv.fastest(results(us)) for us in (9.9, 9.7)] == ["xla", "kernel 1"]
    assert conv.fastest({"kernel": {"us": 1.0}}) == "kernel"
    assert conv.fastest({"xla": {"failure": ""}}) == ""


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_blame(tmp_path):
    path = tmp_path / "rows.jsonl"
    started = {"compiling": ["a", "b"]}
    assert convolutions.blame(write(path, started, {"prepared": "a"})) == [("b", "ours")]
    both = [started, {"prepared": "a"}, {"prepared": "b"}, {"compiled": ["b", "xla"]}]
    assert convolutions.blame(write(path, *both)) == [("a", "xla")]
    running = [*both, {"compile_s": 1.0}, {"begin": ["a", "kernel"]}]
    assert convolutions.blame(write(path, *running)) == [("a", "ours")]
    assert convolutions.blame(write(path, *running, {"begin": []})) == []


class Worker:
    """A worker that writes a plan's first line, then ends as told; the second one finishes."""

    ended = 0

    def __init__(self, command):
        *_, plan, rows = command
        self.plan, self.returncode = json.loads(pathlib.Path(plan).read_text()), None
        Worker.ended += 1
        with open(rows, "a") as file:
            for name in self.plan["names"]:
                dies = Worker.ended == 1 and name == "b"
                line = {"begin": [name, "kernel"]} if dies else {"case": name, "results": {}, "predicted": {}}
                file.write(json.dumps(line) + "\n")
                if dies:
                    break
        self.returncode = 1 if Worker.ended == 1 else 0
        self.skip = self.plan["skip"]

    def poll(self):
        return self.returncode

    def kill(self):
        raise AssertionError("nothing to kill")


def test_a_worker_that_dies_is_followed_by_one_that_skips(monkeypatch, tmp_path):
    made = []
    Worker.ended = 0
    monkeypatch.setattr(convolutions.subprocess, "Popen", lambda command: made.append(Worker(command)) or made[-1])
    path = tmp_path / "rows.jsonl"
    plan = conv_worker.Plan("s", 3, ("a", "b", "c"), {}, time.time() + 100, 1, 1)
    convolutions.watch(plan, path)
    assert [worker.plan["names"] for worker in made] == [["a", "b", "c"], ["b", "c"]]
    assert made[1].skip == {"b": ["ours"]}
    assert convolutions.progress(path)[0] == {"a", "b", "c"}
    assert any("status 1" in line.get("why", "") for line in sweep.lines(path))


def test_no_worker_begins_near_the_end(monkeypatch, tmp_path):
    monkeypatch.setattr(convolutions.subprocess, "Popen", lambda command: pytest.fail("started"))
    convolutions.watch(conv_worker.Plan("s", 1, ("a",), {}, time.time() + 1, 1, 1), tmp_path / "rows.jsonl")
