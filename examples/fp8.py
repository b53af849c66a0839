"""Train the transformer of transformer.py in bfloat16, and in float8 by each recipe, and draw the curves.

    python examples/fp8.py [--recipes tensor,row,block] [--config cpu|gpu] [--steps N] [--out FILE]

The program is that of Flax's own layers; ``cutjax.fuse(..., fp8=...)`` around its gradient is the only difference. All
start from the same parameters and see the same batches. The logits stay in bfloat16. The program prints a table, draws
loss and throughput, and fails if float8 ends with a higher loss than noise explains.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import jax
import numpy as np
from data import TEXT, encode
from model import CONFIGS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformer import Checkpoints, Curves, plot, table, train

RECIPES = ("tensor", "row", "block")
WIDE = "fuse"  # the way that float8 is compared with
MORE = 0.05  # nats that the mean of the last tenth of the losses may be above bfloat16's; 0.020 after 1000 steps


def check(curves: dict[str, Curves]) -> None:
    """Ends the program with an error if float8 does not train as bfloat16 does."""
    ends = {name: float(np.mean(curve.losses[-max(1, len(curve.losses) // 10) :])) for name, curve in curves.items()}
    print(f"mean of the last tenth of the losses: {', '.join(f'{name} {end:.4f}' for name, end in ends.items())}")
    for name, end in ends.items():
        if not end <= ends[WIDE] + MORE:  # a NaN fails too
            sys.exit(f"FAILED: {name} ends with {end:.4f}, bfloat16 with {ends[WIDE]:.4f}")


def main(argv: Sequence[str] | None = None) -> dict[str, Curves]:
    """The command line; returns the curves by way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", default=",".join(RECIPES), help=f"some of {', '.join(RECIPES)}, by commas")
    parser.add_argument("--config", choices=CONFIGS, help="sizes (default: what fits the device)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--set", type=json.loads, default={}, help="other fields of the setup, as in '{\"width\": 64}'")
    parser.add_argument("--out", type=pathlib.Path, default="build/fp8.png", help="where the picture goes")
    args = parser.parse_args(argv)
    recipes = tuple(args.recipes.split(","))
    if unknown := set(recipes) - set(RECIPES):
        parser.error(f"unknown recipe {sorted(unknown)}, expected some of {RECIPES}")

    setup = CONFIGS[args.config or ("gpu" if jax.default_backend() == "gpu" else "cpu")]
    setup = dataclasses.replace(setup, dtype="bfloat16", steps=args.steps, **args.set)
    text, curves = encode(TEXT.read_text()), {}
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}, {task.fields[rate]:,.0f} tokens/s")) as progress:
        for name in (WIDE, *(f"fp8-{recipe}" for recipe in recipes)):
            _, curves[name] = train(setup, name, text, Checkpoints(None), progress)
    Console().print(table(curves))
    plot(curves, setup, args.out)
    print(f"loss and throughput: {args.out}")
    check(curves)
    return curves


if __name__ == "__main__":
    main()
