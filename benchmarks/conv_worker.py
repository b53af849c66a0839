"""The process that measures a sample of convolutions: ``python -m benchmarks conv_worker PLAN ROWS``.

XLA tunes its convolutions on the device, a second each, so those of a batch are compiled first, and then timed with
nothing else running there. Our programs, inputs and checks, which need cores only, are compiled meanwhile for the
batches after it, on half of the cores: XLA's tuning needs some to be exact.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

FIRST, BATCH, AHEAD = 4, 12, 2  # convolutions of the first batch, and of the others; batches that are prepared


@dataclasses.dataclass(frozen=True)
class Plan:
    """The work that a process is given.

    Attributes:
      salt, count: the sample.
      names: those of it that are left.
      skip: ways that end a process, by convolution.
      until: when to begin no further batch that may not end: seconds since the epoch.
      candidates: kernels of each.
      threads: in which XLA compiles.
    """

    salt: str
    count: int
    names: tuple[str, ...]
    skip: Mapping[str, Sequence[str]]
    until: float
    candidates: int
    threads: int


class Log:
    """The lines of a file, written whole, from any thread; the process that watches reads them."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._lock = threading.Lock()

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line."""
        from benchmarks import report

        text = json.dumps(report.finite(dict(line)), allow_nan=False)
        with self._lock, self._path.open("a") as file:
            file.write(text + "\n")


def batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yields the names in batches, the first one small."""
    left = iter(names)
    for size in itertools.chain([FIRST], itertools.repeat(BATCH)):
        if not (batch := list(itertools.islice(left, size))):
            return
        yield batch


def work(plan: Plan, log: Log) -> None:
    """Measures until all is done, or time is up."""
    from benchmarks import networks, report
    from benchmarks.conv_programs import Programs

    log.write({"head": report.environment()})
    cases = {case.name: case for case in networks.sample(plan.count, plan.salt)}
    ours = concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2))
    theirs = concurrent.futures.ThreadPoolExecutor(plan.threads)

    def compiled(programs: Programs, name: str) -> None:
        start = time.time()
        programs.compile(name)
        log.write({"compiled": [programs.case.name, name], "seconds": time.time() - start})

    def prepare(programs: Programs) -> None:
        programs.lower(plan.candidates, plan.skip.get(programs.case.name, ()))
        for name in programs.by_us:
            compiled(programs, name)
        log.write({"prepared": programs.case.name})

    def ahead(names: Sequence[str]) -> list[tuple[Programs, concurrent.futures.Future]]:
        found = [Programs(cases[name]) for name in names]
        return [(programs, ours.submit(prepare, programs)) for programs in found]

    rest = batches(plan.names)
    todo = collections.deque(ahead(batch) for batch in itertools.islice(rest, 1 + AHEAD))
    each_s = 0.0
    while todo:
        batch = todo.popleft()
        start = time.time()
        if start + each_s * len(batch) > plan.until:
            break
        log.write({"compiling": [programs.case.name for programs, _ in batch]})
        concurrent.futures.wait([future for _, future in batch])
        jobs = [theirs.submit(compiled, programs, name) for programs, _ in batch for name in programs.by_xla]
        if names := next(rest, None):
            todo.append(ahead(names))
        concurrent.futures.wait(jobs)
        log.write({"compile_s": time.time() - start, "batch": len(batch)})
        for programs, _ in batch:
            _measure(programs, log)
        each_s = (time.time() - start) / len(batch)
    ours.shutdown(wait=False, cancel_futures=True)


def _measure(programs: Any, log: Log) -> None:
    from benchmarks import measure
    from benchmarks.conv_programs import XLA
    from benchmarks.ops import conv

    case, start = programs.case, time.time()

    def begin(way: str) -> None:
        log.write({"begin": [case.name, way] if way else []})

    try:
        results = conv.timed(programs, begin)
    except conv.DeviceLost as error:
        print(f"{case.name}: {error}", file=sys.stderr, flush=True)
        os._exit(3)  # the line of what had begun says what is to blame
    except Exception as error:
        results = {XLA: {"failure": measure.reason(error)}}
    log.write({"case": case.name, "results": results, "predicted": programs.choices, "seconds": time.time() - start})
    programs.compiled.clear()


def main(argv: Sequence[str]) -> int:
    """Works by a plan, until it is done or killed."""
    plan, rows = map(pathlib.Path, argv)
    work(Plan(**json.loads(plan.read_text())), Log(rows))
    sys.stdout.flush()
    os._exit(0)  # threads may still compile what no time is left for
