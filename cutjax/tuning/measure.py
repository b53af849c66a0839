"""Times of functions that compute the same, on the device: compiled in parallel, checked, timed in turns.

The clock is the device's: a function's time is that of its kernels, in a trace of calls one after the other. Inputs are
rotated, so that none is found in L2. Where the device cannot be traced the clock is the host's, of long calls alone.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.tuning import clock

MOST_SETS = 32
NEAR = 5e-2  # of a norm: as far as plain JAX's gradients in 16 bits are from those of a program that rounds elsewhere
FIRST_ROUNDS, LAST_ROUNDS, FINALISTS = 3, 25, 4
# Of calls longer than these microseconds power limits the clock: each function is timed in windows of its own, with no
# gap, since in turns all have the clock that their mean takes; in the one order and the other, after a while in which
# the card is warmed: on an H200 the limit is felt after 50 ms, and who came first was 12% faster. Where time is short,
# fewer functions.
LONG_US, WARM_SECONDS, WINDOW_SECONDS, FEW = 100.0, 0.08, 0.1, 2
HOST_US = 100.0  # of a call, at least, by the host's clock: it takes up to half of that to start one
DEVICE, HOST = "device", "host"  # clocks
_MEMORY_WITHOUT_STATISTICS = 8 << 30
# Each kernel a launch of its own in the trace; XLA's product of the check need not be the fastest, but be right: by the
# tile that XLA's Triton takes untuned, 2048 cubed of int8 was twice what it is (jax 0.11.2).
_TIMED = {"xla_gpu_enable_command_buffer": ""}
_CHECK = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

Function = Callable[..., Sequence[jax.Array]]
Right = Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array]  # results and the reference's: a bool


@dataclasses.dataclass
class Times:
    """Times of functions.

    Attributes:
      us: the median time, in microseconds, of each that was in the last rounds.
      dropped: why, of each that failed, was wrong, or is too short for the clock.
      clock: `DEVICE`, sums of kernels' times, or `HOST`, with what it takes to launch them.
    """

    us: dict[Any, float]
    dropped: dict[Any, str]
    clock: str = DEVICE


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of the functions.

    Attributes:
      make: ``(seed, integers) -> arrays``, traceable: random numbers, or small integers of which every sum is exact.
        The seed is a scalar of uint32.
      l2_bytes: of the device's cache: all inputs together pass twice that, where memory lasts.
    """

    make: Callable[[jax.Array, bool], Sequence[jax.Array]]
    l2_bytes: int


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
      seconds: of the device, about, beside one call of each function. Where they are few, the first rounds are all that
        there are of long calls of which a trusted function's are the fastest.
    """
    found, names = Times({}, {}), list(functions)
    avals = jax.eval_shape(lambda seed: inputs.make(seed, False), _seed(0))
    check, wanted = jax.jit(right), jax.eval_shape(reference, *avals)
    # What takes longest begins first: XLA's, which is the last of the functions, then kernels.
    *programs, make, make_known, expect, _ = parallel(
        lambda given: _compiled(*given),
        [
            *((_named(functions[name], i), avals, _TIMED) for i, name in reversed([*enumerate(names)])),
            (jax.jit(inputs.make, static_argnums=1), (_seed(0), False), {}),
            (jax.jit(inputs.make, static_argnums=1), (_seed(0), True), {}),
            (jax.jit(reference), avals, _CHECK),
            (check, (wanted, wanted), {}),  # kept by jit: what differs from that is compiled later
        ],
    )
    for program in (make, make_known, expect):
        if isinstance(program, Exception):
            raise program
    known = make_known(_seed(0))
    sets = [make(_seed(1 + i)) for i in range(_sets(_bytes(avals), inputs.l2_bytes, _free_bytes()))]
    expected = expect(*known)
    jax.block_until_ready((sets, expected))
    running, took = {}, 0.0
    for name, program in zip(names, reversed(programs), strict=True):
        try:
            if isinstance(program, Exception):
                raise program
            start = time.perf_counter()
            results = jax.block_until_ready(program(*known))
            took += time.perf_counter() - start
            is_right = name in trusted or check(results, expected)
            del results
            if not is_right:
                raise ArithmeticError("its result is wrong")
            running[name] = program
        except Exception as error:
            found.dropped[name] = reason(error)
    del expected, known
    race = _Race({name: (_program(names.index(name)), program) for name, program in running.items()}, sets, found)
    short = seconds < math.inf
    first = race.turns(list(running), max(1, int(min(FIRST_ROUNDS, seconds / max(took, 1e-9)))))
    long = bool(first) and min(first.values()) > LONG_US
    fastest = sorted(first, key=first.__getitem__)
    if long and short and fastest[0] in trusted:  # another would have to win by more than windows change
        found.us = first
        return found
    last = {*fastest[: FEW if long and short else FINALISTS], *keep}
    order = [name for name in fastest if name in last]
    each = min(WINDOW_SECONDS, max(0.0, seconds - WARM_SECONDS) / max(1, 2 * len(order)))
    found.us = race.windows(order, each, first) if long else race.turns(order, LAST_ROUNDS)
    return found


def reason(error: BaseException) -> str:
    """Returns an error as a reason, in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def random_array(seed: Any, shape: Sequence[int], dtype: Any, integers: bool) -> jax.Array:
    """Returns random numbers: nearly normal ones, or -2 to 2; integers are 0 to 3. The seed is a scalar of uint32.

    Not ``jax.random``'s: what takes XLA 1.5 s to compile is done in a tenth of that.
    """
    bits = _mixed(jax.lax.iota(np.uint32, math.prod(shape)).reshape(shape) + _mixed(jnp.asarray(seed, np.uint32)))
    if dtype == np.bool_:
        return bits % 2 == 1
    if jnp.issubdtype(dtype, jnp.integer):
        return (bits % 4).astype(dtype)
    small = (bits % 5).astype(np.int8) - np.int8(2)
    if dtype.name == "float8_e8m0fnu":  # powers of two alone
        return jnp.exp2(small.astype(np.float32)).astype(dtype)
    if integers:
        return small.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real = np.finfo(dtype).dtype
        return jax.lax.complex(*(random_array(seed + np.uint32(x << 16), shape, real, False) for x in (1, 2)))
    # Four even numbers of 8 bits: their sum is nearly normal.
    four = bits % 256 + (bits >> 8) % 256 + (bits >> 16) % 256 + (bits >> 24)
    wide = four.astype(dtype if dtype.itemsize > 4 else np.float32)
    return ((wide - 510) / 147.8).astype(dtype)


def _mixed(x: jax.Array) -> jax.Array:
    """Returns numbers of 32 bits of which each bit depends on all of the given one's: the end of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x ^ (x >> 16)


def _seed(number: int) -> jax.Array:
    return jnp.uint32(number)


class _Race:
    """Programs, each with its name in a trace, that are called in turns; one that fails is dropped."""

    def __init__(self, programs: dict[Any, tuple[str, Any]], sets: Sequence[Any], found: Times):
        self._programs, self._sets, self._found = programs, itertools.cycle(sets), found

    def turns(self, names: Sequence[Hashable], rounds: int) -> dict[Any, float]:
        """Returns the median microseconds of programs in so many rounds."""
        order = random.Random(0)  # a lazy neighbour leaves a cooler card: not always the same one
        calls = [name for _ in range(rounds) for name in order.sample(list(names), len(names))]
        return {name: float(np.median(us)) for name, us in self._called(calls).items()}

    def windows(self, names: Sequence[Hashable], seconds: float, us: Mapping[Any, float]) -> dict[Any, float]:
        """Returns the median microseconds of programs in the second halves of two windows of so many seconds each.

        ``us``: of a call, about.
        """
        calls = {name: max(2, math.ceil(1e6 * seconds / us[name])) for name in names}
        warm = [names[0]] * math.ceil(1e6 * WARM_SECONDS / us[names[0]])
        found = self._called(warm + [name for each in (*names, *names[::-1]) for name in [each] * calls[each]])
        medians = {}
        for name, of_calls in found.items():
            held = of_calls[len(warm) if name == names[0] and len(of_calls) > len(warm) else 0 :]
            half = [x for at, x in enumerate(held) if at % calls[name] >= calls[name] // 2]
            medians[name] = float(np.median(half or held))
        return medians

    def _called(self, calls: Sequence[Hashable]) -> dict[Any, list[float]]:
        """Calls programs in an order, and returns for each that did not fail the microseconds of its calls."""
        done: collections.Counter[Hashable] = collections.Counter()

        def run() -> None:
            done.clear()
            self._run(calls, done)

        if not self._programs:
            return {}
        if self._found.clock == DEVICE:
            spans = clock.spans(run)
            seen = {name: spans.get(module, []) for name, (module, _) in self._programs.items() if done[name]}
            if seen and all(seen.values()):
                return {name: _sums(seen[name], done[name]) for name in seen}
            self._found.clock = HOST
        found: dict[Any, list[float]] = {}
        for name, count in collections.Counter(calls).items():
            done.clear()
            start = time.perf_counter()
            self._run([name] * count, done)
            if name in self._programs:
                found[name] = [1e6 * (time.perf_counter() - start) / count]
        if found and min(found.values())[0] < HOST_US:
            for name in found:
                self._drop(name, "too short for the host's clock, and the device was not traced")
            return {}
        return found

    def _run(self, calls: Sequence[Hashable], done: collections.Counter[Hashable]) -> None:
        """Calls programs, and counts the calls of each; one stream: its last results are ready when all are."""
        last: dict[Hashable, Any] = {}
        for name in calls:
            if name in self._programs:
                try:
                    last[name] = self._programs[name][1](*next(self._sets))
                    done[name] += 1
                except Exception as error:
                    self._drop(name, reason(error))
        for name, results in last.items():
            try:
                jax.block_until_ready(results)
            except Exception as error:
                self._drop(name, reason(error))

    def _drop(self, name: Hashable, why: str) -> None:
        self._programs.pop(name, None)
        self._found.dropped[name] = why


def _sums(kernels: Sequence[float], calls: int) -> list[float]:
    """Returns the sum of each call's kernels; their mean where they are not as many in each."""
    each, left = divmod(len(kernels), calls)
    return [sum(kernels) / calls] if left else [sum(kernels[i * each : (i + 1) * each]) for i in range(calls)]


def _program(number: int) -> str:
    """Returns the name of a program's HLO module."""
    return f"jit_cutjax_timed_{number}"


def _named(function: Function, number: int) -> Any:
    """Returns a jitted function whose program has a name of its own."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = _program(number).removeprefix("jit_")
    return jax.jit(call)


def _compiled(jitted: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """Returns the program of a function, or the error in its place."""
    try:
        return jitted.lower(*arguments).compile(compiler_options=options)
    except Exception as error:
        return error


def parallel(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Returns the function of each item, computed in as many threads as there are cores."""
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64  # a scope of jax.enable_x64 is of its thread alone

    def in_scope(item: Any) -> Any:
        with jax.enable_x64(x64):
            return function(item)

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return list(pool.map(in_scope, items))


def _sets(in_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """Returns the number of sets of inputs: they take at most a quarter of what memory is free."""
    wanted = min(MOST_SETS, 1 + math.ceil(2 * l2_bytes / max(in_bytes, 1)))
    return max(1, min(wanted, free_bytes // 4 // max(in_bytes, 1)))


def _free_bytes() -> int:
    statistics = jax.devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    return _MEMORY_WITHOUT_STATISTICS if limit is None else max(0, limit - statistics.get("bytes_in_use", 0))


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
