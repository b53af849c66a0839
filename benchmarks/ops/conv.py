"""Convolutions of real networks, ours and XLA's: ``python -m benchmarks run --op conv --salt NAME --count 20``.

One by one; ``python -m benchmarks convolutions`` measures a whole sample in a time it is told. Of each, the product
alone is timed: of a gradient no forward pass. Ways to it: "xla" is ``lax.conv_general_dilated``, "auto" ours by
default, "kernel" ours where a kernel must run, "kernel 1", "kernel 2", .. the next of the cost model's candidates.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import measure, networks, timing
from benchmarks.conv_programs import AUTO, KERNEL, OURS, XLA, Programs, product
from benchmarks.networks import Conv
from benchmarks.record import Figures, Row
from benchmarks.suite import Function, Run, Suite
from cutjax.kernels import families, tuned

CUDNN = "sm90_xmma"  # the names of cuDNN's kernels that begin as ours do
FAMILIES = tuple(f"{family.name}_" for family in families.FAMILIES)  # what their kernels' names begin with
CANDIDATES = 4  # kernels of the cost model's that are timed
COUNT, SALT = 20, "public"
BOUND = 4.5e-3  # ||ours - XLA's|| / ||XLA's|| of two results in bf16, each rounded once: 2.4e-3 on Gaussian data
EXACT_BOUND = 2.5e-3  # of one of them from float32
TIMED_US, REPS = 60e3, (3, 20)  # of all ways to a case in turns, and how often each
SLOW_US, SLOW_REPS = 10e3, 2
FAR = 1.3  # a candidate is timed in turns where it took no longer than this many times the fastest, once


def timed(programs: Programs, begin: Callable[[str], None] = lambda way: None) -> dict[str, dict[str, Any]]:
    """Checks every way's result, then times those that are right in turns.

    Args:
      programs: of a case, compiled.
      begin: told a way before it first runs, "ours" before they run in turns, and "" when they have.

    Returns:
      by way, its time and spread in microseconds, its kernels, and its distance from XLA's result; or its failure.

    Raises:
      DeviceLost: after an illegal access, say: this process can compute nothing more.
    """
    case, found = programs.case, programs.compiled
    if why := programs.failures.get("inputs") or programs.failures.get("look"):
        return {XLA: {"failure": why}}
    sets = timing.input_sets(lambda seed: tuple(found["inputs"](np.int32(seed))))
    functions = {name: found[name] for name in found if name not in ("inputs", "look")}
    results: dict[str, dict[str, Any]] = {name: {"failure": why} for name, why in programs.failures.items()}
    reference = None
    for name in sorted(functions, key=lambda name: name != XLA):
        begin(name)
        try:
            out = jax.block_until_ready(functions[name](*sets[-1]))
        except Exception as error:
            _require_device(error)
            results[name] = {"failure": measure.reason(error)}
            del functions[name]
            continue
        if name == XLA:
            reference = out
        elif reference is not None:
            error = float(found["look"](out, reference))
            results[name] = {"error": error}
            if not error <= BOUND and (why := _judged(case, sets[-1], out, reference, found["look"])):
                results[name]["failure"] = why
                del functions[name]
    del reference, out
    begin(OURS)
    for name, time in in_turns(functions, sets).items():
        results[name] = results.get(name, {}) | time
    begin("")
    for name, twin in programs.same.items():
        if twin in results:
            results[name] = results[twin] | {"same": twin}
    return results


class DeviceLost(RuntimeError):
    """A kernel left the device in a state that no process gets over."""


def _require_device(error: Exception) -> None:
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:
        raise DeviceLost(measure.reason(error)) from error


_second_opinions = itertools.repeat(None, 8)  # a program in float32 takes seconds


def _judged(case: Conv, arrays: tuple, out: jax.Array, reference: jax.Array, look: Function) -> str:
    """Returns the fault of a result that is not XLA's, by float32; "" where it is XLA's that is wrong."""
    if next(_second_opinions, "none") == "none":
        return "differs from XLA's; not compared with float32"
    exact = product(case, functools.partial(lax.conv_general_dilated, precision=lax.Precision.HIGHEST), jnp.float32)

    def rounded(*arrays: jax.Array) -> jax.Array:
        return exact(*(x.astype(jnp.float32) for x in arrays)).astype(jnp.bfloat16)

    try:
        right = measure.jit(rounded, **measure.UNTUNED)(*arrays)
    except Exception as error:
        return f"differs from XLA's; in float32: {measure.reason(error)}"
    of_ours, of_xla = float(look(out, right)), float(look(reference, right))
    return "" if of_ours <= EXACT_BOUND else f"wrong: {of_ours:.3g} from float32, XLA's {of_xla:.3g}"


def in_turns(functions: Mapping[str, Function], sets: Sequence[tuple]) -> dict[str, dict[str, Any]]:
    """Returns each function's time and kernels, or its failure: all once, then those that are near in turns."""
    results: dict[str, dict[str, Any]] = {}
    seen: dict[str, list[tuple[str, float]]] = {}
    for name, function in functions.items():
        try:
            seen[name] = timing.records([(function, sets[0])])
        except Exception as error:  # of the profiler
            _require_device(error)
            results[name] = {"failure": f"not timed: {measure.reason(error)}"}
    once = {name: sum(us for _, us in kernels) for name, kernels in seen.items()}
    least = min((us for name, us in once.items() if name != XLA), default=math.inf)
    near = {name: us for name, us in once.items() if name in (XLA, AUTO, KERNEL) or us <= FAR * least}
    fast = sum(us for us in near.values() if us < SLOW_US)
    most = min(max(int(TIMED_US / max(fast, 1.0)), REPS[0]), REPS[1])
    turns = [name for i in range(most) for name, us in near.items() if us < SLOW_US or i < SLOW_REPS]
    rotation = itertools.cycle(sets)
    calls = [(name, functions[name], next(rotation)) for name in turns]
    try:
        times = timing.samples(calls, seen)
    except Exception:  # of one whose kernels are not the same every time
        times = {}
        for name in near:
            with contextlib.suppress(Exception):
                times |= timing.samples([call for call in calls if call[0] == name], seen)
    for name, kernels in seen.items():
        names, time = [kernel for kernel, _ in kernels], times.get(name)
        spread = {} if time is None else {"us": time.us, "iqr_us": time.iqr_us, "kernel_us": list(time.kernel_us)}
        results[name] = {"once_us": once[name], "kernels": names, **spread}
    return results


def row(case: Conv, results: Mapping[str, Mapping[str, Any]], figures: Mapping[str, Any]) -> Row:
    """Returns a case's row: what "auto" ran beside XLA, with the rest as figures."""
    peers = {name: _figures(results.get(name, {})) for name in (XLA, KERNEL)}
    best = fastest(results)
    peers["tuned"] = _figures(results.get(best, {})) if best else Figures(failure="no kernel")
    own = results.get(AUTO, {})
    known = {"kind": case.kind, "floor_us": case.floor_us, "runs": runs(own), **figures}
    fields: dict[str, Any] = {"case": case.name, "peers": peers, "figures": known}
    if "us" not in own:
        return Row(**fields, failure=own.get("failure", "not timed"))
    us = own["us"]
    return Row(
        **fields,
        kernel=" + ".join(own["kernels"]),
        us=us,
        iqr_us=own["iqr_us"],
        tflops=case.flops / us / 1e6,
        gb_per_s=case.bytes / us / 1e3,
        roofline=case.floor_us / us,
        error=own.get("error", 0.0),
        ratios={name: peer.us / us for name, peer in peers.items() if not math.isnan(peer.us)},
    )


def fastest(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the way that a measurement chooses: the fastest kernel, or XLA where none surely leads; "" for none."""
    times = {name: of["us"] for name, of in results.items() if "us" in of}
    kernels = {name: us for name, us in times.items() if name.startswith(KERNEL)}
    best = min(kernels, key=kernels.__getitem__, default="")
    if XLA in times and (not best or times[XLA] < tuned.SURE * times[best]):
        return XLA
    return best


def runs(results: Mapping[str, Any]) -> str:
    """Returns "kernel" where one of ours ran, else "XLA"; "" where nothing did."""
    names = results.get("kernels", ())
    own = any(name.startswith(FAMILIES) and not name.startswith(CUDNN) for name in names)
    return ("kernel" if own else "XLA") if names else ""


def _figures(of: Mapping[str, Any]) -> Figures:
    if "us" not in of:
        return Figures(failure=of.get("failure", "not timed"))
    return Figures(of["us"], of["iqr_us"], " + ".join(of["kernels"]))


def measure_case(case: Conv, run: Run) -> list[Row]:
    """Compiles and times a case alone."""
    programs = Programs(case)
    programs.lower(CANDIDATES)
    for name in (*programs.by_us, *programs.by_xla):
        programs.compile(name)
    return [row(case, timed(programs), programs.choices)]


SUITE = Suite("conv", networks.sample(COUNT, SALT), measure=measure_case, draw=networks.sample, clocks=("cupti",))
