"""Writes tables and pictures into pages when they are built, and carries plots of recorded runs and the tutorial there.

The tables of results.md are made of benchmarks/results/*.json, "What runs where" of what the families of kernels say.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # mkdocs may be run from anywhere

import pictures  # noqa: E402
import tutorial  # noqa: E402
import what_runs_where  # noqa: E402

from benchmarks import report, tables  # noqa: E402

MARK = "<!-- results -->"
DOCUMENTED = re.compile(r"^::: ([\w.]+)\.\w+\n(?: +\S.*\n)*", re.MULTILINE)  # by mkdocstrings
RENAMED = re.compile(r"(cutjax\.(\w+Config)\s.*?doc-signature.*?>)Config(?=<)", re.DOTALL)  # up to the class's own name
PICTURE = re.compile(r"!\[([^]]+)\]\(pictures/(\w+)\.svg\)")
TITLES = {  # of runs, by the first word of their files' names
    "attention": "Products of attention",
    "calls": "Epilogues called and inlined",
    "collective": "Layers over devices, transfers beside products",
    "compile": "Compiling epilogues",
    "cross_entropy": "Heads and their losses",
    "dtypes": "Products of other dtypes",
    "fused": "Products with epilogues",
    "gemm": "Dense products of chosen sizes",
    "grouped": "Products of rows in groups",
    "mma": "Parts of the mma family's kernels",
    "moe": "Layers of experts",
    "products": "Products of models",
    "programs": "Whole models",
    "quantized": "Products by weights of 8 bits",
    "sharded": "Training steps divided over devices",
    "syrk": "Symmetric products",
}


def on_files(files, config):
    from mkdocs.structure.files import File

    for plot in sorted(report.RESULTS.glob("*.png")):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    files.append(File.generated(config, "tutorial.md", content=tutorial.page(ROOT / "examples" / "tutorial.ipynb")))
    return files


def on_page_markdown(markdown, page, config, files):
    # Pages that are read in the repository too show pictures from where they lie there.
    markdown = markdown.replace("](../benchmarks/results/", "](plots/")
    tables_of = {MARK: results, what_runs_where.BEGIN: what_runs_where.text}
    for mark, made in tables_of.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return PICTURE.sub(_picture, DOCUMENTED.sub(_with_source, markdown))


def on_page_content(html, page, config, files):
    return RENAMED.sub(r"\1\2", html)  # the signature by the public name


def _with_source(found: re.Match[str]) -> str:
    """Returns what mkdocstrings documents, and after it the file that defines it."""
    file = found[1].replace(".", "/") + ".py"
    assert (ROOT / file).is_file(), f"{found[0]} is to name the module of its source"
    return f"{found[0]}\nSource: `{file}`\n"


def _picture(found: re.Match[str]) -> str:
    """Returns a picture as HTML: in the page itself, where it has the page's colours."""
    return f'<figure class="picture" data-search-exclude>{pictures.PICTURES[found[2]]().svg(found[1])}</figure>'


def results() -> str:
    """The page's tables, a section for each run."""
    read = {path: report.read(path) for path in sorted(report.RESULTS.glob("*.json"))}
    sections = sorted((_title(path, run), path) for path, (run, _) in read.items())
    return "\n".join(_section(title, path, *read[path]) for title, path in sections) or "No run has been recorded yet."


def _title(path: pathlib.Path, run: dict) -> str:
    name, *_, machine = path.stem.split("-")
    device, _, count = machine.upper().partition("X")  # H200X4 is four
    gpus = f"{count} {device}s" if count else device
    return f"{TITLES.get(name, name)}, {gpus}, {run['commit'][:7]}"


def _section(title: str, path: pathlib.Path, run: dict, rows: list) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        f"## {title}",
        "",
        f"`{path.stem}.json`: {run['device']}, driver {run['driver']}, {versions}; commit `{run['commit'][:12]}`, "
        f"{run['date'][:10]}; times by {run['method']}.",
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
