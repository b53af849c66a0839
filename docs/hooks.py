"""Writes the tables of results.md from benchmarks/results/*.json, and carries the plots beside them into the site."""

from __future__ import annotations

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs may be run from anywhere

from benchmarks import report, tables  # noqa: E402

MARK = "<!-- results -->"


def on_files(files, config):
    from mkdocs.structure.files import File

    for plot in sorted(report.RESULTS.glob("*.png")):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown, page, config, files):
    # Pages that are read in the repository too show pictures from where they lie there.
    markdown = markdown.replace("](../benchmarks/results/", "](plots/")
    return markdown.replace(MARK, results()) if page.file.src_uri == "results.md" else markdown


def results() -> str:
    """The page's tables, a section for each run."""
    return "\n".join(map(_section, sorted(report.RESULTS.glob("*.json")))) or "No run has been recorded yet."


def _section(path: pathlib.Path) -> str:
    run, rows = report.read(path)
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
    if rows:
        lines += [*tables.markdown(run["op"], rows), ""]
    lines += [f"![{plot.stem}](plots/{plot.name})\n" for plot in sorted(report.RESULTS.glob(f"{path.stem}*.png"))]
    for name in ("launch", "compile"):
        if run.get(name):
            lines += [f"{name.capitalize()} cost:", "", "```json", json.dumps(run[name], indent=2), "```", ""]
    return "\n".join(lines)
