"""The choice between the kernels of a network and products one by one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from cutjax.dtypes import short
from cutjax.epilogue import emit
from cutjax.kernels.network.config import Config
from cutjax.kernels.network.kernel import Kernel
from cutjax.kernels.network.problem import Problem
from cutjax.kernels.network.program import Map
from cutjax.runtime.architectures import too_old
from cutjax.runtime.choice import Choice, fastest

DTYPES = ("bfloat16", "float16", "float32")
WIDEST = 256
# By wgmma, the fastest first, of those with as many registers and as much shared memory as a network needs: measured on
# an H200, 64 and 128 wide (benchmarks/results/experiments/networks-again-h200.json). All were faster than any other.
SHAPES = ((8, 3), (4, 5), (12, 1), (8, 1), (4, 1))  # warps, and blocks on an SM
BY_WGMMA = tuple(Config(warps, 1, blocks=blocks, wgmma=True) for warps, blocks in SHAPES)
SUMS_APART = Config(8, 1, memory=True, planes=True, wgmma=True, apart=True)  # of networks wider than 64 alone
SUMS_BY_WGMMA = (
    Config(4, 1, blocks=2, planes=True, wgmma=True),
    dataclasses.replace(SUMS_APART, copied=True),
    SUMS_APART,
)


def why_not(problem: Problem) -> list[str]:
    """Returns the reasons against every kernel."""
    p, program = problem, problem.program
    if not p.flops:
        return ["a size is 0: nothing to launch"]
    found = too_old(p.arch, 80)
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
    if problem.program.sums and problem.dtype.itemsize == 2:
        for memory, warps, tiles, blocks in itertools.product(flags[::-1], (16, 8, 4), (2, 1), (2, 1)):
            yield Config(warps, tiles, True, memory, False, blocks, planes=True)


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel of a config, or every reason why it cannot serve the problem."""
    if found := why_not(problem):
        return tuple(found)
    kernel = Kernel(problem, config)
    return tuple(kernel.reasons()) or kernel


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem) -> Choice[Problem, Kernel]:
    """Returns the kernel that is predicted to be the fastest, or the reasons why there is none."""
    if found := why_not(problem):
        return Choice(problem, tuple(found))
    widest = max(x for kind in problem.program.kinds for x in kind.sizes)
    for config in SUMS_BY_WGMMA if problem.program.sums else BY_WGMMA:
        kernel = resolve(problem, config)
        if isinstance(kernel, Kernel) and kernel.multiplies_at_once and (not config.apart or widest > 64):
            why = "two kernels" if config.apart else "one kernel"
            return fastest(problem, [kernel], why, floor_us(problem))
    each = (resolve(problem, config) for config in configs(problem))
    return fastest(problem, each, "one kernel, not measured", floor_us(problem))


def floor_us(problem: Problem) -> float:
    """Returns the microseconds of moving each row once, or of multiplying at the device's rate."""
    flops = problem.device.peak(problem.dtype, problem.math if isinstance(problem.math, str) else "")
    multiplied = problem.flops / flops if flops else 0.0
    return 1e6 * max(problem.bytes / problem.device.bytes_per_second, multiplied)
