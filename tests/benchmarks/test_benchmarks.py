"""Benchmarks of each operation, without a GPU: cases, right and wrong results, the runner with a fake clock."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_benchmarks import ROOFLINE, FakeRaggedDot, FakeTorch, fake_clock

import cutjax
from benchmarks import cases, oracle, peers, report, run, suite, tables, timing
from benchmarks.ops import (
    calls,
    compile_cost,
    contractions,
    cross_entropy,
    expert_products,
    fused,
    gather,
    gemm,
    grouped,
    launch,
    models,
    moe,
    networks,
    syrk,
)
from benchmarks.record import Roofline
from cutjax.runtime import compiler

SMALL = cases.Dense(64, 48, 32, "tn", (2,), tags=("suite",), target=0.9)
GROUPED = grouped.Grouped(4, 96, 64, 128, tags=("anchors",))
LAYER = moe.Moe("small", 4, 64, 32, 48, 2, target=3.0)
PRODUCTS = grouped.PRODUCTS


@pytest.fixture
def quick(monkeypatch):
    fake_clock(monkeypatch)


@pytest.fixture
def on_xla(quick, monkeypatch):
    """Our functions through XLA."""

    def through_xla(fn):
        return lambda *args, **kwargs: fn(*args, **{**kwargs, "backend": "xla"})

    for name in ("gemm", "grouped_gemm", "grouped_outer", "moe", "syrk"):
        monkeypatch.setattr(cutjax, name, through_xla(getattr(cutjax, name)))


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
            assert problem.groups.count == case.groups
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
    mixtral, deepseek = (case for case in moe.MOE if case.target)
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
    small = np.unravel_index(np.argmin(np.where(right == 0, 9, np.abs(right))), right.shape)
    one = right.copy()
    one[small] = np.nextafter(one[small], one.dtype.type(9))  # right to rounding, but not its mirror image
    assert wrong(one) == "wrong: not symmetric"
    one = right.copy()
    one[0, 3, 3] *= one.dtype.type(1.01)
    assert "diagonal" in wrong(one)


# The runner, a suite at a time.


@pytest.fixture
def other_libraries(monkeypatch):
    """torch and tokamax; Pallas's kernels fail."""
    implementations = {name: FakeRaggedDot(name) for name in ("triton", "mosaic_gpu")}
    flags = types.SimpleNamespace(FLAGS=types.SimpleNamespace(mark_as_parsed=lambda: None))
    monkeypatch.setitem(sys.modules, "absl.flags", flags)
    api = types.SimpleNamespace(IMPLEMENTATIONS=implementations)
    monkeypatch.setitem(sys.modules, "tokamax._src.ops.ragged_dot.api", api)
    monkeypatch.setattr(peers, "_TRITON_DW", peers._TRITON_DW[:1])  # a tile of 64 rows is one of three of the others
    monkeypatch.setattr(peers, "torch_module", FakeTorch)
    return []


SMALL_CASES: dict[str, Any] = {
    "gemm": (SMALL,),
    "fused": (
        fused.Fused("gated", (64, 48, 32), 1.1, 1.03),
        fused.Fused("layer", (32, 48, 16), 1.2),
        fused.Fused("prologue", (8, 32, 48)),
    ),
    "grouped": (GROUPED,),
    "moe": (LAYER,),
    "gather": (gather.Gather("small", 16, 2, 64, 4),),
    "syrk": (syrk.Symmetric(48, 32, (2,), target=1.3), syrk.Symmetric(64, 16)),
    "cross_entropy": (cross_entropy.Head(64, 16, 48, 1.1),),
    "networks": (networks.Network(16, 2, 32, "float32", (1.1, 1.1, 1.1)),),
    "contractions": (
        contractions.Case("siA,sjB->ijAB", (("s", 8), ("i", 4), ("A", 8), ("j", 4), ("B", 8)), "float32", "", ()),
    ),
    "models": (cases.Dense(24, 16, 32, "tn", of="a model"),),
    "compile": (compile_cost.Epilogue("dropout", "bfloat16"),),
}
NAMES = {
    "gemm": ["2x64x48x32 tn"],
    "fused": ["64x48x32 silu(x@wg)*(x@wu)", "32x48x16 bias+gelu layer, fwd+bwd", "8x32x48 rms norm"],
    "grouped": [f"{GROUPED.name} {product}" for product in PRODUCTS],
    "moe": ["small fwd+bwd"],
    "gather": [f"small {name}" for name in ("rows", "2x4x8192", "4x4x8192", "6x4x4096", "4x6x2048")],
    "syrk": ["2x48x32", "64x16"],
    "cross_entropy": ["64x16x48 fwd+bwd"],
    "networks": [f"2x16 of 32 float32 {form}" for form in networks.FORMS],
    "contractions": ["siA,sjB->ijAB s8,i4,A8,j4,B8 float32"],
    "models": ["24x16x32 tn"],
    "compile": ["dropout bfloat16", "dropout bfloat16"],
}


@pytest.mark.parametrize("op", NAMES)
def test_the_command(op, on_xla, monkeypatch, tmp_path, capsys, request):
    if op == "compile" and (missing := compiler.compiler_missing()):
        pytest.skip(missing)
    with_peers = request.getfixturevalue("other_libraries") if op == "grouped" else ["--peers", "xla"]
    small = dataclasses.replace(run.SUITES[op], cases=SMALL_CASES[op], x64=False)  # of the whole process
    monkeypatch.setitem(run.SUITES, op, dataclasses.replace(small, draw=small.draw and (lambda *_: small.cases)))
    path = tmp_path / "out.json"
    arguments = ["--op", op, "--out", str(path), "--commit", "c", "--method", "cupti", *with_peers]
    arguments += ["--tag", "fwd+bwd"] if op == "moe" else []
    assert run.main([*arguments, *(["--plot"] if op == "compile" else [])]) == 0
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
        assert row.fastest in row.ratios
        if op != "moe":
            assert row.us == len(f"ours {row.product}".strip())
            assert row.ratios["copy"] == pytest.approx(row.gb_per_s / ROOFLINE.gb_per_s)
            assert row.roofline == pytest.approx(max(row.ratios["copy"], row.tflops / ROOFLINE.tflops))
    assert not path.with_suffix(".png").exists()  # not asked for, or nothing to draw
    assert all(line.startswith("|") for line in tables.markdown(op, rows))
    if op == "fused":
        assert rows[0].ratios["plain"] == rows[0].peers["plain"].us / rows[0].us
        assert "plain" not in rows[1].peers
    if op == "grouped":
        for row in rows:
            assert set(row.peers) == {"xla", "pallas", "tokamax", "torch", "dense"}
            assert row.peers["torch"].us == len(f"torch {row.product}")
            assert row.peers["torch"].kernel == f"torch {row.product}"
            assert row.peers["tokamax"].us == len(f"tokamax {row.product} 0")
            assert json.loads(row.peers["tokamax"].kernel)["implementation"] == "triton"
            assert row.peers["pallas"].failure
            assert row.ratios["peers"] == row.ratios["xla"]
            assert row.ratios["dense"] > 0
    if op == "models":
        assert content["salt"] == models.SALT
        assert rows[0].figures == {"of": "a model"}


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


def test_xla_is_not_run_where_it_takes_too_long_or_too_much_memory(monkeypatch):
    (product,) = (product for product in grouped.products(GROUPED) if product.name == "dw")
    refuse = product.peers["xla"].refuse
    assert refuse(ROOFLINE) == ""
    assert refuse(Roofline(1e-9, 4000)).startswith("not run: 4 times the product")
    monkeypatch.setattr(grouped, "XLA_MOST_BYTES", 1)
    assert "masked for every group" in refuse(ROOFLINE)


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


def test_contractions_are_what_einsum_takes_and_have_plans():
    assert len(contractions.CASES) == 60
    for case in contractions.CASES:
        avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes[:2]]
        out = jax.eval_shape(lambda x, y, case=case: jnp.einsum(case.equation, x, y), *avals)
        assert out.shape == case.shapes[2]
        assert case.bytes < 1.5e9
        plans, _ = contractions.plan_of(case)
        assert all(plan.d.shape == out.shape for plan in plans), case.name
    assert len({case.of for case in contractions.CASES}) > 50


def test_products_of_experts_are_drawn_by_a_salt():
    one, other = (expert_products.sample(20, salt) for salt in ("one", "other"))
    assert one == expert_products.sample(20, "one") != other
    assert len({case.name for case in one}) == 20
    assert all(case.sizes.sum() == case.m for case in one)
