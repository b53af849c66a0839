"""Results of a final measurement, from the lines of benchmarks/direct.py, and their summary.

``python -m benchmarks final RESULTS.json...`` prints summaries; with ``--lines X.jsonl`` the one file is written first.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import report, sweep
from benchmarks.cases import Dense
from benchmarks.record import Figures, Row
from cutjax.kernels.device import Device, device_of_kind

FEW = 64  # tokens
LONG_US = 100.0  # by XLA
OP = "products"


def _kind(line: Mapping[str, Any]) -> str:
    return line["tags"][0] if line["tags"] else {"nn": "fwd", "nt": "dx", "tn": "dw"}.get(line["layout"], "")


def row_of(line: Mapping[str, Any], sustained: Mapping[str, Any] | None, device: Device) -> Row:
    """Returns the row of a product: its time is the cost model's choice's.

    The ratio to "xla" is of that choice, and that to "xla, tuned" of the tuned one: of a choice of XLA exactly 1, since
    that is the same program. The others are of windows of half a second.
    """
    if "final" not in line:
        return Row(line["case"], failure=line.get("error") or "not measured")
    case = Dense.of_fields(line)
    problem = case.problem.on(device)
    final, kind = line["final"], _kind(line)
    xla, untuned = final["xla"], final["untuned"]
    floor = {
        "flops": 1e6 * problem.flops / device.peak(problem.a.dtype, problem.math),
        "bytes": 1e6 * problem.bytes / device.bytes_per_second,
    }
    figures: dict[str, Any] = {field: line[field] for field in ("m", "n", "k", "layout", "batch", "dtype", "of")}
    figures |= {"kind": kind, "tokens": case.k if kind == "dw" else case.m, "flops": problem.flops}
    figures |= {
        "bytes": problem.bytes,
        "roofline_us": round(max(floor.values()), 3),
        "bound": max(floor, key=floor.__getitem__),
    }
    figures |= {"untuned": untuned, "tuned": final["tuned"], "kernel": final["kernel"], "sustained": {}}
    us = dict.fromkeys(("xla", "xla, tuned", "xla, first"), xla["us"])
    ours = {"xla": untuned["us"], "xla, tuned": final["tuned"]["us"], "xla, first": final.get("first", untuned)["us"]}
    if sustained and "error" not in sustained:
        figures["sustained"] = {name: sustained.get(f"{name}_us") for name in ("xla", "untuned", "tuned", "first")}
        names = (("untuned", "sustained"), ("tuned", "sustained, tuned"), ("first", "sustained, first"))
        for name, key in names:
            us[key], ours[key] = figures["sustained"]["xla"], figures["sustained"][name]
    failed = [f"{x['why']}" for x in line["failed"] if x["config"] == untuned["config"]]
    time_us = math.nan if untuned["us"] is None else untuned["us"]
    return Row(
        line["case"],
        kernel=untuned.get("kernel", "") if untuned["config"] != "XLA" else "XLA",
        us=time_us,
        iqr_us=untuned.get("iqr_us", math.nan),
        tflops=problem.flops / time_us / 1e6,
        gb_per_s=problem.bytes / time_us / 1e3,
        roofline=max(floor.values()) / time_us,
        ratios={key: us[key] / ours[key] for key in us if us[key] and ours[key]},
        peers={"xla": Figures(xla["us"], xla["iqr_us"], xla["kernel"])},
        figures=figures,
        failure="" if untuned["us"] is not None else (failed or ["the kernel was not timed"])[0],
    )


def write(lines: pathlib.Path, out: pathlib.Path, told: Mapping[str, Any]) -> list[Row]:
    """Writes the results file of what was measured so far, and returns its rows.

    Args:
      lines: that benchmarks/direct.py wrote.
      out: the results file.
      told: of the run: suite, salts and more.

    Raises:
      ValueError: no worker has begun.
    """
    found = list(sweep.lines(lines))
    heads = [line["head"] for line in found if "head" in line]
    if not heads:
        raise ValueError(f"{lines}: nothing was measured")
    head = heads[-1]
    device = device_of_kind(head["device"], "sm_90a", head["sms"])
    windows = {line["sustained"]: line for line in found if "sustained" in line}
    last = {line["case"]: line for line in found if "case" in line}
    rows = [row_of(line, windows.get(case), device) for case, line in last.items()]
    rates = {"tflops": device.peak(np.dtype(jnp.bfloat16)) / 1e12, "gb_per_s": device.bytes_per_second / 1e9}
    environment = {key: value for key, value in head.items() if key not in ("sms", "argv")}
    argv = [pathlib.Path(x).name if x.startswith("/") else x for x in head["argv"]]  # no folder of one machine
    more = {**told, "sms": head["sms"], "device_rates": rates, "argv": argv}
    report.write(out, report.document(OP, environment, "cupti", None, rows, more))
    return rows


def line(row: Mapping[str, Any]) -> str:
    """Returns the ratios of a line of benchmarks/direct.py in words."""
    final = row["final"]
    ratios = []
    for name in ("untuned", "tuned"):
        us = final[name]["us"]
        ratios.append(f"{name} {final['xla']['us'] / us:.3f}" if us else f"{name} failed")
    return ", ".join(f"{text}{' (XLA)' * (final[text.split()[0]]['config'] == 'XLA')}" for text in ratios)


@dataclasses.dataclass(frozen=True)
class Target:
    """A line of the summary: a number made of the ratios of some rows, and the least asked for, untuned and tuned."""

    name: str
    of: Callable[[np.ndarray], float]
    belongs: Callable[[Row], bool]
    least: tuple[float, float]
    sustained: bool = False


def _mean(ratios: np.ndarray) -> float:
    return math.exp(np.log(ratios).mean())


def _every(row: Row) -> bool:
    return True


TARGETS = (
    Target("geometric mean", _mean, _every, (1.03, 1.06)),
    Target("5th percentile", lambda ratios: float(np.percentile(ratios, 5)), _every, (0.97, 0.99)),
    Target("worst", lambda ratios: float(ratios.min()), _every, (0.92, 0.98)),
    Target(
        "tokens up to 64",
        _mean,
        lambda row: row.figures["kind"] in ("fwd", "dx") and row.figures["tokens"] <= FEW,
        (1.10, 1.15),
    ),
    Target("weight gradients", _mean, lambda row: row.figures["kind"] == "dw", (1.02, 1.05)),
    Target("over 100 us", _mean, lambda row: row.peers["xla"].us > LONG_US, (math.nan, math.nan)),
    Target("sustained, over 100 us", _mean, lambda row: row.peers["xla"].us > LONG_US, (1.00, 1.02), sustained=True),
)
BATCHED = (
    Target("geometric mean", _mean, _every, (1.02, 1.02)),
    Target("5th percentile", lambda ratios: float(np.percentile(ratios, 5)), _every, (math.nan, math.nan)),
    Target("worst", lambda ratios: float(ratios.min()), _every, (0.95, 0.95)),
    Target("decoding", _mean, lambda row: row.figures["kind"] == "decode", (math.nan, math.nan)),
)


def targets(rows: Sequence[Row]) -> tuple[Target, ...]:
    """Returns the lines that are asked for: those of batched products, where there are only such."""
    return BATCHED if all(row.figures["batch"] for row in rows) else TARGETS


def on_xla(rows: Sequence[Row], choice: str) -> int:
    """Returns the number of products that a choice, "untuned" or "tuned", leaves to XLA."""
    return sum(row.figures[choice]["config"] == "XLA" for row in rows)


def summary(rows: Sequence[Row], asked: bool = True) -> Iterator[str]:
    """Yields the lines of a table in Markdown: XLA's time over ours, without tuning and with it; then what failed.

    Args:
      rows: of one run.
      asked: whether the table has the least ratios that were asked for.
    """
    failed = [row for row in rows if row.failure]
    rows = [row for row in rows if not row.failure]
    heads = [name for name in ("products", "untuned", "asked", "tuned", "asked") if asked or name != "asked"]
    yield f"| XLA's time over ours | {' | '.join(heads)} |"
    yield f"|---|{'--:|' * len(heads)}"
    for target in targets(rows) if rows else ():
        prefix = "sustained" if target.sustained else "xla"
        cells, count = [], 0
        for suffix, least in zip(("", ", tuned"), target.least, strict=True):
            key = prefix + suffix
            ratios = [row.ratios[key] for row in rows if target.belongs(row) and key in row.ratios]
            count = max(count, len(ratios))
            cells.append(f"{target.of(np.array(ratios)):.3f}" if ratios else "-")
            if asked:
                cells.append("" if math.isnan(least) else f"{least:.2f}")
        if count or asked:
            yield f"| {target.name} | {count} | {' | '.join(cells)} |"
    if rows:
        cells = [str(on_xla(rows, "untuned")), "", str(on_xla(rows, "tuned")), ""]
        yield f"| run by XLA | {len(rows)} | {' | '.join(cells if asked else cells[::2])} |"
    yield from _engine(rows)
    if failed:
        yield ""
    for row in failed:
        yield f"- failed: {row.name}: {row.failure}"


def _engine(rows: Sequence[Row]) -> Iterator[str]:
    """Yields lines of a second table: of kernels wherever there is one, and of those that win over 100 us."""
    if not any("xla, first" in row.ratios for row in rows):
        return
    yield from ("", "| beside XLA | products | geometric mean | worst |", "|---|--:|--:|--:|")
    long = [row for row in rows if row.peers["xla"].us > LONG_US]
    for name, key, some in (
        ("our kernels alone", "xla, first", rows),
        ("our kernels alone, over 100 us", "xla, first", long),
        ("our kernels alone, sustained", "sustained, first", long),
        ("untuned, sustained", "sustained", long),
        ("tuned, sustained", "sustained, tuned", long),
    ):
        found = np.array([row.ratios[key] for row in some if key in row.ratios])
        if len(found):
            yield f"| {name} | {len(found)} | {_mean(found):.3f} | {found.min():.3f} |"
    for choice, key in (("untuned", "xla"), ("tuned", "xla, tuned")):
        wins = [row for row in long if row.figures[choice]["config"] != "XLA" and row.ratios.get(key, 0) >= 1.01]
        if long:
            yield f"| {choice}, over 100 us: kernels win by 1% | {len(wins)} of {len(long)} | | |"


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks final", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, nargs="+")
    parser.add_argument("--lines", type=pathlib.Path, help="JSON lines of benchmarks direct, to make the one file of")
    args = parser.parse_args(argv)
    if args.lines:
        (out,) = args.results
        write(args.lines, out, {})
    for path in args.results:
        content, rows = report.read(path)
        print(f"{path.stem}: {content['device']}, {content['commit'][:9]}, salts {content.get('salts', 'not told')}\n")
        print("\n".join(summary(rows)) + "\n")
    return 0
