"""``bench --report``: the sample, the file, the table, and the device that a file tells of. Times are made up."""

from __future__ import annotations

import json

import pytest

from cutjax.kernels import device
from cutjax.tuning import autotune, command, device_report, measure
from cutjax.tuning.device_report import SAMPLE, Case

SMALL = (
    Case("bfloat16", "bfloat16", (256, 256, 256)),
    Case("float64", "float64", (64, 64, 64)),
    Case("int8", "int8", (64, 64, 64), out="int32"),
    Case("bfloat16", "bfloat16", (256, 256, 256), groups=2),
)


@pytest.fixture
def fake_device(monkeypatch):
    """A device on which kernels take 2, 3, .. us, XLA twice as long as the first, and grouped products fail."""

    def timed(task, seconds=0):
        if task.problem.groups:
            raise MemoryError("full")
        us = {config: 2.0 + i for i, config in enumerate(task.configs)}
        dropped = dict.fromkeys(list(us)[1:2], "wrong")
        us = {config: time for config, time in us.items() if config not in dropped}
        return measure.Times(us | {autotune.XLA: 4.0}, dropped)

    monkeypatch.setattr(autotune, "require_device", lambda: None)
    monkeypatch.setattr(device_report.lowering, "on_cuda", lambda: True)
    monkeypatch.setattr(autotune, "timed", timed)
    monkeypatch.setattr(device_report, "SAMPLE", SMALL)
    monkeypatch.setattr(device_report, "COPIED", 1 << 10)


def test_every_case_is_a_product():
    """Of the dtypes that it says, on the device that programs are lowered for."""
    for case in SAMPLE:
        with device_report.jax.enable_x64(case.dtype == "float64"):
            product = case.found()
        assert product.avals[0].dtype == product.avals[1].dtype == case.dtype, case
        assert product.avals[0].size == case.sizes[0] * case.sizes[2] * max(1, case.batch), case
        (out,) = product.eqn.outvars
        assert out.aval.dtype == (case.out or case.dtype), case
    assert len({case.name for case in SAMPLE}) == len(SAMPLE)
    assert {case.rate for case in SAMPLE} <= set(dict(device.named("NVIDIA L4").flops))


def test_report(fake_device, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert command.main(["bench", "--report", str(path), "--quiet"]) == 0
    content = device_report.read(path)
    assert (content["arch"], content["sms"]) == ("sm_90a", 132)
    assert {"cutjax", "jax", "python", "compiler"} == set(content["versions"])
    copy, dense, double, integers, grouped = content["rows"]
    assert copy["xla_us"] > 0
    assert dense["flops"] == 2 * 256**3
    assert dense["problem"]["m"] == 256
    assert sorted(dense["us"].values()) == [2.0, 4.0, 5.0]
    assert list(dense["dropped"].values()) == ["wrong"]
    assert set(dense["us"]) < set(dense["predicted_us"])
    assert double["problem"]["a_dtype"] == "float64"
    assert (double["xla_us"], integers["xla_us"]) == (4.0, 4.0)
    assert grouped == {"case": "256x256x256:bfloat16:2 groups", "error": "MemoryError: full"}
    out = capsys.readouterr().out
    assert next(line for line in out.splitlines() if line.startswith("256x256x256")).split()[1:4] == [
        "2.0",
        "4.0",
        "2.000",
    ]
    assert "not measured: 256x256x256:bfloat16:2 groups: MemoryError: full" in out
    assert f"written to {path}: please attach it to an issue" in out


@pytest.mark.parametrize(
    "case", [SMALL[1], SMALL[2], Case("float8_e4m3fn", "float8_e4m3fn", (32, 32, 32), out="float32")]
)
def test_a_row_is_measured(case, monkeypatch):
    """By XLA, for real: programs are compiled in threads, in which double precision is to be what it is here."""
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-5)
    monkeypatch.setattr(device_report, "CANDIDATES", 0)  # no kernel runs here
    row = device_report._row(case)
    assert row["dropped"] == {}
    assert row["xla_us"] > 0


def test_what_was_measured_before_an_interruption_is_kept(fake_device, tmp_path, monkeypatch):
    rows = iter([{"case": "first"}])

    def interrupted(case):
        try:
            return next(rows)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(device_report, "_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        device_report.run(tmp_path / "r.json", progress=False)
    assert [row["case"] for row in device_report.read(tmp_path / "r.json")["rows"]] == ["copy", "first"]


REPORT = {
    "format": 1,
    "device": "NVIDIA L4",
    "arch": "sm_89",
    "sms": 58,
    "rows": [
        {"case": "copy", "bytes": 8 << 26, "xla_us": 2000.0, "us": {}},
        {"case": "a", "rate": "bfloat16", "flops": 2 * 8192**3, "xla_us": 20000.0, "us": {"mma_x": 17000.0}},
        {"case": "b", "rate": "bfloat16", "flops": 2 * 512**3, "xla_us": 20.0, "us": {}},
        {"case": "c", "rate": "tf32", "flops": 2 * 8192**3, "xla_us": 40000.0, "us": {"mma_y": 50000.0}},
        {"case": "d", "error": "MemoryError: full"},
    ],
}


def test_the_device_of_a_report(tmp_path, capsys):
    found = device_report.fitted(REPORT)
    listed = device.named("NVIDIA L4")
    assert (found.name, found.sms, found.l2_bytes) == ("NVIDIA L4", 58, listed.l2_bytes)
    assert found.measured == ("bfloat16", "bytes", "tf32")
    rates, before = dict(found.flops), dict(listed.flops)
    assert rates["bfloat16"] == pytest.approx(2 * 8192**3 / 17e-3, rel=0.01)  # the best of both
    assert rates["tf32"] == pytest.approx(2 * 8192**3 / 40e-3, rel=0.01)
    assert rates["int8"] == before["int8"]
    assert found.bytes_per_second == pytest.approx((8 << 26) / 2e-3, rel=0.01)
    (tmp_path / "r.json").write_text(json.dumps(REPORT))
    assert command.main(["info", "--report", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert '    "bfloat16": 6.47e+13,' in out
    assert ["bfloat16", "64.7", "T/s", "measured"] in map(str.split, out.splitlines())


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"format": 2, "rows": []}'])
def test_a_file_that_is_no_report(text, tmp_path, capsys):
    (tmp_path / "r.json").write_text(text)
    assert command.main(["info", "--report", str(tmp_path / "r.json")]) == 1
    assert "is no report of a device" in capsys.readouterr().err


def test_info_of_a_gpu_elsewhere(capsys):
    assert command.main(["info", "--arch", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("device    NVIDIA H200, sm_90a, 132 SMs")
    assert "bfloat16       sm90" in out
    assert command.main(["info", "--device", "NVIDIA A100-SXM4-40GB"]) == 0
    assert "1.4 T/s  published, times a share" in capsys.readouterr().out
    assert command.main(["info", "--arch", "sm_99"]) == 1
    assert "expected an architecture such as sm_90a" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "64x64x64", "--report"]])
def test_bench_wants_products_or_the_sample(arguments, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "expected products, or --report" in capsys.readouterr().err


def test_without_a_gpu(tmp_path, capsys):
    assert command.main(["bench", "--report", str(tmp_path / "r.json")]) == 1
    assert "kernels are timed on an NVIDIA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_where_to_send(monkeypatch):
    class Metadata:
        def get_all(self, name):
            return ["Documentation, https://a.example", "Issues, https://b.example/issues"]

    monkeypatch.setattr(device_report.metadata, "metadata", lambda name: Metadata())
    assert device_report.where_to_send() == "please attach it to an issue at https://b.example/issues"
