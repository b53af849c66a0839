"""Times of calls that follow each other for half a second and more, where power limits the clock.

XLA and ours run as a user's program would have them: compiled by JAX, on its stream, results in its memory.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import cutjax
from benchmarks import timing
from benchmarks.cases import Dense
from benchmarks.direct import COMPILE, INPUTS, TIME, Board, Job, say
from benchmarks.direct_bench import Programs, compile_programs

LEAST_US = 100.0  # by XLA: of shorter calls the host sets the pace
WINDOW_S, HEAT_S = 0.5, 0.2  # of each, and of XLA before them
QUEUED, QUEUED_BYTES = 32, 2 << 30  # calls that wait, at most, and their results
NAMES = ("xla", "untuned", "tuned", "first")
Function = Callable[..., jax.Array]
_NONE = {"xla": {"us": 0.0}}


def seconds(count: int) -> float:
    """Returns the seconds that so many products take, compiling included."""
    return count * (len(NAMES) * WINDOW_S + HEAT_S + 0.5)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Returns so many items at equal distances; all, where there are not more."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def measure(
    jobs: Sequence[tuple[int, Job]], lines: Sequence[dict[str, Any]], board: Board, plan: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the sustained times of products that have a row of a final measurement.

    Args:
      jobs: with their numbers.
      lines: that were written so far, in part by workers before this one.
      board: to say what is under way: XLA, whatever it is, so that a product that does not survive is left out.
      plan: of the worker.
    """
    rows = {line["case"]: line["final"] for line in lines if "final" in line}
    done = {line["sustained"] for line in lines if "sustained" in line}
    slow = [(number, job) for number, job in jobs if rows.get(job.case.name, _NONE)["xla"]["us"] > LEAST_US]
    chosen = [(number, job.case) for number, job in spread(slow, plan["sustained"]) if -1 not in job.skip]
    chosen = [(number, case) for number, case in chosen if case.name not in done]
    say(f"sustained: {len(chosen)} of {len(slow)} products over {LEAST_US:.0f} us")

    def compiled(case: Dense) -> tuple[Programs, dict[str, Function]] | Exception:
        try:
            programs = compile_programs(case)
            return programs, _functions(case, rows[case.name], programs.xla)
        except Exception as error:
            return error
        finally:
            board.mark(-1, -1, COMPILE)

    board.mark(-1, -1, COMPILE)
    with concurrent.futures.ThreadPoolExecutor(plan["threads"]) as pool:
        functions = list(pool.map(compiled, [case for _, case in chosen]))
    for i, ((number, case), of_case) in enumerate(zip(chosen, functions, strict=True)):
        if time.time() > plan["deadline"]:
            return
        try:
            if isinstance(of_case, Exception):
                raise of_case
            line = {"sustained": case.name, "window_s": WINDOW_S, **_times(number, *of_case, board, i)}
        except Exception as error:
            if "CUDA_ERROR" in str(error):  # nothing runs after such
                raise
            line = {"sustained": case.name, "error": f"{type(error).__name__}: {error}"[:500]}
        say(" ".join(f"{name} {value}" for name, value in line.items()))
        yield line


def _functions(case: Dense, row: dict[str, Any], xla: Function) -> dict[str, Function]:
    """Returns the functions to run, by name; one program is one function."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in (case.a_shape, case.b_shape)]
    keys = {name: json.dumps(row[name]["config"], sort_keys=True) for name in NAMES}
    found = {keys["xla"]: xla}
    for name, key in keys.items():
        if key not in found:
            found[key] = jax.jit(ours(case.layout, row[name]["config"])).lower(*avals).compile()
    return {name: found[key] for name, key in keys.items()}


def ours(layout: str, config: dict[str, Any]) -> Function:
    """Returns the product by the kernel of a config, never by XLA."""
    return lambda a, b: cutjax.gemm(a, b, layout=layout, config=cutjax.Config(**config), backend="cuda")


def _times(
    number: int, programs: Programs, functions: dict[str, Function], board: Board, turn: int
) -> dict[str, float]:
    """Returns microseconds a call by name; which goes first changes from product to product."""
    board.mark(number, -1, INPUTS)
    sets = timing.input_sets(lambda seed: programs.make(jnp.uint32(seed)))

    def beat() -> None:
        board.mark(number, -1, TIME)

    beat()
    distinct = list(dict.fromkeys(functions.values()))
    turn %= len(distinct)
    window_us(functions["xla"], sets, HEAT_S, beat)
    us = {f: window_us(f, sets, WINDOW_S, beat) for f in (*distinct[turn:], *distinct[:turn])}
    return {f"{name}_us": round(us[function], 3) for name, function in functions.items()}


def window_us(function: Function, sets: Sequence[tuple], seconds: float, beat: Callable[[], None]) -> float:
    """Returns the time of a call when calls follow each other for so long, without a gap.

    Args:
      function: that returns before its kernels end.
      sets: of arguments, in turns.
      seconds: at least.
      beat: called now and then.
    """
    rotation = itertools.cycle(sets)
    out = jax.block_until_ready(function(*next(rotation)))
    depth = max(1, min(QUEUED, QUEUED_BYTES // max(1, math.prod(out.shape) * out.dtype.itemsize)))
    del out
    waiting: collections.deque[jax.Array] = collections.deque()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        waiting.append(function(*next(rotation)))
        calls += 1
        if len(waiting) > depth:
            jax.block_until_ready(waiting.popleft())
            beat()
    jax.block_until_ready(list(waiting))
    return 1e6 * (time.perf_counter() - start) / calls
