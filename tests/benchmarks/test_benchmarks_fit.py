"""The judgement of the cost model by measured times, and the fit of constants."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import direct, fit
from cutjax.kernels.device import device_of_kind

H200 = device_of_kind("NVIDIA H200", "sm_90a")


@pytest.fixture(scope="module")
def lines():
    """Products measured as a made-up model says: time of work, of bytes, and of a launch."""
    found = []
    for case in direct.products(["fit"], 40, [], "bfloat16"):
        job = direct.plan(case, H200, 8, 4)
        if job.configs:
            sizes = {"m": case.m, "n": case.n, "k": case.k, "layout": case.layout, "batch": [], "dtype": case.dtype}
            configs = [{**config, "us": 1.0} for config in job.configs]
            found.append(
                {"case": case.name, **sizes, "device": H200.name, "sms": 132, "xla_us": 50.0, "configs": configs}
            )
    return found


def made_up(constants, rows):
    work, stored, launch = constants
    waves = np.array([-(-kernel.tiles // 132) for kernel in rows.kernels])
    tile = np.array([kernel.config.bm * kernel.config.bn for kernel in rows.kernels])
    return waves * tile * (work * np.array([kernel.problem.k for kernel in rows.kernels]) + stored) * 1e-6 + launch


TRUE = (1.7, 300.0, 4.0)


def measured(lines):
    rows = fit.flatten(lines)
    times = iter(made_up(TRUE, rows))
    return fit.flatten([{**x, "configs": [{**row, "us": next(times)} for row in x["configs"]]} for x in lines])


def test_a_fit_finds_the_constants_that_made_the_times(lines):
    rows = measured(lines)
    start = (1.0, 1000.0, 1.0)
    found = fit.fit(made_up, start, rows, fit.error_loss)
    np.testing.assert_allclose(found, TRUE, rtol=0.05)

    def both(constants):
        times = made_up(constants, rows)
        return fit.pick_loss(rows, times) + fit.error_loss(rows, times)

    assert both(fit.fit(made_up, start, rows)) < 0.2 * both(start)
    assert fit.fit(made_up, (1.0, 0.0, 1.0), rows)[1] == 0


def test_judgement(lines):
    rows = measured(lines)
    perfect, worst = fit.judge(rows, rows.us), fit.judge(rows, 1 / rows.us)
    assert np.all(perfect.to_best == 1)
    assert np.all(perfect.picks == perfect.best)
    for i, line in enumerate(rows.lines):
        of = rows.us[rows.product == i]
        assert worst.to_best[i] == of.min() / of.max()
        assert worst.to_xla[i] == line["xla_us"] / of.max()
    assert fit.pick_loss(rows, 1 / rows.us) > fit.pick_loss(rows, rows.us) >= 0
    assert fit.error_loss(rows, rows.us) == 0 < fit.error_loss(rows, 2 * rows.us)


def test_the_command_judges_the_shipped_model(lines, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    again = {**lines[0], "xla_us": 1e-3}
    broken = {"case": "broken", "error": "no"}
    path.write_text("\n".join(json.dumps(line) for line in ({"head": {}}, *lines, broken, again)) + '\n{"case": "cu')
    assert fit.main([str(path), "--worst", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"all {' ' * 12}" in shown
    assert f" {len(lines):4d} | " in shown
    assert shown.count("best / pick 1.000") == 2  # of equal times
    assert "under 10 us           1 | 0.001, 0.001, 0.001" in shown
