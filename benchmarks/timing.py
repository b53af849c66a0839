"""Kernel times: several functions interleaved in one run, inputs rotated so that none is found in L2."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

L2_BYTES = 60 << 20  # H200 and H100
ONE_SET_BYTES = 8 << 30  # of inputs larger than this there is one set: a single run of them leaves nothing in L2
Call = tuple[Callable[..., Any], tuple]  # a function and its arguments


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one function.

    Attributes:
      samples_us: time of each call.
      kernels: names of the kernels one call runs; empty when timed by the host's clock.
      method: "cupti" (kernel time) or "host" (host clock over many calls in one executable, launch gaps included).
      kernel_us: the median of each of the kernels; empty when timed by the host's clock.
    """

    samples_us: tuple[float, ...]
    kernels: tuple[str, ...]
    method: str
    kernel_us: tuple[float, ...] = ()

    @property
    def us(self) -> float:
        """The median."""
        return float(np.median(self.samples_us))

    @property
    def iqr_us(self) -> float:
        """The spread: third quartile less first."""
        low, high = np.percentile(self.samples_us, (25, 75))
        return float(high - low)


class _Schedule:
    """Calls that together look like a jitted function (``jax.stages.Wrapped``): the profiler runs them as they are."""

    def __init__(self, calls: Sequence[Call], warm_up: Sequence[Call]):
        self._runs = itertools.chain([warm_up], itertools.repeat(calls))  # the profiler's first run is not recorded

    def __call__(self):
        out = None
        for function, args in next(self._runs):
            out = function(*args)  # one stream: the last result is ready when all are
        return out

    def trace(self, *args, **kwargs):
        raise NotImplementedError

    def lower(self, *args, **kwargs):
        raise NotImplementedError


def records(calls: Sequence[Call], warm_up: Sequence[Call] | None = None) -> list[tuple[str, float]]:
    """(kernel name, us) of every kernel the calls run, in order; before that a warm-up runs, by default the same."""
    from jax.experimental.mosaic.gpu import profiler

    # finalize=False: detaching CUPTI after each measurement costs more than most measurements.
    schedule = _Schedule(calls, calls if warm_up is None else warm_up)
    _, found = profiler.Cupti(finalize=False).measure(schedule, aggregate=False)()  # pyright: ignore
    return [(name, 1e3 * ms) for name, ms in found or ()]


def cupti_works() -> bool:
    """True if kernel times can be read here."""
    if jax.default_backend() != "gpu":
        return False
    try:
        x = jnp.ones(8)
        return bool(records([(jax.jit(jnp.sin), (x,))]))
    except (
        Exception
    ) as error:  # the profiler belongs to an experimental module, and CUPTI takes one subscriber at a time
        print(f"no kernel times, the host's clock instead: {type(error).__name__}: {error}", file=sys.stderr)
        return False


def _measure_cupti(functions: dict[str, Callable], sets: Sequence[tuple], reps: int) -> dict[str, Timing]:
    once = {name: records([(f, sets[0])]) for name, f in functions.items()}
    rotation = itertools.cycle(sets)
    return samples([(name, f, next(rotation)) for _ in range(reps) for name, f in functions.items()], once)


def samples(
    turns: Sequence[tuple[str, Callable, tuple]], once: Mapping[str, Sequence[tuple[str, float]]]
) -> dict[str, Timing]:
    """Times functions by their kernels.

    Args:
      turns: (name, function, arguments) of each call, in order.
      once: the records of a single call of each function, by name.
    """
    kernels = {name: [kernel for kernel, _ in once[name]] for name, _, _ in turns}
    calls = [(function, args) for _, function, args in turns]
    seen = records(calls)
    taken: dict[str, list[list[float]]] = {name: [] for name in kernels}  # of each call, each kernel's
    at = 0
    for name, _, _ in turns:
        part = seen[at : at + len(kernels[name])]
        at += len(part)
        if [kernel for kernel, _ in part] != kernels[name]:
            raise RuntimeError(f"{name}: expected the kernels {kernels[name]}, the profiler saw {part}")
        taken[name].append([us for _, us in part])
    if at != len(seen):
        raise RuntimeError(f"the profiler saw {len(seen)} kernels, expected {at}")
    return {
        name: Timing(
            tuple(map(sum, calls)), tuple(kernels[name]), "cupti", tuple(float(x) for x in np.median(calls, axis=0))
        )
        for name, calls in taken.items()
    }


def _measure_host(functions: dict[str, Callable], sets: Sequence[tuple], reps: int) -> dict[str, Timing]:
    out_bytes = max(_nbytes(jax.eval_shape(f, *sets[0])) for f in functions.values())
    inner = max(2, min(32, (4 << 30) // max(out_bytes, 1)))  # every result of one run lives at once
    chosen = [sets[i % len(sets)] for i in range(inner)]
    # Distinct calls on the same inputs would be merged: a barrier makes each its own.
    loops = {
        name: jax.jit(lambda chosen, f=f: [f(*jax.lax.optimization_barrier(args)) for args in chosen])
        for name, f in functions.items()
    }
    for loop in loops.values():
        jax.block_until_ready(loop(chosen))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(reps):
        for name, loop in loops.items():
            start = time.perf_counter()
            jax.block_until_ready(loop(chosen))
            samples[name].append(1e6 * (time.perf_counter() - start) / inner)
    return {name: Timing(tuple(samples[name]), (), "host") for name in functions}


def measure(functions: dict[str, Callable], sets: Sequence[tuple], reps: int, method: str) -> dict[str, Timing]:
    """Times functions interleaved (A B A B ...), each call on the next set of inputs.

    Args:
      functions: name to jitted function; for "cupti" also compiled ones, or ones that wait for kernels of any stream.
      sets: input sets, in all at least twice the L2 (see `input_sets`).
      reps: samples of each function.
      method: "cupti" or "host".
    """
    return (_measure_cupti if method == "cupti" else _measure_host)(functions, sets, reps)


def _nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def input_sets(make: Callable[[int], tuple], least: int = 2, most: int = 64) -> list[tuple]:
    """Enough sets of inputs that together they pass twice the L2: ``make(seed)`` returns one."""
    first = make(0)
    if _nbytes(first) > ONE_SET_BYTES:
        return [jax.block_until_ready(first)]
    count = min(most, max(least, math.ceil(2 * L2_BYTES / max(_nbytes(first), 1)) + 1))
    sets = [first, *(make(seed) for seed in range(1, count))]
    jax.block_until_ready(sets)
    return sets
