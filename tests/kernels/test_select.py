"""Problem, Device, Config, candidates, reasons and the cost model: arithmetic, no GPU."""

import dataclasses
import functools
import json
import pathlib
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from recorded import recorded_products
from windows import view

import cutjax
from benchmarks import fused_sweep
from benchmarks.cases import Grouped
from benchmarks.ops import grouped as cases
from benchmarks.ops import moe
from cutjax.epilogue.expression import identity
from cutjax.epilogue.trace import trace
from cutjax.kernels import choose, convolution, tuned, xla
from cutjax.kernels.arguments import batch_steps
from cutjax.kernels.sm90 import cost
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.xla_tails import library_has
from cutjax.runtime.launch import Int32, TensorMap

BF16, F16, F32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
E4, E5 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)


def time_us(config, p):
    return sm90.resolved(p, config).time_us(p.device)


def ranked_us(config, p):
    return cost.times(sm90.resolved(p, config), p.device)[1]


def test_problem_counts():
    p = cutjax.Problem.of(128, 256, 64, batch=(4, 3), a_batch=(4, 3), b_batch=(1, 1))
    assert p.flops == 2 * 128 * 256 * 64 * 12
    assert p.bytes == 2 * (128 * 64 * 12 + 64 * 256 + 128 * 256 * 12)
    assert str(p) == "128x256x64 nn bf16 x bf16 -> bf16 batch 4x3"
    assert hash(p) == hash(dataclasses.replace(p))


@pytest.mark.parametrize(
    ("batch", "a", "b", "groups"),
    [
        ((), (), (), ()),
        ((5,), (5,), (5,), ((5, True, True),)),
        ((2, 3), (2, 3), (2, 3), ((6, True, True),)),
        ((2, 3), (2, 3), (1, 1), ((6, True, False),)),
        ((2, 1, 3), (2, 1, 3), (2, 1, 1), ((2, True, True), (3, True, False))),
        ((2, 3, 4), (2, 1, 4), (1, 3, 4), ((2, True, False), (3, False, True), (4, True, True))),
    ],
)
def test_batch_groups(batch, a, b, groups):
    assert cutjax.Problem.of(8, 8, 8, batch=batch, a_batch=a, b_batch=b).batch_groups == groups


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()).filter(lambda g: g[1] or g[2]), max_size=3),
)
@settings(deadline=None)
def test_batch_steps_reach_the_matrices_broadcasting_would(axes):
    """The scheduler's arithmetic (scheduler.cuh, BatchSteps) against numpy's broadcasting."""
    batch = tuple(n for n, _, _ in axes)
    shapes = [tuple(n if move[i] else 1 for n, *move in axes) for i in range(2)]
    p = cutjax.Problem.of(8, 8, 8, batch=batch, a_batch=shapes[0], b_batch=shapes[1])
    groups = [(1, False, False)] * (3 - len(p.batch_groups)) + list(p.batch_groups)
    sizes = [size for size, _, _ in groups]
    for operand, shape in enumerate(shapes):
        steps = batch_steps([moves[operand] for _, *moves in groups], sizes)
        expected = np.broadcast_to(np.arange(int(np.prod(shape))).reshape(shape), batch).ravel()
        for z, want in enumerate(expected):
            i0, i1, i2 = np.unravel_index(z, sizes)
            assert int(i0) * steps[0] + int(i1) * steps[1] + int(i2) * steps[2] == want


def test_what_one_family_refuses_another_serves():
    p = cutjax.Problem.of(256, 256, 256, a_dtype=F32, b_dtype=F32, out_dtype=F32)
    assert "f32 x f32: wgmma multiplies float32 as one of tf32, tf32x3, bf16" in "; ".join(
        cutjax.reasons(cutjax.Config(), p)
    )
    assert {type(config) for config in cutjax.candidates(p)} == {cutjax.MmaConfig}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"layout": "xy"}, "unknown layout 'xy'"),
        ({"m": -1}, "negative size"),
        ({"batch": (2,), "a_batch": (3,), "b_batch": (2,)}, "do not broadcast"),
        ({"batch": (2,)}, "batch ranks differ"),
    ],
)
def test_bad_problem(fields, match):
    with pytest.raises(ValueError, match=match):
        cutjax.Problem.of(**{"m": 8, "n": 8, "k": 8, **fields})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"bm": 96}, "bm is 64, 128 or 256"),
        ({"bn": 20}, "multiples of 8 columns"),
        ({"bn": 272}, "at most 256"),
        ({"bk": 32}, "bk is 64 or 128"),
        ({"stages": 1}, "stages=1"),
        ({"cluster_m": 2, "cluster_n": 2}, "cluster 2x2"),
        ({"schedule": "stream"}, "schedule='stream'"),
        ({"bm": 256, "bn": 128, "schedule": "pingpong"}, "bm is 64 or 128"),
        ({"bm": 256, "bn": 256}, "256 accumulator registers"),
        ({"raster": 0}, "raster=0"),
        ({"evict_first": "db"}, "evict_first='db', expected one of"),
        ({"bm": 128.0}, "expected an int"),
        ({"bm": 96, "bk": 32}, "bm=96.*bk=32"),  # all reasons, not the first
    ],
)
def test_bad_config(fields, match):
    with pytest.raises(ValueError, match=match):
        cutjax.Config(**fields)


def test_unknown_config_field():
    with pytest.raises(TypeError, match="unexpected keyword argument 'tile'"):
        cutjax.Config(tile=128)  # pyright: ignore


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"a_dtype": np.dtype("int16"), "b_dtype": np.dtype("int16")}, "s16 x s16"),
        ({"a_dtype": BF16, "b_dtype": F16}, "bf16 x f16"),
        ({"out_dtype": np.dtype("float64")}, "result f64: one of bf16, f16, f32, "),
        ({"arch": "sm_70"}, "architecture sm_70"),
        ({"k": 0}, "a size is 0"),
        ({"batch": (2, 2, 2, 2), "a_batch": (2, 1, 2, 1), "b_batch": (1, 2, 1, 2)}, "more than 3 groups"),
    ],
)
def test_problems_no_kernel_serves(fields, match):
    p = cutjax.Problem.of(**{"m": 256, "n": 256, "k": 256, **fields})
    assert match in "; ".join(cutjax.reasons(cutjax.Config(), p))
    assert cutjax.candidates(p) == ()
    choice = choose.choose(p)
    assert choice.config is None
    assert choice.kernel == "XLA"
    assert any(match in r for r in choice.reasons)


def test_all_reasons_reach_the_user():
    reason = "; ".join(
        cutjax.reasons(cutjax.Config(stages=9), cutjax.Problem.of(8, 100, 100, a_dtype=F16, out_dtype=np.dtype("f8")))
    )
    for part in ("f16 x bf16", "result f64", "9 stages of 49152 bytes and two staging buffers"):
        assert part in reason


@pytest.mark.parametrize("out", [BF16, F32])
@pytest.mark.parametrize("layout", cutjax.kernels.problem.LAYOUTS)
def test_candidates_are_distinct_valid_and_sorted(layout, out):
    p = cutjax.Problem.of(2048, 1536, 4096, layout, out_dtype=out)
    configs = cutjax.candidates(p)
    assert len(set(configs)) == len(configs) > 50
    assert all(cutjax.reasons(c, p) == () for c in configs)
    times = [ranked_us(c, p) for c in configs]
    assert times == sorted(times)
    assert {c.cluster for c in configs} == {1, 2}
    assert {c.bm for c in configs} == {64, 128, 256}


def test_pinned_config_and_its_refusal():
    p = cutjax.Problem.of(512, 512, 512)
    pinned = cutjax.Config(bm=64, bn=64, stages=4)
    assert choose.choose(p, pinned).config == pinned
    refused = choose.choose(p, cutjax.Config(stages=12))
    assert refused.config is None
    assert "shared memory" in refused.reasons[0]


def test_choose_off_cuda():
    assert choose.choose(cutjax.Problem.of(512, 512, 512), platform="cpu").kernel == "XLA"


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(1, 600), st.sampled_from(cutjax.kernels.problem.LAYOUTS))
@settings(deadline=None, max_examples=50)
def test_prediction_is_a_time(m, n, k, layout):
    p = cutjax.Problem.of(8 * m if layout[0] == "t" else m, 8 * n, 8 * k, layout)
    choice = choose.choose(p, backend="cuda")
    assert choice.config is not None
    assert choice.time_us is not None
    assert choice.roofline is not None
    assert choice.time_us > 0
    assert 0 < choice.roofline <= 1


def test_prediction_grows_with_work():
    config = cutjax.Config()
    times = [time_us(config, cutjax.Problem.of(s, s, s)) for s in (1024, 2048, 4096, 8192)]
    assert times == sorted(times)
    assert times[-1] > 6 * times[-2]


def _plan(p, config):
    return sm90.resolved(p, config).call().launches[0]


def test_launch_plan():
    p = cutjax.Problem.of(300, 520, 200, "nn", batch=(2, 3), a_batch=(2, 3), b_batch=(2, 1))
    plan = _plan(p, cutjax.Config(cluster_m=2, stages=3))
    a, b, d, *scalars = plan.params
    assert plan.kernel == "sm90_bf16_nn_128x256x64_s3_c2x1_coop"
    assert (a.dims, a.strides, a.box, a.swizzle) == ((200, 300, 6), (400, 120000), (64, 128, 1), 128)
    assert (b.dims, b.strides, b.box, b.swizzle) == ((520, 200, 2), (1040, 208000), (64, 64, 1), 128)
    assert (d.dims, d.strides, d.box, d.swizzle) == ((520, 300, 6), (1040, 312000), (64, 64, 1), 128)
    assert all(isinstance(x, TensorMap) for x in (a, b, d))
    assert all(isinstance(x, Int32) for x in scalars)
    # m, n, k, raster, batch, its two inner sizes, steps of a, steps of b
    assert [s.value for s in scalars][:3] == [300, 520, 200]
    assert [s.value for s in scalars][4:] == [6, 2, 3, 0, 3, 1, 0, 1, 0]
    assert plan.grid == (2 * 3 * 6 * 2, 1, 1)
    assert plan.cluster == (2, 1, 1)
    assert plan.block == (384, 1, 1)


def test_launch_plan_of_transposed_and_narrow():
    p = cutjax.Problem.of(64, 48, 128, "tt", out_dtype=F32)
    plan = _plan(p, cutjax.Config(bm=64, bn=48, stages=4))
    a, b, d = plan.params[:3]
    assert (a.dims, a.box, a.swizzle) == ((64, 128, 1), (64, 64, 1), 128)
    assert (b.dims, b.box, b.swizzle) == ((128, 48, 1), (64, 48, 1), 128)
    assert (d.box, d.swizzle) == ((16, 64, 1), 64)
    assert plan.blocks_per_sm == 2  # one consumer warpgroup, 24 accumulators, under half the shared memory


RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
CONFIG = re.compile(r"(?:pick)?(\d+)x(\d+) c(\d)(\d) (\w+) s(\d+) r\d+")


def recorded_configs(times):
    """{config: us} of {name: us}; rasters are 1."""
    found = {}
    for name, us in times.items():
        if config := CONFIG.fullmatch(name):
            bm, bn, cluster_m, cluster_n, schedule, stages = config.groups()
            sizes = (int(bm), int(bn), 64, int(stages), int(cluster_m), int(cluster_n))
            found[cutjax.Config(*sizes, schedule, 1)] = us
    return found


def recorded_groups(ragged):
    """The same of grouped products, of three records; rasters are 1."""
    problems = {}
    experiments = (RESULTS / "experiments" / f"{name}-h200.json" for name in ("grouped", "grouped-order"))
    for row in (row for path in experiments for row in json.loads(path.read_text())["rows"]):
        if "product" in row and row.get("order") != "as given":
            case, product = cases.find_grouped(f"{row['case']} {row['product']}")
            found = problems.setdefault((row.get("order", "in turn"), case.problem(product)), {})
            found |= recorded_configs(row["us"])
    recorded = json.loads((RESULTS / "sweeps" / "grouped-h200.json").read_text())
    for row in recorded["rows"]:
        commit, name, *fields, _, us, dense_us = row
        if commit == "50a0aef":  # the newest kernels
            case, product = cases.find_grouped(name)
            # Some configs of a case ran at another clock; where the dense product is short it does not show that.
            found = problems.setdefault(("sweep", case.problem(product)), {})
            found[cutjax.Config(*fields, 1)] = us / dense_us if dense_us > 100 else us
    # Depths decide where groups are of the contraction: what was timed in another order is superseded.
    again = {problem for order, problem in problems if order == "deepest first"}
    found = {
        key: {config: us for config, us in times.items() if not superseded(key[1], config)}
        for key, times in problems.items()
        if key[0] == "deepest first" or key[1] not in again
    }
    return {key: times for key, times in found.items() if key[1].divided == ragged and len(times) > 1}


def superseded(problem, config):
    """True of kernels that left out rows of no group then, which of deep contractions took longer than now."""
    return problem.divided == "m" and config.bm > 64 and problem.k >= 2048


def regret(problem, times):
    """What the model's pick costs over the best, where both were measured."""
    ranked = [dataclasses.replace(config, raster=1) for config in choose.candidates(problem)]
    known = [config for config in times if dataclasses.replace(config, raster=1) in ranked]
    picked = min(known, key=lambda config: ranked.index(dataclasses.replace(config, raster=1)))
    return times[picked] / min(times.values())


@pytest.mark.parametrize(
    ("ragged", "least", "mean", "most"),
    # As shipped 1.007 and 1.02 of products of rows, 1.008 and 1.04 of weight gradients.
    [("m", 14, 1.015, 1.03), ("k", 14, 1.01, 1.045)],
)
def test_the_model_picks_well_among_recorded_groups(ragged, least, mean, most):
    regrets = {key: regret(key[1], times) for key, times in recorded_groups(ragged).items()}
    assert len(regrets) >= least
    assert np.exp(np.mean(np.log(list(regrets.values())))) < mean
    assert max(regrets.values()) < most, max(regrets, key=lambda key: regrets[key])


def experts_in_step():
    """The rows of the sweep of kernels whose blocks stay in step: what was timed, the case, and the times."""
    recorded = json.loads((RESULTS / "sweeps" / "experts-in-step-h200.json").read_text())
    for row in recorded["rows"]:
        groups, m, n, k = map(int, re.findall(r"\d+", row["case"]))
        yield row, Grouped(groups, m, n, k), {cutjax.Config(*fields): us for *fields, us, _ in row["times"]}


def test_the_model_picks_well_for_gated_groups():
    epilogue = trace(lambda g, u: jax.nn.silu(g) * u, [jax.ShapeDtypeStruct((8, 8), F32)] * 2).epilogue.primal
    gated = [(case, times) for row, case, times in experts_in_step() if row["product"] == "gated"]
    assert len(gated) == 3
    for case, times in gated:
        assert regret(case.problem("forward").fused(epilogue), times) < 1.04, case.name


def test_the_model_picks_well_in_layers_of_experts():
    """As shipped 1.022 and 1.05 of weight gradients; kernels of rows are superseded."""
    recorded = json.loads((RESULTS / "sweeps" / "moe-h200.json").read_text())
    measured = {}
    for row in recorded["rows"]:
        for *fields, raster, evicted, us in row["times"]:
            if raster is None and not evicted:
                times = measured.setdefault((row["case"], row["product"]), {})
                times.setdefault(cutjax.Config(*fields, 1), []).append(us)
    regrets = {}
    for case in moe.MOE:
        layer = moe.passes(functools.partial(cutjax.moe, k=case.k, backend="cuda"))["fwd+bwd"]
        if not any(name == case.name for name, _ in measured):
            continue
        for row in cutjax.explain(layer, platform="cuda")(jax.eval_shape(moe._maker(case))).rows:
            problem = row.choice.problem
            if isinstance(problem, cutjax.Problem) and problem.divided == "k":
                times = {config: np.mean(us) for config, us in measured[case.name, _product(problem)].items()}
                picked = times[dataclasses.replace(row.choice.config, raster=1)]  # among all, not only those measured
                regrets[case.name, _product(problem)] = picked / min(times.values())
    assert set(regrets) == {key for key in measured if key[1].startswith("dw")}
    assert np.exp(np.mean(np.log(list(regrets.values())))) < 1.03
    assert max(regrets.values()) < 1.06


def test_the_model_picks_well_of_experts_in_step():
    """As shipped 1.006 and 1.03 over the best of up to ten; torch takes 1.17, and 1.003 at least."""
    regrets, over = [], []
    for row, case, times in experts_in_step():
        if row["product"] != "gated":
            regrets.append(regret(case.problem(row["product"]), times))
            over.append(row["torch"][0] / (regrets[-1] * min(times.values())))
    assert len(regrets) == 25
    assert np.exp(np.mean(np.log(regrets))) < 1.02
    assert max(regrets) < 1.07
    assert np.exp(np.mean(np.log(over))) > 1.15
    assert min(over) > 1


def _product(problem):
    """The name in the sweep of a layer of experts."""
    return "dw2" if problem.products > 1 else "dwd"


# The formula was fitted to the first two, the network to the first and the last. As shipped 1.012 and 1.05, 1.023 and
# 1.09, 1.019 and 1.08, 1.012 and 1.05.
@pytest.mark.parametrize(
    ("name", "least", "mean", "worst_of_20"),
    [
        ("products-h200", 600, 1.014, 1.07),
        ("products-h100", 110, 1.026, 1.1),
        ("products-held-h200", 360, 1.021, 1.09),
        ("attention-h200", 300, 1.014, 1.07),
    ],
)
def test_the_model_picks_well_among_recorded_times(name, least, mean, worst_of_20):
    """Not a benchmark: the times are data."""
    regrets = []
    for problem, times, _ in recorded_products(name):
        predicted = {config: ranked_us(config, problem) for config in times}
        regrets.append(times[min(predicted, key=predicted.__getitem__)] / min(times.values()))
    assert len(regrets) > least
    assert np.exp(np.mean(np.log(regrets))) < mean
    assert np.percentile(regrets, 95) < worst_of_20


def test_the_model_picks_well_among_streams_of_weights():
    """As shipped 1.016 and 1.06 of 14, to which it was fitted; by the constants of all products 1.06 and 1.2."""
    recorded = json.loads((RESULTS / "experiments" / "streams-h200.json").read_text())
    regrets = []
    for row in recorded["rows"]:
        if "configs" not in row:
            continue
        problem = cutjax.Problem.of(row["m"], row["n"], row["k"], row["layout"])
        if row["products"] == 2:
            function = functools.partial(cutjax.gemm, epilogue=lambda gate, up: jax.nn.silu(gate) * up)
            a, b = (jax.ShapeDtypeStruct(shape, BF16) for shape in problem.shapes[:2])
            problem = cutjax.explain(function, platform="cpu")(a, (b, b)).rows[0].choice.problem
        times = {cutjax.Config(**fields): us for fields, us in row["configs"]}
        predicted = {x: ranked_us(x, problem) for x in times}
        regrets.append(times[min(predicted, key=predicted.__getitem__)] / min(times.values()))
    assert len(regrets) == 14
    assert np.exp(np.mean(np.log(regrets))) < 1.025
    assert max(regrets) < 1.1


def test_a_stream_of_weights_keeps_as_much_on_its_way_as_memory_takes():
    """Deeper pipelines of the same tiles took 1 to 5% longer."""
    for sizes in ((16, 28672, 4096), (16, 4096, 4096), (8, 18944, 3584), (32, 10240, 8192)):
        problem = cutjax.Problem.of(*sizes)
        config = cutjax.candidates(problem)[0]
        kernel = sm90.resolved(problem, config)
        at_once = min(kernel.tiles, problem.device.sms * kernel.blocks_per_sm) * config.cluster
        assert config.swap
        assert 5 < at_once * config.stages * kernel.stage_bytes / 1e6 < 13


@pytest.mark.parametrize(("rows", "line"), [(16, 128), (64, 128), (65, 256)])
def test_a_stream_of_weights_is_fetched_by_lines(rows, line):
    kernel = sm90.resolved(cutjax.Problem.of(rows, 4096, 4096), cutjax.Config(bm=64, bn=64, stages=4))
    maps = [x.value for x in kernel.arguments if x.name in ("map_a", "map_b0")]
    assert [x.l2_bytes for x in maps if isinstance(x, TensorMap)] == [line, line]


def test_the_model_picks_well_among_fused_products():
    """As shipped 1.010 and 1.05 of all, to which the network was fitted."""
    recorded = json.loads((RESULTS / "experiments" / "fused-sweep-h200.json").read_text())
    regrets = []
    for row in recorded["rows"][::4]:  # all of them are worth it after a change of the model
        shape, name = (row["m"], row["n"], row["k"], row["layout"]), row["epilogue"]
        function = fused_sweep.ours(row["layout"], name, None)
        problem = cutjax.explain(function, platform="cpu")(fused_sweep.avals(shape, name)).rows[0].choice.problem
        times = {cutjax.Config(**fields): us for fields, us in row["configs"]}
        resolved = {config: sm90.resolve(problem, config) for config in times}
        predicted = {x: ranked_us(x, problem) for x, k in resolved.items() if isinstance(k, sm90.Kernel)}
        regrets.append(times[min(predicted, key=predicted.__getitem__)] / min(times[x] for x in predicted))
    assert len(regrets) == 40
    assert np.exp(np.mean(np.log(regrets))) < 1.015
    assert np.percentile(regrets, 95) < 1.07


@pytest.mark.parametrize(
    ("m", "n", "k", "measured_us"),  # of two days, in turns with other kernels
    [(4096, 7168, 16384, (673, 690)), (4096, 24576, 1536, (213, 213)), (8192, 8192, 8192, (804, 868))],
)
def test_the_time_of_xlas_float8_products(m, n, k, measured_us):
    us = xla.time_us(cutjax.Problem.of(m, n, k, "nt", E4, E4, BF16))
    assert us is not None
    assert 0.95 * min(measured_us) < us < 1.03 * max(measured_us)


@pytest.mark.parametrize(
    ("rows", "n", "k", "layout", "served"),
    [
        (51688, 3072, 1024, "nt", True),
        (45321, 4096, 1024, "nn", True),
        (12912, 12288, 256, "nt", True),
        (14664, 6144, 768, "tn", True),
        (51712, 3072, 1024, "nt", False),
        (51688, 4096, 4096, "nt", False),
        (680, 3072, 1024, "nt", False),
    ],
)
def test_kernels_run_long_shallow_products_of_uneven_rows(rows, n, k, layout, served):
    """There XLA's tiles cost it 1 to 10%; of rows that tiles divide, and deeper, neither is surely faster."""
    with cutjax.use_tuning(None):
        assert choose.choose(cutjax.Problem.of(rows, n, k, layout)).served == served


def test_kernels_are_faster_of_uneven_rows():
    """Not a benchmark: the times are data."""
    recorded = json.loads((RESULTS / "experiments" / "uneven-rows-h200.json").read_text())
    ratios = []
    for row in recorded["rows"]:
        sizes, layout, *dtype = row["case"].split()
        m, n, k = map(int, sizes.split("x"))
        operand = np.dtype(dtype[0]) if dtype else BF16
        problem = cutjax.Problem.of(m, n, k, layout, operand, operand)
        with cutjax.use_tuning(None):
            if choose.choose(problem).served:
                ratios.append(row["us"]["xla"] / row["us"]["config 0"])
    assert len(ratios) == 52
    assert np.exp(np.mean(np.log(ratios))) > 1.04
    assert min(ratios) > 0.97


@pytest.mark.parametrize(("matrices", "size", "served"), [(128, 128, False), (32, 512, True)])
def test_short_scores_of_half_lines_are_left_to_xla(matrices, size, served):
    batch = dict.fromkeys(("batch", "a_batch", "b_batch"), (matrices,))
    with cutjax.use_tuning(None):
        assert choose.choose(cutjax.Problem.of(size, size, 96, "nt", **batch)).served == served


def test_results_that_pass_l2_leave_it_first():
    """8192 cubed took 0.991 of the time so; an up-convolution's gradient 1.03."""
    first = [choose.choose(cutjax.Problem.of(m, m, m), backend="cuda").config.evict_first for m in (4096, 8192)]
    assert first == ["", "d"]
    images = convolution.forward(view(64, (112, 112), (3, 3), 64, low=(1, 1), high=(1, 1)), 128)
    assert images.result_bytes > 2 * images.device.l2_bytes
    assert choose.choose(images, backend="cuda").config.evict_first == ""


def test_a_constant_costs_xla_no_pass():
    """Attention's scores in float32: cuBLAS scales them. 4.3 GB took it 1062 us, the best of 64 kernels 1227."""
    accs = [jax.ShapeDtypeStruct((8, 8, 8), F32)]
    scaled = trace(lambda acc: acc * 0.158, accs, []).epilogue.primal
    assert library_has(scaled)
    assert not library_has(scaled, "forward")
    assert not library_has(trace(lambda acc: acc * acc, accs, []).epilogue.primal)
    plain = identity(F32, F32)
    scores = cutjax.Problem.of(4096, 4096, 40, "nt", batch=(64,), a_batch=(64,), b_batch=(64,), epilogue=plain)
    kernel, by_xla = choose.choose(scores, backend="cuda").time_us, xla.time_us(scores)
    assert kernel is not None
    assert by_xla is not None
    assert kernel > 1.05 * by_xla


@pytest.mark.parametrize(("m", "n", "k", "measured_us"), [(4096, 7168, 16384, 729.5), (8192, 8192, 8192, 888.2)])
def test_the_time_of_xlas_pass_over_float8_products(m, n, k, measured_us):
    """XLA writes the accumulators in float32, which its pass reads, as of scales of rows."""
    accs = [jax.ShapeDtypeStruct((8, 8), F32)]
    epilogue = trace(lambda acc: (acc * 0.5).astype(jnp.bfloat16), accs, []).epilogue.primal
    us = xla.time_us(cutjax.Problem.of(m, n, k, "nt", E4, E4, epilogue=epilogue))
    assert us is not None
    assert 0.98 * measured_us < us < 1.02 * measured_us


# XLA, which has only products nt, took 1372 and 473 us there on an H200, kernels 798 and 270.
@pytest.mark.parametrize(("n", "k"), [(7168, 16384), (24576, 1536)])
def test_kernels_multiply_float8_that_xla_would_transpose(n, k):
    with tuned.use_tuning(None):
        choice = choose.choose(cutjax.Problem.of(4096, n, k, "nn", E4, E4))
    assert choice.served


def test_a_pass_over_float8_products_counts():
    """A kernel with an epilogue is beside XLA's product and its pass, which a small k makes the longer."""
    accs = [jax.ShapeDtypeStruct((8, 8), F32)]
    epilogue = trace(lambda acc: jax.nn.gelu(acc).astype(jnp.bfloat16), accs, []).epilogue.primal
    for k, served in ((8192, False), (256, True)):
        problem = cutjax.Problem.of(512, 8192, k, "nt", E4, E4, epilogue=epilogue)
        assert choose.choose(problem).served == served
