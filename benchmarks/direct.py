"""Times many configs on many sampled products in minutes: ``python -m benchmarks direct --salts A,B --out X.jsonl``.

Kernels are launched through the driver, so nothing but XLA's own product is compiled by XLA. This process draws the
products, compiles their kernels in processes of their own, and watches the worker that measures (direct_worker.py):
when that hangs or dies, the config it was running is written down as failed and a new worker goes on with the rest.

With ``--final RESULTS.json`` the configs are those that ``cutjax.autotune`` would time; the fastest of them, the cost
model's choice and XLA are then timed once more in turns, some of them in long windows too, and results are written.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import mmap
import multiprocessing
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import cutjax
from benchmarks import final
from benchmarks.cases import Dense
from benchmarks.driver import Driver
from benchmarks.ops import attention, models
from cutjax.kernels import tuned
from cutjax.kernels.choose import choose
from cutjax.kernels.device import Device, device_of_kind
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import family
from cutjax.kernels.sm90.kernel import Kernel, resolve, resolved
from cutjax.runtime.compiler import compile_kernel
from cutjax.tuning import autotune

START, COMPILE, INPUTS, CHECK, TIME = range(5)  # what a worker is at
SILENCE_S = {START: 120, COMPILE: 180, INPUTS: 60, CHECK: 15, TIME: 15}
SAMPLES = {"models": models.sample, "attention": attention.sample}
GRACE_S = 25  # beyond --seconds, for the product under way


class Board:
    """Shared memory in a file: what the worker is at, and how many products have their kernels compiled.

    Attributes:
      FIELDS: the numbers kept: how often the worker has written, its product and config (-1: XLA), its phase, and the
        products whose kernels are ready.
    """

    FIELDS = ("beat", "product", "config", "phase", "ready")

    def __init__(self, path: pathlib.Path):
        if not path.exists():
            path.write_bytes(bytes(8 * len(self.FIELDS)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * len(self.FIELDS))

    def __getitem__(self, field: str) -> int:
        return struct.unpack_from("<q", self._memory, 8 * self.FIELDS.index(field))[0]

    def __setitem__(self, field: str, value: int) -> None:
        struct.pack_into("<q", self._memory, 8 * self.FIELDS.index(field), value)

    def mark(self, product: int, config: int, phase: int) -> None:
        """Records the product, config and phase that the worker begins."""
        struct.pack_into("<4q", self._memory, 0, self["beat"] + 1, product, config, phase)


@dataclasses.dataclass
class Job:
    """One product.

    Attributes:
      case: the product.
      configs: what to time on it: fields of ``cutjax.Config``.
      predicted: microseconds of each.
      skip: configs, by their place, that a worker did not survive, and how it ended; -1 is XLA.
      untuned: of a final measurement, the cost model's choice: its place, -1 for XLA, and what is predicted of both.
    """

    case: Dense
    configs: list[dict[str, Any]]
    predicted: list[float]
    skip: dict[int, str] = dataclasses.field(default_factory=dict)
    untuned: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the form that `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """Reads what `to_json` returned."""
        case = {key: tuple(value) if isinstance(value, list) else value for key, value in data["case"].items()}
        skip = {int(place): why for place, why in data["skip"].items()}
        return cls(Dense(**case), data["configs"], data["predicted"], skip, data["untuned"])


def problem_of(case: Dense, device: Device) -> Problem:
    """Returns the problem of a case on a device."""
    return case.problem.on(device)


def kind(config: cutjax.Config) -> str:
    """Returns the kind of a config: of each, some are timed."""
    divided = "parts" if config.parts > 1 else "stream" if config.stream_k else "whole"
    return f"swapped {divided}" if config.swap else divided


def plan(case: Dense, device: Device, most: int, more: int) -> Job:
    """Returns the ``most`` configs predicted fastest for a product, and ``more`` of the others of each kind by chance.

    Of each kind there are at least a fifth of the ``most``.
    """
    problem = problem_of(case, device)
    found = [kernel for x in family.configs(problem) if isinstance(kernel := resolve(problem, x), Kernel)]
    ranked = sorted(((kernel.time_us(device), i, kernel) for i, kernel in enumerate(found)), key=lambda x: x[:2])
    chance = random.Random(hashlib.sha256(case.name.encode()).digest())  # the same products, the same configs
    chosen = dict.fromkeys(ranked[:most])
    for name in dict.fromkeys(kind(kernel.config) for _, _, kernel in ranked):
        of_kind = [entry for entry in ranked if kind(entry[2].config) == name]
        chosen |= dict.fromkeys(of_kind[: -(-most // 5)])
        rest = [entry for entry in of_kind if entry not in chosen]
        chosen |= dict.fromkeys(chance.sample(rest, min(more, len(rest))))
    return Job(case, [dataclasses.asdict(kernel.config) for _, _, kernel in chosen], [us for us, _, _ in chosen])


def plan_final(case: Dense, device: Device, most: int) -> Job:
    """Returns the configs that ``cutjax.autotune`` would time, and which of them runs without it."""
    problem = problem_of(case, device)
    with tuned.use_tuning(None):
        choice = choose(problem)
    configs = autotune.configs_of(problem, most)
    if choice.config is not None and choice.config not in configs:
        configs.append(choice.config)
    place = -1 if choice.config is None else configs.index(choice.config)
    untuned = {"place": place, "predicted_us": choice.time_us, "predicted_xla_us": getattr(choice, "xla_us", None)}
    predicted = [resolved(problem, config).time_us(device) for config in configs]
    return Job(case, [dataclasses.asdict(config) for config in configs], predicted, untuned=untuned)


def products(salts: Sequence[str], count: int, cases: Sequence[str], dtype: str, suite: str = "models") -> list[Dense]:
    """Returns products given as ``m,n,k,layout[,batch...]``, then so many of each salt, in turns."""
    found: dict[str, Dense] = {}
    for text in cases:
        m, n, k, layout, *batch = text.split(",")
        case = Dense(int(m), int(n), int(k), layout, tuple(map(int, batch)), dtype)
        found.setdefault(case.name, case)
    for drawn in itertools.zip_longest(*(SAMPLES[suite](count, salt) for salt in salts)):
        for case in filter(None, drawn):
            case = dataclasses.replace(case, dtype=dtype)
            found.setdefault(case.name, case)
    return list(found.values())


def compile_all(jobs: Sequence[Job], device: Device, board: Board, pool: concurrent.futures.Executor) -> None:
    """Compiles every kernel of the jobs into the disk cache, in order; ``board`` counts the jobs that have theirs."""
    start, done, needed = time.monotonic(), {}, []
    try:
        for job in jobs:
            needed.append([])
            for config in job.configs:
                kernel = resolved(problem_of(job.case, device), cutjax.Config(**config))
                source = kernel.source
                if source not in done:
                    done[source] = pool.submit(compile_kernel, source, name=kernel.name, arch=device.arch)
                needed[-1].append(done[source])
        say(f"{len(done)} kernels of {sum(map(len, needed))} (product, config)s to compile")
        failed = set()
        for i, of_job in enumerate(needed):
            for future in of_job:
                if (error := future.exception()) and future not in failed:
                    failed.add(future)
                    say(f"does not compile: {str(error)[:400]}")
            board["ready"] = i + 1
    except (concurrent.futures.CancelledError, RuntimeError) as error:  # the time is up
        say(f"kernels left uncompiled: {type(error).__name__} {error}")
        return
    say(f"kernels compiled in {time.monotonic() - start:.1f} s")


_START = time.time()


def say(text: str) -> None:
    """Prints a line with the seconds since the start, the worker's start included."""
    start = float(os.environ.get("CUTJAX_DIRECT_START", _START))
    print(f"[{time.time() - start:6.1f} s] {text}", flush=True)


def watch(jobs: Sequence[Job], board: Board, write_todo: Any, command: Sequence[str], deadline: float) -> None:
    """Runs workers until one ends well or the time is up; a config that a worker did not survive is skipped.

    Args:
      jobs: of the workers; what to skip is added to them.
      board: where a worker says what it is at.
      write_todo: writes the jobs for the next worker.
      command: starts a worker.
      deadline: of all, by ``time.time()``.
    """
    lost = 0
    while time.time() < deadline:
        board.mark(-1, -1, START)
        write_todo()
        worker = subprocess.Popen(
            command, env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUTJAX_DIRECT_START": str(_START)}
        )
        ending = _until_silent(worker, board, deadline)
        if not ending:
            return
        product, config, phase = board["product"], board["config"], board["phase"]
        where = f"product {product}, config {config}, phase {phase}"
        say(f"worker lost ({ending}) at {where}")
        if phase in (CHECK, TIME, INPUTS) and 0 <= product < len(jobs):
            jobs[product].skip[config] = ending
            lost = 0
        else:
            lost += 1
            if lost == 3:
                raise RuntimeError(f"three workers in a row were lost before they measured: {ending}")


def _until_silent(worker: subprocess.Popen, board: Board, deadline: float) -> str:
    """Waits for a worker; returns the way it ended, or "" where that is well."""
    beat, since = -1, time.monotonic()
    try:
        while worker.poll() is None:
            if board["beat"] != beat:
                beat, since = board["beat"], time.monotonic()
            if time.time() > deadline + GRACE_S:
                say("time is up: the worker is stopped")
                return ""
            if time.monotonic() - since > (limit := SILENCE_S[board["phase"]]):
                return f"hang: nothing for {limit} s"
            time.sleep(0.02)
        return "" if worker.returncode == 0 else f"the process ended with status {worker.returncode}"
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks direct", description=__doc__.splitlines()[0])
    parser.add_argument("--salts", default="", help="of the samples of products of models, joined by commas")
    parser.add_argument("--suite", choices=list(SAMPLES), default="models", help="that the samples are of")
    parser.add_argument("--count", type=int, default=150, help="products of each salt")
    parser.add_argument("--cases", nargs="*", default=(), help="more products, first: m,n,k,layout[,batch...]")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--most", type=int, default=12, help="configs of each product, the predicted fastest first")
    parser.add_argument("--random", type=int, default=4, help="of the others, by chance")
    parser.add_argument("--seconds", type=float, default=200, help="after which no other product is begun")
    parser.add_argument("--reps", type=int, default=6, help="timings of each config; 3 above a millisecond")
    parser.add_argument("--final", type=pathlib.Path, metavar="RESULTS", help="JSON to write of what autotune gives")
    parser.add_argument("--again", type=int, default=20, help="with --final: timings in turns of what is chosen")
    parser.add_argument("--sustained", type=int, default=0, help="with --final: products in windows of half a second")
    parser.add_argument("--chunk", type=int, default=48, help="products that XLA compiles between timings")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="that compile XLA's products")
    parser.add_argument("--commit", help="the commit measured, where the tree is a copy without its history")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--compile-only", metavar="DEVICE", help="only fill the disk cache, for this kind of GPU")
    args = parser.parse_args(argv)
    name, sms = (args.compile_only, None) if args.compile_only else Driver().describe()
    device = device_of_kind(name, "sm_90a", sms)
    deadline = _START + args.seconds
    salts = [salt for salt in args.salts.split(",") if salt]
    cases = products(salts, args.count, args.cases, args.dtype, args.suite)
    if args.final:
        jobs = [plan_final(case, device, args.most) for case in cases]
    else:
        jobs = [plan(case, device, args.most, args.random) for case in cases]
    say(f"{len(jobs)} products on {device.name} with {device.sms} SMs, {args.seconds:.0f} s")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        todo, board_path = pathlib.Path(folder) / "todo.json", pathlib.Path(folder) / "board"
        board = Board(board_path)
        # The driver is open here, and does not survive a fork.
        pool = concurrent.futures.ProcessPoolExecutor(args.threads, multiprocessing.get_context("spawn"))
        if args.compile_only:
            with pool:
                compile_all(jobs, device, board, pool)
            return 0
        more = {field: getattr(args, field) for field in ("reps", "again", "sustained", "chunk", "threads", "commit")}
        more |= {"device": name, "sms": sms, "deadline": deadline, "argv": list(argv)}

        def write_todo() -> None:
            todo.write_text(json.dumps({**more, "jobs": [job.to_json() for job in jobs]}))

        threading.Thread(target=compile_all, args=(jobs, device, board, pool), daemon=True).start()
        command = [sys.executable, "-m", "benchmarks", "direct_worker", str(todo), str(board_path), str(args.out)]
        try:
            watch(jobs, board, write_todo, command, deadline)
        finally:
            pool.shutdown(cancel_futures=True)
            if args.final:
                told = {"suite": args.suite, "salts": salts, "count": args.count, "most": args.most}
                print("\n".join(final.summary(final.write(args.out, args.final, told))))
    return 0
