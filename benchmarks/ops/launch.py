"""Host cost of a launch, beside XLA's own cuBLAS call: ``python -m benchmarks run --tag launch``.

A chain of N dependent small products in one executable is run with N = 1 and N = 101, and the slope is the cost of one.
"host": the time until the call returns while the device is kept busy by long products in front of the chain; host work
alone, if launches happen on the calling thread. "wall": the whole time; the longer of host work and device time, so an
upper bound in any case. Both with XLA's command buffers (CUDA graphs) off, where every launch is paid on every run, and
at their default, where a graph is launched instead.
"""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from benchmarks import children

SIZE, SHORT, LONG = 256, 1, 101
TARGET_US = 5.0
_OFF = "--xla_gpu_enable_command_buffer="


def _median_us(call, reps: int, busy=None) -> tuple[float, float]:
    """Medians of (time until the call returns, time until its result is ready)."""
    returned, ready = [], []
    for _ in range(reps):
        if busy is not None:
            busy()
        start = time.perf_counter()
        out = call()
        returned.append(time.perf_counter() - start)
        jax.block_until_ready(out)
        ready.append(time.perf_counter() - start)
    return 1e6 * float(np.median(returned)), 1e6 * float(np.median(ready))


def measure(reps: int = 50, size: int = SIZE) -> dict[str, dict[str, float]]:
    """Microseconds per launch in this process, for cutjax and for XLA restricted to cuBLAS."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16) / jnp.bfloat16(size**0.5)
    on_gpu = jax.default_backend() == "gpu"
    large = jnp.ones((8192 if on_gpu else 8,) * 2, jnp.bfloat16)
    long_product = jax.jit(lambda a: a @ a)
    busy = lambda: [long_product(large) for _ in range(4)]  # noqa: E731  about 5 ms, longer than the host needs
    options = {"xla_gpu_enable_triton_gemm": False} if on_gpu else {}
    products = {
        "cutjax": (lambda a, b: cutjax.gemm(a, b, backend="cuda" if on_gpu else "auto"), {}),
        "xla": (lambda a, b: jnp.matmul(a, b), options),
    }
    results = {}
    for name, (product, compiler_options) in products.items():
        times = {}
        for count in (SHORT, LONG):

            def chain(x, w, count=count, product=product):
                for _ in range(count):
                    x = product(x, w)
                return x

            call = jax.jit(chain, compiler_options=compiler_options)
            for _ in range(5):
                jax.block_until_ready(call(x, w))
            host, _ = _median_us(lambda call=call: call(x, w), reps, busy)
            _, wall = _median_us(lambda call=call: call(x, w), reps)
            times[count] = host, wall
        host, wall = ((times[LONG][i] - times[SHORT][i]) / (LONG - SHORT) for i in (0, 1))
        results[name] = {"host_us": host, "wall_us": wall, "first_us": times[SHORT][1]}
    return results


def in_processes() -> dict[str, Any]:
    """Both settings of command buffers, each in a process of its own."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {
        "command_buffers_off": children.child("benchmarks.ops.launch", env={"XLA_FLAGS": f"{flags} {_OFF}".strip()}),
        "default": children.child("benchmarks.ops.launch"),
    }


def show(results: dict[str, Any]) -> None:
    """Prints the table a person reads."""
    for setting, result in results.items():
        if "failure" in result:
            print(f"launch, {setting}: {result['failure']}")
            continue
        for name, times in result.items():
            print(
                f"launch, {setting}, {name}: host {times['host_us']:.2f} us, wall {times['wall_us']:.2f} us "
                f"(target: under {TARGET_US:.0f} us); one launch and its synchronisation {times['first_us']:.0f} us"
            )
