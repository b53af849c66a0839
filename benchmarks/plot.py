"""Draws a run's JSON: ``python -m benchmarks.plot benchmarks/results/gemm-suite.json``."""

from __future__ import annotations

import json
import math
import pathlib
import sys
from typing import Any

from benchmarks import report

_OURS, _MISSED, _XLA = "#76b900", "#d95f02", "#9e9e9e"


def _subtitle(content: dict[str, Any]) -> str:
    versions = content["versions"]
    return (
        f"{content['device']}, driver {content['driver']}, jax {versions['jax']}, cutjax {versions['cutjax']} "
        f"({content['commit'][:9]}), {content['date'][:10]}"
    )


def draw(path: pathlib.Path, suffixes: tuple[str, ...] = (".png",)) -> list[pathlib.Path]:
    """Draws the cost model's rows as two bar charts, the ratio to XLA and the share of the measured roofline.

    Of grouped products, the ratio to the fastest peer, and to a dense product or the copy bandwidth.

    Args:
      path: JSON written by ``benchmarks.run``.
      suffixes: ".png", ".svg" or both; the pictures lie beside the JSON.

    Returns:
      The files written.

    Raises:
      ValueError: the file holds no timed row.
    """
    import matplotlib.figure

    if json.loads(path.read_text()).get("op") == "grouped":
        return _draw_grouped(path, suffixes)
    content, rows = report.read(path)
    rows = [row for row in rows if not row.failure and row.choice == "auto"][::-1]
    if not rows:
        raise ValueError(f"{path}: no timed rows to draw")
    figure = matplotlib.figure.Figure(figsize=(11, 1.6 + 0.32 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    y = range(len(rows))
    missed = [row.target is not None and not row.ratio >= row.target for row in rows]
    left.barh(y, [row.ratio for row in rows], color=[_MISSED if miss else _OURS for miss in missed])
    left.axvline(1, color="black", linewidth=0.8)
    for i, row in enumerate(rows):
        left.text(row.ratio, i, f" {row.ratio:.2f}", va="center", fontsize=8)
        if row.target is not None:
            left.plot([row.target] * 2, [i - 0.4, i + 0.4], color="black", linestyle=":")
    left.set_yticks(y, [row.case for row in rows], fontsize=8)
    left.set_xlabel("XLA time / cutjax time (dotted: target, orange: missed)")
    left.set_xlim(0, 1.12 * max(1.0, *(row.ratio for row in rows)))
    right.barh([i + 0.2 for i in y], [100 * row.roofline for row in rows], 0.4, color=_OURS, label="cutjax")
    right.barh([i - 0.2 for i in y], [100 * row.roofline / row.ratio for row in rows], 0.4, color=_XLA, label="XLA")
    right.set_xlabel("% of the measured roofline")
    right.legend(fontsize=8)
    figure.suptitle(_subtitle(content), fontsize=9)
    return _save(figure, path, suffixes)


def _save(figure: Any, path: pathlib.Path, suffixes: tuple[str, ...]) -> list[pathlib.Path]:
    written = [path.with_suffix(suffix) for suffix in suffixes]
    for target in written:
        figure.savefig(target, dpi=150)
    return written


def _draw_grouped(path: pathlib.Path, suffixes: tuple[str, ...]) -> list[pathlib.Path]:
    import matplotlib.figure

    from benchmarks import grouped

    content, rows = grouped.read(path)
    rows = [row for row in rows if not row.failure][::-1]
    if not rows:
        raise ValueError(f"{path}: no timed rows to draw")
    figure = matplotlib.figure.Figure(figsize=(11, 1.6 + 0.32 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    # On the right what bounds the product: a copy where the weights do, else a dense product.
    bounds = ["copy" if row.ratios["copy"] > row.ratios.get("dense", 0) else "dense" for row in rows]
    for axes, keys in ((left, ["peers"] * len(rows)), (right, bounds)):
        for i, (row, key) in enumerate(zip(rows, keys, strict=True)):
            ratio, target = row.ratios.get(key, math.nan), row.targets.get(key)
            if math.isnan(ratio):
                continue
            axes.barh(i, ratio, color=_MISSED if key in row.missed else _OURS)
            axes.text(ratio, i, f" {ratio:.2f} {row.fastest if key == 'peers' else key}", va="center", fontsize=8)
            if target is not None:
                axes.plot([target] * 2, [i - 0.4, i + 0.4], color="black", linestyle=":")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.2)
    left.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    left.set_xlabel("fastest peer's time / cutjax time (dotted: target, orange: missed)")
    right.set_xlabel("share of a dense product's rate, or of the copy bandwidth")
    figure.suptitle(_subtitle(content), fontsize=9)
    return _save(figure, path, suffixes)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for picture in draw(pathlib.Path(name), (".png", ".svg")):
            print(picture)
