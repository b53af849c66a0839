"""What a new GEMM adds to the first call of a jitted function: ``python -m benchmarks.run --tag compile``.

Each measured function holds one product with a kernel of its own (pinned configs), so nothing is found in memory.
Cold: empty disk caches, ours and CUDA's own. Warm: a new process over those that the first one filled. XLA: the same
function with backend="xla", autotuning included. Lowering is where cutjax compiles; the first call is lowering, XLA's
compilation and one run.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from typing import Any

from benchmarks import children

COUNT = 6
COLD_S, WARM_S = 0.5, 0.02


def measure(count: int = COUNT) -> dict[str, dict[str, float]]:
    """Medians in seconds of lowering, compiling and running ``count`` new functions in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import cutjax

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
                config = cutjax.candidates(cutjax.Problem(m, n, k))[i]
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
        return {name: children.child("benchmarks.compile_cost", env=env) for name in ("cold", "warm")}


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


if __name__ == "__main__":
    children.answer(measure())
    sys.exit(0)
