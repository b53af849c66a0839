"""Draws a run's JSON: ``python -m benchmarks.plot benchmarks/results/gemm-suite.json``."""

from __future__ import annotations

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

    Args:
      path: JSON written by ``benchmarks.run``.
      suffixes: ".png", ".svg" or both; the pictures lie beside the JSON.

    Returns:
      The files written.

    Raises:
      ValueError: the file holds no timed row.
    """
    import matplotlib.figure

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
    written = [path.with_suffix(suffix) for suffix in suffixes]
    for target in written:
        figure.savefig(target, dpi=150)
    return written


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for picture in draw(pathlib.Path(name), (".png", ".svg")):
            print(picture)
