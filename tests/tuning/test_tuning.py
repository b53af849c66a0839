"""Tuned kernels go before the cost model's; autotune finds every product, measures each once, and keeps the fastest.

The device is the one that programs are lowered for without a GPU, an H200; times are made up.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mesh_of
from cuda_kernels import make
from jax import lax

import cutjax
from cutjax.binding import lowering
from cutjax.kernels import choose, device, families, tuned, xla
from cutjax.kernels.keys import key
from cutjax.runtime import settings, tuning_file
from cutjax.tuning import autotune, first_sight, measure

H = jnp.bfloat16
H200 = "NVIDIA H200"
PROBLEM = cutjax.Problem.of(256, 512, 512)
SECOND = cutjax.candidates(PROBLEM)[1]
X, W = (jax.ShapeDtypeStruct(shape, H) for shape in ((256, 512), (512, 512)))


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """A user's folder of this test alone; returns it."""
    with settings.override(tuning_dir=tmp_path / "user"):
        yield tmp_path / "user"


def write(path, config, time_us, xla_us, problem=PROBLEM, of=H200):
    fields = {} if config is None else families.fields_of(config)
    entry = tuned.Entry(tuple(sorted(fields.items())), time_us, xla_us).encoded()
    tuning_file.merge(path, {of: {key(problem): entry}})
    tuned.read_again()
    return path


def user_file():
    return tuning_file.user_path()


def lowered(f, *args):
    """The names of the kernels of a program for CUDA."""
    return re.findall(r'kernel = "(\w+)"', f.trace(*args).lower(lowering_platforms=("cuda",)).as_text())


# The choice.


def test_tuned_goes_before_the_model():
    first = choose.choose(PROBLEM)
    assert "predicted" in first.reasons[0]
    write(user_file(), SECOND, 7.0, 9.0)
    choice = choose.choose(PROBLEM)
    assert (choice.config, choice.reasons) == (SECOND, ("tuned: 7.0 us, XLA 9.0 us",))
    assert choice.time_us == 7.0
    assert choice.roofline == pytest.approx(choose.floor_us(PROBLEM) / 7.0)
    other = cutjax.Problem.of(256, 512, 136)
    assert "predicted" in choose.choose(other).reasons[0]


def test_pinned_goes_before_tuned():
    write(user_file(), SECOND, 7.0, 9.0)
    pinned = cutjax.candidates(PROBLEM)[2]
    assert choose.choose(PROBLEM, pinned).config == pinned


def test_xla_where_it_was_faster():
    write(user_file(), SECOND, 13.1, 12.3)
    auto = choose.choose(PROBLEM)
    assert (auto.kernel, auto.reasons) == ("XLA", ("tuned: XLA 12.3 us, best kernel 13.1 us",))
    assert choose.choose(PROBLEM, backend="cuda").config == SECOND
    for backend, runs in (("auto", "XLA"), ("cuda", SECOND.name(PROBLEM))):
        (row,) = cutjax.explain(functools.partial(cutjax.gemm, backend=backend), platform="cuda")(X, W).rows
        assert (row.runs, row.why) == (runs, "tuned: XLA 12.3 us, best kernel 13.1 us")


def test_backend_cuda_where_no_kernel_ran():
    write(user_file(), None, None, 12.3)
    assert choose.choose(PROBLEM).kernel == "XLA"
    assert "predicted" in choose.choose(PROBLEM, backend="cuda").reasons[0]


def test_precision_goes_before_tuned():
    write(user_file(), SECOND, 7.0, 9.0)
    assert choose.in_precision(PROBLEM, lax.DotAlgorithmPreset.BF16_BF16_BF16).kernel == "XLA"


def test_another_device():
    write(user_file(), SECOND, 7.0, 9.0, of="NVIDIA H100 80GB HBM3")
    assert "predicted" in choose.choose(PROBLEM).reasons[0]
    h100 = device.device_of_kind("NVIDIA H100 80GB HBM3", "sm_90a", 132)
    assert choose.choose(PROBLEM.on(h100)).config == SECOND


@pytest.mark.parametrize(
    "fields",
    [
        {"family": "sm90", "bm": 96},
        {"family": "sm90", "from_the_future": 3},
        {"family": "sm120"},
        {"family": "sm90", "stages": 16},  # a config, but not one that fits
    ],
)
def test_a_config_that_is_no_more_is_ignored(tmp_path, fields):
    """The next source is asked."""
    stale = {H200: {key(PROBLEM): {"config": fields, "time_us": 1.0, "xla_us": 0.5}}}
    tuning_file.merge(user_file(), stale)
    assert "predicted" in choose.choose(PROBLEM).reasons[0]
    tuning_file.merge(tmp_path / "mine.json", stale)
    write(user_file(), SECOND, 7.0, 9.0)
    with cutjax.use_tuning(tmp_path / "mine.json"):
        assert choose.choose(PROBLEM).config == SECOND


def test_later_sources_win(tmp_path, monkeypatch):
    configs = cutjax.candidates(PROBLEM)[1:5]
    shipped, scopes = tmp_path / "shipped", [tmp_path / "a.json", tmp_path / "b.json"]
    monkeypatch.setattr(tuned, "SHIPPED", shipped)
    paths = [shipped / "h200.json", user_file(), *scopes]
    model = choose.choose(PROBLEM).config
    for path, config in zip(paths[:2], configs[:2], strict=True):
        write(path, config, 7.0, 9.0)
        assert choose.choose(PROBLEM).config == config
    for path, config in zip(scopes, configs[2:], strict=True):
        write(path, config, 7.0, 9.0)
    with cutjax.use_tuning(scopes[0]):
        assert choose.choose(PROBLEM).config == configs[2]
        with cutjax.use_tuning(scopes[1]):
            assert choose.choose(PROBLEM).config == configs[3]
        with cutjax.use_tuning(None):
            assert choose.choose(PROBLEM).config == model
            with cutjax.use_tuning(scopes[1]):
                assert choose.choose(PROBLEM).config == configs[3]
                assert choose.choose(cutjax.Problem.of(512, 512, 512)).reasons[0].startswith("predicted")
        assert choose.choose(PROBLEM).config == configs[2]
    assert choose.choose(PROBLEM).config == configs[1]


def test_a_file_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cutjax.autotune\(fn, path=...\) wrote, .*none.json is none"):
        cutjax.use_tuning(tmp_path / "none.json")


# Functions that were jitted before.


def test_use_tuning_lowers_again(tmp_path):
    path, traces = write(tmp_path / "a.json", SECOND, 7.0, 9.0), []

    @jax.jit
    def f(x, w):
        traces.append(1)
        return cutjax.gemm(x, w)

    model, second = choose.choose(PROBLEM).kernel, SECOND.name(PROBLEM)
    assert model != second
    assert lowered(f, X, W) == [model]
    with cutjax.use_tuning(path):
        assert lowered(f, X, W) == [second]
    assert lowered(f, X, W) == [model]
    assert len(traces) == 2
    third = cutjax.candidates(PROBLEM)[2]
    write(path, third, 6.0, 9.0)
    with cutjax.use_tuning(path):  # the same path, another content
        assert lowered(f, X, W) == [third.name(PROBLEM)]


def counted():
    """A jitted product, and a list that grows whenever it is traced."""
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return cutjax.gemm(x, x)

    return f, traces


def test_calls_compile_again(tmp_path):
    """The cache of calls too, not only that of lowering."""
    f, traces = counted()
    x = jnp.ones((8, 8), H)
    f(x), f(x)
    assert len(traces) == 1
    write(tmp_path / "other.json", SECOND, 7.0, 9.0)
    with cutjax.use_tuning(tmp_path / "other.json"):
        f(x)
    f(x)
    assert len(traces) == 2


# autotune. Times are made up: of each config by its place among the candidates.


class Fake:
    """A measurement of made-up times, in place of the device's: by place among a task's configs, XLA's given."""

    def __init__(self, monkeypatch, kernel_us=(5.0, 3.0, 4.0), xla_us=6.0, dropped=()):
        self.tasks = []
        monkeypatch.setattr(autotune, "require_device", lambda: None)

        def timed(task, seconds=math.inf):
            self.tasks.append(task)
            us = {config: kernel_us[min(i, len(kernel_us) - 1)] for i, config in enumerate(task.configs)}
            if autotune.XLA in task.functions:
                us[autotune.XLA] = xla_us
            lost = {name: "wrong" for i, name in enumerate(task.functions) if i in dropped}
            return measure.Times({name: x for name, x in us.items() if name not in lost}, lost)

        monkeypatch.setattr(autotune, "timed", timed)


def test_autotune_keeps_the_fastest_and_jit_takes_it(monkeypatch):
    fake = Fake(monkeypatch)
    f = jax.jit(lambda x, w: cutjax.gemm(x, w))
    model = choose.choose(PROBLEM)
    assert lowered(f, X, W) == [model.kernel]
    report = cutjax.autotune(f, candidates=3)(X, W)
    (task,) = fake.tasks
    assert task.configs == list(cutjax.candidates(PROBLEM)[:3])
    assert lowered(f, X, W) == [task.configs[1].name(PROBLEM)]
    (row,) = report.rows
    assert (row.before, row.before_us, row.xla_us) == (model.kernel, 5.0, 6.0)
    assert (row.after, row.after_us, row.config) == (task.configs[1].name(PROBLEM), 3.0, task.configs[1])
    assert row.roofline == pytest.approx(choose.floor_us(PROBLEM) / 3.0)
    stored = tuning_file.read(user_file())[H200][key(PROBLEM)]
    assert {key: stored[key] for key in ("runs", "time_us", "xla_us")} == {
        "runs": "kernel",
        "time_us": 3.0,
        "xla_us": 6.0,
    }
    assert stored["cutjax"] == cutjax.__version__
    assert stored["jax"] == jax.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", stored["date"])
    again = cutjax.autotune(f, candidates=1)(X, W)  # what runs today is among those measured
    assert fake.tasks[-1].configs == [cutjax.candidates(PROBLEM)[0], task.configs[1]]
    assert again.rows[0].before == row.after


def test_autotune_calls_again_what_was_jitted(monkeypatch):
    Fake(monkeypatch)
    f, traces = counted()
    x = jnp.ones((64, 64), H)
    f(x), f(x)
    cutjax.autotune(f)(x)
    f(x)
    assert len(traces) == 3 - 1  # autotune found it traced


def test_autotune_into_a_file_of_its_own(monkeypatch, tmp_path):
    Fake(monkeypatch)
    report = cutjax.autotune(cutjax.gemm, path=tmp_path / "mine.json")(X, W)
    assert report.path == tmp_path / "mine.json"
    assert not user_file().exists()
    assert "predicted" in choose.choose(PROBLEM).reasons[0]
    with cutjax.use_tuning(report.path):
        assert "tuned: 3.0 us, XLA 6.0 us" in choose.choose(PROBLEM).reasons


def test_autotune_of_a_convolution(monkeypatch, tmp_path):
    """Its forward product, the gradient of images and that of weights are three problems."""
    fake = Fake(monkeypatch)
    x, w = (jax.ShapeDtypeStruct(shape, H) for shape in ((8, 28, 28, 128), (3, 3, 128, 128)))
    f = jax.jit(jax.grad(lambda x, w: (cutjax.conv(x, w).astype(jnp.float32) ** 2).sum(), (0, 1)))
    report = cutjax.autotune(f, path=tmp_path / "mine.json", candidates=3)(x, w)
    assert len(fake.tasks) == len(report.rows) == len(tuning_file.read(report.path)[H200]) == 3
    with cutjax.use_tuning(report.path):
        assert sorted(lowered(f, x, w)) == sorted(row.after for row in report.rows)


def test_xla_wins(monkeypatch):
    Fake(monkeypatch, xla_us=1.0)
    report = cutjax.autotune(lambda x, w: cutjax.gemm(x, w))(X, W)
    assert (report.rows[0].after, report.rows[0].config) == ("XLA", None)
    assert choose.choose(PROBLEM).kernel == "XLA"
    (row,) = cutjax.autotune(lambda x, w: cutjax.gemm(x, w, backend="cuda"))(X, W).rows
    assert (row.after_us, row.xla_us) == (3.0, 1.0)


@pytest.mark.parametrize(("before", "lead", "kernel"), [(1, 1.07, 0), (1, 1.09, 1), (0, 1.01, 0), (0, 1.03, 1)])
def test_what_was_measured_once_in_place_of_xla_must_lead_by_more(monkeypatch, before, lead, kernel):
    """It runs in the report, in this process and in those that read the file, or XLA does in all of them."""
    Fake(monkeypatch, xla_us=3.0 * lead)
    problem = cutjax.Problem.of(256, 512, 512 + 8 * before)
    if before:
        monkeypatch.setattr(xla, "time_us", lambda problem: 0.1)
    shapes = (problem.m, problem.k), (problem.k, problem.n)
    (row,) = cutjax.autotune(cutjax.gemm)(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)).rows
    tuned.read_again()
    assert (row.before == "XLA") == bool(before)
    assert [row.config is not None, choose.choose(problem).kernel != "XLA"] == [kernel, kernel]


def test_dropped_candidates(monkeypatch):
    Fake(monkeypatch, dropped=(1,))
    (row,) = cutjax.autotune(cutjax.gemm, candidates=3)(X, W).rows
    assert row.after_us == 4.0
    assert row.dropped == ((cutjax.candidates(PROBLEM)[1].name(PROBLEM), "wrong"),)
    assert row.tried == 4


def test_nothing_ran(monkeypatch):
    Fake(monkeypatch, dropped=range(99))
    report = cutjax.autotune(cutjax.gemm)(X, W)
    assert (report.rows[0].after, report.rows[0].after_us) == ("nothing ran", None)
    assert not user_file().exists()
    assert "nothing ran" in str(report)


def test_a_problem_that_fails_is_not_the_others(monkeypatch):
    Fake(monkeypatch)
    timed = autotune.timed

    def failing(task, seconds):
        if task.problem.n == 512:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return timed(task)

    monkeypatch.setattr(autotune, "timed", failing)
    report = cutjax.autotune(lambda x, w: (cutjax.gemm(x, w), cutjax.gemm(x, w[:, :256])))(X, W)
    assert [row.problem.n for row in report.rows] == [256]
    assert [(x.problem, x.why) for x in report.skipped] == [
        (str(PROBLEM), "RuntimeError: RESOURCE_EXHAUSTED: out of memory")
    ]


def test_an_interruption_keeps_what_was_measured(monkeypatch):
    Fake(monkeypatch)
    timed = autotune.timed

    def interrupted(task, seconds):
        if task.problem.n == 256:
            raise KeyboardInterrupt
        return timed(task)

    monkeypatch.setattr(autotune, "timed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cutjax.autotune(lambda x, w: (cutjax.gemm(x, w), cutjax.gemm(x, w[:, :256])))(X, W)
    assert "tuned" in choose.choose(PROBLEM).reasons[0]


# Measured as programs are lowered.


@pytest.fixture
def on_gpu(monkeypatch):
    """A process that could time kernels, once each in every test; the measurement is made up."""
    monkeypatch.setattr(lowering, "on_cuda", lambda: True)
    monkeypatch.setattr(first_sight, "_seen", set())
    return Fake(monkeypatch)


def test_a_new_problem_is_measured_when_it_is_lowered(on_gpu, tmp_path):
    f = jax.jit(lambda x, w: cutjax.gemm(cutjax.gemm(x, w), w))
    model, second = choose.choose(PROBLEM).kernel, SECOND.name(PROBLEM)
    assert lowered(f, X, W) == [model] * 2
    assert not on_gpu.tasks
    with cutjax.use_tuning(measure=3):
        assert lowered(f, X, W) == [second] * 2
        lowered(jax.jit(lambda x, w: cutjax.gemm(x, w)), X, W)
        with cutjax.use_tuning(None):
            assert lowered(jax.jit(lambda x, w: cutjax.gemm(x, w[:, :256])), X, W) != []
    (task,) = on_gpu.tasks
    assert task.configs == list(cutjax.candidates(PROBLEM)[:3])
    assert tuning_file.read(user_file())[H200][key(PROBLEM)]["time_us"] == 3.0
    assert lowered(jax.jit(cutjax.gemm), X, W) == [second]  # from then on, whoever asks
    write(tmp_path / "other.json", cutjax.candidates(PROBLEM)[2], 7.0, 9.0)
    with cutjax.use_tuning(tmp_path / "other.json", measure=3):
        assert lowered(jax.jit(cutjax.gemm), X, W) == [cutjax.candidates(PROBLEM)[2].name(PROBLEM)]
    assert len(on_gpu.tasks) == 1


def test_what_cannot_be_measured_runs_as_it_would(on_gpu, monkeypatch):
    mesh = mesh_of(i=2)
    sharded = jax.ShapeDtypeStruct(X.shape, H, sharding=jax.NamedSharding(mesh, jax.P("i")))
    with cutjax.use_tuning(measure=2):
        lowered(jax.jit(lambda x, w: cutjax.gemm(x, w, backend="xla")), X, W)
        lowered(jax.jit(lambda x, w: cutjax.gemm(x, w, config=SECOND)), X, W)
        lowered(jax.jit(lambda x, w: cutjax.gemm(x, w)), jax.ShapeDtypeStruct((0, 512), H), W)
        lowered(jax.jit(cutjax.gemm), sharded, W)
        by_hand = jax.shard_map(cutjax.gemm, mesh=mesh, in_specs=(jax.P("i"), jax.P()), out_specs=jax.P("i"))
        assert lowered(jax.jit(by_hand), X, W)
        assert not on_gpu.tasks
        monkeypatch.setattr(autotune, "timed", lambda task, seconds: 1 / 0)
        for _ in range(2):  # a failure is not tried again
            lowered(jax.jit(lambda x, w: cutjax.gemm(x, w)), X, W)
        monkeypatch.setattr(first_sight, "_seen", set())
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        first_sight._warn.cache_clear()
        with pytest.warns(RuntimeWarning, match="a job of several processes times no kernels"):
            lowered(jax.jit(lambda x, w: cutjax.gemm(x, w[:, :128])), X, W)


def test_measuring_by_the_environment(on_gpu):
    assert settings.Settings.of({"CUTJAX_MEASURE": "2"}).measure == 2
    with pytest.raises(ValueError, match="CUTJAX_MEASURE: expected a number of kernels, 0 or more, got 'all'"):
        settings.Settings.of({"CUTJAX_MEASURE": "all"})
    with settings.override(measure=2):
        lowered(jax.jit(lambda x, w: cutjax.gemm(x, w)), X, W)
        with cutjax.use_tuning(measure=0):
            lowered(jax.jit(lambda x, w: cutjax.gemm(x, w[:, :128])), X, W)
    assert [task.configs for task in on_gpu.tasks] == [list(cutjax.candidates(PROBLEM)[:2])]


def test_frozen(on_gpu, tmp_path):
    """Whatever else is tuned, before, in scopes around, or later."""
    path = write(tmp_path / "a.json", SECOND, 7.0, 9.0)
    others = cutjax.candidates(PROBLEM)[2:4]
    write(user_file(), others[0], 1.0, 9.0)
    other = cutjax.Problem.of(256, 256, 512)
    with cutjax.use_tuning(None):
        model = choose.choose(other).kernel
    write(user_file(), cutjax.candidates(other)[3], 1.0, 9.0, other)
    with cutjax.use_tuning(write(tmp_path / "b.json", others[1], 1.0, 9.0), measure=3):
        with cutjax.use_tuning(frozen=path):
            assert choose.choose(PROBLEM).config == SECOND
            assert lowered(jax.jit(lambda x, w: cutjax.gemm(x, w[:, :256])), X, W) == [model]
            with cutjax.use_tuning(measure=3):  # what won would be hidden, so nothing is timed
                lowered(jax.jit(lambda x, w: cutjax.gemm(x, w[:, :128])), X, W)
        with cutjax.use_tuning(None), cutjax.use_tuning(path, measure=3):
            lowered(jax.jit(lambda x, w: cutjax.gemm(x, w[:, :384])), X, W)
        assert choose.choose(PROBLEM).config == others[1]
    assert not on_gpu.tasks


@pytest.mark.parametrize(
    ("text", "message"), [("{", "it is damaged"), ('{"format": 2, "devices": {}}', "its format is 2")]
)
def test_frozen_refuses_what_it_cannot_read(tmp_path, text, message):
    """Processes of one job of which some cannot read it would compile different programs."""
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"frozen= names .*a\.json, by which nothing can be chosen: {message}"):
        cutjax.use_tuning(frozen=path)


def test_a_frozen_program_is_the_same_whatever_is_tuned(tmp_path, monkeypatch):
    """Plans of contractions, fused tails, groups and gradients too, which are chosen as programs are traced."""
    asked, find = {}, tuned.find
    monkeypatch.setattr(tuned, "find", lambda problem: (asked.setdefault(problem), find(problem))[1])

    def step(x, w, q, experts, sizes):
        y = cutjax.fuse(lambda x, w: jax.nn.gelu(x @ w))(x, w)
        scores = cutjax.einsum("bqhd,bkhd->bhqk", q, q)
        mixed = cutjax.einsum("bsic,bsjd->bijcd", q, q)
        rows = cutjax.grouped_gemm(y, experts, sizes)
        return sum(z.astype(jnp.float32).sum() for z in (cutjax.gemm(y, w), scores, mixed, rows))

    def program():
        jax.clear_caches()
        shapes = ((256, 512), (512, 512), (4, 256, 8, 64), (8, 512, 512))
        avals = [jax.ShapeDtypeStruct(shape, H) for shape in shapes]
        f = jax.jit(jax.value_and_grad(step, argnums=(0, 1, 2, 3)))
        return f.trace(*avals, jax.ShapeDtypeStruct((8,), jnp.int32)).lower(lowering_platforms=("cuda",)).as_text()

    with cutjax.use_tuning(frozen=write(tmp_path / "a.json", SECOND, 7.0, 9.0)):
        frozen = program()
    for i, problem in enumerate(asked):
        configs = cutjax.candidates(problem)
        if configs:  # each other kernel is fast, and so is each other product of XLA's
            write(user_file(), configs[-1], 1.0, (99.0, 0.5)[i % 2], problem)
    assert len(asked) > 8
    assert program() != frozen
    with cutjax.use_tuning(frozen=tmp_path / "a.json"):
        assert program() == frozen


def test_a_scope_counts_where_it_is_entered(tmp_path):
    """Not where it was made; the file is read there."""
    path, third = write(tmp_path / "a.json", SECOND, 7.0, 9.0), cutjax.candidates(PROBLEM)[2]
    other = write(tmp_path / "b.json", third, 7.0, 9.0)
    before = cutjax.use_tuning(path)
    with cutjax.use_tuning(other):
        within = cutjax.use_tuning(measure=0)
    with cutjax.use_tuning(None), before:
        assert [x.path for x in tuned.tables()] == [path]
        assert choose.choose(PROBLEM).config == SECOND
    with within:
        assert other not in [x.path for x in tuned.tables()]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TypeError, "expected a file"),
        ({"frozen": "/"}, FileNotFoundError, "/ is none"),
        ({"path": None, "measure": 3}, TypeError, "hides what was measured"),
        ({"frozen": "a", "measure": 3}, TypeError, "without path and measure="),
        ({"measure": -1}, ValueError, "a number of kernels, 0 or more, got -1"),
        ({"measure": True}, ValueError, "got True"),
        ({"frozen": "/nowhere/a.json"}, FileNotFoundError, "/nowhere/a.json is none"),
    ],
)
def test_use_tuning_refuses(given, error, message):
    with pytest.raises(error, match=message):
        cutjax.use_tuning(**given)


def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="timed on an NVIDIA GPU, and JAX computes on 'cpu' here"):
        cutjax.autotune(cutjax.gemm)(X, W)


def test_no_candidates():
    with pytest.raises(ValueError, match="candidates must be 1 or more, got 0"):
        cutjax.autotune(cutjax.gemm, candidates=0)


def test_a_file_of_another_format_is_refused_first(monkeypatch):
    fake = Fake(monkeypatch)
    user_file().parent.mkdir()
    user_file().write_text('{"format": 9}')
    with pytest.raises(ValueError, match="its format is 9"):
        cutjax.autotune(cutjax.gemm)(X, W)
    assert not fake.tasks


def found(monkeypatch, f, *args):
    """The problems that autotune measures of a function, in short, with their counts; and those it does not."""
    Fake(monkeypatch)
    report = cutjax.autotune(f, candidates=1)(*args)
    rows = {}
    for row in report.rows:
        kind = "syrk" if row.problem.symmetric else {"m": "rows", "k": "depth", "": "gemm"}[row.problem.divided]
        kind += "" if row.problem.plain else " fused"
        rows[kind] = rows.get(kind, 0) + row.count
    return rows, report


def product(x):
    return cutjax.gemm(x, x)


@jax.custom_vjp
def with_rule(x):
    return cutjax.gemm(x, x)


with_rule.defvjp(lambda x: (product(x), x), lambda x, g: (cutjax.gemm(g, x, layout="nt") + cutjax.gemm(x, g),))


@jax.custom_jvp
def with_jvp(x):
    return cutjax.gemm(x, x)


with_jvp.defjvp(lambda primals, tangents: (product(primals[0]), cutjax.gemm(tangents[0], primals[0])))


def summed(f):
    return lambda x: f(x).astype(jnp.float32).sum()


SQUARE = jax.ShapeDtypeStruct((64, 64), H)
SIZES = jnp.array([10, 20, 30, 4], jnp.int32)
PROGRAMS = {
    "plain": (product, {"gemm": 1}),
    "jit": (jax.jit(jax.jit(product)), {"gemm": 1}),
    "scan": (lambda x: lax.scan(lambda c, _: (product(c), None), x, None, length=5)[0], {"gemm": 5}),
    "scan of scans": (
        lambda x: lax.scan(lambda c, _: (lax.fori_loop(0, 3, lambda _, y: product(y), c), None), x, None, length=5)[0],
        {"gemm": 15},
    ),
    "while": (lambda x: lax.while_loop(lambda c: c[0, 0] < 1, product, x), {"gemm": 1}),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, product, lambda y: product(product(y)), x), {"gemm": 3}),
    "vmap": (lambda x: jax.vmap(product)(jnp.stack([x, x])), {"gemm": 1}),
    "grad": (jax.grad(summed(product)), {"gemm": 2}),
    "jitted grad": (jax.jit(jax.value_and_grad(summed(product))), {"gemm": 3}),
    "remat": (jax.grad(summed(jax.checkpoint(lambda x: product(jnp.sin(product(x)))))), {"gemm": 5}),
    "custom_vjp": (with_rule, {"gemm": 1}),
    "grad of custom_vjp": (jax.grad(summed(with_rule)), {"gemm": 2}),
    "custom_jvp": (with_jvp, {"gemm": 1}),
    "jvp of custom_jvp": (lambda x: jax.jvp(with_jvp, (x,), (x,)), {"gemm": 2}),
    "shard_map": (
        jax.shard_map(
            lambda x: cutjax.gemm(x, x, layout="nt"), mesh=mesh_of(i=2), in_specs=jax.P("i"), out_specs=jax.P("i")
        ),
        {"gemm": 1},
    ),
    "epilogue": (lambda x: cutjax.gemm(x, x, epilogue=jax.nn.gelu), {"gemm fused": 1}),
    "two products": (lambda x: cutjax.gemm(x, (x, x), epilogue=lambda a, b: a * b), {"gemm fused": 1}),
    "syrk": (cutjax.syrk, {"syrk": 1}),
    "mlp": (lambda x: cutjax.mlp(x, x, x), {"gemm": 1, "gemm fused": 1}),
    "grad of mlp": (
        jax.grad(lambda ws, x: cutjax.mlp(x, *ws).astype(jnp.float32).sum()),
        {"gemm": 2, "gemm fused": 2},
    ),
    "grouped": (lambda x: cutjax.grouped_gemm(x, jnp.stack([x] * 4), SIZES), {"rows": 1}),
    "grad of grouped": (
        jax.grad(lambda w, x: cutjax.grouped_gemm(x, w, SIZES).astype(jnp.float32).sum()),
        {"depth": 1},
    ),
    "ragged_dot": (lambda x: cutjax.ragged_dot(x, jnp.stack([x] * 4), SIZES), {"rows": 1}),
}
ARGUMENTS = {
    "grad of mlp": ((SQUARE, SQUARE), SQUARE),
    "grad of grouped": (jax.ShapeDtypeStruct((4, 64, 64), H), SQUARE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_product_is_found(name, monkeypatch):
    f, expected = PROGRAMS[name]
    rows, report = found(monkeypatch, f, *ARGUMENTS.get(name, (SQUARE,)))
    assert rows == expected
    assert not report.skipped
    assert all(row.exact for row in report.rows) == (name not in ("while", "cond"))


def test_arrays_and_keyword_arguments(monkeypatch):
    Fake(monkeypatch)
    x = jnp.ones((64, 64), H)
    (row,) = cutjax.autotune(lambda a, *, b: cutjax.gemm(a, b))(x, b=x).rows
    assert row.count == 1


def test_products_without_a_choice(monkeypatch):
    def f(x, w):
        pinned, xla = cutjax.gemm(x, w, config=SECOND), cutjax.gemm(x, w, backend="xla")
        return pinned, xla, cutjax.gemm(x.astype(jnp.int16), w.astype(jnp.int16)), cutjax.gemm(x, w[:, :0])

    rows, report = found(monkeypatch, f, X, W)
    assert rows == {}
    s16 = "s16 x s16: both operands are bf16, f16, f32, of float8 or of 8-bit integers; s16 x s16 on sm_90a"
    assert [x.why for x in report.skipped] == ["pinned by config=", "backend 'xla'", s16, "nothing to compute"]


def test_of_a_product_that_is_divided_one_device_s_part_is_measured(monkeypatch):
    x = jax.ShapeDtypeStruct((64, 64), H, sharding=jax.NamedSharding(mesh_of(i=2), jax.P("i")))
    rows, report = found(monkeypatch, product, x)
    assert rows == {"gemm": 1}
    assert (report.rows[0].problem.m, report.rows[0].problem.n) == (32, 64)


def test_kernels_of_the_users_own_are_no_products(monkeypatch):
    x = jnp.ones(32)
    rows, report = found(monkeypatch, lambda x: make()(x, x, a=2.0), x)
    assert (rows, report.skipped) == ({}, ())


# What is measured, on this machine's CPU, where only XLA runs.

CASES = {
    "plain": lambda x: cutjax.gemm(x, x),
    "f32 result": lambda x: cutjax.gemm(x, x, out_dtype=jnp.float32),
    "batched": lambda x: cutjax.gemm(jnp.stack([x, x]), jnp.stack([x, x])),
    "fused": lambda x: cutjax.gemm(
        x, x, epilogue=lambda acc, y: (acc * y.astype(acc.dtype), acc.sum(-1)), operands=(x,)
    ),
    "integer operand": lambda x: cutjax.gemm(
        x,
        x,
        epilogue=lambda acc, i, b: jnp.where(b, acc, acc * i.astype(acc.dtype)),
        operands=(x.astype(jnp.int32), x > 0),
    ),
    "syrk": cutjax.syrk,
    "rows": lambda x: cutjax.grouped_gemm(x, jnp.stack([x] * 3), jnp.array([20, 30, 14])),
    "depth": lambda x: cutjax.grouped_outer(x, x, jnp.array([20, 30, 14])),
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_functions_and_reference(name):
    """XLA's function agrees with the reference, on inputs of the avals; groups are of even sizes."""
    products, _ = autotune.walk.products(CASES[name], (SQUARE,), {}, "cuda")
    (task,), skipped = autotune.tasks(products, 2)
    assert not skipped
    for integers in (True, False):
        arrays = task.inputs(np.uint32(1), integers)
        assert [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in task.product.avals]
        assert len({float(arrays[0][0, ..., i].ravel()[0].astype(jnp.float32)) for i in range(20)}) > 2
    if task.problem.groups:
        assert arrays[2].tolist() == [22, 21, 21]
    known = task.inputs(np.uint32(1), True)
    expected = task.reference(*known)
    xla = task._bound("xla", None)
    right = measure.equal if task.problem.plain else measure.close
    assert right(xla(*known), expected)
    assert not right([x.at[..., -1].add(1) for x in xla(*known)], expected)
    assert (autotune.XLA in task.functions) == (not task.problem.groups)


def test_measured_on_this_machine(monkeypatch):
    """All of it but the kernels: each is dropped with its reason, and XLA's time is one."""
    monkeypatch.setattr(autotune, "require_device", lambda: None)
    monkeypatch.setattr(measure, "HOST_US", 0.0)
    report = cutjax.autotune(cutjax.gemm, candidates=2)(SQUARE, SQUARE)
    assert (report.clock, "host's clock" in str(report)) == ("host", True)
    (row,) = report.rows
    assert len(row.dropped) == 2
    assert all("needs an NVIDIA GPU" in why for _, why in row.dropped)
    assert row.xla_us > 0
    assert choose.choose(row.problem).reasons[0].startswith("tuned: XLA")


@pytest.mark.parametrize(("problem", "most", "count"), [((8192, 8192, 8192), 3, 4), ((512, 512, 512), 3, 3)])
def test_of_long_products_a_cluster_of_two_is_timed(problem, most, count):
    configs = autotune.configs_of(cutjax.Problem.of(*problem), most)
    assert configs[:most] == list(cutjax.candidates(cutjax.Problem.of(*problem))[:most])
    assert len(configs) == count == most + any(config.cluster_m * config.cluster_n == 2 for config in configs)
