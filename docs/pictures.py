"""Draws the pictures of pages: rules of sharding, the roofline, a convolution, the way of tokens to experts.

A page has ``![what it shows](pictures/NAME.svg)``, and docs/hooks.py puts the picture itself in that place, so that its
colours are those of the page, light or dark (docs/site.css). ``python docs/pictures.py NAME`` prints one.
"""

from __future__ import annotations

import html
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"
WIDTH = 480  # of every picture: at 400 px of a window its letters are still 10 px high


class Canvas:
    """Shapes of a picture; what they look like is said by their classes, in site.css."""

    def __init__(self, height: int):
        self.height, self.parts = height, []

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draws a rectangle."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>')

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> None:
        """Writes words, whose base line is at y."""
        of_kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{of_kind}>{html.escape(words)}</text>')

    def lines(self, x: float, y: float, words: Sequence[str]) -> None:
        """Writes lines, the first as a heading."""
        for i, line in enumerate(words):
            self.text(x, y + 18 * i, line, kind="" if i else "strong")

    def line(self, points: Sequence[tuple[float, float]], kind: str = "line") -> None:
        """Draws a line through points."""
        path = " L ".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path d="M {path}" class="{kind}"/>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Draws a line with a head at its end."""
        self.line([(x0, y0), (x1, y1)])
        angle = math.atan2(y1 - y0, x1 - x0)
        ends = [(x1 - 7 * math.cos(angle + turn), y1 - 7 * math.sin(angle + turn)) for turn in (-0.45, 0.45)]
        self.line([ends[0], (x1, y1), ends[1]])

    def dot(self, x: float, y: float, radius: float, kind: str) -> None:
        """Draws a disc."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"/>')

    def svg(self, shows: str) -> str:
        """Returns the picture, in one line: a blank one would end the HTML of a page in Markdown."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {WIDTH + 2} {self.height + 2}" role="img"'
        return f'{head} aria-label="{html.escape(shows)}">{"".join(self.parts)}</svg>'


def sharding() -> Canvas:
    """The four ways in which one mesh axis of two devices divides a product."""
    side, high = 66, 94
    arrays = {"x [m, k]": 0, "w [k, n]": 92, "y [m, n]": 196}
    rules = (  # how x, w and y are divided; its name, and what it means
        ("rows", "whole", "rows", ("m divided", "each device: its rows of y;", "nothing moves")),
        ("whole", "columns", "columns", ("n divided", "each device: its columns;", "nothing moves")),
        (
            "columns",
            "rows",
            "sums",
            ("k of both divided", "partial sums: an all-reduce,", "or a reduce-scatter", "to a divided y"),
        ),
        (
            "rows",
            "rows",
            "rows",
            ("m of x, k of w divided", "fully sharded weights:", "an all-gather of w,", "then as m"),
        ),
    )
    canvas = Canvas(high * len(rules) + 12)
    for name, x in arrays.items():
        canvas.text(x + side / 2, 14, name, "middle", "strong")
    for i, (*divided, words) in enumerate(rules):
        y, half = 26 + high * i, side / 2
        for x, how in zip(arrays.values(), divided, strict=True):
            if how == "rows":
                canvas.box(x, y, side, half, "first")
                canvas.box(x, y + half, side, half, "second")
            elif how == "columns":
                canvas.box(x, y, half, side, "first")
                canvas.box(x + half, y, half, side, "second")
            elif how == "sums":
                canvas.box(x + 8, y + 8, side, side, "second")
                canvas.box(x, y, side, side, "first")
                canvas.text(x + half, y + half + 5, "sums", "middle")
            else:
                canvas.box(x, y, side, side, "whole")
                canvas.text(x + half, y + half + 5, "whole", "middle")
        canvas.text(79, y + half + 5, "@", "middle", "strong")
        canvas.arrow(166, y + half, 188, y + half)
        canvas.lines(292, y + 12, words)
    return canvas


def roofline() -> Canvas:
    """The rate of each product of models that was measured on an H200, by its arithmetic for a byte."""
    run = json.loads((RESULTS / "products-4b08411-h200.json").read_text())
    rows = [row for row in run["rows"] if not row["failure"]]
    tflops, gb_per_s = run["device_rates"]["tflops"], run["device_rates"]["gb_per_s"]
    left, right, top, bottom = 44, WIDTH - 8, 30, 300
    lows, highs = (0.3, 0.05), (1e4, 1.3e3)  # FLOP for a byte; TFLOP/s

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x, y = (
            math.log(value / low) / math.log(high / low)
            for value, low, high in zip((intensity, rate), lows, highs, strict=True)
        )
        return left + x * (right - left), bottom - y * (bottom - top)

    canvas = Canvas(390)
    canvas.text(left, 16, f"TFLOP/s, {run['device']}, bfloat16", kind="strong")
    for power in range(-1, 4):
        _, y = at(1, 10**power)
        canvas.line([(left, y), (right, y)], "grid")
        canvas.text(left - 6, y + 4, f"{10**power:g}", "end")
    for power in range(5):
        x, _ = at(10**power, 1)
        canvas.line([(x, top), (x, bottom)], "grid")
        canvas.text(x, bottom + 18, f"{10**power:,}", "middle" if power < 4 else "end")
    canvas.text((left + right) / 2, bottom + 38, "operations for each byte of operands and result", "middle")
    ridge = 1e3 * tflops / gb_per_s
    canvas.line([at(lows[0], lows[0] * gb_per_s / 1e3), at(ridge, tflops), at(highs[0], tflops)], "roof")
    x, y = at(6, 60)
    canvas.text(x, y, f"{gb_per_s / 1e3:.1f} TB/s", "end")
    x, y = at(highs[0], tflops)
    canvas.text(x, y - 8, f"{tflops:.0f} TFLOP/s", "end")
    for row in rows:
        figures = row["figures"]
        intensity = figures["flops"] / figures["bytes"]
        canvas.dot(*at(intensity, figures["flops"] / row["peers"]["xla"]["us"] / 1e6), 3, "theirs")
    for row in rows:
        if row["kernel"] != "XLA":
            figures = row["figures"]
            canvas.dot(*at(figures["flops"] / figures["bytes"], row["tflops"]), 3, "ours")
    ours = sum(row["kernel"] != "XLA" for row in rows)
    for i, (kind, words) in enumerate(
        (
            ("ours", f"cutjax's kernel, nothing tuned: {ours} of {len(rows)} products"),
            ("theirs", f"XLA's product: all {len(rows)}, of which it keeps {len(rows) - ours}"),
        )
    ):
        canvas.dot(left + 6, bottom + 60 + 20 * i, 4, kind)
        canvas.text(left + 18, bottom + 64 + 20 * i, words)
    return canvas


def convolution() -> Canvas:
    """A window of an image as a row of a product, which is never written to memory."""
    cell, tap, taps, top = 20, 14, 9, 26
    window, end = taps * tap, top + 6 * cell
    images, windows, weights = 0, 166, 336
    canvas = Canvas(334)
    for x, words in ((images, "image [h, w, c]"), (windows, "windows [h w, 9 c]"), (weights, "weights [9 c, n]")):
        canvas.text(x, 14, words, kind="strong")
    for i in range(6):
        for j in range(6):
            canvas.box(images + cell * j, top + cell * i, cell, cell, "first" if 1 <= i < 4 and 2 <= j < 5 else "whole")
        canvas.box(windows, top + cell * i, window, cell, "first" if i == 2 else "whole")
    canvas.box(weights, top, 66, window, "second")
    for i in range(1, taps):
        canvas.line([(windows + tap * i, top), (windows + tap * i, end)], "grid")
        canvas.line([(weights, top + tap * i), (weights + 66, top + tap * i)], "grid")
    canvas.arrow(124, top + 50, windows - 6, top + 50)
    canvas.text(weights - 22, top + 54, "@", "middle", "strong")
    notes = (
        ("3 x 3 pixels,", "c channels each"),
        ("gathered on the way", "into shared memory"),
        ("a column for each", "of n channels"),
    )
    for x, words in zip((images, windows, weights), notes, strict=True):
        for i, line in enumerate(words):
            canvas.text(x, end + 26 + 18 * i, line)
    below = end + 84
    for x, kind, words in (
        (images, "first", ("sums", "in float32,", "in registers")),
        (windows, "third", ("epilogue", "bias, silu,", "a residual")),
        (weights, "third", ("result", "[h, w, n],", "rounded once")),
    ):
        canvas.box(x, below, 40, 6 * 13, "whole")
        canvas.box(x, below + 2 * 13, 40, 13, kind)
        canvas.lines(x + 50, below + 26, words)
    canvas.arrow(132, below + 39, windows - 6, below + 39)
    canvas.arrow(302, below + 39, weights - 6, below + 39)
    return canvas


def moe() -> Canvas:
    """Six tokens, each to two of three experts: sorted by expert, multiplied in groups, added up for each token."""
    chosen = ((0, 2), (1, 2), (0, 1), (0, 2), (1, 0), (0, 2))
    kinds = ("first", "second", "third")
    pairs = sorted((expert, token) for token, of in enumerate(chosen) for expert in of)  # as a stable sort has them
    gap, row = 10, 20
    tops = [40 + row * i + gap * expert for i, (expert, _) in enumerate(pairs)]
    canvas = Canvas(tops[-1] + row + 62)
    token_at = [40 + (tops[-1] - 40) / 5 * token for token in range(len(chosen))]
    columns = {"tokens": 0, "rows": 138, "hidden": 246, "out": 330, "y": 428}
    for words, name in (("tokens", "tokens"), ("by expert", "rows"), ("products", "hidden"), ("result", "y")):
        canvas.text(columns[name], 16, words, kind="strong")
    for (expert, token), y in zip(pairs, tops, strict=True):
        canvas.line([(52, token_at[token] + row / 2), (columns["rows"], y + row / 2)])
        canvas.line([(columns["out"] + 52, y + row / 2), (columns["y"], token_at[token] + row / 2)])
        canvas.box(columns["rows"], y, 66, row, kinds[expert])
        canvas.text(columns["rows"] + 33, y + 15, f"token {token}", "middle")
        canvas.box(columns["out"], y, 52, row, kinds[expert])
    for expert, kind in enumerate(kinds):
        ys = [y for (of, _), y in zip(pairs, tops, strict=True) if of == expert]
        canvas.box(columns["hidden"], ys[0], 62, ys[-1] + row - ys[0], kind)
        canvas.text(columns["hidden"] + 31, (ys[0] + ys[-1] + row) / 2 + 5, f"expert {expert}", "middle")
        middle = (ys[0] + ys[-1] + row) / 2
        canvas.arrow(columns["rows"] + 66, middle, columns["hidden"] - 2, middle)
        canvas.arrow(columns["hidden"] + 62, middle, columns["out"] - 2, middle)
    for token, y in enumerate(token_at):
        canvas.box(columns["tokens"], y, 52, row, "whole")
        canvas.text(26, y + 15, f"token {token}", "middle")
        canvas.box(columns["y"], y, 52, row, "whole")
    end = tops[-1] + row + 24
    for words, x in (("dispatch:", 60), ("gate, up, down:", 206), ("combine:", 384)):
        canvas.text(x, end, words, kind="strong")
    for words, x in (("a gather", 60), ("grouped kernels", 206), ("a gather,", 384)):
        canvas.text(x, end + 18, words)
    canvas.text(384, end + 34, "and a sum")
    return canvas


PICTURES: dict[str, Callable[[], Canvas]] = {draw.__name__: draw for draw in (sharding, roofline, convolution, moe)}


if __name__ == "__main__":
    print(PICTURES[sys.argv[1]]().svg(sys.argv[1]))
