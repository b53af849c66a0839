"""The choice between the kernels of a network and products one by one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from cutjax.dtypes import short
from cutjax.epilogue import emit
from cutjax.kernels.network.kernel import Kernel
from cutjax.kernels.network.problem import Problem
from cutjax.kernels.network.program import Map
from cutjax.kernels.network.resolved import Config
from cutjax.runtime.architectures import number
from cutjax.runtime.launch import Call

DTYPES = ("bfloat16", "float16", "float32")
WIDEST = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """The kernel of a network, or the reasons why it runs as products.

    Attributes:
      problem: what was asked.
      reasons: why there is no kernel, or how it was chosen.
      resolved: the kernel.
    """

    problem: Problem
    reasons: tuple[str, ...]
    resolved: Kernel | None

    @property
    def served(self) -> bool:
        """True if a kernel runs."""
        return self.resolved is not None

    @property
    def kernel(self) -> str:
        """Name of what runs."""
        return "XLA" if self.resolved is None else self.resolved.name

    @property
    def time_us(self) -> float | None:
        """Predicted time of a call."""
        return None if self.resolved is None else self.resolved.time_us

    @property
    def roofline(self) -> float | None:
        """Share of what reading and writing each row once would take, or multiplying at the device's rate."""
        p, us = self.problem, self.time_us
        if us is None or not math.isfinite(us):
            return None
        flops = p.device.peak(p.dtype, p.math if isinstance(p.math, str) else "")
        least = max(p.bytes / p.device.bytes_per_second, p.flops / flops if flops else 0.0)
        return 1e6 * least / us

    def call(self) -> Call:
        """Compiles the kernel; returns what is launched."""
        if self.resolved is None:
            raise ValueError(f"no kernel for {self.problem}: {'; '.join(self.reasons)}")
        return self.resolved.call()


def why_not(problem: Problem) -> list[str]:
    """Returns the reasons against every kernel."""
    p, program = problem, problem.program
    if not p.flops:
        return ["a size is 0: nothing to launch"]
    found = []
    if number(p.arch) < 80:
        found.append(f"architecture {p.arch}: the kernels are for sm_80 and later")
    if p.dtype.name not in DTYPES:
        return [*found, f"{short(p.dtype.name)}: the kernels are of {', '.join(map(short, DTYPES))}"]
    if isinstance(p.math, tuple):
        found += p.math
    elif p.dtype.name == "float32" and not p.math:
        found.append("float32 by FMA: kernels multiply TF32 or parts of bf16, as precision='BF16_BF16_F32_X9' says")
    elif p.math in ("tf32x3", "f16"):
        found.append(f"products by {p.math}: the kernels have none")
    widths = [x for kind in program.kinds for x in kind.sizes]
    if not all(widths):
        return ["a width is 0: nothing to launch"]
    if max(widths) > WIDEST:
        found.append(f"width {max(widths)}, at most {WIDEST}")
    for kind, (dtype, _) in zip(program.inputs, p.given, strict=True):
        if dtype not in DTYPES or (kind.name != "vector" and dtype != p.dtype.name):
            found.append(f"{kind.name} in {short(dtype)}, products of {short(p.dtype.name)}")
    found += [f"a result in {short(x)}" for x in p.dtypes if x not in DTYPES]
    for x in program.outputs:
        if x < len(program.inputs):
            found.append("a result that is an input")
    for step in program.steps:
        if isinstance(step, Map):
            found += emit.reasons(step.function)
    return list(dict.fromkeys(found))


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the ways to compute a network."""
    flags = (True, False)
    sums = flags[::-1] if problem.program.sums else (False,)
    for chained, memory, memory_sums in itertools.product(flags, flags[::-1], sums):
        for warps, tiles, blocks in itertools.product((8, 4, 2, 1), (2, 1), (4, 3, 2, 1)):
            yield Config(warps, tiles, chained, memory, memory_sums, blocks)


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel of a config, or every reason why it cannot serve the problem."""
    if found := why_not(problem):
        return tuple(found)
    kernel = Kernel(problem, config)
    return tuple(kernel.reasons()) or kernel


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem) -> Choice:
    """Returns the kernel that is predicted to be the fastest, or the reasons why there is none."""
    if found := why_not(problem):
        return Choice(problem, tuple(found), None)
    each = [resolve(problem, config) for config in configs(problem)]
    kernels = [one for one in each if isinstance(one, Kernel)]
    if not kernels:
        return Choice(problem, tuple(next(one for one in reversed(each) if isinstance(one, tuple))), None)
    return Choice(problem, ("one kernel, not measured",), min(kernels, key=lambda one: one.time_us))
