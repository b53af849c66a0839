"""autotune on the device: real times, right results, and the kernels that run afterwards. Nothing asserts on a time."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.kernels import tuned
from cutjax.runtime import settings
from cutjax.tuning import autotune, bench, bench_table, cases, command, device_report, measure

pytestmark = pytest.mark.gpu

H = jnp.bfloat16
# Of a gradient in bf16 to the norm of that by other kernels: orders of summation differ, roundings to bf16 hardly.
TOLERANCE = 8e-3


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """A user's folder of this test alone: what it measures is nobody else's."""
    with settings.override(tuning_dir=tmp_path):
        yield tmp_path
    tuned.read_again()
    jax.clear_caches()


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, H) * H(shape[-2] ** -0.5)


def close(got, expected):
    for x, ref in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
        assert np.linalg.norm(x - ref) <= TOLERANCE * np.linalg.norm(ref)


def kernels(f, *args):
    return set(re.findall(r'kernel = "(\w+)"', f.lower(*args).as_text()))


def check(report, f, *args):
    """Every product was measured, none by a wrong kernel, and what the report says is what runs."""
    print(report)
    assert report.rows
    assert not report.skipped
    for row in report.rows:
        assert not row.dropped, row
        assert row.before_us > 0
        assert row.after_us <= row.before_us  # what ran before is a candidate
    assert kernels(f, *args) == {row.after for row in report.rows} - {"XLA"}
    rows = cutjax.explain(f)(*args).rows
    assert {row.runs for row in rows} == {row.after for row in report.rows}
    assert all(row.why.startswith("tuned: ") for row in rows)


def test_gradient_of_two_layers():
    """A gradient that was jitted and called before runs the tuned kernels afterwards, to the same result."""

    @jax.jit
    def step(ws, x):
        def loss(ws):
            h = cutjax.gemm(x, ws[0], epilogue=jax.nn.gelu)
            return (cutjax.gemm(h, ws[1]).astype(jnp.float32) ** 2).mean()

        return jax.grad(loss)(ws)

    ws, x = (normal(0, 512, 1536), normal(1, 1536, 512)), normal(2, 640, 512)
    before = step(ws, x)
    report = cutjax.autotune(step, candidates=6)(ws, x)
    check(report, step, ws, x)
    assert len(report.rows) == 5  # two products, what h and each of the weights get
    close(step(ws, x), before)


def test_grouped():
    sizes = jnp.array([100, 0, 300, 112], jnp.int32)

    @jax.jit
    def step(w, x):
        return jax.grad(lambda w: (cutjax.grouped_gemm(x, w, sizes).astype(jnp.float32) ** 2).mean())(w)

    w, x = normal(0, 4, 256, 384), normal(1, 512, 256)
    before = step(w, x)
    report = cutjax.autotune(step, candidates=3)(w, x)
    check(report, step, w, x)
    assert all(row.xla_us is None for row in report.rows)
    close(step(w, x), before)


def test_other_products():
    """Symmetric, batched, two accumulators, a reduction, integer operands, float8 results: each has inputs that fit."""

    def f(x, w):
        scaled = cutjax.gemm(
            x, w, epilogue=lambda acc, i: (acc * i.astype(acc.dtype), acc.sum(-1)), operands=(jnp.arange(384),)
        )
        several = cutjax.gemm(x, (w, w), epilogue=lambda a, b: jax.nn.silu(a) * b)
        batched = cutjax.gemm(jnp.stack([x, x]), jnp.stack([w, w]), out_dtype=jnp.float32)
        return cutjax.syrk(x), scaled, several, batched, cutjax.gemm(x, w, out_dtype=jnp.float8_e4m3fn)

    f = jax.jit(f)
    args = normal(0, 512, 256), normal(1, 256, 384)
    report = cutjax.autotune(f, candidates=2)(*args)
    check(report, f, *args)
    assert len(report.rows) == 5


def test_a_wrong_kernel_never_wins(monkeypatch):
    """One whose result is off in one element is dropped, however fast it is."""
    bound = autotune.Task._bound

    def broken(self, backend, config, **more):
        function = bound(self, backend, config, **more)
        if backend == "xla" or config != self.configs[0]:
            return function
        return lambda *arrays: [x.at[-1, -1].add(1) for x in function(*arrays)]

    monkeypatch.setattr(autotune.Task, "_bound", broken)
    report = cutjax.autotune(cutjax.gemm, candidates=2)(normal(0, 256, 256), normal(1, 256, 256))
    (row,) = report.rows
    assert [why for _, why in row.dropped] == ["ArithmeticError: its result is wrong"]
    assert row.config != cutjax.candidates(row.problem)[0]


def test_memory_is_given_back():
    device = jax.devices()[0]
    args = normal(0, 2048, 2048), normal(1, 2048, 2048)
    cutjax.autotune(cutjax.gemm, candidates=1)(*args)
    used = device.memory_stats()["bytes_in_use"]
    cutjax.autotune(cutjax.gemm, candidates=3)(*args)
    assert device.memory_stats()["bytes_in_use"] <= used + (1 << 20)
    assert measure._free_bytes() > 1 << 30


def test_bench(capsys):
    assert command.main(["bench", "256x512x1024:nt", "4x128x128x256:tn:f16"]) == 0
    out = capsys.readouterr().out
    print(out)
    assert "256x512x1024 nt bf16 x bf16 -> bf16" in out
    assert "dropped" not in out


@pytest.mark.parametrize("case", cases.CASES[: len(cases.KINDS)], ids=lambda case: case.kind)
def test_bench_has_a_row_of_each_kind(case):
    row = bench._row(case)
    assert "error" not in row, row
    assert row["dropped"] == {}
    assert bench_table.ratio_of(row) or "missing" in row or row["runs"] == autotune.XLA


def test_bench_goes_on(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert command.main(["bench", "--report", str(path), "--minutes", "0.001", "--quiet"]) == 0
    assert "cases are left" in capsys.readouterr().out
    first = device_report.read(path)
    again = bench.run(path, minutes=0.001, progress=False)
    assert {**again, "rows": again["rows"][: len(first["rows"])]} == first
