"""Times of functions that compute the same, on the device: compiled in parallel, checked, timed in turns.

The clock is the host's: one sample is many calls, in a program of several and that program several times, so that what
it takes to launch them is hidden behind the device's work. Inputs are rotated, so that none is found in L2.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import os
import random
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SAMPLE_SECONDS = 2e-3  # of device time, at least: a host clock's jitter is some 10 us
MOST_CALLS = 32  # in one program
PROGRAM_SECONDS = 10e-3  # after which a program needs no further call
MOST_RUNS = 16  # of the program, in one sample
MOST_SETS = 32
NEAR = 5e-2  # of a norm: as far as plain JAX's gradients in 16 bits are from those of a program that rounds elsewhere
FIRST_ROUNDS, LAST_ROUNDS, FINALISTS = 3, 9, 4
# Of calls longer than these microseconds power limits the clock: each function is timed in a window of its own, with no
# gap, since in turns all have the clock that their mean takes. Where time is short, fewer functions, once.
LONG_US, WINDOW_SECONDS, WINDOWS, FEW = 100.0, 0.1, 2, 2
_MEMORY_WITHOUT_STATISTICS = 8 << 30

Function = Callable[..., Sequence[jax.Array]]
Right = Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array]  # results and the reference's: a bool


@dataclasses.dataclass
class Times:
    """Times of functions.

    Attributes:
      us: the median time, in microseconds, of each that was in the last rounds.
      dropped: why, of each that failed or was wrong.
    """

    us: dict[Any, float]
    dropped: dict[Any, str]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of the functions.

    Attributes:
      make: ``(key, integers) -> arrays``, traceable: random numbers, or small integers of which every sum is exact.
      l2_bytes: of the device's cache: all inputs together pass twice that, where memory lasts.
      calls: as many as a program needs, where sets do not need more.
    """

    make: Callable[[jax.Array, bool], Sequence[jax.Array]]
    l2_bytes: int
    calls: int = MOST_CALLS


def times(
    functions: Mapping[Hashable, Function],
    inputs: Inputs,
    reference: Function,
    right: Right,
    keep: Collection[Hashable] = (),
    trusted: Collection[Hashable] = (),
    seconds: float = math.inf,
) -> Times:
    """Times functions in turns; all in a few rounds, then the fastest in more, or in windows where they take long.

    Args:
      functions: each takes the arrays of ``inputs``.
      inputs: what they are called with.
      reference: computes the same; the results of each for inputs of integers are held to it.
      right: tells whether they are right: `equal`, `close` or `near`.
      keep: functions that are in the last rounds however fast they are.
      trusted: functions whose results are right whatever they are.
      seconds: after which no further round begins, once each function has been timed; windows come on top.
    """
    keys = iter(jax.random.split(jax.random.key(0), MOST_SETS + 1))
    make = jax.jit(inputs.make, static_argnums=1)
    avals = jax.eval_shape(lambda key: inputs.make(key, False), jax.random.key(0))
    in_bytes = _bytes(avals)
    out_bytes = max((size for f in functions.values() if (size := _result_bytes(f, avals))), default=0)
    sets, calls = _counts(in_bytes, out_bytes, inputs, _free_bytes())
    chosen = [make(next(keys), False) for _ in range(sets)]
    chosen = [chosen[i % sets] for i in range(calls)]
    known = make(next(keys), True)
    jax.block_until_ready((chosen, known))
    found = Times({}, {})
    programs: dict[Hashable, Any] = {}
    least_us = math.inf
    expected, check = jax.jit(reference)(*known), jax.jit(right)
    for name, program in _compiled(functions, chosen).items():
        try:
            if isinstance(program, Exception):
                raise program
            first, *_ = program([known] * calls)
            if name not in trusted and not check(first, expected):
                raise ArithmeticError("its result is wrong")
            del first
            start = time.perf_counter()
            jax.block_until_ready(program(chosen))
            took = time.perf_counter() - start
            least_us = min(least_us, 1e6 * took / calls)
            programs[name] = program, _runs(took, calls * out_bytes)
        except Exception as error:
            found.dropped[name] = reason(error)
    del expected
    rounds = _Rounds(programs, chosen, calls, found, time.monotonic() + seconds)
    long, short = programs and least_us > LONG_US, seconds < math.inf
    rounds.play(list(programs), 1 if long and short else FIRST_ROUNDS)
    fastest = sorted(rounds.samples, key=rounds.us)
    last = {*fastest[: FEW if long and short else FINALISTS], *keep}
    names = [name for name in fastest if name in last]
    if long:
        rounds.hold(names, 1 if short else WINDOWS)
    else:
        rounds.play(names, LAST_ROUNDS)
    found.us = {name: rounds.us(name) for name in rounds.samples if name in last}
    return found


def reason(error: BaseException) -> str:
    """Returns an error as a reason, in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def random_array(key: jax.Array, shape: Sequence[int], dtype: Any, integers: bool) -> jax.Array:
    """Returns random numbers: normal ones, drawn in bfloat16 for 16 bits and fewer, or -2 to 2; integers are 0 to 3."""
    if dtype == np.bool_:
        return jax.random.bernoulli(key, shape=shape)
    if dtype.name == "float8_e8m0fnu":  # powers of two alone
        return jnp.exp2(jax.random.randint(key, shape, -2, 3, np.int8).astype(np.float32)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, 0, 4, np.uint8).astype(dtype)
    if integers:
        return jax.random.randint(key, shape, -2, 3, np.int8).astype(dtype)
    return jax.random.normal(key, shape, jnp.bfloat16 if dtype.itemsize <= 2 else dtype).astype(dtype)


def enough_calls(floor_us: float) -> int:
    """Returns the number of calls that a program needs, of functions that take so long at least."""
    return max(1, min(MOST_CALLS, math.ceil(1e6 * PROGRAM_SECONDS / max(floor_us, 1.0))))


class _Rounds:
    """The samples of programs that run in turns; a program that fails is dropped."""

    def __init__(
        self, programs: Mapping[Hashable, Any], chosen: Sequence[Any], calls: int, found: Times, deadline: float
    ):
        self._programs, self._chosen, self._calls, self._found = programs, chosen, calls, found
        self._deadline = deadline
        self.samples: dict[Any, list[float]] = {name: [] for name in programs}

    def us(self, name: Hashable) -> float:
        """Returns the median of a program's samples."""
        return float(np.median(self.samples[name]))

    def play(self, names: Sequence[Hashable], count: int) -> None:
        """Takes samples of some programs; of each only those of the last call count, so that they compare."""
        order = random.Random(0)  # a lazy neighbour leaves a cooler card: not always the same one
        if time.monotonic() > self._deadline and all(self.samples[name] for name in names):
            return
        for name in names:
            self.samples[name].clear()
        for done in range(count):
            if done and time.monotonic() > self._deadline:
                return
            for name in order.sample(list(names), len(names)):
                if name in self.samples:
                    self._sample(name)

    def hold(self, names: Sequence[Hashable], windows: int) -> None:
        """Takes samples of so many windows of each program, in the one order and the other."""
        for name in names:
            self.samples[name].clear()
        for window in range(windows):
            for name in names[:: -1 if window % 2 else 1]:
                if name in self.samples:
                    self._sample(name, WINDOW_SECONDS)

    def _sample(self, name: Hashable, seconds: float = 0.0) -> None:
        """Takes a sample of some runs, or of as many as take so many seconds: two at a time are on their way then."""
        program, runs = self._programs[name]
        try:
            waiting: collections.deque[Any] = collections.deque(maxlen=2)  # an older one is let go
            done, start = 0, time.perf_counter()
            while done < runs or time.perf_counter() - start < seconds:
                if seconds and len(waiting) == 2:
                    jax.block_until_ready(waiting.popleft())
                waiting.append(program(self._chosen))  # one stream: the last result is ready when all are
                done += 1
            jax.block_until_ready(waiting.pop())
            self.samples[name].append(1e6 * (time.perf_counter() - start) / (done * self._calls))
        except Exception as error:
            del self.samples[name]
            self._found.dropped[name] = reason(error)


def _compiled(functions: Mapping[Hashable, Function], chosen: Sequence[Any]) -> dict[Hashable, Any]:
    """Returns for each function the program that calls it with each set of inputs, or the error in its place."""

    def compile_one(function: Function) -> Any:
        inner = jax.jit(lambda *args: function(*args))  # lowered once, however often it is called
        # Each input is a parameter of its own, the same array twice too: XLA can merge no two calls.
        program = jax.jit(lambda sets: [inner(*args) for args in sets])
        try:
            return program.lower(chosen).compile()
        except Exception as error:
            return error

    return dict(zip(functions, parallel(compile_one, functions.values()), strict=True))


def parallel(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Returns the function of each item, computed in as many threads as there are cores."""
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64  # a scope of jax.enable_x64 is of its thread alone

    def in_scope(item: Any) -> Any:
        with jax.enable_x64(x64):
            return function(item)

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return list(pool.map(in_scope, items))


def _counts(in_bytes: int, out_bytes: int, inputs: Inputs, free_bytes: int) -> tuple[int, int]:
    """Returns the number of sets of inputs, and the number of calls in a program.

    They and the results take at most half of what memory is free.
    """
    wanted = min(MOST_SETS, 1 + math.ceil(2 * inputs.l2_bytes / max(in_bytes, 1)))
    fit = max(1, min(MOST_CALLS, max(wanted, inputs.calls), free_bytes // 4 // max(out_bytes, 1)))
    sets = max(1, min(wanted, fit, free_bytes // 4 // max(in_bytes, 1)))
    return sets, fit // sets * sets  # whole rotations: no set is warm because the last program ended with it


def _runs(seconds: float, out_bytes: int) -> int:
    """Returns the number of runs of a program in a sample; the results of all of them may live at once."""
    fit = _free_bytes() // 2 // max(out_bytes, 1)
    return max(1, min(MOST_RUNS, fit, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-9))))


def _free_bytes() -> int:
    statistics = jax.devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    return _MEMORY_WITHOUT_STATISTICS if limit is None else max(0, limit - statistics.get("bytes_in_use", 0))


def _result_bytes(function: Function, avals: Sequence[Any]) -> int | None:
    try:
        return _bytes(jax.eval_shape(function, *avals))
    except Exception:  # it will fail again where the reason is kept
        return None


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def equal(results: Sequence[jax.Array], reference: Sequence[jax.Array]) -> jax.Array:
    """Compares results: true if they are equal; NaN is to be where the reference has it."""
    verdict = jnp.array(True)
    for x, ref in zip(results, reference, strict=True):
        verdict &= jnp.all((x == ref) | ((x != x) & (ref != ref)))
    return verdict


def close(results: Sequence[jax.Array], reference: Sequence[jax.Array]) -> jax.Array:
    """Compares results: true if each element is near by its size, as where an epilogue rounds.

    NaN and infinities are to be where the reference has them. Integers are to be equal.
    """
    verdict = jnp.array(True)
    for x, ref in zip(results, reference, strict=True):
        same = (x == ref) | ((x != x) & (ref != ref))
        if jnp.issubdtype(x.dtype, jnp.floating):
            # Two units in the last place of 16 bits or fewer; a sum of f32 is held no tighter. What is missing a stage,
            # or a tile, is off by many times that.
            unit = max(2.0**-6, 2 * float(jnp.finfo(x.dtype).eps))
            wide, ref = (y.astype(np.float64 if y.dtype.itemsize > 4 else np.float32) for y in (x, ref))
            finite = jnp.isfinite(ref)
            scale = jnp.sqrt(jnp.mean(jnp.where(finite, ref, 0) ** 2))
            same |= finite & (jnp.abs(wide - ref) <= unit * (jnp.abs(ref) + scale))
        verdict &= jnp.all(same)
    return verdict


def near(results: Sequence[jax.Array], reference: Sequence[jax.Array]) -> jax.Array:
    """Compares results of many products that are rounded in between: true if each array is near by its norm.

    Without one of the parts that add up to a gradient it is off by many times that.
    """
    verdict = jnp.array(True)
    for x, ref in zip(results, reference, strict=True):
        x, ref = x.astype(np.float32), ref.astype(np.float32)
        verdict &= jnp.linalg.norm((x - ref).ravel()) <= NEAR * jnp.linalg.norm(ref.ravel())
    return verdict
