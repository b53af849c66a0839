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
import pathlib
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cutjax
from benchmarks import measure, networks, timing
from benchmarks.cases import operands
from benchmarks.networks import Conv
from benchmarks.record import Figures, Row
from benchmarks.suite import Function, Run, Suite
from cutjax.binding import lowering, walk
from cutjax.kernels import families, keys, tuned
from cutjax.kernels.choose import Choice, candidates
from cutjax.runtime import tuning_file
from cutjax.runtime.launch import TARGET

XLA, AUTO, KERNEL = "xla", "auto", "kernel"
OURS = "ours"  # every way but XLA's
FAMILIES = tuple(f"{family.name}_" for family in families.FAMILIES)  # what their kernels' names begin with
ENDED = "ended its process: crashed, or took too long"
CANDIDATES = 4  # kernels of the cost model's that are timed
COUNT, SALT = 20, "public"
BOUND = 4.5e-3  # ||ours - XLA's|| / ||XLA's|| of two results in bf16, each rounded once: 2.4e-3 on Gaussian data
EXACT_BOUND = 2.5e-3  # of one of them from float32
TIMED_US, REPS = 60e3, (3, 20)  # of all ways to a case in turns, and how often each
SLOW_US, SLOW_REPS = 10e3, 2
FAR = 1.3  # a candidate is timed in turns where it took no longer than this many times the fastest, once


def product(case: Conv, convolve: Function, dtype: Any = jnp.bfloat16) -> Function:
    """Returns the case's product of its two arrays, by a function with the signature of ``conv_general_dilated``."""
    avals = avals_of(case, dtype)

    def conv(x: Any, w: Any) -> Any:
        return convolve(x, w, **case.options)

    def dx(y: Any, w: Any) -> Any:
        return jax.linear_transpose(lambda x: conv(x, w), avals["x"])(y)[0]

    def dw(x: Any, y: Any) -> Any:
        return jax.linear_transpose(lambda w: conv(x, w), avals["w"])(y)[0]

    return {"fwd": conv, "dx": dx, "dw": dw}[case.kind]


def avals_of(case: Conv, dtype: Any = jnp.bfloat16) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the case's three arrays."""
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in case.shapes.items()}


def arguments(case: Conv) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the two arrays that are given."""
    avals = avals_of(case)
    return [avals[name] for name in case.operands]


def inputs(case: Conv) -> Callable[[Any], Any]:
    """Returns what makes them of a seed, of random normal numbers."""
    return operands(tuple(case.shapes[name] for name in case.operands), ("bfloat16",) * 2)


def ours(case: Conv) -> Function:
    """Returns our product."""
    return product(case, cutjax.conv_general_dilated)


def chosen(case: Conv, backend: str) -> Choice | None:
    """Returns the choice for the case's product on this process's device; None where it is not one product."""
    with cutjax.use_backend(backend):
        found, _ = walk.products(ours(case), arguments(case), {}, "cuda")
    choices = [lowering.choosers[x.eqn.primitive](*x.avals, target=lowering.target(), **x.eqn.params) for x in found]
    return choices[0] if len(choices) == 1 and isinstance(choices[0], Choice) else None


def ways(case: Conv, most: int) -> dict[str, Function]:
    """Returns our ways to a case's product, by name, and of the candidates at most so many."""
    found: dict[str, Function] = {AUTO: scoped(ours(case), AUTO), KERNEL: scoped(ours(case), "cuda")}
    choice = chosen(case, "cuda")
    if choice is None or not choice.served:
        return found
    others = [config for config in candidates(choice.problem) if config != choice.config]
    for i, config in enumerate(others[: most - 1], 1):
        found[f"{KERNEL} {i}"] = scoped(ours(case), "cuda", pinned(choice.problem, config))
    return found


def pinned(problem: Any, config: Any) -> pathlib.Path:
    """Returns a tuning file by which a config is what runs for a problem, as if it had been measured to be fast."""
    path = pathlib.Path(tempfile.mkstemp(suffix=".json", dir=_folder())[1])
    path.unlink()
    entry = tuned.Entry(tuple(sorted(families.fields_of(config).items())), 1e-3, None)
    tuning_file.merge(path, {problem.device.name: {keys.key(problem): entry.encoded()}})
    return path


@functools.cache
def _folder() -> str:
    return tempfile.mkdtemp()


def scoped(fn: Function, backend: str, tuning: pathlib.Path | None = None) -> Function:
    """Returns a function under a backend, and by a tuning file."""

    def call(*arrays: Any) -> Any:
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(cutjax.use_backend(backend))
            if tuning:
                scopes.enter_context(cutjax.use_tuning(tuning))
            return fn(*arrays)

    return call


def difference(out: jax.Array, reference: jax.Array) -> jax.Array:
    """Returns ||out - reference|| / ||reference||."""
    wide = reference.astype(jnp.float32)
    apart = out.astype(jnp.float32) - wide
    return jnp.sqrt(jnp.sum(apart * apart) / jnp.maximum(jnp.sum(wide * wide), 1e-30))


class Programs:
    """The compiled programs of a case.

    Attributes:
      case: whose.
      compiled: by way; a way whose program is another's is not there.
      same: which other way it is then.
      failures: why a way has no program.
      choices: what the cost model says, for the record.
    """

    def __init__(self, case: Conv):
        self.case = case
        self.compiled: dict[str, Any] = {}
        self.same: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.choices: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._lowered: dict[str, Any] = {}
        self._lock = threading.Lock()

    def lower(self, most: int, skip: Sequence[str] = ()) -> None:
        """Lowers XLA's program and ours; to be called before the rest, in any thread."""
        case = self.case
        self._lower(XLA, product(case, lax.conv_general_dilated), skip)
        if OURS in skip:
            self.failures |= dict.fromkeys((AUTO, KERNEL), ENDED)
            return
        try:
            self.choices = predicted(case)
            for name, fn in ways(case, most).items():
                self._lower(name, fn, skip)
        except Exception as error:
            self.failures |= dict.fromkeys((AUTO, KERNEL), measure.reason(error))

    def _lower(self, name: str, fn: Function, skip: Sequence[str]) -> None:
        if name in skip:
            self.failures[name] = ENDED
            return
        try:
            lowered = measure.jit(named(fn)).lower(*arguments(self.case))
        except Exception as error:
            self.failures[name] = measure.reason(error)
            return
        text = lowered.as_text()
        if TARGET not in text:  # XLA runs: the programs are the same where their operations are
            text = " ".join(re.findall(r"stablehlo\.(\w+)", text))
        twin = next((other for other, known in self._texts.items() if known == text), None)
        if twin:
            self.same[name] = twin
        else:
            self._texts[name], self._lowered[name] = text, lowered

    @property
    def by_xla(self) -> list[str]:
        """The ways that XLA tunes on the device, to be compiled while nothing is timed."""
        return [name for name, lowered in self._lowered.items() if TARGET not in self._texts[name]]

    @property
    def by_us(self) -> list[str]:
        """The others, which may be compiled at any time, and what makes inputs and looks at results."""
        return [*(name for name in self._lowered if name not in self.by_xla), "inputs", "look"]

    def compile(self, name: str) -> None:
        """Compiles one of them; a failure is kept."""
        try:
            if name == "inputs":
                compiled = inputs(self.case).lower(jax.ShapeDtypeStruct((), jnp.int32)).compile()
            elif name == "look":
                out = avals_of(self.case)[self.case.result]
                compiled = measure.jit(difference).lower(out, out).compile()
            else:
                compiled = self._lowered[name].compile()
        except Exception as error:
            self.failures[name] = measure.reason(error)
            return
        with self._lock:
            self.compiled[name] = compiled


def named(fn: Function) -> Function:
    """Returns the function under a name that all share: equal programs are equal texts."""

    def convolution(*arrays: Any) -> Any:
        return fn(*arrays)

    return convolution


def predicted(case: Conv) -> dict[str, Any]:
    """Returns what the cost model says of a case: the problem, the kernel, its time and XLA's, and why."""
    auto, kernel = chosen(case, "auto"), chosen(case, "cuda")
    if auto is None or kernel is None:
        return {}
    return {
        "problem": str(auto.problem),
        "why": "; ".join(auto.reasons),
        "auto": auto.kernel,
        "kernel": kernel.kernel,
        "kernel_us": kernel.time_us,
        "xla_us": auto.xla_us,
    }


def timed(programs: Programs, begin: Callable[[str], None] = lambda way: None) -> dict[str, dict[str, Any]]:
    """Checks every way's result, then times those that are right in turns.

    Args:
      programs: of a case, compiled.
      begin: told a way before it first runs, and "" when all have.

    Returns:
      by way, its time and spread in microseconds, its kernels, and its distance from XLA's result; or its failure.
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
    begin("")
    for name, time in in_turns(functions, sets).items():
        results[name] = results.get(name, {}) | time
    for name, twin in programs.same.items():
        if twin in results:
            results[name] = results[twin] | {"same": twin}
    return results


_second_opinions = itertools.repeat(None, 8)  # a program in float32 takes seconds


def _judged(case: Conv, arrays: tuple, out: jax.Array, reference: jax.Array, look: Function) -> str:
    """Returns what is wrong with a result that is not XLA's, by float32; "" where it is XLA's that is wrong."""
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
    return ("kernel" if any(name.startswith(FAMILIES) for name in names) else "XLA") if names else ""


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
