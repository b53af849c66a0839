"""Parts of benchmarks/ that need no GPU: cases, the runner with a fake clock, results on disk, the sweep's watchdog."""

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
from benchmarks import cases, measure, oracle, peers, report, run, suite, sweep, tables, timing
from benchmarks.ops import calls, compile_cost, fused, gemm, grouped, launch, models, moe, syrk
from benchmarks.report import Figures, Row
from cutjax.runtime import compiler

ENVIRONMENT = {
    "device": "made up",
    "driver": "1",
    "versions": {"jax": "0", "jaxlib": "0", "plugin": "0", "cutjax": "0", "nvrtc": "0", "cublas": "0"},
    "commit": "0123456789",
    "date": "2000-01-01T00:00:00+00:00",
}
ROOFLINE = report.Roofline(800, 4000)
SMALL = cases.Dense(64, 48, 32, "tn", (2,), tags=("suite",), target=0.9)
GROUPED = grouped.Grouped(4, 96, 64, 128, tags=("anchors",))
LAYER = moe.Moe("small", 4, 64, 32, 48, 2, target=3.0)
PRODUCTS = grouped.PRODUCTS


@pytest.fixture
def quick(monkeypatch):
    """Two sets of inputs; every function runs once and takes as long as its name."""

    def fake(functions, sets, reps, method):
        for function in functions.values():
            jax.block_until_ready(function(*sets[0]))
        return {name: timing.Timing((float(len(name)),) * reps, (name,), method) for name in functions}

    monkeypatch.setattr(timing, "input_sets", lambda make: [make(0), make(1)])
    monkeypatch.setattr(timing, "measure", fake)
    monkeypatch.setattr(measure, "roofline", lambda method: ROOFLINE)


@pytest.fixture
def on_xla(quick, monkeypatch):
    """Our functions through XLA."""

    def through_xla(fn):
        return lambda *args, **kwargs: fn(*args, **{**kwargs, "backend": "xla"})

    for name in ("gemm", "grouped_gemm", "grouped_outer", "moe"):
        monkeypatch.setattr(cutjax, name, through_xla(getattr(cutjax, name)))
    # It may not be there yet, and has its own tests.
    monkeypatch.setattr(cutjax, "syrk", lambda a: oracle.xla("nt", a.dtype)(a, a), raising=False)


def measured(s: suite.Suite, case: Any, **fields: Any) -> list[Row]:
    return measure.measure_case(s, case, suite.Run(**{"method": "cupti", "roofline": ROOFLINE, **fields}))


# Cases.


def test_dense_cases_have_unique_names_and_a_kernel():
    assert len({case.name for case in gemm.CASES}) == len(gemm.CASES)
    for case in gemm.CASES:
        assert case.problem.flops == 2 * case.m * case.n * case.k * math.prod(case.batch)
        assert cutjax.candidates(case.problem), case.name
        assert cases.find(gemm.CASES, case.name) is case
    with pytest.raises(ValueError, match="no case named"):
        cases.find(gemm.CASES, "1x1x1 nn")


def test_cases_have_unique_names():
    for s in run.SUITES.values():
        assert len({(case.name, *case.tags) for case in s.cases}) == len(s.cases) > 0


def test_select():
    def select(tags):
        return gemm.SUITE.select(tags)[0]

    assert len(select("suite")) == 14
    assert {case.layout for case in select("layouts")} == {"nn", "nt", "tn", "tt"}
    assert len(select("layouts")) == 12
    assert all(64 <= case.batch[0] <= 1024 for case in select("batched"))
    assert select("all") == gemm.CASES
    assert select("launch") == select("launch,compile") == ()
    assert select("launch,skinny") == select("skinny")
    with pytest.raises(ValueError, match="unknown tag"):
        select("suit")
    assert fused.SUITE.select("suite") == fused.SUITE.select("all") == (fused.FUSED, None)
    assert {case.kind for case in fused.SUITE.select("gated,mlp")[0]} == {"gated", "mlp"}
    assert moe.SUITE.select("all") == (moe.MOE, None)
    assert [case.name for case in moe.SUITE.select("deepseek,forward")[0]] == ["deepseek"]


def test_select_grouped():
    select = grouped.SUITE.select
    assert select("all") == (grouped.GROUPED, None)
    anchors, products = select("anchors,dw")
    assert (len(anchors), products) == (5, ("dw",))
    decoding, products = select("decode,forward,dx")
    assert (len(decoding), products) == (4, ("forward", "dx"))
    assert {case.tokens for case in decoding} == {0, 128}
    assert [case.tokens for case in select("deepseek")[0]] == [16384, 4096, 128]
    assert select("dx") == (grouped.GROUPED, ("dx",))


def test_grouped_cases():
    for case in grouped.GROUPED:
        assert case.sizes.sum() == case.m
        assert case.sizes.min() >= 0
        assert np.count_nonzero(case.sizes) <= (case.nonempty or case.groups)
        for product in PRODUCTS:
            assert grouped.find_grouped(f"{case.name} {product}") == (case, product)
            problem = case.problem(product)
            assert problem.flops == case.flops
            assert problem.groups == case.groups
            assert case.bytes(product) >= 2 * case.m * (case.n + case.k)
            assert case.targets(product)["peers"] == 1.0
    with pytest.raises(ValueError, match="no grouped product"):
        grouped.find_grouped("8g 1x1x1 dx")


def test_a_salt_draws_the_same_sizes_again_and_another_draws_others():
    drawn = models.sample(50, "public")
    assert drawn[0].of == "qwen3-32b head 1000 dx"
    assert drawn == models.sample(300, "public")[:50]
    assert len({(case.m, case.n, case.k, case.layout) for case in drawn}) == 50
    assert len({*drawn} & {*models.sample(50, "another")}) < 10
    assert {case.layout for case in drawn} == {"nn", "nt", "tn"}


def test_xla_gets_as_many_tokens_as_fit():
    mixtral, deepseek = moe.MOE
    assert moe.xla_tokens(mixtral) == mixtral.tokens
    few = moe.xla_tokens(deepseek)
    assert 2 * 256 * 8 * few * 7168 <= moe.XLA_MOST_BYTES < 2 * 2 * 256 * 8 * few * 7168


# Right and wrong results.


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
    case = cases.Dense(5, 3, 4, layout, (2,))
    a, b = np.random.default_rng(0).standard_normal((2, 60), np.float32)
    a, b = (x[: math.prod(shape)].reshape(shape) for x, shape in ((a, case.a_shape), (b, case.b_shape)))
    expected = np.matmul(a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT)
    np.testing.assert_allclose(oracle.reference(jnp.asarray(a), jnp.asarray(b), layout), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_wrong_grouped_result_is_seen(product):
    case = grouped.Grouped(20, 600, 96, 128)
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


def test_a_wrong_symmetric_result_is_seen():
    case = syrk.Symmetric(96, 64, (2,))
    (product,) = syrk.products(case)
    args = case.inputs(0)
    look = jax.jit(product.look)
    right = np.array(oracle.xla("nt", jnp.bfloat16)(*args, *args))

    def wrong(out):
        return product.judge(look(args, jnp.asarray(out), None))[1]

    assert wrong(right) == ""
    one = right.copy()
    one[1, 5, 7] *= 2
    assert "worst element" in wrong(one)
    one[1, 5, 7] = right[1, 5, 7] + right.dtype.type(1e-4)  # no further off than rounding, but not its mirror image
    one[1, 7, 5] = right[1, 5, 7] - right.dtype.type(1e-4)
    assert wrong(one) == "wrong: not symmetric"
    one = right.copy()
    one[0, 3, 3] *= one.dtype.type(1.01)
    assert "diagonal" in wrong(one)


def test_a_wrong_result_is_not_timed(on_xla, monkeypatch):
    right = cutjax.gemm
    monkeypatch.setattr(cutjax, "gemm", lambda *args, **kwargs: 1.02 * right(*args, **kwargs))
    (row,) = measured(gemm.SUITE, SMALL)
    assert row.failure.startswith("wrong: relative error")
    assert math.isnan(row.us)
    assert row.peers["xla"].us > 0
    for row in measured(fused.SUITE, fused.Fused("gated", (64, 48, 32))):
        assert row.failure.startswith("wrong: relative error")


# The runner, a suite at a time.

SMALL_CASES: dict[str, Any] = {
    "gemm": (SMALL, cases.Dense(32, 16, 64, tags=("suite", "skinny"))),
    "fused": (fused.Fused("gated", (64, 48, 32), 1.1, 1.03), fused.Fused("layer", (32, 48, 16), 1.2)),
    "grouped": (GROUPED,),
    "moe": (LAYER,),
    "syrk": (syrk.Symmetric(48, 32, (2,), target=1.3), syrk.Symmetric(64, 16)),
    "models": (cases.Dense(24, 16, 32, "tn", of="a model"),),
    "compile": (compile_cost.Epilogue("dropout", "bfloat16"),),
}
NAMES = {
    "gemm": ["2x64x48x32 tn", "32x16x64 nn"],
    "fused": ["64x48x32 silu(x@wg)*(x@wu)", "32x48x16 bias+gelu layer, fwd+bwd"],
    "grouped": [f"{GROUPED.name} {product}" for product in PRODUCTS],
    "moe": ["small forward", "small fwd+bwd"],
    "syrk": ["2x48x32", "64x16"],
    "models": ["24x16x32 tn"],
    "compile": ["dropout bfloat16", "dropout bfloat16"],
}


@pytest.mark.parametrize("op", NAMES)
def test_the_command(op, on_xla, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    if op == "compile" and (missing := compiler.compiler_missing()):
        pytest.skip(missing)
    small = dataclasses.replace(run.SUITES[op], cases=SMALL_CASES[op])
    monkeypatch.setitem(run.SUITES, op, dataclasses.replace(small, draw=small.draw and (lambda *_: small.cases)))
    path = tmp_path / "out.json"
    arguments = ["--op", op, "--out", str(path), "--commit", "c", "--method", "cupti", "--peers", "xla"]
    assert run.main([*arguments, *(["--plot"] if op != "compile" else [])]) == 0
    content, rows = report.read(path)
    assert (content["schema"], content["op"], content["commit"]) == (report.SCHEMA, op, "c")
    assert [row.name for row in rows] == NAMES[op]
    printed = capsys.readouterr().out
    for row in rows:
        assert row.failure == ""
        assert row.name in printed
        if op == "compile":
            assert row.figures["cubin_bytes"] > 10_000
            assert row.figures["spill_bytes"] == 0 < row.figures["cpu_s"]
            continue
        assert row.us > 0
        assert row.error < 1.5e-2
        assert row.peak_mib > 0
        assert row.ratios["xla"] == pytest.approx(row.peers["xla"].us / row.us)
        assert row.fastest == "xla"
        if op != "moe":
            assert row.us == len(f"ours {row.product}".strip())
            assert row.ratios["copy"] == pytest.approx(row.gb_per_s / ROOFLINE.gb_per_s)
            assert row.roofline == pytest.approx(max(row.ratios["copy"], row.tflops / ROOFLINE.tflops))
    assert path.with_suffix(".png").exists() == (op != "compile")
    assert all(line.startswith("|") for line in tables.markdown(op, rows))
    if op == "fused":
        assert rows[0].ratios["plain"] == rows[0].peers["plain"].us / rows[0].us
        assert "plain" not in rows[1].peers
    if op == "grouped":
        assert rows[0].ratios["peers"] == rows[0].ratios["xla"]
        assert rows[0].ratios["dense"] > 0
    if op == "models":
        assert content["salt"] == models.SALT
        assert rows[0].figures == {"of": "a model"}


def test_a_case_that_fails_does_not_end_the_others(on_xla, monkeypatch, tmp_path, capsys):
    broken = cases.Dense(8, 8, 8, layout="nonsense", tags=("suite",))
    monkeypatch.setitem(run.SUITES, "gemm", dataclasses.replace(gemm.SUITE, cases=(broken, SMALL)))
    path = tmp_path / "out.json"
    assert run.main(["--tag", "suite", "--out", str(path), "--method", "cupti"]) == 1
    failed, right = report.read(path)[1]
    assert failed.case == broken.name
    assert failed.failure
    assert right.us > 0


def test_pinned_configs(on_xla, tmp_path, monkeypatch):
    monkeypatch.setitem(run.SUITES, "gemm", dataclasses.replace(gemm.SUITE, cases=(SMALL,)))
    configs, path = tmp_path / "configs.json", tmp_path / "out.json"
    configs.write_text('[{"bm": 128}, {"bm": 1}]')
    monkeypatch.setattr(cutjax, "gemm", lambda a, b, config, gemm=cutjax.gemm, **kwargs: gemm(a, b, **kwargs))
    assert run.main(["--configs", str(configs), "--out", str(path), "--method", "cupti"]) == 1
    auto, right, wrong = report.read(path)[1]
    assert (auto.variant, right.variant, wrong.variant) == ("auto", '{"bm": 128}', '{"bm": 1}')
    assert auto.targets == {"xla": 0.9}
    assert right.us > 0
    assert right.targets == {}
    assert "bm=1" in wrong.failure


def test_what_is_measured_in_processes(on_xla, monkeypatch, tmp_path, capsys):
    times = {"host_us": 1.0, "wall_us": 2.0, "first_us": 3.0}
    launched = suite.Extra(lambda: {"default": {"cutjax": times}, "off": {"failure": "no"}}, launch.show)
    seconds = {"lower_s": 0.1, "first_call_s": 0.2}
    compiled = suite.Extra(
        lambda: {"cold": {"xla": seconds, "cuda": seconds}, "warm": {"failure": "no"}}, compile_cost.show
    )
    extras = {"launch": launched, "compile": compiled}
    monkeypatch.setitem(run.SUITES, "gemm", dataclasses.replace(gemm.SUITE, extras=extras))
    path = tmp_path / "out.json"
    assert run.main(["--tag", "launch,compile", "--out", str(path), "--method", "cupti"]) == 0
    content, rows = report.read(path)
    assert rows == []
    assert content["launch"]["default"]["cutjax"] == times
    printed = capsys.readouterr().out
    assert "launch, default, cutjax: host 1.00 us" in printed
    assert "cutjax adds 0.0 ms to lowering" in printed


def test_a_case_timed_by_the_hosts_clock(monkeypatch):
    right = cutjax.gemm
    monkeypatch.setattr(cutjax, "gemm", lambda *args, **kwargs: right(*args, **{**kwargs, "backend": "xla"}))
    monkeypatch.setattr(timing, "input_sets", lambda make: [make(0), make(1)])
    (row,) = measured(dataclasses.replace(gemm.SUITE, timed_us=1.0, reps=(2, 2)), SMALL, method="host")
    assert row.failure == ""
    assert row.ratios["xla"] == row.peers["xla"].us / row.us > 0


def test_xla_gets_fewer_tokens_where_its_layer_would_not_fit(quick, monkeypatch):
    monkeypatch.setattr(moe, "XLA_MOST_BYTES", 2 * 4 * 16 * 2 * 48)
    monkeypatch.setattr(moe, "plain", lambda case: lambda x, *_: x)
    for factor in (1.0, 1.1):
        monkeypatch.setattr(moe, "ours", lambda case, factor=factor: lambda x, *_: x * jnp.bfloat16(factor))
        (row,) = moe.measure_case(LAYER, suite.Run("cupti", ROOFLINE, ("forward",)))
        assert row.figures["xla_tokens"] == 16
        assert row.us > 0
        if factor == 1:
            assert row.failure == ""
            assert row.ratios["xla"] == row.peers["xla"].us / row.figures["same_us"]
        else:
            assert "wrong: relative error 0.1" in row.failure


def test_input_sets_pass_the_l2(monkeypatch):
    sets = timing.input_sets(lambda seed: (np.zeros(1 << 20, np.float32), np.full(1 << 20, seed, np.float32)))
    assert len(sets) * 8 * (1 << 20) > 2 * timing.L2_BYTES
    assert len(timing.input_sets(lambda seed: (np.zeros(1, np.float32),))) == 64
    monkeypatch.setattr(timing, "ONE_SET_BYTES", 3)
    assert len(timing.input_sets(lambda seed: (np.zeros(1, np.float32),))) == 1


def test_forms_of_epilogues(capsys):
    own = {name: calls.ships(name) for name in calls.EPILOGUES}
    assert own["gelu"] == own["silu"] == "inlined"
    assert own["dropout"] == own["sin"] == "called"
    assert run.main(["--op", "calls", "--method", "host"]) == 1
    assert "needs kernel times" in capsys.readouterr().out


# Peers of grouped products.


def test_peers_that_are_not_installed(on_xla):
    rows = measured(grouped.SUITE, GROUPED, method="host", products=("forward",))
    assert set(rows[0].peers) == {"xla", "pallas", "tokamax", "torch", "dense"}
    assert rows[0].fastest == "xla"
    assert rows[0].peers["pallas"].failure
    assert "tokamax" in rows[0].peers["tokamax"].failure
    assert "torch is timed by its kernels only" in rows[0].peers["torch"].failure


def test_a_peer_that_would_take_too_long_is_not_run(on_xla, monkeypatch):
    few = {"products": ("dw",), "peers": ("xla",)}
    (row,) = measured(grouped.SUITE, GROUPED, roofline=report.Roofline(1e-9, 4000), **few)
    assert row.peers["xla"].failure.startswith("not run: 4 times the product")
    assert row.fastest == ""
    assert row.missed == ()
    assert "peers" not in row.ratios
    monkeypatch.setattr(grouped, "XLA_MOST_BYTES", 1)
    (row,) = measured(grouped.SUITE, GROUPED, **few)
    assert "masked for every group" in row.peers["xla"].failure


def test_a_failing_grouped_kernel_is_reported(quick):
    for row in measured(grouped.SUITE, GROUPED, products=("forward", "dw"), peers=("xla",)):
        assert row.failure.startswith("NotImplementedError")
        assert math.isnan(row.us)
        assert row.peers["xla"].us > 0
        assert row.missed == ()


def test_a_function_that_cannot_be_timed_does_not_end_the_others(on_xla, monkeypatch):
    fake = timing.measure

    def failing(functions, *args):
        if "xla dx" in functions or grouped.DENSE in functions:
            raise RuntimeError("the profiler saw something else")
        return fake(functions, *args)

    monkeypatch.setattr(timing, "measure", failing)
    (row,) = measured(grouped.SUITE, GROUPED, products=("dx",), peers=("xla",))
    assert row.us == len("ours dx")
    assert row.peers["xla"].failure.startswith("not timed: RuntimeError: the profiler saw")
    assert "dense" not in row.ratios


class FakeTorch:
    """As much of torch as benchmarks.peers asks for, by jax."""

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
    fake = timing.measure

    def noting(functions, *args):
        together.append(set(functions))
        return fake(functions, *args)

    monkeypatch.setattr(timing, "measure", noting)
    monkeypatch.setattr(peers, "torch_module", FakeTorch)
    for row in measured(grouped.SUITE, GROUPED, peers=("torch",)):
        assert row.peers["torch"].us == len(f"torch {row.product}")
        assert row.peers["torch"].kernel == f"torch {row.product}"
        assert row.fastest == "torch"
        assert row.ratios["torch"] == row.ratios["peers"] == row.peers["torch"].us / row.us
    everything = {"dense", *(f"{whose} {product}" for whose in ("ours", "torch") for product in PRODUCTS)}
    assert [names for names in together if names] == [everything, everything]  # called in turns: at one clock
    monkeypatch.setattr(FakeTorch, "_grouped_mm", lambda self, a, b, offs: 1 / 0)
    (row,) = measured(grouped.SUITE, GROUPED, products=("dx",), peers=("torch",))
    assert row.peers["torch"].failure == "ZeroDivisionError: division by zero"
    assert row.us == len("ours dx")


def test_torch_runs_beside_functions_that_wait(on_xla, monkeypatch):
    """Each call of one measurement ends before the next begins, whosever stream it is on."""
    ended = []

    def records(calls):
        found = []
        for function, args in calls:
            out = function(*args)
            ended.append(not isinstance(out, jax.Array) or out.is_ready())  # pyright: ignore
            found.append(("kernel", 1.0))
        return found

    monkeypatch.setattr(
        timing, "measure", lambda functions, sets, reps, _: timing._measure_cupti(functions, sets, reps)
    )
    monkeypatch.setattr(timing, "_records", records)
    monkeypatch.setattr(peers, "torch_module", FakeTorch)
    (row,) = measured(grouped.SUITE, GROUPED, products=("forward",), peers=("torch",))
    assert row.peers["torch"].us == row.us == 1.0
    assert row.ratios["dense"] == 1.0
    assert len(ended) > 20
    assert all(ended)


@dataclasses.dataclass(frozen=True)
class FakeRaggedDot:
    """As much of tokamax's implementations as benchmarks.peers asks for, by XLA; "mosaic_gpu" refuses."""

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
    for name in ("_TRITON", "_TRITON_DW", "_MOSAIC"):
        monkeypatch.setattr(peers, name, getattr(peers, name)[:1])
    for row in measured(grouped.SUITE, GROUPED, peers=("tokamax",)):
        peer = row.peers["tokamax"]
        assert peer.failure == ""
        assert peer.us == len(f"tokamax {row.product} 0")
        assert json.loads(peer.kernel)["implementation"] == "triton"
        assert row.fastest == "tokamax"
    assert parsed
    monkeypatch.setitem(implementations, "triton", FakeRaggedDot("mosaic_gpu"))
    (row,) = measured(grouped.SUITE, GROUPED, products=("dw",), peers=("tokamax",))
    assert row.peers["tokamax"].failure == "NotImplementedError: Not supported on cpu."


def test_tokamax_tiles_follow_the_size_of_groups():
    for case in grouped.GROUPED:
        for product in PRODUCTS:
            configs = peers.tokamax_configs(case, product)
            assert 2 <= len(configs) <= 4
            tiles = {config["block_m"] for config in configs}
            assert product == "dw" or tiles == {64 if case.m < 64 * case.groups else 128}
            assert len({config["implementation"] for config in configs}) == 1 + (product != "dw")


def test_pallas_configs_divide_every_case():
    for case in grouped.GROUPED:
        for product in PRODUCTS:
            configs = peers.pallas_configs(case, product)
            assert 1 <= len(configs) <= 6
            rows, columns = {"forward": (1, case.n), "dx": (1, case.k), "dw": (case.k, case.n)}[product]
            for config in configs:
                assert columns % (config["block_n"] * config["grid_block_n"]) == 0
                assert product != "dw" or rows % config["block_m"] == 0


# Results on disk.


def made_up(case: str = "a", **fields: Any) -> Row:
    seen = {"xla": Figures(9.0, 0.2, "x"), "torch": Figures(failure="not run"), "plain": Figures(8.0)}
    rates = {"us": 10.0, "iqr_us": 0.1, "tflops": 100.0, "gb_per_s": 900.0, "roofline": 0.5, "error": 1e-3}
    shares = {"ratios": {"xla": 0.9, "plain": 0.8}, "targets": {"xla": 0.97, "plain": 0.5}}
    return Row(**{"case": case, "kernel": "k", "peers": seen, **rates, **shares, **fields})


def test_results_survive_a_round_trip(tmp_path):
    rows = [
        made_up(figures={"rest_us": math.nan, "of": "it"}),
        Row("b", "dx", failure="no kernel", targets={"xla": 1.0}),
    ]
    path = tmp_path / "results" / "run.json"
    report.write(path, report.document("gemm", ENVIRONMENT, "cupti", ROOFLINE, rows, {"salt": "s"}))
    content, back = report.read(path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["roofline"] == {"tflops": 800, "gb_per_s": 4000}
    assert (content["commit"], content["salt"]) == (ENVIRONMENT["commit"], "s")
    assert repr(back) == repr(rows)  # NaN is equal to nothing
    assert back[0].fastest == "xla"
    assert back[0].missed == ("xla",)
    assert (back[1].fastest, back[1].missed) == ("", ())
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema"):
        report.read(path)


DENSE_FORMS = {"case": "", "kernel": "", "tflops": ".0f", "roofline": ".2f", "ratio": ".3f", "target": ".2f"}
DENSE_FORMS |= dict.fromkeys(("us", "iqr_us", "xla_us", "xla_iqr_us"), ".1f")
DENSE_FORMS |= {"plain_ratio": ".3f", "plain_target": ".2f", "peak_mib": ".0f", "xla_peak_mib": ".0f"}
MOE_NUMBERS = ("tokens", "us", "rest_us", "peak_mib", "xla_tokens", "xla_us", "xla_peak_mib")
FORMS = {  # of the columns of each table, by the fields of rows in schema 1
    "gemm": DENSE_FORMS,
    "grouped": {"case": "", "product": "", "kernel": "", "us": ".1f", "tflops": ".0f"}
    | {"xla us": ".0f", "pallas us": ".0f", "torch us": ".0f"}
    | {"dense ratio": ".3f", "torch ratio": ".3f", "copy ratio": ".3f"},
    "moe": {"case": "", "ratio": ".2f"} | dict.fromkeys(MOE_NUMBERS, ".0f"),
    "compile": {"case": "", "tile": "", "cpu_s": ".2f", "target": ".1f", "cubin_bytes": "", "registers": ""},
    "calls": {"case": "", "ships": "", "inlined_us": ".1f", "called_us": ".1f", "ratio": ".3f", "most_ratio": ".3f"},
}
RECORDED = sorted(report.RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_recorded_runs_can_still_be_read(path, capsys):
    """The numbers of each recorded row stand in its line of the table, as when each operation had rows of its own."""
    content, rows = report.read(path)
    op, recorded = content["op"], json.loads(path.read_text())["rows"]
    _, _, *lines = tables.markdown(op, rows)
    for old, line in zip(recorded, lines, strict=True):
        old |= {f"{name} ratio": ratio for name, ratio in old.get("ratios", {}).items()}
        old |= {f"{name} us": peer["us"] for name, peer in old.get("peers", {}).items()}
        shown = {format(old[key], form) for key, form in FORMS[op].items() if old.get(key) is not None}
        assert shown <= {cell.strip(" `") for cell in line.replace("±", "|").split("|")}
    tables.print_rows(op, rows, path.stem)
    assert rows[0].case in capsys.readouterr().out


def test_rows_recorded_without_a_time_can_be_read(tmp_path):
    path = tmp_path / "old.json"
    numbers = ("us", "iqr_us", "xla_us", "xla_iqr_us", "tflops", "roofline", "ratio", "error", "target", "plain_us")
    old = {"case": "a", "choice": "auto", "kernel": "", "xla_kernel": "", "failure": "no kernel"}
    path.write_text(json.dumps({"schema": 1, "roofline": None, "rows": [{**old, **dict.fromkeys(numbers)}]}))
    content, (row,) = report.read(path)
    assert (content["op"], row.failure, row.ratios, row.targets) == ("gemm", "no kernel", {}, {})
    assert list(tables.markdown("gemm", [row]))[2] == "| a | - | - | - | - | - | - | no kernel |"


def test_table(capsys):
    rows = [made_up(), made_up(case="b", ratios={"xla": 1.0}), made_up(case="c", variant='{"bm": 1}', targets={})]
    tables.print_rows("gemm", rows, "made up")
    printed = capsys.readouterr().out
    assert "0.900" in printed
    assert "xla 0.97" in printed
    assert "ratio to xla: geometric mean 0.949 of 2" in printed
    assert printed.count("torch: not run") == 1
    assert "k (pinned)" in printed


def test_roofline_is_the_longer_of_two_times():
    assert ROOFLINE.us(flops=800_000_000, moved_bytes=1) == pytest.approx(1)
    assert ROOFLINE.us(flops=1, moved_bytes=4_000_000) == pytest.approx(1)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    path = tmp_path / "run.json"
    rows = [made_up(), made_up(case="b", targets={}, ratios={"xla": 1.1}), Row("c", failure="wrong")]
    report.write(path, report.document("gemm", ENVIRONMENT, "cupti", None, rows))
    written = plot.draw(path, (".png", ".svg"))
    assert [file.suffix for file in written] == [".png", ".svg"]
    assert all(file.stat().st_size > 1000 for file in written)
    report.write(path, report.document("gemm", ENVIRONMENT, "cupti", None, rows[2:]))
    with pytest.raises(ValueError, match="no timed rows"):
        plot.draw(path)


# The sweep.

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


@pytest.mark.parametrize("product", PRODUCTS)
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
