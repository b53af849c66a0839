"""Grouped products on a CPU, beside a dense one of the same FLOP: ``python -m benchmarks reference``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import cutjax

M, K, N, G = 8192, 512, 512, 64
REPS = 21


def main(argv: Sequence[str]) -> int:
    """The command line."""
    argparse.ArgumentParser(prog="python -m benchmarks reference", description=__doc__).parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((M, K), (G, K, N), (M, N)))
    sizes = jnp.asarray(rng.multinomial(M, rng.dirichlet(np.ones(G))), jnp.int32)
    calls = {
        "dense": lambda: x @ w[0],
        "forward": lambda: cutjax.grouped_gemm(x, w, sizes),
        "dx": lambda: cutjax.grouped_gemm(dy, w, sizes, layout="nt"),
        "dw": lambda: cutjax.grouped_outer(x, dy, sizes),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPS):  # processor time, in turn: the machine may have other things to do
        for name, call in calls.items():
            start = time.process_time()
            jax.block_until_ready(call())
            times[name].append(time.process_time() - start)
    dense = min(times["dense"])
    for name, found in times.items():
        print(f"{name:8} {1e3 * min(found):6.1f} ms  {min(found) / dense:.2f} of dense")
    return 0
