"""The worker of benchmarks/direct.py: compiles XLA's programs in threads, checks each config, times all in turns."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import pathlib
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from benchmarks import final, oracle, report, sustained, sweep, timing
from benchmarks.cases import Dense
from benchmarks.direct import CHECK, COMPILE, INPUTS, TIME, Board, Job, problem_of, say
from benchmarks.direct_bench import Bench, Entry, Programs, compile_programs, padded
from benchmarks.driver import CudaError, Driver
from cutjax.kernels.choose import floor_us
from cutjax.kernels.device import Device, device_of_kind
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import operands
from cutjax.kernels.sm90.kernel import resolved
from cutjax.kernels.tuned import Entry as Tuned
from cutjax.runtime.launch import Call
from cutjax.tuning.measure import FINALISTS, LAST_ROUNDS, LONG_US, WINDOW_SECONDS

SLOW_US = 1000.0  # products that cannot take less are timed fewer times
SLOW_REPS = 3
ZEROS_US = 1.5  # of zeroing the tickets of tiles in parts, which is no kernel


def get_call(case: Dense, device: Device, fields: dict[str, Any]) -> Call | str:
    """Returns the call of a config, its kernel compiled before, or why there is none."""
    try:
        return resolved(problem_of(case, device), cutjax.Config(**fields)).call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def compile_finish(call: Call) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Compiles what JAX makes of a call's results, and zeros in their place to time it with."""
    finish, results = call.finish, call.results
    assert finish is not None
    zeros = jax.jit(lambda: tuple(jnp.zeros(x.shape, x.dtype) for x in results)).lower().compile()
    return jax.jit(lambda *xs: finish(xs, ())).lower(*results).compile(), zeros


def measure(bench: Bench, number: int, job: Job, programs: Programs, reps: int, again: int) -> dict[str, Any]:
    """Returns the row of a product; in a final measurement with what was timed ``again`` so many times."""
    case, board, device = job.case, bench.board, bench.device
    problem = problem_of(case, device)
    board.mark(number, -1, INPUTS)
    sets = timing.input_sets(lambda seed: programs.make(jnp.uint32(seed)))
    failed = [{"config": _brief(job.configs[i]), "why": why} for i, why in job.skip.items() if i >= 0]
    board.mark(number, -1, CHECK)
    # Of one row or column XLA rounds each product to the operands' dtype, and then adds them up.
    trusted = jax.jit(oracle.exact(case.layout, case.dtype)) if 1 in (case.m, case.n) else programs.xla
    expected = jax.block_until_ready(trusted(*sets[0]))
    padded_sets, pad_us = _pad(problem, sets)
    entries = []
    for place, fields in enumerate(job.configs):
        if place in job.skip:
            continue
        board.mark(number, place, CHECK)
        call = programs.calls[place]
        why = call if isinstance(call, str) else ""
        try:
            if not isinstance(call, str):
                entry = bench.prepare(case, place, call)
                bench.reserve(sum(map(padded, entry.results)))
                if not (why := bench.check(entry, case, padded_sets[0], expected)):
                    entries.append(entry)
        except Exception as error:
            traceback.print_exc()
            bench.driver.synchronize()  # an error that the device does not get over is raised again
            why = f"{type(error).__name__}: {error}"[:300]
        if why:
            failed.append({"config": _brief(fields), "why": why})
    del expected
    slow = floor_us(problem) > SLOW_US
    times = _time(bench, number, entries, programs.xla, sets, padded_sets, SLOW_REPS if slow else reps)
    xla = times.pop(-1)
    board.mark(number, -1, INPUTS)
    sums = {place: _finish_us(*programs.finishes[place]) for place in times if place in programs.finishes}
    beside = {place: sums.get(place, 0) + pad_us + ZEROS_US * job.configs[place]["stream_k"] for place in times}
    configs = []
    for place, timed in times.items():
        row = {**_brief(job.configs[place]), "us": round(timed.us + beside[place], 3)}
        if place in sums:
            row["finish_us"] = round(sums[place], 3)
        configs.append({**row, "predicted_us": round(job.predicted[place], 3)})
    chosen = {}
    if job.untuned is not None:
        totals = {place: timed.us + beside[place] for place, timed in times.items()}
        finalists = sorted(totals, key=totals.__getitem__)[:FINALISTS]
        picked = [entry for entry in entries if entry.place in finalists]
        last = _time(bench, number, picked, programs.xla, sets, padded_sets, SLOW_REPS if slow else LAST_ROUNDS)
        us = {place: timing.us for place, timing in last.items()}
        if us[-1] > LONG_US:  # power limits the clock then: each in a window of its own
            us = _held(bench, number, picked, programs.xla, sets, padded_sets, us)
        totals = {place: us[place] + beside[place] for place in finalists}
        best = min(totals, key=totals.__getitem__, default=-1)
        tuned = -1 if best < 0 or Tuned((), totals[best], us[-1]).xla_wins else best
        # "first": what runs where a kernel must.
        places = {"untuned": job.untuned["place"], "tuned": tuned, "kernel": best, "first": 0 if 0 in times else best}
        picked = [entry for entry in entries if entry.place in places.values()]
        reps = max(SLOW_REPS, again // 3) if slow else again
        timed = _time(bench, number, picked, programs.xla, sets, padded_sets, reps)
        chosen = {"final": _final(job, timed, beside, places)}
    return {
        "case": case.name,
        **{field: getattr(case, field) for field in ("m", "n", "k", "layout", "batch", "dtype", "of", "tags")},
        "device": device.name,
        "sms": device.sms,
        "xla_us": round(xla.us, 3),
        "xla_kernels": list(xla.kernels),
        "configs": sorted(configs, key=lambda row: row["us"]),
        "failed": failed,
        **chosen,
        "compile_s": round(programs.seconds, 2),
    }


def _final(
    job: Job, times: dict[int, timing.Timing], beside: dict[int, float], places: dict[str, int]
) -> dict[str, Any]:
    """Returns times of what was chosen, by how it was; of the cost model's choice with what it had predicted."""

    def told(place: int) -> dict[str, Any]:
        config = "XLA" if place < 0 else _brief(job.configs[place])
        if place not in times:
            return {"config": config, "us": None}
        timed = times[place]
        us = round(timed.us + beside.get(place, 0), 3)
        return {"config": config, "kernel": "+".join(timed.kernels), "us": us, "iqr_us": round(timed.iqr_us, 3)}

    found = {name: told(place) for name, place in {"xla": -1, **places}.items()}
    assert job.untuned is not None
    found["untuned"] |= {name: job.untuned[name] for name in ("predicted_us", "predicted_xla_us")}
    return found


def _brief(fields: dict[str, Any]) -> dict[str, Any]:
    defaults = dataclasses.asdict(cutjax.Config())
    return {name: value for name, value in fields.items() if defaults[name] != value}


def _time(
    bench: Bench,
    number: int,
    entries: Sequence[Entry],
    xla: Callable[..., jax.Array],
    sets: Sequence[tuple],
    padded_sets: Sequence[tuple],
    reps: int,
) -> dict[int, timing.Timing]:
    """Returns the times of each entry by its place, and of XLA as -1."""

    def ours(entry: Entry) -> Callable[..., None]:
        def run(*arrays: jax.Array) -> None:
            bench.board.mark(number, entry.place, TIME)
            bench.launch(entry, arrays, bench.place(entry.results))

        return run

    def theirs(*arrays: jax.Array) -> None:
        bench.board.mark(number, -1, TIME)
        jax.block_until_ready(xla(*arrays))

    functions = {-1: theirs, **{entry.place: ours(entry) for entry in entries}}
    chance, rotation = random.Random(number), itertools.cycle(range(len(sets)))
    order = [place for _ in range(reps) for place in chance.sample(list(functions), len(functions))]
    calls = []
    for place in order:
        i = next(rotation)
        calls.append((functions[place], sets[i] if place < 0 else padded_sets[i]))
    seen = timing.records(calls, calls[: len(functions)] if reps > SLOW_REPS else calls[:1])
    # Each stream's kernels come in their order; ours run on another than XLA's.
    by_place = {entry.place: entry for entry in entries}
    names = {kernel for entry in entries for kernel in entry.kernels}
    mine = iter([record for record in seen if record[0] in names])
    others = [record for record in seen if record[0] not in names]
    if not others or len(others) % reps:
        raise RuntimeError(f"XLA ran {len(others)} kernels in {reps} calls: {others[:8]}")
    each = len(others) // reps
    samples: dict[int, list[float]] = {place: [] for place in functions}
    samples[-1] = [sum(us for _, us in others[i : i + each]) for i in range(0, len(others), each)]
    for place in order:
        if place < 0:
            continue
        part = list(itertools.islice(mine, len(by_place[place].kernels)))
        if [name for name, _ in part] != by_place[place].kernels:
            raise RuntimeError(f"expected the kernels {by_place[place].kernels}, the profiler saw {part}")
        samples[place].append(sum(us for _, us in part))
    if left := list(mine):
        raise RuntimeError(f"the profiler saw {len(left)} kernels too many: {left[:3]}")
    kernels = {-1: [name for name, _ in others[:each]]} | {place: entry.kernels for place, entry in by_place.items()}
    return {place: timing.Timing(tuple(us), tuple(kernels[place]), "cupti") for place, us in samples.items()}


def _held(
    bench: Bench,
    number: int,
    entries: Sequence[Entry],
    xla: Callable[..., jax.Array],
    sets: Sequence[tuple],
    padded_sets: Sequence[tuple],
    us: dict[int, float],
) -> dict[int, float]:
    """Returns microseconds a call of each entry by its place, and of XLA as -1, in windows without a gap."""

    def beat(place: int) -> Callable[[], None]:
        return lambda: bench.board.mark(number, place, TIME)

    found = {-1: sustained.window_us(xla, sets, WINDOW_SECONDS, beat(-1))}
    rotation = itertools.cycle(padded_sets)
    for entry in entries:
        beat(entry.place)()
        calls = max(3, math.ceil(1e6 * WINDOW_SECONDS / us[entry.place]))
        start = time.perf_counter()
        for _ in range(calls):
            bench.start(entry, next(rotation), bench.place(entry.results))
        bench.driver.synchronize()
        found[entry.place] = 1e6 * (time.perf_counter() - start) / calls
    return found


def _pad(problem: Problem, sets: Sequence[tuple]) -> tuple[Sequence[tuple], float]:
    """Returns the sets with rows as kernels take them, and the time that copying one takes."""
    columns = {copy.buffer: copy.columns for copy in operands.prepared(problem)}
    if not columns:
        return sets, 0.0

    def pad(*arrays: jax.Array) -> list[jax.Array]:
        """Only what is padded: the rest would be copied."""
        zeros = [(0, 0, 0)] * (arrays[0].ndim - 1)
        return [jax.lax.pad(arrays[i], np.zeros((), arrays[i].dtype), [*zeros, (0, c, 0)]) for i, c in columns.items()]

    function, padded_sets = jax.jit(pad), []
    for arrays in sets:
        copies = dict(zip(columns, function(*arrays), strict=True))
        padded_sets.append(tuple(copies.get(i, x) for i, x in enumerate(arrays)))
    jax.block_until_ready(padded_sets)
    seen = timing.records([(function, arrays) for arrays in itertools.islice(itertools.cycle(sets), 5)])
    return padded_sets, sum(us for _, us in seen) / 5


def _finish_us(function: Callable[..., Any], zeros: Callable[[], Any], reps: int = 5) -> float:
    """Returns the time of what JAX does after a call's kernels, with arguments that were just read."""
    seen = timing.records([(function, zeros())] * reps)
    if len(seen) % reps:
        raise RuntimeError(f"the end of a call ran {len(seen)} kernels in {reps} calls: {seen[:8]}")
    each = len(seen) // reps
    return float(np.median([sum(us for _, us in seen[i : i + each]) for i in range(0, reps * each, max(each, 1))]))


def work(todo: pathlib.Path, board: Board, out: pathlib.Path) -> int:
    """Measures the products that have no row yet; returns the exit status."""
    plan = json.loads(todo.read_text())
    jobs = list(enumerate(map(Job.from_json, plan["jobs"])))
    device = device_of_kind(plan["device"], "sm_90a", plan["sms"])
    environment = report.environment(plan["commit"])
    done = {line["case"] for line in sweep.lines(out) if "case" in line}
    append(out, {"head": {**environment, "sms": device.sms, "argv": plan["argv"]}})
    if not timing.cupti_works():
        say("no kernel times: CUPTI does not work here")
        return 4
    driver = Driver()
    driver.describe()
    driver.enter()
    bench = Bench(driver, device, board)
    left = [(number, job) for number, job in jobs if job.case.name not in done and -1 not in job.skip]
    say(f"worker started: {len(left)} of {len(jobs)} products to do")
    end = plan["deadline"] - sustained.seconds(plan["sustained"])
    for start in range(0, len(left), plan["chunk"]):
        chunk = left[start : start + plan["chunk"]]
        if time.time() > end:
            break
        programs = _compile_chunk(chunk, bench, plan)
        for number, job in chunk:
            if time.time() > end:
                break
            append(out, _row(bench, number, job, programs.pop(number), plan["reps"], plan["again"]))
    if plan["sustained"]:
        for line in sustained.measure(jobs, list(sweep.lines(out)), board, plan):
            append(out, line)
    say("worker done")
    return 0


def _compile_chunk(
    chunk: Sequence[tuple[int, Job]], bench: Bench, plan: dict[str, Any]
) -> dict[int, Programs | Exception]:
    """Compiles a chunk: returns each product's programs, or the error."""
    begin = time.monotonic()

    def guarded(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            try:
                return function(x)
            except Exception as error:
                traceback.print_exc()
                return error
            finally:
                bench.board.mark(-1, -1, COMPILE)

        return run

    bench.board.mark(-1, -1, COMPILE)
    with concurrent.futures.ThreadPoolExecutor(plan["threads"]) as pool:
        found = list(pool.map(guarded(compile_programs), [job.case for _, job in chunk]))
        each = [x.seconds for x in found if isinstance(x, Programs)]
        took = f"{np.median(each):.1f} s each, at most {max(each):.1f} s" if each else "none"
        say(f"XLA compiled {len(each)} of {len(chunk)} products in {time.monotonic() - begin:.1f} s ({took})")
        while bench.board["ready"] <= chunk[-1][0] and time.time() < plan["deadline"]:
            bench.board.mark(-1, -1, COMPILE)
            time.sleep(0.05)
        ends = []
        for (_, job), programs in zip(chunk, found, strict=True):
            if isinstance(programs, Programs) and time.time() < plan["deadline"]:
                calls = {i: get_call(job.case, bench.device, config) for i, config in enumerate(job.configs)}
                programs.calls = calls
                ends += [
                    (programs, i, call)
                    for i, call in calls.items()
                    if not isinstance(call, str) and job.configs[i]["splits"] > 1
                ]
                bench.board.mark(-1, -1, COMPILE)
        finishes = pool.map(guarded(compile_finish), [call for *_, call in ends])
        for (programs, place, _), finish in zip(ends, finishes, strict=True):
            if isinstance(finish, Exception):
                programs.calls[place] = f"its end does not compile: {finish}"[:300]
            else:
                programs.finishes[place] = finish
    say(f"{sum(len(x.calls) for x in found if isinstance(x, Programs))} calls, {len(ends)} with an end in JAX")
    return {number: x for (number, _), x in zip(chunk, found, strict=True)}


def _row(bench: Bench, number: int, job: Job, programs: Programs | Exception, reps: int, again: int) -> dict[str, Any]:
    """Returns the row of a product, one with an error where there is one; errors of the device are raised."""
    try:
        if isinstance(programs, Exception):
            raise programs
        row = measure(bench, number, job, programs, reps, again)
    except CudaError:
        raise
    except Exception as error:
        traceback.print_exc()
        bench.driver.synchronize()
        return {"case": job.case.name, "error": f"{type(error).__name__}: {error}"[:500]}
    best = row["configs"][0]["us"] if row["configs"] else math.nan
    say(
        f"{number:4d} {row['case']:34s} XLA {row['xla_us']:9.1f} us, best of {len(row['configs']):3d} {best:9.1f} us, "
        f"{row['xla_us'] / best:.3f}"
        + (f", {final.line(row)}" if "final" in row else "")
        + (f", {len(row['failed'])} failed" if row["failed"] else "")
    )
    return row


def append(path: pathlib.Path, line: dict[str, Any]) -> None:
    """Writes a line at once."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def main(argv: Sequence[str]) -> NoReturn:
    """Works in this process, and ends it: after an error of the device with a status that is not 0."""
    todo, board, out = map(pathlib.Path, argv)
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/cutjax-direct-xla")
    jax.config.update("jax_compilation_cache_dir", cache)  # for the next worker
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # many threads would write one file
    try:
        status = work(todo, Board(board), out)
    except BaseException:
        traceback.print_exc()
        status = 3
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # after an error of the device nothing can be torn down in order
