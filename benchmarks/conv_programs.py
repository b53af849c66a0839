"""The programs of a convolution that is measured: XLA's, ours, and ours by other kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import cutjax
from benchmarks import measure
from benchmarks.cases import operands
from benchmarks.networks import Conv
from benchmarks.suite import Function
from cutjax.binding import lowering, walk
from cutjax.kernels import families, keys, tuned
from cutjax.kernels.choose import Choice, candidates
from cutjax.runtime import tuning_file
from cutjax.runtime.launch import TARGET

XLA, AUTO, KERNEL = "xla", "auto", "kernel"
OURS = "ours"  # every way but XLA's
ENDED = "ended its process: crashed, or took too long"


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
    """Returns the function that makes these arrays of a seed, of random normal numbers."""
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


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to a case's product: a function, and the scopes in which it is lowered.

    Attributes:
      fn: of the case's two arrays.
      backend: "auto", or "cuda" where a kernel must run.
      tuning: a tuning file that chooses the kernel.
    """

    fn: Function
    backend: str = "auto"
    tuning: pathlib.Path | None = None

    def lower(self, case: Conv) -> Any:
        """Returns the lowered program; the same text for the same program."""

        def convolution(*arrays: Any) -> Any:
            return self.fn(*arrays)

        with contextlib.ExitStack() as scopes:
            scopes.enter_context(cutjax.use_backend(self.backend))
            if self.tuning:
                scopes.enter_context(cutjax.use_tuning(self.tuning))
            return measure.jit(convolution).lower(*arguments(case))


def ways(case: Conv, most: int) -> dict[str, Way]:
    """Returns the ways to a case's product, by name; of the cost model's candidates at most so many."""
    fn = ours(case)
    found = {XLA: Way(product(case, lax.conv_general_dilated)), AUTO: Way(fn), KERNEL: Way(fn, "cuda")}
    choice = chosen(case, "cuda")
    if choice is None or not choice.served:
        return found
    others = [config for config in candidates(choice.problem) if config != choice.config]
    for i, config in enumerate(others[: most - 1], 1):
        found[f"{KERNEL} {i}"] = Way(fn, "cuda", pinned(choice.problem, config))
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
        """Lowers XLA's program and ours, but for the ways to skip; to be called before the rest, in any thread."""
        found = {XLA: Way(product(self.case, lax.conv_general_dilated))}
        try:
            if OURS not in skip:
                self.choices = predicted(self.case)
                found = ways(self.case, most)
        except Exception as error:
            self.failures |= dict.fromkeys((AUTO, KERNEL), measure.reason(error))
        self.failures |= {name: ENDED for name in (AUTO, KERNEL) if OURS in skip}
        self.failures |= {name: ENDED for name in found if name in skip}
        for name, way in found.items():
            if name not in skip:
                self._lower(name, way)

    def _lower(self, name: str, way: Way) -> None:
        try:
            lowered = way.lower(self.case)
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


def predicted(case: Conv) -> dict[str, Any]:
    """Returns the cost model's choice for a case: the problem, the kernel, its time and XLA's, and why."""
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
