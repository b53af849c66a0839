"""The pictures and tables of docs/performance.md and README.md: ``python -m benchmarks performance``.

They are made of the recorded runs in benchmarks/results; what stands in the pages between their marks is replaced.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import answers, final, report
from benchmarks.plot import subtitle
from benchmarks.record import Row

README = report.RESULTS.parent.parent / "README.md"
PAGE = README.parent / "docs" / "performance.md"
SPEED = "speed.png"  # beside the results; README.md shows it
MOST = 4  # the largest ratio that it shows as it is
BEGIN, END = "<!-- written by python -m benchmarks performance -->", "<!-- end -->"
KINDS = {
    "few tokens": "#d95f02",
    "forward": "#1b9e77",
    "input gradient": "#386cb0",
    "weight gradient": "#984ea3",
    "attention": "#386cb0",
    "decoding": "#d95f02",
}
_XLA, _UNTUNED, _TUNED, _LOSES = "#9e9e9e", "#76b900", "#1b5e9e", "#d95f02"
SHORT_US = 10.0


def kind(row: Row) -> str:
    """Returns the kind of a product, as the pictures name it."""
    kind, tokens = row.figures["kind"], row.figures["tokens"]
    if kind == "fwd":
        return "few tokens" if tokens <= final.FEW else "forward"
    return {"dx": "input gradient", "dw": "weight gradient", "decode": "decoding"}.get(kind, "attention")


def runs(folder: pathlib.Path) -> dict[str, tuple[dict[str, Any], list[Row]]]:
    """Returns the final measurements in a folder, by the names of their files; rows without a time are left out."""
    found = {path.stem: report.read(path) for path in sorted(folder.glob("*.json"))}
    return {
        stem: (content, [row for row in rows if not row.failure])
        for stem, (content, rows) in found.items()
        if content["op"] == final.OP
    }


def reason(row: Row) -> str:
    """Returns the reasons why XLA is faster than the cost model's choice, as far as the times tell."""
    us, xla, figures = row.us, row.peers["xla"], row.figures
    fastest, floor_us = figures["kernel"]["us"], figures["roofline_us"]
    m, n, k, layout = (figures[name] for name in ("m", "n", "k", "layout"))
    why = []
    if fastest and fastest < 0.98 * us:
        still = "" if fastest < xla.us else ", slower than XLA too"
        why.append(f"the choice: another config takes {fastest:.1f} us{still}")
    if any(row_length % 8 for row_length in (k if layout[0] == "n" else m, n if layout[1] == "n" else k, n)):
        why.append("rows that are no multiple of 16 bytes")
    if "+" in xla.kernel or re.search("split|stream", xla.kernel, re.IGNORECASE):
        why.append("XLA divides k")
    if xla.us < SHORT_US:
        why.append("short: starting and ending a kernel takes most of it")
    bound = "the rate of a copy" if figures["bound"] == "bytes" else "the arithmetic"
    why.append(f"{100 * floor_us / us:.0f}% of {bound}, XLA {100 * floor_us / xla.us:.0f}%")
    return "; ".join(why)


def worst(rows: Sequence[Row], most: int = 20) -> Iterator[str]:
    """Yields a table of the products on which the cost model's choice loses most to XLA, the worst first."""
    losing = sorted((row for row in rows if row.ratios["xla"] < answers.LEVEL), key=lambda row: row.ratios["xla"])
    if not losing:
        yield "No product is slower than XLA by more than half a percent."
        return
    share = len(losing) / len(rows)
    yield f"{len(losing)} of {len(rows)} ({100 * share:.0f}%) are slower than XLA by more than half a percent untuned."
    yield ""
    yield "| product | of | XLA us | ours us | untuned | tuned | why |"
    yield "|---|---|--:|--:|--:|--:|---|"
    for row in losing[:most]:
        tuned = row.ratios.get("xla, tuned", math.nan)
        yield (
            f"| {row.case} | {row.figures['of']} | {row.peers['xla'].us:.1f} | {row.us:.1f} "
            f"| {row.ratios['xla']:.3f} | {tuned:.3f} | {reason(row)} |"
        )


def titled(found: dict[str, tuple[dict[str, Any], list[Row]]]) -> dict[str, str]:
    """Returns a title for each run, in the order of the page: products of models first, a device's newest first."""
    kinds = {"models": "Products of models", "attention": "Products of attention"}
    order = sorted(found, key=lambda stem: (found[stem][0]["device"], found[stem][0]["date"]), reverse=True)
    titles: dict[str, str] = {}
    for stem in sorted(order, key=lambda stem: found[stem][0]["suite"] != "models"):
        content = found[stem][0]
        title = (
            f"{kinds.get(content['suite'], content['suite'])}, {content['device'].removeprefix('NVIDIA ').split()[0]}"
        )
        titles[stem] = f"{title}, an earlier version" if title in titles.values() else title
    return titles


def section(stem: str, title: str, content: dict[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    """Yields the section of a run in the page: how fast, where it loses, pictures, and what was measured on what."""
    versions = content["versions"]
    yield f"## {title}"
    yield ""
    yield from final.summary(rows, asked=False)
    yield ""
    for picture in ("roofline", "ratio"):
        yield f"![{title}: {picture}](../benchmarks/results/{stem}-{picture}.png)"
        yield ""
    yield "Where XLA is faster:"
    yield ""
    yield from worst(rows)
    yield ""
    yield (
        f"From `benchmarks/results/{stem}.json`: {content['device']}, commit {content['commit'][:7]}, "
        f"{content['date'][:10]}, jax {versions['jax']}, cuBLAS {versions['cublas']}, driver {content['driver']}; "
        f"samples {', '.join(content['salts'])} of the suite {content['suite']}."
    )


def page(folder: pathlib.Path = report.RESULTS) -> tuple[str, str]:
    """Returns the generated parts of the page: the answers, and further down a section for each run."""
    found = runs(folder)
    if not found:
        return ("No run has been recorded yet.", "")
    tables = {"How fast is my case?": answers.gains, "Where does it lose?": answers.losses}
    heads = ["\n".join([f"## {title}", "", *table(folder)]) for title, table in tables.items()]
    sections = ["\n".join(section(stem, title, *found[stem])) for stem, title in titled(found).items()]
    return "\n\n".join(heads), "\n\n".join(sections)


def in_readme(folder: pathlib.Path = report.RESULTS) -> str:
    """Returns the generated part of README."""
    return "\n".join(answers.brief(folder))


def fill(text: str, *contents: str) -> str:
    """Returns a page with what is between each pair of its marks replaced, in order.

    Raises:
      ValueError: there are fewer or more pairs.
    """
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(marked.findall(text)) != len(contents):
        raise ValueError(f"the page has not {len(contents)} times {BEGIN} and {END}")
    of_page = iter(contents)
    return marked.sub(lambda _: f"{BEGIN}\n\n{next(of_page)}\n\n{END}", text)


def _figure(size: tuple[float, float], columns: int, title: str) -> tuple[Any, list[Any]]:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, columns, sharex=True, sharey=True)))
    figure.suptitle(title, fontsize=9)
    for axis in axes:
        axis.grid(color="#eeeeee", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_roofline(content: dict[str, Any], rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws rates over arithmetic intensity: of single calls, and of windows of half a second where there are some."""
    windows = [row for row in rows if row.figures["sustained"]]
    figure, axes = _figure((11, 4.6), 1 + bool(windows), subtitle(content))
    peak, copied = content["device_rates"]["tflops"], content["device_rates"]["gb_per_s"]
    single = [(row, {name: row.figures[name]["us"] for name in ("untuned", "tuned")}) for row in rows]
    single = [(row, {"xla": row.peers["xla"].us, **us}) for row, us in single]
    of_panels = [
        ("single calls", single),
        ("windows of half a second", [(row, row.figures["sustained"]) for row in windows]),
    ]
    styles = {
        "xla": ("XLA", _XLA, "o", 16),
        "untuned": ("cutjax, untuned", _UNTUNED, "o", 12),
        "tuned": ("cutjax, tuned", _TUNED, "x", 14),
    }
    for axis, (title, times) in zip(axes, of_panels, strict=False):
        intensity = np.array([row.figures["flops"] / row.figures["bytes"] for row, _ in times])
        ends = np.geomspace(intensity.min() / 1.5, intensity.max() * 1.5, 200)
        roof = np.minimum(peak, ends * copied / 1e3)
        axis.plot(ends, roof, color="black", linewidth=0.9, label=f"{peak:.0f} TFLOP/s, {copied:.0f} GB/s")
        for name, (label, color, marker, size) in styles.items():
            rates = [row.figures["flops"] / (us[name] or math.nan) / 1e6 for row, us in times]
            axis.scatter(intensity, rates, size, color, marker=marker, linewidths=0.8, alpha=0.8, label=label)
        axis.set(xscale="log", yscale="log", title=f"{title}: {len(times)} products")
        axis.set_xlabel("floating-point operations a byte")
    axes[0].set_ylabel("TFLOP/s")
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def draw_ratio(content: dict[str, Any], rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws the ratio to XLA over XLA's time, product by product."""
    figure, axes = _figure((11, 4.6), 2, subtitle(content))
    for axis, (title, key) in zip(axes, (("untuned", "xla"), ("tuned", "xla, tuned")), strict=True):
        for name in dict.fromkeys(map(kind, rows)):
            of_kind = [row for row in rows if kind(row) == name and key in row.ratios]
            x, y = [row.peers["xla"].us for row in of_kind], [row.ratios[key] for row in of_kind]
            axis.scatter(x, y, 14, KINDS[name], alpha=0.8, linewidths=0, label=f"{name} ({len(of_kind)})")
        axis.axhline(1, color="black", linewidth=0.8)
        mean = report.geometric_mean(row.ratios[key] for row in rows if key in row.ratios)
        count = final.on_xla(rows, title)
        axis.set(xscale="log", yscale="log", title=f"{title}: geometric mean {mean:.3f}, {count} run by XLA")
        axis.set_xlabel("XLA's time, us")
        axis.set_yticks(ticks := [0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3], list(map(str, ticks)))
        axis.minorticks_off()
    low = min(0.88, *(row.ratios[key] for row in rows for key in ("xla", "xla, tuned") if key in row.ratios))
    axes[0].set_ylim(low / 1.05, None)
    axes[0].set_ylabel("XLA's time / cutjax's")
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def draw_speed(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Draws the ratios of every answer that has a label: a point each, and their geometric mean."""
    shown = [answer for answer in answers.told(answers.ANSWERS, folder) if answer.label][::-1]
    if not shown:
        raise ValueError(f"{folder}: no run to draw")
    figure, (axis,) = _figure((8.5, 0.9 + 0.36 * len(shown)), 1, "Speed beside XLA on an NVIDIA H200")
    for y, answer in enumerate(shown):
        rows = answer.rows(folder)
        ratios = np.array([row.ratios[answer.key] for row in rows])
        spread = (np.arange(len(ratios)) * 0.382 % 1 - 0.5) * 0.55  # so that points do not hide each other
        own = np.array([answer.own(row) for row in rows])
        color = np.where(ratios < answers.LEVEL, _LOSES, np.where(own, _UNTUNED, _XLA))
        for far, marker in ((False, "o"), (True, ">")):
            at = (ratios > MOST) == far
            axis.scatter(
                np.minimum(ratios, MOST)[at], (y + spread)[at], 12, color[at], marker=marker, alpha=0.55, linewidths=0
            )
        mean = report.geometric_mean(ratios)
        axis.plot([mean] * 2, [y - 0.36, y + 0.36], color="black", linewidth=1.8)
        axis.annotate(f"{mean:.2f}", (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    axis.set_yticks(range(len(shown)), [f"{x.label} ({len(x.rows(folder))})" for x in shown], fontsize=9)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xticks(ticks := [0.8, 0.9, 1, 1.2, 1.5, 2, 3, MOST], list(map(str, ticks)))
    axis.minorticks_off()
    axis.set_xlabel(
        "XLA's (or torch's) time / cutjax's. A point is a product: green where cutjax is faster, orange where it is\n"
        f"slower, grey where it leaves the product to XLA; a triangle is one above {MOST}.\n"
        "Bar and number: the geometric mean of all.",
        fontsize=8,
    )
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks performance", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=report.RESULTS, help="folder of recorded runs")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE)
    parser.add_argument("--readme", type=pathlib.Path, default=README)
    args = parser.parse_args(argv)
    for path in written(args.results, runs(args.results)):
        print(path)
    for path, contents in ((args.page, page(args.results)), (args.readme, [in_readme(args.results)])):
        path.write_text(fill(path.read_text(), *contents))
        print(path)
    return 0


def written(folder: pathlib.Path, found: dict[str, tuple[dict[str, Any], list[Row]]]) -> Iterator[pathlib.Path]:
    """Draws everything, and yields the pictures."""
    for stem, (content, rows) in found.items():
        for name, draw in (("roofline", draw_roofline), ("ratio", draw_ratio)):
            path = folder / f"{stem}-{name}.png"
            draw(content, rows, path)
            yield path
    if found:
        draw_speed(folder, folder / SPEED)
        yield folder / SPEED
