"""The pictures and tables of docs/performance.md and README.md: ``python -m benchmarks.performance``.

They are made of the recorded runs in benchmarks/results; what stands in the page between its marks is replaced.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import final, report
from benchmarks.plot import subtitle
from benchmarks.report import Row

PAGE = report.RESULTS.parent.parent / "docs" / "performance.md"
SPEED = "speed.png"  # beside the results; README.md shows it
BEGIN, END = "<!-- written by python -m benchmarks.performance -->", "<!-- end -->"
KINDS = {
    "few tokens": "#d95f02",
    "forward": "#1b9e77",
    "input gradient": "#386cb0",
    "weight gradient": "#984ea3",
    "attention": "#386cb0",
    "decoding": "#d95f02",
}
_XLA, _UNTUNED, _TUNED = "#9e9e9e", "#76b900", "#1b5e9e"
LOSES = 0.995  # of XLA: nearer to 1 than this, two runs disagree
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
    """Returns why XLA is faster than the cost model's choice, as far as the times tell."""
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
    losing = sorted((row for row in rows if row.ratios["xla"] < LOSES), key=lambda row: row.ratios["xla"])
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


def section(stem: str, content: dict[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    """Yields the section of a run in the page."""
    versions = content["versions"]
    sampled = f"salts {', '.join(content['salts'])} of the suite {content['suite']}"
    yield f"## {stem}"
    yield ""
    yield (
        f"{content['device']}, {len(rows)} products ({sampled}), jax {versions['jax']}, cuBLAS {versions['cublas']}, "
        f"driver {content['driver']}; commit `{content['commit'][:12]}`, {content['date'][:10]}."
    )
    yield ""
    yield from final.summary(rows)
    yield ""
    for picture in ("roofline", "ratio"):
        yield f"![{stem}: {picture}](../benchmarks/results/{stem}-{picture}.png)"
        yield ""
    yield "Where we lose:"
    yield ""
    yield from worst(rows)


def page(folder: pathlib.Path = report.RESULTS) -> str:
    """Returns what stands between the page's marks."""
    sections = ["\n".join(section(stem, *run)) for stem, run in runs(folder).items()]
    return "\n\n".join(sections) or "No run has been recorded yet."


def fill(text: str, content: str) -> str:
    """Returns a page with what is between its marks replaced.

    Raises:
      ValueError: the marks are not there.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{content}\n\n{END}{tail}"


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


def bands(folder: pathlib.Path, device: str) -> Iterator[tuple[str, str, list[float]]]:
    """Yields what the picture of README.md shows: a name, "untuned", "tuned" or "", and ratios to the peer it names."""
    for content, rows in runs(folder).values():
        if content["device"] != device:
            continue
        dtypes = {row.figures["dtype"] for row in rows}
        dtype = "" if dtypes == {"bfloat16"} else f", {' and '.join(sorted(dtypes))}"
        several = dict.fromkeys(map(kind, rows))
        groups = {"all products of models": rows} if content["suite"] == "models" else {}
        groups |= {name: [row for row in rows if kind(row) == name] for name in KINDS if name in several}
        for name, of_group in groups.items():
            for tuning, key in (("untuned", "xla"), ("tuned", "xla, tuned")):
                yield f"{name}{dtype}", tuning, [row.ratios[key] for row in of_group if key in row.ratios]
        for tuning, key in (("untuned", "sustained"), ("tuned", "sustained, tuned")):
            if ratios := [row.ratios[key] for row in rows if key in row.ratios]:
                yield f"over 100 us, sustained{dtype}", tuning, ratios
    for stem, name, key in (
        ("fused", "fused epilogues, recorded suite", "xla"),
        ("grouped", "grouped, to torch, recorded suite", "torch"),
    ):
        for path in sorted(folder.glob(f"{stem}-*.json")):
            content, rows = report.read(path)
            ratios = [row.ratios[key] for row in rows if row.variant == "auto" and key in row.ratios]
            if content["device"] == device and ratios:
                yield name, "", ratios


def draw_speed(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Draws ratios kind by kind: 5th to 95th percentile, quartiles, median; on the device with most sampled products.

    Raises:
      ValueError: there is no final measurement.
    """
    devices: dict[str, int] = {}
    for content, rows in runs(folder).values():
        devices[content["device"]] = devices.get(content["device"], 0) + len(rows)
    if not devices:
        raise ValueError(f"{folder}: no final measurement to draw")
    device = max(devices, key=devices.__getitem__)
    shown = list(bands(folder, device))[::-1]
    content = next(content for content, _ in runs(folder).values() if content["device"] == device)
    figure, (axis,) = _figure((9, 1.1 + 0.27 * len(shown)), 1, subtitle(content))
    for y, (_, tuning, ratios) in enumerate(shown):
        color = {"untuned": _UNTUNED, "tuned": _TUNED}.get(tuning, "#666666")
        low, first, middle, third, high = np.percentile(ratios, (5, 25, 50, 75, 95))
        axis.plot([low, high], [y, y], color=color, linewidth=2, solid_capstyle="butt")
        axis.plot([first, third], [y, y], color=color, linewidth=8, alpha=0.45, solid_capstyle="butt")
        axis.plot([middle], [y], "o", color=color, markersize=5)
        axis.annotate(
            f"{report.geometric_mean(ratios):.2f}",
            (1.005, y),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
    names = [f"{name} {tuning} ({len(ratios)})".replace("  ", " ") for name, tuning, ratios in shown]
    axis.set_yticks(range(len(shown)), names, fontsize=8)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xticks(ticks := [0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3], list(map(str, ticks)))
    axis.minorticks_off()
    axis.set_xlim(*(edge(np.percentile(ratios, at) for *_, ratios in shown) * by for edge, at, by in _EDGES))
    axis.set_xlabel("the other's time / cutjax's: 5th to 95th percentile, quartiles, median; geometric mean")
    figure.savefig(path, dpi=110)


_EDGES = ((min, 5, 0.97), (max, 95, 1.03))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=report.RESULTS, help="folder of recorded runs")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE)
    args = parser.parse_args(argv)
    found = runs(args.results)
    for path in written(args.results, found):
        print(path)
    args.page.write_text(fill(args.page.read_text(), page(args.results)))
    print(args.page)
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


if __name__ == "__main__":
    sys.exit(main())
