"""Writes the tables of results.md from benchmarks/results/*.json, and carries the plots beside them into the site."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"
MARK = "<!-- results -->"
# Columns of runs that have them: heading and format.
MORE = {
    "plain_ratio": ("of plain", ".3f"),
    "plain_target": ("at most", ".2f"),
    "peak_mib": ("peak MiB", ".0f"),
    "xla_peak_mib": ("XLA's MiB", ".0f"),
}


def on_files(files, config):
    from mkdocs.structure.files import File

    for plot in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown, page, config, files):
    return markdown.replace(MARK, _results()) if page.file.src_uri == "results.md" else markdown


def _results() -> str:
    paths = sorted(RESULTS.glob("*.json"))
    return "\n".join(map(_section, paths)) or "No run has been recorded yet."


def _section(path: pathlib.Path) -> str:
    run = json.loads(path.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        f"## {path.stem}",
        "",
        f"{run['device']}, driver {run['driver']}, {versions}; commit `{run['commit'][:12]}`, {run['date'][:10]}; "
        f"times by {run['method']}.",
        "",
    ]
    if roofline := run["roofline"]:
        lines += [
            f"Measured roofline: {roofline['tflops']:.0f} TFLOP/s in bf16, {roofline['gb_per_s']:.0f} GB/s copied.",
            "",
        ]
    if run["rows"] and run.get("op") in TABLES:
        lines += [*TABLES[run["op"]](run["rows"]), ""]
    elif run["rows"]:
        more = [name for name in MORE if any(row.get(name) is not None for row in run["rows"])]
        names = _cells(MORE[name][0] for name in more)
        lines += [
            f"| case | cutjax us | TFLOP/s | of the roofline | XLA us | ratio | target |{names} kernel |",
            f"|---|--:|--:|--:|--:|--:|--:|{'--:|' * len(more)}---|",
            *(_row(row, more) for row in run["rows"]),
            "",
        ]
    lines += [f"![{plot.stem}](plots/{plot.name})\n" for plot in sorted(RESULTS.glob(f"{path.stem}*.png"))]
    for name in ("launch", "compile"):
        if run.get(name):
            lines += [f"{name.capitalize()} cost:", "", "```json", json.dumps(run[name], indent=2), "```", ""]
    return "\n".join(lines)


def _grouped(rows: list[dict]) -> Iterable[str]:
    yield (
        "| case | product | cutjax us | TFLOP/s | dense us / ours | torch us / ours | of the copy rate "
        "| XLA us | Pallas us | torch us | kernel |"
    )
    yield f"|---|---|{'--:|' * 8}---|"
    for row in rows:
        peers = _cells(_number(row["peers"].get(name, {}).get("us"), ".0f") for name in ("xla", "pallas", "torch"))
        ratios = _cells(_number(row["ratios"].get(name), ".3f") for name in ("dense", "torch", "copy"))
        ours = _cells(_number(row[name], form) for name, form in (("us", ".1f"), ("tflops", ".0f")))
        yield f"| {row['case']} | {row['product']} |{ours}{ratios}{peers} `{row['kernel']}` |"


def _moe(rows: list[dict]) -> Iterable[str]:
    yield "| layer | tokens | cutjax us | all but products | peak MiB | XLA's tokens | XLA us | XLA's MiB | ratio |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        ours = _cells(_number(row[name], ".0f") for name in ("tokens", "us", "rest_us", "peak_mib"))
        xla = _cells(_number(row[name], ".0f") for name in ("xla_tokens", "xla_us", "xla_peak_mib"))
        yield f"| {row['case']} |{ours}{xla} {_number(row['ratio'], '.2f')} |"


def _compile(rows: list[dict]) -> Iterable[str]:
    yield "| epilogue, result | tile | CPU seconds | at most | cubin bytes | registers | bytes spilled |"
    yield f"|---|---|{'--:|' * 5}"
    for row in rows:
        found = _cells(_number(row[name], form) for name, form in (("cpu_s", ".2f"), ("target", ".1f")))
        found += _cells(str(row[name]) for name in ("cubin_bytes", "registers", "spill_bytes"))
        yield f"| {row['case']} | {row['tile']} |{found}"


def _calls(rows: list[dict]) -> Iterable[str]:
    yield "| product, epilogue | inlined us | called us | plain us | ships | of the other | at most |"
    yield "|---|--:|--:|--:|---|--:|--:|"
    for row in rows:
        us = _cells(_number(row[name], ".1f") for name in ("inlined_us", "called_us", "plain_us"))
        ratios = _cells(_number(row[name], ".3f") for name in ("ratio", "most_ratio"))
        yield f"| {row['case']} |{us} {row['ships']} |{ratios}"


TABLES = {"calls": _calls, "compile": _compile, "grouped": _grouped, "moe": _moe}


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cells(values: Iterable[str]) -> str:
    return "".join(f" {value} |" for value in values)


def _row(row: dict, more: list[str]) -> str:
    if row["failure"]:
        return f"| {row['case']} | - | - | - | - | - | - |{_cells('-' for _ in more)} {row['failure']} |"
    target = "" if row["target"] is None else f"{row['target']:.2f}"
    kernel = row["kernel"] if row["choice"] == "auto" else f"{row['kernel']} (pinned)"
    return (
        f"| {row['case']} | {row['us']:.1f} ± {row['iqr_us']:.1f} | {row['tflops']:.0f} | {row['roofline']:.2f} "
        f"| {row['xla_us']:.1f} ± {row['xla_iqr_us']:.1f} | {row['ratio']:.3f} | {target} |"
        f"{_cells('' if row[name] is None else format(row[name], MORE[name][1]) for name in more)} `{kernel}` |"
    )
