"""Small problems with tails, of each schedule, layout, cluster shape and kind of epilogue: for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py

and the same with racecheck, synccheck and initcheck. It launches our kernels alone, so every finding is ours, and into
memory full of NaN, since initcheck does not see what TMA writes. Prints "ok" and how many kernels ran, or what was
wrong. ``--seconds`` ends it early; the most different kernels come first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# Each array in an allocation of its own: in one large pool, memcheck would not see an access past the end of an array.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import grouped_epilogues
import grouped_problems
import jax
import jax.numpy as jnp
import numpy as np
import problems

import cutjax
from cutjax import _fusion, _sm90
from cutjax._launch import TARGET, Launch

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

    def gemm(a, *rest):
        bs = rest[0] if products == 1 else rest[:products]
        return cutjax.gemm(a, bs, epilogue=epilogue, operands=rest[products:], layout=layout, out_dtype=np.float32)

    avals = [jax.ShapeDtypeStruct(shape, problems._INPUTS[0]) for shape in shapes(4096, 4096)]
    (row,) = cutjax.explain(gemm, platform="cuda")(*avals).rows
    config = pick(row.choice.problem, schedule, cluster, number)
    m, n = sizes(config)
    problem = dataclasses.replace(row.choice.problem, m=m, n=n)
    draw = np.random.default_rng(number).integers
    arrays = [draw(-2, 3, shape).astype(problems._INPUTS[0]) for shape in shapes(m, n)]
    got = run(_sm90.launch(problem, config), arrays, _fusion.of(problem).outputs, (*BATCH, m, n))
    accs = [problems.reference(arrays[0], b, layout, np.float32) for b in arrays[1 : 1 + products]]
    expected = epilogue(*accs, *(x.astype(np.float32) for x in arrays[1 + products :]))
    return f"{config.name(problem)}  {name}", wrong(got, expected)


def run(launch: Launch, arrays: list[np.ndarray], outputs: Any, shape: tuple[int, ...]) -> list[np.ndarray]:
    """The kernel alone, on NaN for results; what it leaves to XLA is done on the CPU."""
    results = launch.results or [jax.ShapeDtypeStruct(shape, np.dtype(out.dtype)) for out in outputs]

    @functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    def call(arrays, poison):
        return jax.ffi.ffi_call(TARGET, results)(*arrays, **launch.attributes())

    poison = [np.full(x.shape, np.nan, x.dtype) for x in results]
    got = [np.asarray(x) for x in call(*jax.device_put((arrays, poison)))]
    with jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(x) for x in launch.finish(list(map(jnp.asarray, got)))] if launch.finish else got


def grouped_problem(ragged: str, number: int, config: cutjax.Config | None = None) -> cutjax.Problem:
    """Groups for more tiles than SMs, of fewer rows than a tile has and of a few more."""
    layout = "tn" if ragged == "k" else ("nn", "nt")[number % 2]
    dtype = problems._INPUTS[number // 2 % 2]
    out = (dtype, np.dtype(np.float32))[number % 3 == 2]
    m, n = (4096, 4096) if config is None else sizes(config)
    kind: dict[str, Any] = {
        "groups": TILES // (4 if ragged == "k" else 2),
        "ragged": ragged,
        "leading": number % 2 == 0,
    }
    if ragged == "k":
        return cutjax.Problem(m, n, kind["groups"] * 40, layout, dtype, dtype, out, **kind)
    return cutjax.Problem(kind["groups"] * (m // 2), n, K, layout, dtype, dtype, out, **kind)


def grouped_sizes(problem: cutjax.Problem, hostile: bool) -> np.ndarray:
    """Some empty, a few rows of none at the end; or a negative one, and a sum that passes the rows and 32 bits."""
    rng = np.random.default_rng(problem.groups)
    rows = grouped_problems.rows(problem) - 5
    drawn = rng.multinomial(rows, rng.dirichlet(np.full(problem.groups + problem.leading, 1.0)))
    if hostile:
        drawn[3], drawn[40:44], drawn[50] = -7, np.iinfo(np.int32).max, rows
    return drawn.astype(np.int32)


def grouped(ragged: str, turn: int, schedule: str, cluster: tuple[int, int]) -> tuple[str, str | None]:
    """A product of rows in groups, forward ("m") or of the weights' gradient ("k"), with ragged tails."""
    number = turn + SCHEDULES.index(schedule) + 2 * CLUSTERS.index(cluster)
    config = pick(grouped_problem(ragged, number), schedule, cluster, number)
    problem = grouped_problem(ragged, number, config)
    of_groups = grouped_sizes(problem, hostile=turn > 0)
    a, b = grouped_problems.integers(problem, number)
    executable = grouped_problems.compiled(problem, config, "cuda")
    args = (*grouped_problems.with_nan(problem, a, b, of_groups), of_groups, grouped_problems.poison(problem))
    got = np.asarray(executable(*jax.device_put(args)))
    expected = grouped_problems.reference(problem, a, b, of_groups, np.float32)
    return f"{config.name(problem)}  {problem}", wrong([got], [expected])


def grouped_fused(name: str, schedule: str, cluster: tuple[int, int]) -> tuple[str, str | None]:
    """The same with an epilogue."""
    number = list(grouped_epilogues.EPILOGUES).index(name) + SCHEDULES.index(schedule) + 2 * CLUSTERS.index(cluster)
    layout = ("nn", "nt")[number % 2]
    config = pick(grouped_epilogues.Fused(name, layout).problem, schedule, cluster, number)
    m, n = sizes(config)
    groups = TILES // 2
    item = grouped_epilogues.Fused(name, layout, m=groups * (m // 2), n=n, k=K, groups=groups)
    got = item.run(item.compiled(config))
    return f"{config.name(item.problem)}  {name}", wrong(got, item.expected)


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
        for ragged in "mk":
            probe = cutjax.candidates(grouped_problem(ragged, turn))
            served = {(config.schedule, (config.cluster_m, config.cluster_n)) for config in probe}
            yield from (functools.partial(grouped, ragged, turn, *shape) for shape in shapes if shape in served)
        if turn == 0:
            for i, name in enumerate(EPILOGUES):
                yield from (functools.partial(fused, name, *shape) for shape in (shapes[i], shapes[3 + (i + 1) % 3]))
            for i, name in enumerate(("every operand", "gated with biases", "two results")):
                for schedule in SCHEDULES:
                    yield functools.partial(grouped_fused, name, schedule, CLUSTERS[2 * (i % 2)])


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
