"""Times many configs on many cases, to fit the cost model: ``python -m benchmarks.sweep --tag suite --most 40``.

A worker process compiles every config of a case in threads, checks each for equality on small integers, times the right
ones interleaved with XLA, and appends JSON lines as it goes. The process that started it only watches: when the worker
says nothing for too long (a kernel that never ends) or dies (an illegal address), the config it had begun is written
down as failed, and a new worker goes on with the rest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import cases, report

COMPILE_S = 150  # silence allowed while a case compiles; the first also starts CUDA
STEP_S = 25  # silence allowed for one check or one group of timings
GROUP = 8  # configs timed together with XLA
REPS = 7


@dataclasses.dataclass(frozen=True)
class Item:
    """One config on one case; ``config`` holds the fields of ``cutjax.Config``."""

    case: str
    config: dict[str, Any]

    @property
    def key(self) -> str:
        """The same for equal items."""
        return json.dumps([self.case, self.config], sort_keys=True)


def lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The whole lines written so far; one cut short by a kill is left out."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def unfinished(items: Sequence[Item], path: pathlib.Path) -> tuple[list[Item], list[Item]]:
    """(items with no row yet, those of them that the last worker had begun and not left)."""
    rows = {Item(line["case"], line["config"]).key for line in lines(path) if "case" in line}
    begun: list[str] = []
    for line in lines(path):
        if "begin" in line:
            begun = line["begin"]
    left = [item for item in items if item.key not in rows]
    return left, [item for item in left if item.key in begun]


def watch(
    items: Sequence[Item], path: pathlib.Path, command: Sequence[str], compile_s=COMPILE_S, step_s=STEP_S
) -> None:
    """Runs workers until every item has a row.

    Args:
      items: what to measure; rows already in ``path`` are kept.
      path: JSON lines, appended to.
      command: starts a worker; it gets the paths of the items still to do and of the rows.
      compile_s, step_s: seconds of silence after which a worker is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    todo = path.with_suffix(".todo")
    idle = 0
    while True:
        left, _ = unfinished(items, path)
        if not left:
            break
        _append(path, {"begin": []})
        todo.write_text(json.dumps([dataclasses.asdict(item) for item in left]))
        worker = subprocess.Popen([*command, str(todo), str(path)])
        ending = _until_silent(worker, path, compile_s, step_s)
        with path.open("a") as file:
            file.write("\n")  # ends a line cut short
        after, begun = unfinished(items, path)
        if len(begun) == 1:
            _append(path, {**dataclasses.asdict(begun[0]), "failure": ending})
        elif begun:  # a group whose members all passed the check: which one is to blame is not known
            for item in begun:
                _append(path, {**dataclasses.asdict(item), "failure": f"timed with others: {ending}"})
        idle = idle + 1 if len(after) == len(left) and not begun else 0
        if idle == 3:
            raise RuntimeError(f"three workers in a row measured nothing: {ending}")
    todo.unlink(missing_ok=True)


def _until_silent(worker: subprocess.Popen, path: pathlib.Path, compile_s: float, step_s: float) -> str:
    size, since = -1, time.monotonic()
    while worker.poll() is None:
        now = path.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
            begun = next((line["begin"] for line in reversed(list(lines(path))) if "begin" in line), [])
        if time.monotonic() - since > (step_s if begun else compile_s):
            worker.kill()
            worker.wait()
            return f"hang: nothing for {step_s if begun else compile_s:.0f} s"
        time.sleep(0.05)
    return f"the process ended with status {worker.returncode}"


def _append(path: pathlib.Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(report.finite(line)) + "\n")
        file.flush()


def work(items: Sequence[Item], path: pathlib.Path) -> None:
    """Measures items in this process, case by case."""
    from benchmarks import timing

    method = "cupti" if timing.cupti_works() else "host"
    for name, group in itertools.groupby(items, key=lambda item: item.case):
        _work_case(cases.find(name), list(group), path, method)


def _work_case(case: cases.Case, items: list[Item], path: pathlib.Path, method: str) -> None:
    import jax
    import jax.numpy as jnp

    import cutjax
    from benchmarks import oracle, timing
    from benchmarks.run import inputs

    def begin(begun: Sequence[Item]):
        _append(path, {"begin": [item.key for item in begun]})

    def failed(item: Item, why: str):
        _append(path, {**dataclasses.asdict(item), "failure": why})

    a = jax.ShapeDtypeStruct(case.a_shape, case.dtype)
    b = jax.ShapeDtypeStruct(case.b_shape, case.dtype)
    backend = "cuda" if jax.default_backend() == "gpu" else "auto"

    def build(item: Item):
        config = cutjax.Config(**item.config)
        return jax.jit(lambda a, b: cutjax.gemm(a, b, layout=case.layout, backend=backend, config=config))

    def compile(item: Item):
        try:
            return build(item).lower(a, b).compile()
        except Exception as error:  # whatever is wrong with this config, the others go on
            return f"{type(error).__name__}: {error}"

    begin([])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(compile, items))
    whole = [
        jax.random.randint(jax.random.key(i), s.shape, -2, 3, jnp.int8).astype(s.dtype) for i, s in enumerate((a, b))
    ]
    # Sums of small integers are exact in f32 in any order, so right results are equal, bit for bit.
    expected = jax.jit(lambda a, b: oracle.reference(a, b, case.layout, precision=None).astype(case.dtype))(*whole)
    equal = jax.jit(lambda x, y: jnp.all(x == y)).lower(expected, expected).compile()
    right = []
    for item, function in zip(items, compiled, strict=True):
        if isinstance(function, str):
            failed(item, function)
            continue
        begin([item])
        if bool(equal(function(*whole), expected)):
            right.append((item, function))
        else:
            failed(item, "wrong: differs from the reference on small integers")
    begin([])
    del whole, expected
    sets = timing.input_sets(lambda seed: inputs(case, seed))
    xla = jax.jit(oracle.xla(case.layout, case.dtype))
    jax.block_until_ready(xla(*sets[0]))
    for start in range(0, len(right), GROUP):
        group = right[start : start + GROUP]
        begin([item for item, _ in group])
        # The host's clock needs functions it can trace.
        functions = {item.key: function if method == "cupti" else build(item) for item, function in group}
        times = timing.measure({"xla": xla, **functions}, sets, REPS, method)
        for item, _ in group:
            ours = times[item.key]
            row = {"us": ours.us, "iqr_us": ours.iqr_us, "xla_us": times["xla"].us, "ratio": times["xla"].us / ours.us}
            _append(path, {**dataclasses.asdict(item), "kernel": " + ".join(ours.kernels), **row})
    begin([])


def plan(chosen: Sequence[cases.Case], configs: list[dict[str, Any]] | None, most: int) -> list[Item]:
    """The items of a sweep: given configs that serve the case, else the predicted fastest ``most`` candidates."""
    import cutjax

    items = []
    for case in chosen:
        if configs is None:
            served = cutjax.candidates(case.problem)[:most]
        else:
            served = [
                c for c in (cutjax.Config(**fields) for fields in configs) if not cutjax.supports(c, case.problem)
            ]
        items += [Item(case.name, dataclasses.asdict(config)) for config in served]
    return items


def show(path: pathlib.Path, best: int = 3) -> None:
    """Prints the best configs of each case, and what failed."""
    rows = [line for line in lines(path) if "case" in line]
    for name, group in itertools.groupby(sorted(rows, key=lambda row: row["case"]), key=lambda row: row["case"]):
        group = list(group)
        timed = sorted((row for row in group if "us" in row), key=lambda row: -row["ratio"])
        print(f"{name}: {len(timed)} timed, {len(group) - len(timed)} failed")
        for row in timed[:best]:
            fields = " ".join(f"{key}={value}" for key, value in row["config"].items())
            print(f"  {row['ratio']:.3f} {row['us']:9.1f} us  {fields}")
        for row in [row for row in group if "failure" in row][:best]:
            print(f"  FAILED {row['failure'][:160]}  {row['config']}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description="Times many configs on many cases.")
    parser.add_argument("--tag", default="suite", help=f"some of {', '.join(cases.TAGS)}, joined by commas; or all")
    parser.add_argument("--case", action="append", help="only this case, by name; may be given again")
    parser.add_argument("--configs", type=pathlib.Path, help="JSON list of configs (default: candidates of each case)")
    parser.add_argument("--most", type=int, default=40, help="candidates of each case, the predicted fastest first")
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "sweep.jsonl")
    parser.add_argument("--worker", nargs=2, type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        todo, path = args.worker
        work([Item(**item) for item in json.loads(todo.read_text())], path)
        return 0
    chosen = [cases.find(name) for name in args.case] if args.case else cases.select(args.tag)
    configs = json.loads(args.configs.read_text()) if args.configs else None
    watch(plan(chosen, configs, args.most), args.out, [sys.executable, "-m", "benchmarks.sweep", "--worker"])
    show(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
