"""Prints recorded runs as tables, and draws them: ``python -m benchmarks show benchmarks/results/gemm-h200.json``."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from benchmarks import plot, report, tables


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks show", description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=pathlib.Path, nargs="+", help="JSON of runs, in any schema")
    parser.add_argument("--plot", action="store_true", help="also draw a PNG and an SVG beside each")
    args = parser.parse_args(argv)
    for path in args.runs:
        content, rows = report.read(path)
        tables.print_rows(content["op"], rows, f"{path.stem}: {content['device']}, {content['date'][:10]}")
        for picture in plot.draw(path, (".png", ".svg")) if args.plot else ():
            print(picture)
    return 0
