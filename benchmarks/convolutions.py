"""Times convolutions of real networks in a bounded time: ``python -m benchmarks convolutions --salt NAME``.

A sample drawn by the salt is measured in its order, so that what an end of time leaves is a smaller sample of the same
kind. A worker process appends lines as it goes; this one watches: where the worker says nothing for too long (a kernel
that never ends) or dies (an illegal address), what it had begun is left out, and a new worker goes on with the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import conv_report, networks, report, sweep
from benchmarks.conv_programs import KERNEL, OURS, XLA
from benchmarks.conv_worker import Plan
from benchmarks.ops import conv
from benchmarks.record import Row

COMPILE_S, STEP_S = 100, 20  # silence allowed while a batch compiles, and while one case is timed
START_S = 25  # that a process takes to begin: none is started later before the end


def watch(plan: Plan, path: pathlib.Path) -> None:
    """Runs workers until every convolution of a sample has a line, or time is up."""
    todo = path.with_suffix(".todo")
    idle = 0
    while idle < 3:
        done, skip = progress(path)
        names = tuple(name for name in plan.names if name not in done)
        if not names or time.time() + START_S > plan.until:
            break
        todo.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(plan, names=names, skip=skip))))
        sweep.append(path, {"begin": []})
        worker = subprocess.Popen([sys.executable, "-m", "benchmarks", "conv_worker", str(todo), str(path)])
        alarm = threading.Timer(max(0.0, plan.until - time.time()), worker.kill)
        alarm.start()
        ending = sweep.until_silent(worker, path, COMPILE_S, STEP_S)
        alarm.cancel()
        with path.open("a") as file:
            file.write("\n")  # ends a line cut short
        if worker.returncode == 0 or time.time() >= plan.until:
            break
        blamed = blame(path)
        for name, way in blamed:
            sweep.append(path, {"skip": [name, way], "why": ending})
        idle = 0 if blamed or len(progress(path)[0]) > len(done) else idle + 1
    todo.unlink(missing_ok=True)


def progress(path: pathlib.Path) -> tuple[set[str], dict[str, list[str]]]:
    """Returns the convolutions that have lines, and the ways to skip, by convolution."""
    done, skip = set(), {}
    for line in sweep.lines(path):
        if "case" in line:
            done.add(line["case"])
        if "skip" in line:
            name, way = line["skip"]
            skip.setdefault(name, []).append(way)
    return done, skip


def blame(path: pathlib.Path) -> list[tuple[str, str]]:
    """Returns the ways that a worker had begun when it ended: one that ran, else those that were being compiled.

    Where one of our kernels ended it, the case's others are not tried: they are likely to do so too.
    """
    begun, batch, ready = [], [], set()
    for line in sweep.lines(path):
        begun = line.get("begin", begun)
        ready = set() if "head" in line else ready  # another process began
        batch = line.get("compiling", [] if "compile_s" in line else batch)
        ready |= {(line["prepared"], OURS)} if "prepared" in line else set()
        ready |= {tuple(line["compiled"])} if "compiled" in line else set()
    if begun:
        name, way = begun
        return [(name, XLA if way == XLA else OURS)]
    unready = [(name, OURS) for name in batch if (name, OURS) not in ready]
    return unready or [(name, XLA) for name in batch if (name, XLA) not in ready]


def rows(path: pathlib.Path, cases: Iterable[networks.Conv]) -> list[Row]:
    """Returns the rows of what was measured, in the order of the sample."""
    lines = {line["case"]: line for line in sweep.lines(path) if "case" in line}
    found = []
    for case in cases:
        if line := lines.get(case.name):
            found.append(conv.row(case, line["results"], {"predicted": line["predicted"]}))
    return found


def unseen(count: int, salt: str, files: Sequence[pathlib.Path]) -> list[networks.Conv]:
    """Returns the convolutions of a sample but those that files hold."""
    seen = {row.case for path in files for row in report.read(path)[1]}
    return [case for case in networks.sample(count, salt) if case.name not in seen]


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks convolutions", description=__doc__)
    parser.add_argument("--salt", default=conv.SALT, help="draws the sample")
    parser.add_argument("--count", type=int, default=160, help="how many convolutions")
    parser.add_argument(
        "--except",
        dest="without",
        type=pathlib.Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="JSON of runs whose convolutions are left out",
    )
    parser.add_argument("--seconds", type=float, default=300, help="after which it ends, whatever is left")
    parser.add_argument("--candidates", type=int, default=conv.CANDIDATES, help="kernels that are timed of each")
    parser.add_argument("--threads", type=int, default=1, help="in which XLA compiles")
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write, and JSON lines beside it")
    parser.add_argument("--show", action="store_true", help="measure nothing: of the JSON lines that are there")
    parser.add_argument("--plot", action="store_true", help="also draw a picture beside the JSON")
    parser.add_argument("--commit", help="commit measured, where git cannot tell")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """The command line; returns 1 where a result was wrong or a kernel failed."""
    args = arguments(argv)
    until = time.time() + args.seconds
    out = args.out or report.RESULTS / f"conv-{args.salt}.json"
    path = out.with_suffix(".jsonl")
    cases = unseen(args.count, args.salt, args.without)
    if not args.show:
        path.parent.mkdir(parents=True, exist_ok=True)
        names = tuple(case.name for case in cases)
        plan = Plan(args.salt, args.count, names, {}, until, args.candidates, args.threads)
        watch(plan, path)
    write(out, path, cases, args)
    _, found = report.read(out)
    print(conv_report.text(found, {case.name: case for case in cases}))
    if args.plot:
        print(f"wrote {conv_report.draw(out)}")
    return int(any(row.failure or row.peers[KERNEL].failure.startswith("wrong") for row in found))


def write(out: pathlib.Path, path: pathlib.Path, cases: Sequence[networks.Conv], args: Any) -> None:
    """Writes the JSON of what was measured."""
    head = next((line["head"] for line in sweep.lines(path) if "head" in line), None)
    if head is None:
        raise RuntimeError(f"{path}: the worker did not begin")
    head["commit"] = args.commit or head["commit"]
    more = {"salt": args.salt, "count": args.count}
    report.write(out, report.document("conv", head, "cupti", None, rows(path, cases), more))
