"""The parts of benchmarks/ that need no GPU: cases, tolerances, results on disk, plots, the sweep's watchdog."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from benchmarks import calls, cases, compile_cost, grouped, moe, oracle, peers, report, run, sweep, timing
from cutjax.runtime import compiler

ENVIRONMENT = {
    "device": "made up",
    "driver": "1",
    "versions": {"jax": "0", "jaxlib": "0", "plugin": "0", "cutjax": "0", "nvrtc": "0", "cublas": "0"},
    "commit": "0123456789",
    "date": "2000-01-01T00:00:00+00:00",
}
SMALL = cases.Case(64, 48, 32, "tn", (2,), tags=("suite",), target=0.9)


def row(**fields) -> report.Row:
    times = {"us": 10.0, "iqr_us": 0.1, "xla_us": 9.0, "xla_iqr_us": 0.2, "tflops": 100.0}
    shares = {"roofline": 0.5, "ratio": 0.9, "target": 0.97, "error": 1e-3}
    return report.Row(**{"case": "a", "kernel": "k", **times, **shares, **fields})


def test_cases_have_unique_names_known_tags_and_a_kernel():
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)
    assert {tag for case in cases.CASES for tag in case.tags} == set(cases.TAGS)
    for case in cases.CASES:
        assert case.problem.flops == 2 * case.m * case.n * case.k * math.prod(case.batch)
        assert cutjax.candidates(case.problem), case.name
        assert cases.find(case.name) is case


def test_select():
    assert len(cases.select("suite")) == 14
    assert {case.layout for case in cases.select("layouts")} == {"nn", "nt", "tn", "tt"}
    assert len(cases.select("layouts")) == 12
    assert all(64 <= case.batch[0] <= 1024 for case in cases.select("batched"))
    assert cases.select("all") == cases.CASES
    with pytest.raises(ValueError, match="unknown tag"):
        cases.select("suit")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_oracle_passes_rounding_and_nothing_more(dtype):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((128, 256)), rng.standard_normal((256, 128))
    ref = a @ b
    right = ref.astype(np.float32).astype(jnp.dtype(dtype))
    assert oracle.compare(right, ref, 256).ok
    assert not oracle.compare((1.004 * ref).astype(np.float32).astype(jnp.dtype(dtype)), ref, 256).ok
    one_wrong = right.copy()
    one_wrong[3, 5] += jnp.dtype(dtype).type(0.5)
    assert not oracle.compare(one_wrong, ref, 256).ok
    one_wrong[3, 5] = jnp.nan
    assert not oracle.compare(one_wrong, ref, 256).ok


def test_truncation_to_bf16_is_wrong():
    ref = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    truncated = (ref.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(jnp.bfloat16)
    assert not oracle.compare(truncated, ref.astype(np.float64), 1).ok


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_oracle_reference(layout):
    case = cases.Case(5, 3, 4, layout, (2,))
    a, b = np.random.default_rng(0).standard_normal((2, 60), np.float32)
    a, b = (x[: math.prod(shape)].reshape(shape) for x, shape in ((a, case.a_shape), (b, case.b_shape)))
    expected = np.matmul(a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT)
    np.testing.assert_allclose(oracle.reference(jnp.asarray(a), jnp.asarray(b), layout), expected, rtol=1e-5, atol=1e-5)


def test_input_sets_pass_the_l2():
    sets = timing.input_sets(lambda seed: (np.zeros(1 << 20, np.float32), np.full(1 << 20, seed, np.float32)))
    assert len(sets) * 8 * (1 << 20) > 2 * timing.L2_BYTES
    assert len(timing.input_sets(lambda seed: (np.zeros(1, np.float32),))) == 64


def test_a_small_case_on_the_cpu(monkeypatch):
    gemm = cutjax.gemm
    monkeypatch.setattr(cutjax, "gemm", lambda *args, **kwargs: gemm(*args, **{**kwargs, "backend": "xla"}))
    monkeypatch.setattr(timing, "input_sets", lambda make: [make(0), make(1)])
    monkeypatch.setattr(run, "TIMED_US", 1.0)
    (measured,) = run.measure_case(SMALL, [None], report.Roofline(800, 4000), "host")
    assert measured.failure == ""
    assert measured.us > 0
    assert measured.ratio == measured.xla_us / measured.us


def test_a_wrong_result_is_not_timed(monkeypatch):
    gemm = cutjax.gemm
    monkeypatch.setattr(cutjax, "gemm", lambda *args, **kwargs: 1.02 * gemm(*args, **{**kwargs, "backend": "xla"}))
    monkeypatch.setattr(timing, "input_sets", lambda make: [make(0)])
    (measured,) = run.measure_case(SMALL, [None], report.Roofline(800, 4000), "host")
    assert measured.failure.startswith("wrong: relative error")
    assert math.isnan(measured.us)


def test_results_survive_a_round_trip(tmp_path):
    rows = [row(), row(case="b", us=math.nan, ratio=math.nan, target=None, failure="no kernel")]
    path = tmp_path / "results" / "run.json"
    report.write(path, report.document(ENVIRONMENT, "cupti", report.Roofline(800, 4300), rows))
    content, back = report.read(path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["roofline"] == {"tflops": 800, "gb_per_s": 4300}
    assert content["commit"] == ENVIRONMENT["commit"]
    assert back[0] == rows[0]
    assert math.isnan(back[1].ratio)
    assert back[1].target is None
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema"):
        report.read(path)


def test_table(capsys):
    report.print_rows([row(), row(ratio=1.0, case="b")], "made up")
    printed = capsys.readouterr().out
    assert "0.900" in printed
    assert "geometric mean" in printed
    assert "0.949" in printed


def test_roofline_is_the_longer_of_two_times():
    roofline = report.Roofline(tflops=800, gb_per_s=4000)
    assert roofline.us(flops=800_000_000, moved_bytes=1) == pytest.approx(1)
    assert roofline.us(flops=1, moved_bytes=4_000_000) == pytest.approx(1)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    path = tmp_path / "run.json"
    rows = [row(), row(case="b", target=None, ratio=1.1), row(case="c", failure="wrong")]
    report.write(path, report.document(ENVIRONMENT, "cupti", None, rows))
    written = plot.draw(path, (".png", ".svg"))
    assert [file.suffix for file in written] == [".png", ".svg"]
    assert all(file.stat().st_size > 1000 for file in written)
    report.write(path, report.document(ENVIRONMENT, "cupti", None, rows[2:]))
    with pytest.raises(ValueError, match="no timed rows"):
        plot.draw(path)


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
    case = cases.find("1024x1024x1024 nn")
    named = {case.name: case.problem}
    assert len(sweep.plan(named, None, 5)) == 5
    given = [dataclasses.asdict(cutjax.Config()), dataclasses.asdict(cutjax.Config(stages=16))]
    assert [item.config for item in sweep.plan(named, given, 5)] == given[:1]


def test_sweep_problems():
    assert sweep.problems("skinny", (), "gemm") == {case.name: case.problem for case in cases.select("skinny")}
    assert list(sweep.problems("all", ["1024x1024x1024 nn"], "gemm")) == ["1024x1024x1024 nn"]
    found = sweep.problems("qwen,dx", (), "grouped")
    assert [problem.layout for problem in found.values()] == ["nt"] * 3
    (name,) = sweep.problems("all", [f"{cases.GROUPED[0].name} dw"], "grouped")
    assert name == f"{cases.GROUPED[0].name} dw"


GROUPED = cases.Grouped(4, 96, 64, 128, tags=("anchors",))
ROOFLINE = report.Roofline(800, 4000)


def test_grouped_cases():
    assert len({case.name for case in cases.GROUPED}) == len(cases.GROUPED)
    for case in cases.GROUPED:
        assert case.sizes.sum() == case.m
        assert case.sizes.min() >= 0
        assert np.count_nonzero(case.sizes) <= (case.nonempty or case.groups)
        for product in cases.PRODUCTS:
            assert cases.find_grouped(f"{case.name} {product}") == (case, product)
            problem = case.problem(product)
            assert problem.flops == case.flops
            assert problem.groups == case.groups
            assert case.bytes(product) >= 2 * case.m * (case.n + case.k)
            assert case.targets(product)["peers"] == 1.0
    with pytest.raises(ValueError, match="no grouped product"):
        cases.find_grouped("8g 1x1x1 dx")


def test_select_grouped():
    assert cases.select_grouped("all") == (cases.GROUPED, cases.PRODUCTS)
    anchors, products = cases.select_grouped("anchors,dw")
    assert (len(anchors), products) == (5, ("dw",))
    decoding, products = cases.select_grouped("decode,forward,dx")
    assert (len(decoding), products) == (4, ("forward", "dx"))
    assert {case.tokens for case in decoding} == {0, 128}
    assert [case.tokens for case in cases.select_grouped("deepseek")[0]] == [16384, 4096, 128]
    assert len(cases.select_grouped("dx")[0]) == len(cases.GROUPED)
    with pytest.raises(ValueError, match="unknown tag"):
        cases.select_grouped("anchor")


@pytest.fixture
def quick(monkeypatch):
    """Two sets of inputs; every function runs once and takes as long as its name."""

    def measure(functions, sets, reps, method):
        for function in functions.values():
            jax.block_until_ready(function(*sets[0]))
        return {name: timing.Timing((float(len(name)),) * reps, (name,), method) for name in functions}

    monkeypatch.setattr(timing, "input_sets", lambda make: [make(0), make(1)])
    monkeypatch.setattr(timing, "measure", measure)


@pytest.fixture
def on_xla(quick, monkeypatch):
    ours = grouped.ours
    monkeypatch.setattr(grouped, "ours", lambda product, *_: ours(product, None, "xla"))


def test_a_grouped_case_on_the_cpu(on_xla):
    rows = grouped.measure_case(GROUPED, cases.PRODUCTS, ROOFLINE, "host")
    assert [row.product for row in rows] == list(cases.PRODUCTS)
    for row in rows:
        assert row.failure == ""
        assert row.us == len(f"ours {row.product}")
        assert row.error < 1.8e-3
        assert row.ratios["copy"] == pytest.approx(row.gb_per_s / ROOFLINE.gb_per_s)
        assert row.ratios["peers"] == row.peers["xla"].us / row.us
        assert row.ratios["dense"] > 0
        assert set(row.peers) == {"xla", "pallas", "tokamax", "torch"}
        assert row.fastest == "xla"
        assert row.peers["pallas"].failure
        assert "tokamax" in row.peers["tokamax"].failure
        assert "torch" in row.peers["torch"].failure


def test_a_peer_that_would_take_too_long_is_not_run(on_xla, monkeypatch):
    (row,) = grouped.measure_case(GROUPED, ("dw",), report.Roofline(1e-9, 4000), "host", ("xla",))
    assert row.peers["xla"].failure.startswith("not run: 4 times the product")
    assert row.fastest == ""
    assert row.missed == ()
    assert "peers" not in row.ratios
    monkeypatch.setattr(grouped, "XLA_MOST_BYTES", 1)
    (row,) = grouped.measure_case(GROUPED, ("dw",), ROOFLINE, "host", ("xla",))
    assert "masked for every group" in row.peers["xla"].failure


@pytest.mark.parametrize("product", cases.PRODUCTS)
def test_a_wrong_grouped_result_is_seen(product):
    case = cases.Grouped(20, 600, 96, 128)
    (i,) = grouped.inputs(case, 0)
    function, look = jax.jit(grouped.ours(product, None, "xla")), jax.jit(grouped.looks(case, product))
    right = np.asarray(function(i))

    def wrong(out):
        return grouped.judge(case, product, *look(i, jnp.asarray(out)))[1]

    assert wrong(right) == ""
    assert "relative error" in wrong(right * right.dtype.type(1.01))
    row = (7, 11) if product == "dw" else 345
    one = right.copy()
    one[row] = -one[row]
    assert "off by" in wrong(one)
    one[row][5] = np.nan
    assert wrong(one)
    sizes = i["sizes"].at[10].add(-1).at[11].add(1)  # one row by its neighbours' weights
    assert wrong(function({**i, "sizes": sizes}))


def test_a_failing_grouped_kernel_is_reported(quick):
    rows = grouped.measure_case(GROUPED, ("forward", "dw"), ROOFLINE, "host", ("xla",))
    for row in rows:
        assert row.failure.startswith("NotImplementedError")
        assert math.isnan(row.us)
        assert row.peers["xla"].us > 0
        assert row.missed == ()


def test_a_function_that_cannot_be_timed_does_not_end_the_others(on_xla, monkeypatch):
    measure = timing.measure

    def failing(functions, *args):
        if "xla dx" in functions or grouped.DENSE in functions:
            raise RuntimeError("the profiler saw something else")
        return measure(functions, *args)

    monkeypatch.setattr(timing, "measure", failing)
    (row,) = grouped.measure_case(GROUPED, ("dx",), ROOFLINE, "host", ("xla",))
    assert row.us == len("ours dx")
    assert row.peers["xla"].failure.startswith("not timed: RuntimeError: the profiler saw")
    assert "dense" not in row.ratios


class FakeTorch:
    """What benchmarks.peers asks of torch, by jax."""

    int32 = np.int32

    def __init__(self):
        self.cuda = types.SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
        self.nn = types.SimpleNamespace(functional=types.SimpleNamespace())

    def tensor(self, values, **_):
        return np.asarray(values, np.int32)

    def from_dlpack(self, x):
        return np.asarray(x)

    def _grouped_mm(self, a, b, offs):
        sizes = jnp.asarray(np.diff(offs, prepend=0))
        assert offs.dtype == np.int32
        if b.ndim == 3:
            out = cutjax.grouped_gemm(jnp.asarray(a), jnp.asarray(b), sizes, backend="xla")
        else:
            out = cutjax.grouped_outer(jnp.asarray(a.T), jnp.asarray(b), sizes, backend="xla")
        return types.SimpleNamespace(contiguous=lambda: out)


def test_torch_as_a_peer(on_xla, monkeypatch):
    together = []
    measure = timing.measure

    def noting(functions, *args):
        together.append(set(functions))
        return measure(functions, *args)

    monkeypatch.setattr(timing, "measure", noting)
    monkeypatch.setattr(peers, "torch_module", FakeTorch)
    for row in grouped.measure_case(GROUPED, cases.PRODUCTS, ROOFLINE, "cupti", ("torch",)):
        assert row.peers["torch"].us == len(f"torch {row.product}")
        assert row.peers["torch"].kernel == f"torch {row.product}"
        assert row.fastest == "torch"
        assert row.ratios["torch"] == row.ratios["peers"] == row.peers["torch"].us / row.us
    everything = {"dense", *(f"{whose} {product}" for whose in ("ours", "torch") for product in cases.PRODUCTS)}
    assert together == [everything, everything]  # called in turns: at one clock
    monkeypatch.setattr(FakeTorch, "_grouped_mm", lambda self, a, b, offs: 1 / 0)
    for row in grouped.measure_case(GROUPED, ("dx",), ROOFLINE, "cupti", ("torch",)):
        assert row.peers["torch"].failure == "ZeroDivisionError: division by zero"
        assert row.us == len("ours dx")


def test_torch_runs_beside_functions_that_wait(monkeypatch):
    """Each call of one measurement ends before the next begins, whosever stream it is on."""
    ended = []

    def records(calls):
        found = []
        for function, args in calls:
            out = function(*args)
            ended.append(not isinstance(out, jax.Array) or out.is_ready())  # pyright: ignore
            found.append(("kernel", 1.0))
        return found

    monkeypatch.setattr(timing, "_records", records)
    monkeypatch.setattr(peers, "torch_module", FakeTorch)
    ours = grouped.ours
    monkeypatch.setattr(grouped, "ours", lambda product, *_: ours(product, None, "xla"))
    monkeypatch.setattr(grouped, "dense", lambda i: i["x"] @ i["v"])
    (row,) = grouped.measure_case(GROUPED, ("forward",), ROOFLINE, "cupti", ("torch",))
    assert row.peers["torch"].us == row.us == 1.0
    assert row.ratios["dense"] == 1.0
    assert len(ended) > 20
    assert all(ended)


@dataclasses.dataclass(frozen=True)
class FakeRaggedDot:
    """What benchmarks.peers asks of tokamax's implementations, by XLA; "mosaic_gpu" refuses."""

    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config_cls = dict

    def replace(self, config):
        assert all(isinstance(size, int) for size in config.values())
        return FakeRaggedDot(self.name, config)

    def __call__(self, a, b, *, group_sizes, ragged_dot_dimension_numbers):
        if self.name == "mosaic_gpu":
            raise NotImplementedError("Not supported on cpu.")
        assert self.config["block_m"] in (64, 128, 256)
        return jax.lax.ragged_dot_general(a, b, group_sizes, ragged_dot_dimension_numbers)


def test_tokamax_as_a_peer(on_xla, monkeypatch):
    parsed = []
    flags = types.SimpleNamespace(FLAGS=types.SimpleNamespace(mark_as_parsed=lambda: parsed.append(True)))
    implementations = {name: FakeRaggedDot(name) for name in ("triton", "mosaic_gpu")}
    monkeypatch.setitem(sys.modules, "absl.flags", flags)
    api = types.SimpleNamespace(IMPLEMENTATIONS=implementations)
    monkeypatch.setitem(sys.modules, "tokamax._src.ops.ragged_dot.api", api)
    for row in grouped.measure_case(GROUPED, cases.PRODUCTS, ROOFLINE, "host", ("tokamax",)):
        peer = row.peers["tokamax"]
        assert peer.failure == ""
        assert peer.us == len(f"tokamax {row.product} 0")
        assert json.loads(peer.kernel)["implementation"] == "triton"
        assert row.fastest == "tokamax"
    assert parsed
    monkeypatch.setitem(implementations, "triton", FakeRaggedDot("mosaic_gpu"))
    (row,) = grouped.measure_case(GROUPED, ("dw",), ROOFLINE, "host", ("tokamax",))
    assert row.peers["tokamax"].failure == "NotImplementedError: Not supported on cpu."


def test_tokamax_tiles_follow_the_size_of_groups():
    for case in cases.GROUPED:
        for product in cases.PRODUCTS:
            configs = peers.tokamax_configs(case, product)
            assert 2 <= len(configs) <= 4
            tiles = {config["block_m"] for config in configs}
            assert product == "dw" or tiles == {64 if case.m < 64 * case.groups else 128}
            assert len({config["implementation"] for config in configs}) == 1 + (product != "dw")


def test_pallas_configs_divide_every_case():
    for case in cases.GROUPED:
        for product in cases.PRODUCTS:
            configs = peers.pallas_configs(case, product)
            assert 1 <= len(configs) <= 6
            rows, columns = {"forward": (1, case.n), "dx": (1, case.k), "dw": (case.k, case.n)}[product]
            for config in configs:
                assert columns % (config["block_n"] * config["grid_block_n"]) == 0
                assert product != "dw" or rows % config["block_m"] == 0


def test_grouped_results_survive_a_round_trip(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    seen = {"xla": grouped.Peer(failure="not run"), "torch": grouped.Peer(12.0, 0.1, "k")}
    ratios = {"dense": 0.95, "peers": 1.2, "copy": 0.3, "torch": 1.2}
    targets = {"peers": 1.0, "torch": 1.25}
    good = grouped.Row("8g 1x2x3", "dw", "kernel", 10.0, 0.1, 700.0, 900.0, 1e-3, ratios, targets, seen)
    bad = grouped.Row("8g 1x2x3", "dx", targets=targets, failure="no kernel")
    path = tmp_path / "grouped.json"
    report.write(path, grouped.document(ENVIRONMENT, "cupti", ROOFLINE, [good, bad]))
    content, back = grouped.read(path)
    assert content["op"] == "grouped"
    assert back[0].missed == ("torch",)
    assert math.isnan(back[0].peers["xla"].us)
    assert dataclasses.replace(back[0], peers={}) == dataclasses.replace(good, peers={})
    assert back[1].failure == "no kernel"
    assert all(file.stat().st_size > 1000 for file in plot.draw(path, (".png", ".svg")))
    grouped.print_rows(back, "made up")
    printed = capsys.readouterr().out
    assert "torch 1.25" in printed
    assert "dw to torch: geometric mean 1.200" in printed
    report.write(path, report.document(ENVIRONMENT, "cupti", None, []))
    with pytest.raises(ValueError, match="op grouped"):
        grouped.read(path)


def test_the_grouped_command(on_xla, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases, "GROUPED", (GROUPED,))
    monkeypatch.setattr(run, "measure_roofline", lambda method: ROOFLINE)
    path = tmp_path / "out.json"
    arguments = ["--op", "grouped", "--tag", "anchors,dx", "--out", str(path), "--commit", "c", "--peers", "xla"]
    assert run.main(arguments) == 0
    assert [row.name for row in grouped.read(path)[1]] == [f"{GROUPED.name} dx"]
    assert "dx to peers" in capsys.readouterr().out.replace("forward and dx", "dx")


@pytest.mark.parametrize("product", cases.PRODUCTS)
def test_sweep_of_a_grouped_product(product, quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases, "GROUPED", (GROUPED,))
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
    monkeypatch.setattr(cases, "CASES", (SMALL,))
    path = tmp_path / "sweep.jsonl"
    sweep.work([sweep.Item(SMALL.name, dataclasses.asdict(cutjax.Config()))], path)
    (row,) = [line for line in sweep.lines(path) if "case" in line]
    assert row["ratio"] == pytest.approx(row["xla_us"] / row["us"])


LAYER = cases.Moe("small", 4, 64, 32, 48, 2, target=3.0)


def test_select_moe():
    assert cases.select_moe("all") == cases.MOE
    assert [case.name for case in cases.select_moe("deepseek")] == ["deepseek"]
    with pytest.raises(ValueError, match="unknown tag"):
        cases.select_moe("deep")


def test_xla_gets_as_many_tokens_as_fit():
    mixtral, deepseek = cases.select_moe("mixtral")[0], cases.select_moe("deepseek")[0]
    assert moe.xla_tokens(mixtral) == mixtral.tokens
    few = moe.xla_tokens(deepseek)
    assert 2 * 256 * 8 * few * 7168 <= moe.XLA_MOST_BYTES < 2 * 2 * 256 * 8 * few * 7168


def test_a_layer_of_experts_on_the_cpu(monkeypatch):
    monkeypatch.setattr(moe, "REPS", 1)
    monkeypatch.setattr(moe, "XLA_MOST_BYTES", 2 * 4 * 16 * 2 * 48)
    for row in moe.measure_case(LAYER, "host", backend="xla"):
        assert row.failure == ""
        assert row.xla_tokens == 16
        assert row.error < moe.RELATIVE
        assert row.ratio == pytest.approx(row.xla_us / row.same_us)
        assert row.peak_mib > 0
        assert row.same_us != row.us


def test_a_wrong_layer_is_seen(monkeypatch):
    monkeypatch.setattr(moe, "REPS", 1)
    monkeypatch.setattr(moe, "ours", lambda case, _: lambda *args: 1.1 * cutjax.moe(*args, k=2, backend="xla"))
    (row,) = moe.measure_case(LAYER, "host", ("forward",))
    assert "wrong: relative error 0.1" in row.failure


def test_the_moe_command(monkeypatch, tmp_path, capsys):
    ours = moe.ours
    monkeypatch.setattr(moe, "REPS", 1)
    monkeypatch.setattr(moe, "ours", lambda case, _: ours(case, "xla"))
    monkeypatch.setattr(cases, "MOE", (LAYER,))
    path = tmp_path / "moe.json"
    assert run.main(["--op", "moe", "--tag", "small", "--out", str(path), "--commit", "c"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["small forward", "small fwd+bwd"]
    assert all(row["same_us"] == row["us"] and row["xla_tokens"] == 64 for row in rows)
    assert "small fwd+bwd" in capsys.readouterr().out


@pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
def test_the_compile_command(monkeypatch, tmp_path, capsys):
    functions = {name: compile_cost.epilogues()[name] for name in ("relu", "dropout")}
    monkeypatch.setattr(compile_cost, "epilogues", lambda: functions)
    path = tmp_path / "out.json"
    assert run.main(["--op", "compile", "--out", str(path), "--commit", "c"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows[::2]] == [f"{name} {d}" for name in functions for d in ("float32", "bfloat16")]
    assert all(row["cubin_bytes"] > 10_000 and row["spill_bytes"] == 0 < row["cpu_s"] for row in rows)
    assert "dropout bfloat16" in capsys.readouterr().out


def test_forms_of_epilogues(capsys):
    own = {name: calls.ships(name) for name in calls.EPILOGUES}
    assert own["gelu"] == own["silu"] == "inlined"
    assert own["dropout"] == own["sin"] == "called"
    row = calls.Row("1x2x3 gelu", "inlined", 10.0, 0.1, 11.0, 0.1, 9.5, 10 / 11)
    assert calls.document(ENVIRONMENT, "cupti", [row])["op"] == "calls"
    calls.print_rows([row])
    assert "inlined ships: 0.909 of the other" in capsys.readouterr().out
