"""Results of benchmarks on disk, in every schema, their tables and plots."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from fake_benchmarks import ENVIRONMENT, ROOFLINE

from benchmarks import report, tables
from benchmarks.record import Figures, Row


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


DENSE_FORMS = {"case": "", "kernel": "", "tflops": ".0f", "roofline": ".2f", "ratio": ".3f"}
DENSE_FORMS |= dict.fromkeys(("us", "iqr_us", "xla_us", "xla_iqr_us"), ".1f")
DENSE_FORMS |= {"plain_ratio": ".3f", "peak_mib": ".0f", "xla_peak_mib": ".0f"}
MOE_NUMBERS = ("tokens", "us", "rest_us", "peak_mib", "xla_tokens", "xla_us", "xla_peak_mib")
FORMS = {  # of the columns of each table, by the fields of rows as recorded: in schema 1, or in 2
    "syrk": {"case": "", "kernel": "", "us": ".1f", "tflops": ".0f", "roofline": ".2f", "peak_mib": ".0f"}
    | {"xla us": ".1f", "xla ratio": ".3f"},
    "gemm": DENSE_FORMS,
    "grouped": {"case": "", "product": "", "kernel": "", "us": ".1f", "tflops": ".0f"}
    | {"xla us": ".0f", "pallas us": ".0f", "torch us": ".0f"}
    | {"dense ratio": ".3f", "torch ratio": ".3f", "copy ratio": ".3f"},
    "products": {"case": "", "kernel": "", "roofline": ".2f"}
    | dict.fromkeys(("us", "xla us"), ".1f")
    | dict.fromkeys([f"{key} ratio" for key in ("xla", "xla, tuned", "sustained", "sustained, tuned")], ".3f"),
    "programs": {"case": "", "product": "", "jax ratio": ".3f", "peak_mib": ".0f"},
    "collective": {"case": "", "product": "", "peak_mib": ".0f"},
    "moe": {"case": "", "ratio": ".2f"} | dict.fromkeys(MOE_NUMBERS, ".0f"),
    "compile": {"case": "", "tile": "", "cpu_s": ".2f", "cubin_bytes": "", "registers": ""},
    "calls": {"case": "", "ships": "", "inlined_us": ".1f", "called_us": ".1f", "ratio": ".3f"},
}
FORMS["dtypes"] = FORMS["syrk"]
FORMS["sharded"] = FORMS["programs"]
FORMS["low_precision"] = {"case": "", "us": ".1f"}
FORMS["fused"] = {key: form for key, form in FORMS["syrk"].items() if key != "case"}  # with the product behind it
FORMS["conv"] = {"us": ".1f", "xla us": ".1f", "xla ratio": ".3f"}
FORMS["gather"] = {"us": ".1f", "xla us": ".1f", "xla ratio": ".3f"}
FORMS["mma_parts"] = {"case": "", "us": ".1f", "without us": ".1f", "without ratio": ".3f"}
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
    assert list(tables.markdown("gemm", [row]))[2] == "| a | - | - | - | - | - | no kernel |"


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
