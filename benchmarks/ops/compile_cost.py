"""The cost of compiling: a first call, ``python -m benchmarks run --tag compile``, and each function of an epilogue.

Each measured function holds one product with a kernel of its own (pinned configs), so nothing is found in memory.
Cold: empty disk caches, ours and CUDA's own. Warm: a new process over those that the first one filled. XLA: the same
function with backend="xla", autotuning included. Lowering is where cutjax compiles; the first call is lowering, XLA's
compilation and one run.

``python -m benchmarks run --op compile`` measures what NVRTC takes of one core for the 4096 x 4096 x 4096 kernels with
each function that epilogues have, with dropout, with normal noise and with chains of six functions. It needs no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import platform
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import log_ndtr

import cutjax
from benchmarks import children
from benchmarks.record import Row
from benchmarks.suite import Run, Suite
from cutjax.epilogue import trace
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler

COUNT = 6
COLD_S, WARM_S = 0.5, 0.02


def measure(count: int = COUNT) -> dict[str, dict[str, float]]:
    """Medians in seconds of lowering, compiling and running ``count`` new functions in this process."""
    sizes = [(1024 + 128 * i, 2048, 1024) for i in range(count + 1)]
    on_gpu = jax.default_backend() == "gpu"
    results = {}
    for backend in ("xla", "cuda") if on_gpu else ("xla",):
        seconds = []
        for i, (m, n, k) in enumerate(sizes):
            a, b = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16)
            jax.block_until_ready((a, b))
            config = None
            if backend == "cuda":
                config = cutjax.candidates(cutjax.Problem.of(m, n, k))[i]
            start = time.perf_counter()
            lowered = jax.jit(functools.partial(cutjax.gemm, backend=backend, config=config)).lower(a, b)
            lowered_at = time.perf_counter()
            compiled = lowered.compile()
            compiled_at = time.perf_counter()
            jax.block_until_ready(compiled(a, b))
            end = time.perf_counter()
            seconds.append((lowered_at - start, compiled_at - lowered_at, end - compiled_at, end - start))
        # The first function also pays for imports and for loading NVRTC and cuBLAS.
        medians = np.median(np.array(seconds[1:]), axis=0)
        names = ("lower_s", "compile_s", "run_s", "first_call_s")
        results[backend] = {name: float(value) for name, value in zip(names, medians, strict=True)}
        results[backend]["very_first_call_s"] = seconds[0][-1]
    return results


def in_processes() -> dict[str, Any]:
    """Cold, then warm over the same disk caches."""
    with tempfile.TemporaryDirectory() as cache:
        env = {"CUTJAX_CACHE_DIR": f"{cache}/kernels", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        env["CUDA_CACHE_PATH"] = f"{cache}/cuda"  # beside a driver NVRTC keeps what it compiles there
        return {name: children.child("benchmarks.ops.compile_cost", env=env) for name in ("cold", "warm")}


def show(results: dict[str, Any]) -> None:
    """Prints the table a person reads."""
    for (name, result), target in zip(results.items(), (COLD_S, WARM_S), strict=True):
        if "failure" in result:
            print(f"compile, {name}: {result['failure']}")
            continue
        for backend, seconds in result.items():
            text = ", ".join(f"{key[:-2].replace('_', ' ')} {1e3 * value:.1f} ms" for key, value in seconds.items())
            print(f"compile, {name}, {backend}: {text}")
        if "cuda" in result:
            added = {key: result["cuda"][key] - result["xla"][key] for key in ("lower_s", "first_call_s")}
            print(
                f"compile, {name}: cutjax adds {1e3 * added['lower_s']:.1f} ms to lowering and "
                f"{1e3 * added['first_call_s']:.1f} ms to the first call (target: under {1e3 * target:.0f} ms)"
            )


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """An epilogue by its name in `epilogues`, and the dtype of the result."""

    function: str
    dtype: str
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Both."""
        return f"{self.function} {self.dtype}"


TIMES = 2
FUNCTION_S, DROPOUT_S, CHAIN_S = 1.0, 0.8, 2.0


def epilogues() -> dict[str, tuple[float, Callable[..., Any], bool]]:
    """By name: how long it may take, the function, and whether it takes a key beside the accumulators."""

    def dropout(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    unary = "acos acosh asin asinh atan atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p logistic rsqrt "
    unary += "sin sinh sqrt tan tanh"
    functions: dict[str, Callable[..., Any]] = {name: getattr(lax, name) for name in unary.split()}
    functions |= {"log_ndtr": log_ndtr, "sinc": jnp.sinc, "x // 0.7": lambda x: x // 0.7, "abs(x) ** 1.5": _power}
    functions |= {"x / (x + 1)": lambda x: x / (x + 1), "arctan2": lambda x: jnp.arctan2(x, x + 1)}
    functions |= {"rem": lambda x: lax.rem(x, x + 1), "nextafter": lambda x: jnp.nextafter(x, x + 1)}
    functions |= {name: getattr(jax.nn, name) for name in ("gelu", "silu", "relu", "softplus", "mish", "elu")}
    chains = {
        "sin cos tan asin acos atan": (lax.sin, lax.cos, lax.tan, lax.asin, lax.acos, lax.atan),
        "erf_inv tanh log1p expm1 cbrt exp": (lax.erf_inv, lax.tanh, lax.log1p, lax.expm1, lax.cbrt, lax.exp),
        "asinh acosh atanh sinh cosh erfc": (lax.asinh, lax.acosh, lax.atanh, lax.sinh, lax.cosh, lax.erfc),
        "pow log_ndtr sinc pow sin log": (_power, log_ndtr, jnp.sinc, _power, lax.sin, lax.log),
    }
    found = {name: (FUNCTION_S, fn, False) for name, fn in functions.items()}
    found |= {name: (CHAIN_S, functools.partial(_chain, fns), False) for name, fns in chains.items()}
    found["dropout"] = DROPOUT_S, dropout, True
    found["gelu, dropout"] = DROPOUT_S, lambda x, key: dropout(jax.nn.gelu(x), key), True
    found["normal noise"] = DROPOUT_S, lambda x, key: x + jax.random.normal(key, x.shape), True
    return found


def _power(x: Any) -> Any:
    return abs(x) ** 1.5


def _chain(functions: Sequence[Callable[..., Any]], x: Any) -> Any:
    return functools.reduce(lambda value, fn: fn(value), reversed(functions), x)


def measure_epilogue(case: Epilogue, run: Run) -> list[Row]:
    """Compiles the kernel of an epilogue in the chosen tile and in the one with the most accumulators."""
    target, fn, takes_key = epilogues()[case.function]
    key = [jax.random.key(0)] if takes_key else []
    acc = jax.ShapeDtypeStruct((256, 384), jnp.float32)
    epilogue = trace.trace(lambda *args: fn(*args).astype(case.dtype), [acc], key).epilogue.primal
    problem = cutjax.Problem.of(4096, 4096, 4096, epilogue=epilogue)
    served = cutjax.candidates(problem)
    if not served:
        return [Row(case.name, failure="; ".join(cutjax.reasons(cutjax.Config(), problem)) or "no kernel")]
    rows = []
    for config in dict.fromkeys((served[0], max(served, key=lambda config: (config.accumulator_registers, config.bm)))):
        seconds = []
        for _ in range(TIMES):
            start = time.thread_time()
            cubin = compiler.compile_source(sm90.resolved(problem, config).source, name="kernel", arch=problem.arch)
            seconds.append(time.thread_time() - start)
        found = cubin.resources
        figures = {
            "tile": f"{config.bm}x{config.bn} {config.schedule}",
            "cpu_s": min(seconds),
            "most_s": target,
            "cubin_bytes": len(cubin.image),
            "registers": found.registers or 0,
            "spill_bytes": found.spill_store_bytes or 0,
            "stack_bytes": found.stack_bytes or 0,
        }
        ratios = {"limit": target / figures["cpu_s"]}
        rows.append(Row(case.name, ratios=ratios, targets={"limit": 1.0}, figures=figures))
    return rows


def processor() -> str:
    """The model of the CPU."""
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or "unknown"


SUITE = Suite(
    "compile",
    [Epilogue(name, dtype) for name in epilogues() for dtype in ("float32", "bfloat16")],
    measure=measure_epilogue,
    clocks=("CPU clock",),
    device=processor,
)
