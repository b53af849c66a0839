"""Times many configs on many cases, to fit the cost model: ``python -m benchmarks sweep --tag suite --most 40``.

A worker process compiles every config of a case in threads, checks each for equality on small integers, times the right
ones interleaved with XLA, or of ``--op grouped`` with a dense product, and appends JSON lines as it goes. The process
that started it only watches: when the worker says nothing for too long (a kernel that never ends) or dies (an illegal
address), the config it had begun is written down as failed, and a new worker goes on with the rest.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import cutjax
from benchmarks import oracle, report, timing
from benchmarks.cases import find
from benchmarks.ops import gemm, grouped

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
        """A key that is the same for equal items."""
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
        append(path, {"begin": []})
        todo.write_text(json.dumps([dataclasses.asdict(item) for item in left]))
        worker = subprocess.Popen([*command, str(todo), str(path)])
        ending = until_silent(worker, path, compile_s, step_s)
        with path.open("a") as file:
            file.write("\n")  # ends a line cut short
        after, begun = unfinished(items, path)
        if len(begun) == 1:
            append(path, {**dataclasses.asdict(begun[0]), "failure": ending})
        elif begun:  # a group whose members all passed the check: which one is to blame is not known
            for item in begun:
                append(path, {**dataclasses.asdict(item), "failure": f"timed with others: {ending}"})
        idle = idle + 1 if len(after) == len(left) and not begun else 0
        if idle == 3:
            raise RuntimeError(f"three workers in a row measured nothing: {ending}")
    todo.unlink(missing_ok=True)


def until_silent(worker: subprocess.Popen, path: pathlib.Path, compile_s: float, step_s: float) -> str:
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


def append(path: pathlib.Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(report.finite(line)) + "\n")
        file.flush()


@dataclasses.dataclass(frozen=True)
class Subject:
    """A case as a sweep sees it.

    Attributes:
      problem: as ``cutjax.candidates`` takes it.
      avals: of the arguments.
      build: the function of a config, or of None.
      whole: arguments of small integers.
      expected: of them, the right result.
      sets: arguments to time with.
      baseline: what all configs are timed beside.
    """

    problem: cutjax.Problem
    avals: tuple[Any, ...]
    build: Callable[[cutjax.Config | None], Callable[..., Any]]
    whole: Callable[[], tuple[Any, ...]]
    expected: Callable[..., Any]
    sets: Callable[[], list[tuple[Any, ...]]]
    baseline: Callable[..., Any]


def subject(name: str) -> Subject:
    """A dense case by its name, or a grouped one and its product, as in ``8g 16384x14336x4096 dx``."""
    backend = "cuda" if jax.default_backend() == "gpu" else "auto"
    return _dense(name, backend) if name in {case.name for case in gemm.CASES} else _grouped(name, backend)


def _dense(name: str, backend: str) -> Subject:
    case = find(gemm.CASES, name)
    avals = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in (case.a_shape, case.b_shape))

    def whole():
        return tuple(
            jax.random.randint(jax.random.key(i), s.shape, -2, 3, jnp.int8).astype(s.dtype) for i, s in enumerate(avals)
        )

    return Subject(
        case.problem,
        avals,
        lambda config: lambda a, b: cutjax.gemm(a, b, layout=case.layout, backend=backend, config=config),
        whole,
        lambda a, b: oracle.reference(a, b, case.layout, precision=None).astype(case.dtype),
        lambda: timing.input_sets(case.inputs),
        oracle.xla(case.layout, case.dtype),
    )


def _grouped(name: str, backend: str) -> Subject:
    case, product = grouped.find_grouped(name)
    return Subject(
        case.problem(product),
        grouped.avals(case),
        lambda config: grouped.ours(product, config, backend),
        lambda: grouped.inputs(case, 0, whole=True),
        grouped.ours(product, None, "xla"),
        lambda: timing.input_sets(lambda seed: grouped.inputs(case, seed)),
        grouped.dense,
    )


def work(items: Sequence[Item], path: pathlib.Path) -> None:
    """Measures items in this process, case by case."""
    method = "cupti" if timing.cupti_works() else "host"
    for name, group in itertools.groupby(items, key=lambda item: item.case):
        _work_case(subject(name), list(group), path, method)


def _work_case(case: Subject, items: list[Item], path: pathlib.Path, method: str) -> None:
    def begin(begun: Sequence[Item]):
        append(path, {"begin": [item.key for item in begun]})

    def failed(item: Item, why: str):
        append(path, {**dataclasses.asdict(item), "failure": why})

    def build(item: Item):
        return jax.jit(case.build(cutjax.Config(**item.config)))

    def compile(item: Item):
        try:
            return build(item).lower(*case.avals).compile()
        except Exception as error:  # whatever is wrong with this config, the others go on
            return f"{type(error).__name__}: {error}"

    begin([])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(compile, items))
    whole = case.whole()
    # Sums of small integers are exact in f32 in any order, so right results are equal, bit for bit.
    expected = jax.jit(case.expected)(*whole)
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
    sets = case.sets()
    baseline = jax.jit(case.baseline)
    jax.block_until_ready(baseline(*sets[0]))
    for start in range(0, len(right), GROUP):
        group = right[start : start + GROUP]
        begin([item for item, _ in group])
        # The host's clock needs functions it can trace.
        functions = {item.key: function if method == "cupti" else build(item) for item, function in group}
        times = timing.measure({"baseline": baseline, **functions}, sets, REPS, method)
        base_us = times["baseline"].us
        for item, _ in group:
            ours = times[item.key]
            row = {"us": ours.us, "iqr_us": ours.iqr_us, "xla_us": base_us, "ratio": base_us / ours.us}
            append(path, {**dataclasses.asdict(item), "kernel": " + ".join(ours.kernels), **row})
    begin([])


def plan(named: Mapping[str, cutjax.Problem], configs: list[dict[str, Any]] | None, most: int) -> list[Item]:
    """The items of a sweep: given configs that serve a problem, else the predicted fastest ``most`` candidates."""
    items = []
    for name, problem in named.items():
        if configs is None:
            served = cutjax.candidates(problem)[:most]
        else:
            served = [c for c in (cutjax.Config(**fields) for fields in configs) if not cutjax.reasons(c, problem)]
        items += [Item(name, dataclasses.asdict(config)) for config in served]
    return items


def problems(tag: str, names: Sequence[str], op: str) -> dict[str, cutjax.Problem]:
    """Problems to sweep, by name: of the cases named, or those of some tags."""
    if op == "grouped":
        chosen, products = grouped.SUITE.select(tag)
        every = [(case, product) for case in chosen for product in products or grouped.PRODUCTS]
        found = [grouped.find_grouped(name) for name in names] or every
        return {f"{case.name} {product}": case.problem(product) for case, product in found}
    found = [find(gemm.CASES, name) for name in names] or gemm.SUITE.select(tag)[0]
    return {case.name: case.problem for case in found}


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


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sweep", description="Times many configs on many cases.")
    parser.add_argument("--op", choices=["gemm", "grouped"], default="gemm")
    parser.add_argument(
        "--tag",
        default="suite",
        help=f"some of {', '.join(gemm.SUITE.tags)}, joined by commas; or all. "
        f"Of --op grouped: {', '.join(grouped.SUITE.tags)}",
    )
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
    configs = json.loads(args.configs.read_text()) if args.configs else None
    items = plan(problems(args.tag, args.case or (), args.op), configs, args.most)
    watch(items, args.out, [sys.executable, "-m", "benchmarks", "sweep", "--worker"])
    show(args.out)
    return 0
