"""Small problems with tails, of each schedule, layout, cluster shape and kind of epilogue: for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py

and the same with racecheck, synccheck and initcheck. It launches our kernels, and beside them only XLA's that finish
reductions, so every finding is ours. Prints "ok" and how many kernels ran, or what was wrong. ``--seconds`` ends it
early; the most different kernels come first.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# Each array in an allocation of its own: in one large pool, memcheck would not see an access past the end of an array.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax
import jax.numpy as jnp
import numpy as np
import problems

import cutjax

K = 136  # two whole k blocks and a tail
TILES = 280  # twice the SMs and more: every CTA walks several tiles
BATCH = (TILES // 4,)
SCHEDULES, CLUSTERS, LAYOUTS = ("coop", "pingpong"), ((1, 1), (2, 1), (1, 2)), ("nn", "nt", "tn", "tt")

# Functions of JAX's arrays and of numpy's, with the shapes of their operands. Small integers throughout: any order of
# summation gives the same.
EPILOGUES: dict[str, tuple[Callable[..., Any], int, list[str]]] = {
    "operands": (
        lambda acc, s, c, r, f: ((acc * s + c + r + f).astype(jnp.bfloat16), acc),
        1,
        ["11", "1n", "m1", "mn"],
    ),
    "reductions": (
        lambda acc, f: ((y := acc + f), y.sum(-2), y.sum(-1), y.max((-2, -1)), acc.min(-2)),
        1,
        ["mn"],
    ),
    "products": (lambda x, y, c: (x * c + y, y), 2, ["1n"]),
}


def pick(probe: cutjax.Problem, schedule: str, cluster: tuple[int, int], number: int) -> cutjax.Config:
    """One of the configs with that schedule and cluster."""
    served = [
        config
        for config in cutjax.candidates(probe)
        if config.schedule == schedule and (config.cluster_m, config.cluster_n) == cluster
    ]
    return sorted(served, key=lambda config: (config.bm, config.bn))[number * 7 % len(served)]


def sizes(config: cutjax.Config) -> tuple[int, int]:
    """m and n: two tiles along each, the second nearly empty."""
    return config.bm * config.cluster_m + 8, config.bn * config.cluster_n + 8


def plain(turn: int, schedule: str, cluster: tuple[int, int]) -> tuple[str, str | None]:
    """A plain product: its kernel, and what is wrong with its result or None."""
    number = turn + SCHEDULES.index(schedule) + CLUSTERS.index(cluster)
    layout, dtype = LAYOUTS[number % 4], problems._INPUTS[number % 2]
    out = (dtype, np.dtype(np.float32))[number % 3 == 2]
    config = pick(cutjax.Problem(4096, 4096, K, layout, dtype, dtype, out), schedule, cluster, number)
    problem = cutjax.Problem(*sizes(config), K, layout, dtype, dtype, out, BATCH, BATCH, (1,))
    a, b = problems.integers(problems.Random(0, problem, True, None))
    executable = problems.compiled(problem, config, "cuda")
    got = np.asarray(executable(*jax.device_put((a, b, problems.poison(problem)))))
    return f"{config.name(problem)}  {problem}", wrong([got], [problems.reference(a, b, layout, np.float32)])


def fused(name: str, schedule: str, cluster: tuple[int, int]) -> tuple[str, str | None]:
    """The same of a product with an epilogue."""
    epilogue, products, operands = EPILOGUES[name]
    number = list(EPILOGUES).index(name) + 2 * SCHEDULES.index(schedule) + CLUSTERS.index(cluster)
    layout = LAYOUTS[number % 4]

    def shapes(m: int, n: int) -> list[tuple[int, ...]]:
        a, b = (m, K) if layout[0] == "n" else (K, m), (K, n) if layout[1] == "n" else (n, K)
        full = [tuple({"1": 1, "m": m, "n": n}[axis] for axis in shape) for shape in operands]
        return [(*BATCH, *shape) for shape in (a, *[b] * products, *full)]

    def gemm(config, a, *rest):
        bs = rest[0] if products == 1 else rest[:products]
        more = {"layout": layout, "out_dtype": np.float32, "config": config}
        return cutjax.gemm(a, bs, epilogue=epilogue, operands=rest[products:], backend="cuda", **more)

    avals = [jax.ShapeDtypeStruct(shape, problems._INPUTS[0]) for shape in shapes(4096, 4096)]
    (row,) = cutjax.explain(functools.partial(gemm, None), platform="cuda")(*avals).rows
    config = pick(row.choice.problem, schedule, cluster, number)
    draw = np.random.default_rng(number).integers
    arrays = [draw(-2, 3, shape).astype(problems._INPUTS[0]) for shape in shapes(*sizes(config))]
    a, bs, rest = arrays[0], arrays[1 : 1 + products], arrays[1 + products :]
    accs = [problems.reference(a, b, layout, np.float32) for b in bs]
    got = jax.jit(functools.partial(gemm, config))(*jax.device_put(arrays))
    expected = epilogue(*accs, *(x.astype(np.float32) for x in rest))
    return f"{config.name(row.choice.problem)}  {name}", wrong([np.asarray(x) for x in got], expected)


def wrong(got: list[np.ndarray], expected: Any) -> str | None:
    """How results differ from what they are to be after rounding, or None."""
    for i, (out, ref) in enumerate(zip(got, expected, strict=True)):
        if not np.array_equal(out, ref := ref.astype(out.dtype)):
            return f"result {i}: {problems.mismatch(out, ref)}"
    return None


def cases() -> Iterator[Callable[[], tuple[str, str | None]]]:
    """Each schedule and cluster shape first, then each epilogue, then other layouts; tile shapes vary along the way."""
    shapes = [(schedule, cluster) for schedule in SCHEDULES for cluster in CLUSTERS]
    for turn in range(4):
        yield from (functools.partial(plain, turn, *shape) for shape in shapes)
        if turn == 0:
            for i, name in enumerate(EPILOGUES):
                yield from (functools.partial(fused, name, *shape) for shape in (shapes[i], shapes[3 + (i + 1) % 3]))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further kernel after this long")
    args = parser.parse_args()
    start, failures, done = time.monotonic(), 0, 0
    listed = list(cases())
    for case in listed:
        if time.monotonic() - start > args.seconds:
            break
        name, found = case()
        failures += found is not None
        done += 1
        print(f"{time.monotonic() - start:5.1f} s  {name}: {found or 'equal'}", flush=True)
    print(f"{'FAILED' if failures else 'ok'}: {done} of {len(listed)} kernels ran, {failures} wrong", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
