"""Writes what ``python -m cutjax bench`` compares with, from the runs on an H200: ``python -m benchmarks recorded``."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import cutjax
from benchmarks import report
from cutjax.tuning.cases import CASES

RESULTS = pathlib.Path(__file__).parent / "results"
PATH = pathlib.Path(cutjax.__file__).parent / "tuning" / "h200.json"
REPORT = "experiments/device-report-h200.json"  # of the same command, when it had products alone


class Run(NamedTuple):
    """A row of a run: its file, its case, and its product where the case has several."""

    file: str
    case: str
    product: str = ""


DTYPES, FUSED, GROUPED = "dtypes-h200.json", "fused-59dab49-h200.json", "grouped-h200.json"
# The runs of the cases of cutjax/tuning/cases.py, those that REPORT has left out.
RUNS = {
    "16x8192x8192:bfloat16 x int8": Run("quantized-h200.json", "16x8192x8192 bfloat16 x int8"),
    "1000x1001x1003:bfloat16": Run(DTYPES, "1000x1001x1003 bfloat16"),
    "4096x4096x4096:float32": Run(DTYPES, "4096x4096x4096 float32 highest"),
    "4096x32x32x32:float32": Run(DTYPES, "4096x32x32x32 float32 highest"),
    "8192x2048x1024:float32:8 groups": Run(DTYPES, "8192x2048x1024 float32 highest 8g"),
    "8192x14336x4096:bfloat16:8 groups": Run(GROUPED, "8g 8192x14336x4096", "forward"),
    "128x14336x4096:bfloat16:8 groups": Run(GROUPED, "8g 128x14336x4096", "forward"),
    "4096x4096x4096 gelu(x@w+b)": Run(FUSED, "4096x4096x4096", "bias+gelu"),
    "16384x1024x1024 gelu(x@w+b)": Run(FUSED, "16384x1024x1024", "bias+gelu"),
    "4096x4096x4096 s*x@w+b+r": Run(FUSED, "4096x4096x4096", "scale+bias+residual"),
    "2048x2048x2048 silu(x@g)*(x@u)": Run(FUSED, "2048x2048x2048", "silu(x@wg)*(x@wu)"),
    "resnet50 3x3 /2, 32 images": Run("conv-report-2-h200.json", "resnet50 s2 3x3 /2 n32 fwd"),
    "convnext 7x7 each, 64 images": Run("conv-report-2-h200.json", "convnext-t s2 dw7 n64 fwd"),
    "hifigan 11 taps by 5, 16 signals": Run("conv-report-2-h200.json", "hifigan 8192 k11 d5 n16 fwd"),
    "sd-unet 3x3, 16 images": Run("conv-report-2-h200.json", "sd-unet 8 skip n16 fwd"),
    "SwiGLU 2048x8192x2048, gradient": Run("fused-h200.json", "2048x8192x2048 SwiGLU mlp, fwd+bwd"),
}


def recorded() -> dict[str, dict[str, Any]]:
    """Returns by case its record: the times of the fastest kernel and of XLA, and the run that they are of."""
    names = {case.name for case in CASES}
    earlier = json.loads((RESULTS / REPORT).read_text())
    found = {
        row["case"]: _record(min(row["us"].values()), row["xla_us"], REPORT, row["case"], earlier)
        for row in earlier["rows"]
        if row["us"] and row["case"] in names
    }
    return dict(sorted((found | {name: _of_run(run) for name, run in RUNS.items()}).items()))


def _of_run(run: Run) -> dict[str, Any]:
    content, rows = report.read(RESULTS / run.file)
    (row,) = (row for row in rows if (row.case, row.product) == (run.case, run.product))
    ours = row.peers.get("kernel", row)  # of convolutions, where "auto" may be XLA
    return _record(ours.us, row.peers["xla"].us, run.file, " ".join(filter(None, run[1:])), content)


def _record(us: float, xla_us: float, file: str, row: str, content: dict[str, Any]) -> dict[str, Any]:
    of = {"file": f"benchmarks/results/{file}", "row": row, "commit": content["commit"], "date": content["date"][:10]}
    return {"us": round(us, 2), "xla_us": round(xla_us, 2), **of}


def encoded() -> str:
    """Returns the text of the file, a case a line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(record)}" for name, record in recorded().items()]
    return '{\n "written by": "python -m benchmarks recorded",\n "device": "NVIDIA H200",\n "cases": {\n' + (
        ",\n".join(lines) + "\n }\n}\n"
    )


def main(argv: Sequence[str]) -> int:
    """The command line."""
    argparse.ArgumentParser(prog="python -m benchmarks recorded", description=__doc__).parse_args(argv)
    PATH.write_text(encoded())
    print(f"{PATH.name}: {len(recorded())} cases")
    return 0
