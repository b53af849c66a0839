"""Writes the tables of results.md from benchmarks/results/*.json, and carries the plots beside them into the site."""

from __future__ import annotations

import json
import pathlib

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"
MARK = "<!-- results -->"


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
    if run["rows"]:
        lines += [
            "| case | cutjax us | TFLOP/s | of the roofline | XLA us | ratio | target | kernel |",
            "|---|--:|--:|--:|--:|--:|--:|---|",
            *map(_row, run["rows"]),
            "",
        ]
    lines += [f"![{plot.stem}](plots/{plot.name})\n" for plot in sorted(RESULTS.glob(f"{path.stem}*.png"))]
    for name in ("launch", "compile"):
        if run.get(name):
            lines += [f"{name.capitalize()} cost:", "", "```json", json.dumps(run[name], indent=2), "```", ""]
    return "\n".join(lines)


def _row(row: dict) -> str:
    if row["failure"]:
        return f"| {row['case']} | - | - | - | - | - | - | {row['failure']} |"
    target = "" if row["target"] is None else f"{row['target']:.2f}"
    kernel = row["kernel"] if row["choice"] == "auto" else f"{row['kernel']} (pinned)"
    return (
        f"| {row['case']} | {row['us']:.1f} ± {row['iqr_us']:.1f} | {row['tflops']:.0f} | {row['roofline']:.2f} "
        f"| {row['xla_us']:.1f} ± {row['xla_iqr_us']:.1f} | {row['ratio']:.3f} | {target} | `{kernel}` |"
    )
