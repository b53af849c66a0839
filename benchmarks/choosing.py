"""CPU time of choosing a kernel for a problem not seen before: ``python -m benchmarks choosing [--out FILE]``.

Milliseconds of this process, the median over problems of a kind, the least of some rounds of other problems each:
other work on the machine only adds. No device is needed. What tracing with cutjax.fuse takes: trace_overhead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from benchmarks.ops.compile_cost import processor
from cutjax.epilogue.expression import Epilogue, identity
from cutjax.epilogue.trace import trace
from cutjax.kernels import choose, families, keys, remembered
from cutjax.kernels.operand import Operand
from cutjax.runtime import settings

LAYOUTS = ("nn", "nt", "tn")


def _size(draw: random.Random) -> int:
    return 8 * draw.randint(16, 1024)


def _gelu() -> Epilogue:
    accumulator, bias = jax.ShapeDtypeStruct((64, 64), jnp.float32), np.zeros(64, np.float32)
    return trace(lambda acc, b: jax.nn.gelu(acc + b).astype(jnp.bfloat16), [accumulator], [bias]).epilogue.primal


def kinds() -> dict[str, Callable[[random.Random], cutjax.Problem]]:
    """A maker of random problems for each kind."""
    half, of, gelu = np.dtype(jnp.bfloat16), cutjax.Problem.of, _gelu()

    def sizes(draw: random.Random) -> tuple[int, int, int]:
        return _size(draw), _size(draw), _size(draw)

    def weights(draw: random.Random) -> cutjax.Problem:
        b, epilogue = Operand(np.dtype(np.int8), "mn"), identity(half, np.dtype(np.float32))
        return cutjax.Problem(*sizes(draw), Operand(half), (b,), epilogue=epilogue)

    def batched(draw: random.Random) -> cutjax.Problem:
        batch = dict.fromkeys(("batch", "a_batch", "b_batch"), (draw.randint(2, 64),))
        m, n, k = 8 * draw.randint(8, 256), 8 * draw.randint(8, 256), 64 * draw.randint(1, 16)
        return of(m, n, k, draw.choice(LAYOUTS), **batch)

    f8 = np.dtype(jnp.float8_e4m3fn)
    return {
        "dense": lambda draw: of(*sizes(draw), draw.choice(LAYOUTS)),
        "batched": batched,
        "bias and gelu": lambda draw: of(*sizes(draw), draw.choice(LAYOUTS), epilogue=gelu),
        "groups of rows": lambda draw: of(*sizes(draw), "nn", groups=8, ragged="m"),
        "groups of k": lambda draw: of(*sizes(draw), "tn", groups=8, ragged="k"),
        "float8": lambda draw: of(*sizes(draw), "nt", f8, f8, half),
        "weights of int8": weights,
        "dense, sm_80": lambda draw: of(*sizes(draw), draw.choice(LAYOUTS), arch="sm_80"),
    }


def milliseconds(make: Callable[[random.Random], cutjax.Problem], seed: str, count: int) -> float:
    """The median over new problems."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        problem = make(draw)
        start = time.process_time()
        choose.choose(problem)
        found.append(1e3 * (time.process_time() - start))
    return statistics.median(found)


def remembered_ms(make: Callable[[random.Random], cutjax.Problem], seed: str, count: int) -> float:
    """The median over problems whose choice a process before this one made."""
    draw, found = random.Random(seed), []
    problems = [make(draw) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder, settings.override(cache_dir=pathlib.Path(folder)):
        for kept in (False, True):
            for cached in (choose._choose, families._fastest, families.offers, keys.key):
                cached.cache_clear()
            for problem in problems:
                start = time.process_time()
                choose.choose(problem)
                found += [1e3 * (time.process_time() - start)] * kept
    return statistics.median(found)


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks choosing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="problems of a kind and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file to write")
    options = parser.parse_args(argv)
    makers = kinds()
    remembered.ON = False
    for name, make in makers.items():
        milliseconds(make, f"{name} warm", 5)
    found: dict[str, list[float]] = {name: [] for name in makers}
    kept: dict[str, list[float]] = {name: [] for name in makers}
    for i in range(options.rounds):
        for name, make in makers.items():
            remembered.ON = False
            found[name].append(round(milliseconds(make, f"{name} {i}", options.count), 2))
            remembered.ON = True
            kept[name].append(round(remembered_ms(make, f"{name} {i}", options.count), 2))
    for name, ms in found.items():
        print(f"{name:16} {min(ms):6.2f} ms a problem, {min(kept[name]):6.2f} if a process before chose")
    if options.out:
        versions = {name: importlib.metadata.version(name) for name in ("jax", "numpy")}
        content = {"device": processor(), "versions": versions, "milliseconds": found, "remembered": kept}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0
