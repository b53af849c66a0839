"""The benchmark of layers over devices, on virtual ones, and the times that benchmarks/scale.py predicts."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from benchmarks import report, run, scale, tables
from benchmarks.ops import collective
from benchmarks.record import Roofline
from benchmarks.suite import Run
from cutjax.parallel import links

RUN = Run("host", Roofline(100.0, 1000.0))
CASES = {case.name: case for case in collective.SUITE.cases}


@pytest.fixture
def quick(monkeypatch):
    """One round of turns, and four devices."""
    monkeypatch.setattr("benchmarks.ops.programs.ROUNDS", 1)
    monkeypatch.setattr("benchmarks.ops.programs.ROUND_S", 1e-3)
    monkeypatch.setattr("benchmarks.ops.collective.BURST_S", 1e-3)
    monkeypatch.setattr("benchmarks.ops.collective.REST_S", 1e-3)
    make, devices = jax.make_mesh, jax.devices()[:4]
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(jax, "make_mesh", lambda *args, **kwargs: make(*args, **kwargs, devices=devices))


def test_the_ways_agree(quick):
    asked = Run("host", RUN.roofline, peers=("auto", "direct", "pieces narrow"))
    rows = {row.product: row for row in collective.measure_case(CASES["tiny mlp"], asked)}
    assert [*rows] == ["jit", "apart", "auto", "direct", "pieces narrow", "alone"]
    for name, row in rows.items():
        assert not row.failure
        assert row.us > 0
        assert ("jit" in row.ratios) == (name not in ("jit", "alone"))


def test_a_wrong_way_is_seen(quick, monkeypatch):
    right = collective.KINDS["scatter"]

    def wrong(case):
        found = right(case)
        f, specs = found["pieces"]
        found["pieces"] = lambda *args: 1.1 * f(*args), specs
        found["direct"] = collective.cutjax, specs  # no function
        return found

    monkeypatch.setitem(collective.KINDS, "scatter", wrong)
    rows = {row.product: row for row in collective.measure_case(CASES["tiny out"], RUN)}
    assert rows["pieces"].failure.startswith("wrong: differs by 0.1")
    assert rows["direct"].failure
    assert not rows["8 SMs free"].failure


def test_the_command_and_what_is_predicted_from_it(quick, monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.json"
    small = [CASES["tiny links"], dataclasses.replace(CASES["tiny moe"], backward=False)]
    monkeypatch.setitem(run.SUITES, "collective", dataclasses.replace(collective.SUITE, cases=small))
    assert run.main(["--op", "collective", "--tag", "tiny", "--out", str(path), "--commit", "c"]) == 0
    content, rows = report.read(path)
    assert [row.product for row in rows if row.case == "tiny moe"] == [
        "gather",
        "exchange",
        "exchange whole",
        "auto",
    ]
    assert all(line.startswith("|") for line in tables.markdown("collective", rows))
    with pytest.raises(ValueError, match="no links, or not the products"):
        scale.rates(content, 50.0)
    sends = [row for row in rows if "permute" in row.product]
    assert sends[0].gb_per_s == pytest.approx(sends[0].figures["sent"] / sends[0].us / 1e3)
    assert scale.main([str(tmp_path / "missing.json")]) == 1

    def row(case, product, us, **figures):
        return {"case": case, "product": product, "us": us, "figures": figures}

    known = [
        row("links", "permute 1 bytes", 10.0, sent=4 * 10**5, devices=4),
        row("links", "permute 2 bytes", 1000.0, sent=4 * 10**8, devices=4),
        row("llama 70b mlp", "alone", 6 * 8192 * 8192 * 28672 / 4 / 700e6),
    ]
    path.write_text(json.dumps({"rows": known}))
    found = scale.rates(json.loads(path.read_text()), 50.0)
    assert (round(found.tflops), round(found.link), found.latency_us) == (700, 404, 10.0)
    capsys.readouterr()
    assert scale.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| 512 |") == 3


def test_what_is_predicted():
    rate = scale.Rates(700.0, 400.0, 50.0, 10.0)
    inside, outside = (scale.mlp_us(rate, 8192, 8192, 28672, n) for n in (8, 16))
    assert inside["products"] == pytest.approx(2 * outside["products"])
    # Rows of 8192 numbers: 2 bytes gathered, 4 of sums, of 7 of 8 devices.
    bytes_sent = 8192 * 8192 * 7 / 8
    sending = bytes_sent * (2 / links.ALL_GATHER + 4 / links.REDUCE_SCATTER) / 1e3
    assert inside["whole"] == pytest.approx(inside["products"] + sending + 2 * 10)
    assert outside["whole"] - outside["products"] > 2 * sending  # over the network
    for found in (inside, outside):
        assert found["products"] < found["all hidden"]
        assert found["products"] < found["direct"]
    assert inside["direct"] < inside["whole"]
    one = scale.data_us(rate, 10**9, 8192, 1)
    assert one["overlapped"] >= one["products"]
