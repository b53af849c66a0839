"""A report of another machine's GPU: the device that it tells of."""

from __future__ import annotations

import json

import pytest

from cutjax.kernels import device
from cutjax.tuning import command, device_report

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
        {"case": "fused", "flops": 2 * 8192**3, "xla_us": 1.0, "us": {"mma_z": 1.0}},
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
