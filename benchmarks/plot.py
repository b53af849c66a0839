"""Pictures of a run's JSON."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from benchmarks import report

_OURS, _MISSED, _PEER = "#76b900", "#d95f02", "#9e9e9e"


def subtitle(content: dict[str, Any]) -> str:
    """The machine, versions, commit and date of a run."""
    versions = content["versions"]
    return (
        f"{content['device']}, driver {content['driver']}, jax {versions['jax']}, cutjax {versions['cutjax']} "
        f"({content['commit'][:9]}), {content['date'][:10]}"
    )


def draw(path: pathlib.Path, suffixes: tuple[str, ...] = (".png",)) -> list[pathlib.Path]:
    """Draws the cost model's rows as two bar charts: the ratio to the fastest peer, and shares of the roofline.

    Args:
      path: JSON written by ``benchmarks run``.
      suffixes: ".png", ".svg" or both; the pictures lie beside the JSON.

    Returns:
      The files written.

    Raises:
      ValueError: the file holds no row with a time and a peer's.
    """
    import matplotlib.figure

    content, rows = report.read(path)
    rows = [row for row in rows if not row.failure and row.variant == "auto" and row.fastest][::-1]
    if not rows:
        raise ValueError(f"{path}: no timed rows to draw")
    figure = matplotlib.figure.Figure(figsize=(11, 1.6 + 0.32 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    y = range(len(rows))
    ratios = [row.ratios.get("peers", row.ratios.get(row.fastest, math.nan)) for row in rows]
    targets = [row.targets.get("peers", row.targets.get(row.fastest, math.nan)) for row in rows]
    missed = [ratio < target for ratio, target in zip(ratios, targets, strict=True)]
    left.barh(y, ratios, color=[_MISSED if miss else _OURS for miss in missed])
    left.axvline(1, color="black", linewidth=0.8)
    for i, (row, ratio, target) in enumerate(zip(rows, ratios, targets, strict=True)):
        left.text(ratio, i, f" {ratio:.2f} {row.fastest}", va="center", fontsize=8)
        left.plot([target] * 2, [i - 0.4, i + 0.4], color="black", linestyle=":")
    left.set_yticks(y, [row.name for row in rows], fontsize=8)
    left.set_xlabel("fastest peer's time / cutjax time (dotted: target, orange: missed)")
    left.margins(x=0.2, y=0.01)
    ours = [100 * row.roofline for row in rows]
    theirs = [share / ratio for share, ratio in zip(ours, ratios, strict=True)]
    right.barh([i + 0.2 for i in y], ours, 0.4, color=_OURS, label="cutjax")
    right.barh([i - 0.2 for i in y], theirs, 0.4, color=_PEER, label="fastest peer")
    right.set_xlabel("% of the measured roofline")
    right.legend(fontsize=8)
    figure.suptitle(subtitle(content), fontsize=9)
    written = [path.with_suffix(suffix) for suffix in suffixes]
    for target in written:
        figure.savefig(target, dpi=150)
    return written
