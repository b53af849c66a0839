"""Small problems with tails, of every kind of kernel of both families: for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py

and the same with racecheck, synccheck and initcheck. It launches our kernels alone, so every finding is ours, and into
memory full of NaN, since initcheck does not see what TMA writes. Names each kernel before it runs, then says what is
wrong with its result; the last line says "ok" or "FAILED" and how many ran. The most different kernels come first, and
``--seconds`` starts no further one after so long. ``--only REGEX`` runs some: ``--only ^mma_`` those of the mma family,
``--only c1x1_`` Hopper's without clusters. ``--list`` names them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
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
import sanitize_mma
import syrk_problems
from launches import Case, run, wrong

import cutjax
from cutjax.kernels.families import in_order

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
    "residual": (lambda acc, f: ((acc + f).astype(jnp.bfloat16),), 1, ["mn"]),
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
    rows, columns = config.bm * config.cluster_m + 8, config.bn * config.cluster_n + 8
    return (columns, rows) if config.swap else (rows, columns)


def plain(turn: int, schedule: str, cluster: tuple[int, int]) -> Case:
    """A plain product."""
    number = turn + SCHEDULES.index(schedule) + CLUSTERS.index(cluster)
    layout, dtype = LAYOUTS[number % 4], problems._INPUTS[number % 2]
    out = (dtype, np.dtype(np.float32))[number % 3 == 2]
    config = pick(cutjax.Problem.of(4096, 4096, K, layout, dtype, dtype, out), schedule, cluster, number)
    return product(config, layout, dtype, out)


def product(config: cutjax.Config, layout: str, dtype: np.dtype, out: np.dtype, short: int = 0) -> Case:
    """A plain product of sizes that are so much short of multiples of 8."""
    m, n, k = (size - short for size in (*sizes(config), K))
    problem = cutjax.Problem.of(m, n, k, layout, dtype, dtype, out, BATCH, BATCH, (1,))

    def data():
        a, b = problems.integers(problems.Random(0, problem, True, None))
        return (a, b), [problems.reference(a, b, layout, np.float32)]

    return Case(problem, config, data, str(problem))


def strided(turn: int, schedule: str, cluster: tuple[int, int]) -> Case:
    """A plain product of arrays [batch, rows, heads, columns]; data are given, and compared, as they lie in memory."""
    number = turn + SCHEDULES.index(schedule) + CLUSTERS.index(cluster)
    layout, dtype, batch, order = LAYOUTS[number % 4], problems._INPUTS[0], (BATCH[0] // 10, 10), (0, 2, 1, 3)
    config = pick(cutjax.Problem.of(4096, 4096, K, layout), schedule, cluster, number)
    shape = cutjax.Problem.of(*sizes(config), K, layout, dtype, dtype, dtype, batch, batch, batch)
    problem = in_order(shape, (order,) * 3)

    def data():
        a, b = problems.integers(problems.Random(0, problem, True, None))
        d = problems.reference(a, b, layout, np.float32)
        a, b, lying = (np.ascontiguousarray(x.transpose(order)) for x in (a, b, d))
        return (a, b), [lying.reshape(d.shape)]

    return Case(problem, config, data, str(problem))


def fused(name: str, schedule: str, cluster: tuple[int, int]) -> Case:
    """A product with an epilogue."""
    number = list(EPILOGUES).index(name) + 2 * SCHEDULES.index(schedule) + CLUSTERS.index(cluster)
    return with_epilogue(name, number, lambda probe: pick(probe, schedule, cluster, number))


def with_epilogue(
    name: str,
    number: int,
    choose: Callable[[cutjax.Problem], cutjax.Config],
    dtype: np.dtype = problems._INPUTS[0],
    short: int = 0,
) -> Case:
    """A product with an epilogue whose operands have a dtype, of sizes that are so much short of multiples of 8."""
    epilogue, products, operands = EPILOGUES[name]
    layout, k = LAYOUTS[number % 4], K - short

    def shapes(m: int, n: int) -> list[tuple[int, ...]]:
        a, b = (m, k) if layout[0] == "n" else (k, m), (k, n) if layout[1] == "n" else (n, k)
        full = [tuple({"1": 1, "m": m, "n": n}[axis] for axis in shape) for shape in operands]
        return [(*BATCH, *shape) for shape in (a, *[b] * products, *full)]

    def gemm(a, *rest):
        bs = rest[0] if products == 1 else rest[:products]
        return cutjax.gemm(a, bs, epilogue=epilogue, operands=rest[products:], layout=layout, out_dtype=np.float32)

    dtypes = [*[problems._INPUTS[0]] * (1 + products), *[dtype] * len(operands)]
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes(4096, 4096), dtypes, strict=True)]
    (row,) = cutjax.explain(gemm, platform="cuda")(*avals).rows
    config = choose(row.choice.problem)
    m, n = (size - short for size in sizes(config))

    def data():
        draw = np.random.default_rng(number).integers
        arrays = [draw(-2, 3, shape).astype(dtype) for shape, dtype in zip(shapes(m, n), dtypes, strict=True)]
        accs = [problems.reference(arrays[0], b, layout, np.float32) for b in arrays[1 : 1 + products]]
        return arrays, epilogue(*accs, *(x.astype(np.float32) for x in arrays[1 + products :]))

    return Case(dataclasses.replace(row.choice.problem, m=m, n=n), config, data, f"{name}, {m} x {n} x {k}")


def pinned() -> Iterator[Case]:
    """Configs that the model may not choose: operands swapped, k divided in every way, rows that are not aligned."""
    config, (bf16, f16), f32 = cutjax.Config, problems._INPUTS, np.dtype(np.float32)
    swapped = config(64, 32, 64, 4, swap=True), config(128, 64, 64, 4, swap=True, schedule="pingpong", cluster_m=2)
    divided = (
        config(64, 64, 64, 4, cluster_k=2),
        config(128, 96, 64, 4, cluster_k=3),
        config(64, 32, 64, 4, swap=True, cluster_k=4),
        config(128, 128, 64, 4, schedule="pingpong", splits=2),
        config(64, 64, 64, 4, cluster_k=2, splits=2),
        config(128, 64, 64, 4, stream_k=True),
        config(64, 64, 64, 4, schedule="pingpong", stream_k=True),
        config(128, 64, 64, 4, cluster_m=2, stream_k=True),
        config(64, 64, 64, 4, schedule="pingpong", cluster_n=2, stream_k=True),
        config(64, 32, 64, 4, swap=True, stream_k=True),
    )
    for i, each in enumerate((*swapped, *divided)):
        yield product(each, LAYOUTS[i % 4], (bf16, f16)[i % 2], (bf16, f32)[i % 3 == 2])
        yield product(each, LAYOUTS[(i + 1) % 4], bf16, (bf16, f32)[i % 2], short=3)  # padded; stored by threads
    yield product(config(64, 24, 64, 4, swap=True), "nn", bf16, f32)
    yield product(config(64, 24, 64, 4, swap=True), "nt", bf16, f32, short=1)
    for i, each in enumerate((*swapped, divided[0], divided[2], *divided[5:8], divided[9])):
        yield with_epilogue("residual", i, lambda _, each=each: each)
        # Rows of float32 are of whole units of 16 bytes, so TMA loads the operand; those of the result are not.
        yield with_epilogue("residual", i, lambda _, each=each: each, f32, short=4)
        yield with_epilogue("residual", i + 1, lambda _, each=each: each, short=3)
    for i, each in enumerate((config(64, 64, 64, 4, stream_k=True), config(64, 32, 64, 4, cluster_k=2), swapped[0])):
        yield with_epilogue("reductions", i, lambda _, each=each: each)


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
        return cutjax.Problem.of(m, n, kind["groups"] * 40, layout, dtype, dtype, out, **kind)
    return cutjax.Problem.of(kind["groups"] * (m // 2), n, K, layout, dtype, dtype, out, **kind)


def grouped_sizes(problem: cutjax.Problem, hostile: bool) -> np.ndarray:
    """Some empty, a few rows of none at the end; or a negative one, and a sum that passes the rows and 32 bits."""
    rng = np.random.default_rng(problem.groups.count)
    rows = grouped_problems.rows(problem) - 5
    drawn = rng.multinomial(rows, rng.dirichlet(np.full(problem.groups.count + problem.groups.leading, 1.0)))
    if hostile:
        drawn[3], drawn[40:44], drawn[50] = -7, np.iinfo(np.int32).max, rows
    return drawn.astype(np.int32)


def grouped(ragged: str, turn: int, schedule: str, cluster: tuple[int, int]) -> Case:
    """A product of rows in groups, forward ("m") or of the weights' gradient ("k"), with ragged tails."""
    number = turn + SCHEDULES.index(schedule) + 2 * CLUSTERS.index(cluster)
    config = pick(grouped_problem(ragged, number), schedule, cluster, number)
    problem = grouped_problem(ragged, number, config)

    def data():
        of_groups = grouped_sizes(problem, hostile=turn > 0)
        a, b = grouped_problems.integers(problem, number)
        expected = grouped_problems.reference(problem, a, b, of_groups, np.float32)
        return (*grouped_problems.with_nan(problem, a, b, of_groups), of_groups), [expected]

    return Case(problem, config, data, str(problem))


def accumulated(schedule: str, cluster: tuple[int, int]) -> Case:
    """A weights' gradient that is added to what its memory holds."""
    plain = grouped("k", 0, schedule, cluster).problem
    plain = dataclasses.replace(plain, groups=dataclasses.replace(plain.groups, leading=False))
    dtypes = (plain.a.dtype, plain.bs[0].dtype, np.int32, np.dtype(np.float32))
    shapes = grouped_problems.shapes(plain)
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def outer(a, b, of_groups, to):
        return cutjax.grouped_outer(a, b, of_groups, accumulate=to)

    (row,) = cutjax.explain(outer, platform="cuda")(*avals).rows
    problem = row.choice.problem
    config = pick(problem, schedule, cluster, 0)

    def data():
        of_groups = grouped_sizes(problem, hostile=False)
        a, b = grouped_problems.integers(problem, 0)
        to = np.random.default_rng(0).integers(-2, 3, shapes[3]).astype(np.float32)
        expected = to + grouped_problems.reference(problem, a, b, of_groups, np.float32)
        return (*grouped_problems.with_nan(problem, a, b, of_groups), of_groups, to), [expected]

    return Case(problem, config, data, f"{problem}, added")


def grouped_fused(name: str, schedule: str, cluster: tuple[int, int]) -> Case:
    """A product of rows in groups with an epilogue."""
    number = list(grouped_epilogues.EPILOGUES).index(name) + SCHEDULES.index(schedule) + 2 * CLUSTERS.index(cluster)
    layout = ("nn", "nt")[number % 2]
    config = pick(grouped_epilogues.Fused(name, layout).problem, schedule, cluster, number)
    m, n = sizes(config)
    groups = TILES // 2
    item = grouped_epilogues.Fused(name, layout, m=groups * (m // 2), n=n, k=K, groups=groups)

    def data():
        x, ws, of_groups, operands = item.with_nan()
        return (x, *ws, of_groups, *operands), item.expected

    return Case(item.problem, config, data, name)


def symmetric(name: str, schedule: str, cluster: tuple[int, int]) -> Case:
    """A product of matrices and their transposes, with an epilogue."""
    number = SCHEDULES.index(schedule) + 2 * CLUSTERS.index(cluster)
    out = np.dtype(np.float32) if name == "two results" else problems._INPUTS[0]  # mirrored in words of 32 bits, of 16
    probe = syrk_problems.Random(name, 4096, K, "nt"[number % 2], out_dtype=out, batch=BATCH)
    config = pick(probe.problem, schedule, cluster, number)
    item = dataclasses.replace(probe, m=max(sizes(config)))

    def data():
        a, *operands = item.integers()
        operands = [x.reshape((1,) * (a.ndim - x.ndim) + x.shape) for x in operands]
        return (a, *operands), item.expected(a, *operands)

    return Case(item.problem, config, data, f"symmetric, {name}")


def cases() -> Iterator[Case]:
    """The cases of all kinds in turns, so that any time limit has some of each."""
    kinds = [sm90_cases(), sanitize_mma.mma_cases(), sanitize_mma.wide_cases(BATCH[0])]
    return (case for turn in itertools.zip_longest(*kinds) for case in turn if case is not None)


def sm90_cases() -> Iterator[Case]:
    """Each schedule and cluster shape first, then each epilogue, then other layouts; tile shapes vary along the way."""
    shapes = [(schedule, cluster) for schedule in SCHEDULES for cluster in CLUSTERS]
    for turn in range(4):
        yield from (plain(turn, *shape) for shape in shapes)
        for ragged in "mk":
            probe = cutjax.candidates(grouped_problem(ragged, turn))
            served = {(config.schedule, (config.cluster_m, config.cluster_n)) for config in probe}
            yield from (grouped(ragged, turn, *shape) for shape in shapes if shape in served)
        yield from (strided(turn, *shape) for shape in shapes[turn % 2 :: 2])
        if turn == 0:
            for i, name in enumerate(("operands", "reductions", "products")):
                yield from (fused(name, *shape) for shape in (shapes[i], shapes[3 + (i + 1) % 3]))
            for i, name in enumerate(("every operand", "gated with biases", "two results")):
                yield from (grouped_fused(name, schedule, CLUSTERS[2 * (i % 2)]) for schedule in SCHEDULES)
            yield from (accumulated(schedule, CLUSTERS[i]) for i, schedule in enumerate(SCHEDULES))
            for i, name in enumerate(("two results", "plain")):
                yield from (symmetric(name, schedule, CLUSTERS[i]) for schedule in SCHEDULES)
            yield from pinned()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further kernel after this long")
    parser.add_argument("--only", type=re.compile, default="", help="a regular expression: which kernels")
    parser.add_argument("--list", action="store_true", help="only name the kernels; needs no GPU")
    args = parser.parse_args()
    start, failures, done = time.monotonic(), 0, 0
    listed = [case for case in cases() if not args.only or args.only.search(str(case))]
    if args.list:
        print(*listed, f"{len(listed)} kernels", sep="\n")
        return 0
    prefetch = problems.Prefetch(listed, Case.prepare, ahead=16)
    for case in listed:
        if time.monotonic() - start > args.seconds:
            break
        launch, arrays, expected = prefetch.get(case)
        print(f"{time.monotonic() - start:5.1f} s  {case}: ", end="", flush=True)
        found = wrong(run(case.problem, launch, arrays), expected)
        failures += found is not None
        done += 1
        print(found or "equal", flush=True)
    prefetch.close()
    print(f"{'FAILED' if failures else 'ok'}: {done} of {len(listed)} kernels ran, {failures} wrong", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
