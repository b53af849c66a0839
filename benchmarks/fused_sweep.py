"""Times configs of products with epilogues beside XLA: ``python -m benchmarks fused_sweep --out X.json --seconds 200``.

The cost model's constants of epilogues were fitted to such a sweep. For each shape and epilogue the configs predicted
fastest are timed, some of each kind of tile, in random order with XLA's program; ``--list`` only names them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import pathlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from benchmarks import report, timing
from cutjax.kernels.sm90 import family
from cutjax.kernels.sm90.kernel import Kernel, resolve
from cutjax.runtime.compiler import compile_kernel

DTYPE = jnp.bfloat16
SHAPES = (  # m, n, k, layout
    *((8192, 14336, 4096, "nn"), (8192, 8192, 8192, "nn"), (2048, 2048, 2048, "nn"), (4096, 4096, 4096, "nn")),
    *((16384, 1024, 1024, "nn"), (2048, 8192, 2048, "nn"), (16384, 16384, 4096, "nn"), (8192, 4096, 4096, "nn")),
    *((8192, 4096, 14336, "nn"), (8192, 4096, 1024, "nn"), (8192, 1024, 4096, "nn"), (12608, 3072, 768, "nn")),
    *((12608, 768, 3072, "nn"), (8192, 14336, 4096, "nt"), (12608, 3072, 768, "nt"), (16, 14336, 4096, "nn")),
    *((64, 4096, 14336, "nn"), (1024, 2304, 768, "nn")),
)
GRADIENTS = (  # of weights
    *((4096, 14336, 8192, "tn"), (4096, 4096, 8192, "tn"), (4096, 1024, 8192, "tn"), (1024, 4096, 8192, "tn")),
    *((1024, 1024, 8192, "tn"), (3072, 1024, 8192, "tn"), (768, 3072, 12608, "tn")),
)
SLOW_US, REPS, SLOW_REPS = 500.0, 6, 4


def _derivative_of_gelu(x: jax.Array) -> jax.Array:
    return jax.vmap(jax.vmap(jax.grad(jax.nn.gelu)))(x)


def _derivative_of_gate(acc: jax.Array, h: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    s = jax.nn.sigmoid(h)
    return h * s * acc, acc * u * s * (1 + h * (1 - s))


def _adamw(acc: jax.Array, p: jax.Array, m: jax.Array, v: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
    m, v = 0.9 * m + 0.1 * acc, 0.999 * v + 0.001 * acc**2
    return p - 1e-4 * (m / c / (jnp.sqrt(v / c) + 1e-8) + 1e-4 * p), m, v


# The right operands, those of the epilogue (b: bias, r: of the result's shape, P, M, V: and of float32, C: one number),
# and the epilogue in float32, of which the results are bf16 where no operand is wider.
EPILOGUES: dict[str, tuple[str, str, Callable[..., Any] | None]] = {
    "plain": ("w", "", None),
    "bias": ("w", "b", lambda acc, b: acc + b),
    "bias+relu": ("w", "b", lambda acc, b: jax.nn.relu(acc + b)),
    "bias+gelu": ("w", "b", lambda acc, b: jax.nn.gelu(acc + b)),
    "bias+erf": ("w", "b", lambda acc, b: jax.nn.gelu(acc + b, approximate=False)),
    "bias+silu": ("w", "b", lambda acc, b: jax.nn.silu(acc + b)),
    "bias+residual": ("w", "br", lambda acc, b, r: acc + b + r),
    "residual": ("w", "r", lambda acc, r: acc + r),
    "gate": ("wu", "", lambda g, u: jax.nn.silu(g) * u),
    "dgelu": ("w", "r", lambda acc, r: acc * _derivative_of_gelu(r)),
    "two": ("w", "b", lambda acc, b: (jax.nn.gelu(acc + b), acc + b)),
}
# Of products that were timed while the device was hot: sweeps/hot-h200.json.
HELD: dict[str, tuple[str, str, Callable[..., Any] | None]] = {
    "gelu": ("w", "", jax.nn.gelu),
    "times": ("w", "r", lambda acc, r: (acc, r * acc)),
    "dsilu": ("w", "rs", _derivative_of_gate),
}
UPDATES: dict[str, tuple[str, str, Callable[..., Any] | None]] = {
    "plain": EPILOGUES["plain"],
    "adamw": ("w", "PMVC", _adamw),
}
JOBS = [
    (shape, name) for shapes, names in ((GRADIENTS, UPDATES), (SHAPES, EPILOGUES)) for shape in shapes for name in names
]
EPILOGUES |= UPDATES | HELD
Shape = tuple[int, int, int, str]


def avals(shape: Shape, name: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of what a product reads, by name."""
    m, n, k, layout = shape
    weight = (n, k) if layout[1] == "t" else (k, n)
    shapes = {"x": (k, m) if layout[0] == "t" else (m, k), "w": weight, "u": weight, "b": (n,), "C": (1, 1)}
    weights, operands, _ = EPILOGUES[name]
    dtypes = {key: jnp.float32 if key.isupper() else DTYPE for key in ("x", *weights, *operands)}
    return {key: jax.ShapeDtypeStruct(shapes.get(key, (m, n)), dtype) for key, dtype in dtypes.items()}


def ours(layout: str, name: str, config: cutjax.Config | None) -> Callable[..., Any]:
    """Returns the product with its epilogue by a kernel."""
    weights, operands, epilogue = EPILOGUES[name]

    def narrowed(*args: jax.Array) -> Any:
        assert epilogue is not None
        accs, rest = args[: len(weights)], args[len(weights) :]
        if operands.isupper():
            return epilogue(*args)
        return jax.tree.map(lambda y: y.astype(DTYPE), epilogue(*accs, *(x.astype(accs[0].dtype) for x in rest)))

    def run(x: dict[str, jax.Array]) -> Any:
        b = tuple(x[key] for key in weights)
        how: dict[str, Any] = {"layout": layout, "backend": "cuda", "config": config}
        if epilogue is not None:
            how |= {"epilogue": narrowed, "operands": tuple(x[key] for key in operands)}
        return cutjax.gemm(x["x"], b if len(b) > 1 else b[0], **how)

    return run


def xla(layout: str, name: str) -> Callable[..., Any]:
    """Returns the same in plain JAX, in bf16 as programs have it."""
    weights, operands, epilogue = EPILOGUES[name]

    def run(x: dict[str, jax.Array]) -> Any:
        a = x["x"].T if layout[0] == "t" else x["x"]
        accs = [jnp.matmul(a, x[key].T if layout[1] == "t" else x[key]) for key in weights]
        return accs[0] if epilogue is None else epilogue(*accs, *(x[key] for key in operands))

    return run


def problem_of(shape: Shape, name: str) -> cutjax.Problem:
    """Returns the problem that a product with its epilogue is."""
    (row,) = cutjax.explain(ours(shape[3], name, None), platform="cpu")(avals(shape, name)).rows
    return row.choice.problem


def kernels(shape: Shape, name: str, most: int) -> list[Kernel]:
    """Returns the kernels to time: those predicted fastest, three of a kind of tile at most, and of other kinds one."""
    problem = problem_of(shape, name)
    found = [kernel for x in family.configs(problem) if isinstance(kernel := resolve(problem, x), Kernel)]
    found.sort(key=lambda kernel: kernel.time_us(problem.device))
    limit = 1.6 * found[0].time_us(problem.device)
    chosen: list[Kernel] = []
    of_kind: dict[tuple[Any, ...], int] = {}
    for kernel in found:
        c = kernel.config
        kind = c.bm, c.bn, c.schedule, c.swap, c.stream_k, c.parts > 1
        known = of_kind.setdefault(kind, 0)
        another = known == 0 and len(of_kind) <= most + 3 and kernel.time_us(problem.device) < limit
        if (len(chosen) < most and known < 3) or another:
            chosen.append(kernel)
            of_kind[kind] += 1
    return chosen


def _compile(source: str, name: str, arch: str) -> str:
    try:
        compile_kernel(source, name=name, arch=arch)
    except Exception as error:
        return f"{name}: {error}"[:300]
    return ""


def compile_all(found: Sequence[Kernel], workers: int) -> None:
    """Compiles kernels into the disk cache, in processes of their own."""
    sources = {kernel.source: kernel for kernel in found}
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_compile, source, x.name, x.problem.arch) for source, x in sources.items()]
        for future in futures:
            if failure := future.result():
                print(failure)


def measure(shape: Shape, name: str, chosen: Sequence[Kernel], pool: concurrent.futures.Executor) -> dict[str, Any]:
    """Returns the row of a product."""
    types = avals(shape, name)
    functions = [xla(shape[3], name), *(ours(shape[3], name, kernel.config) for kernel in chosen)]
    compiled = list(pool.map(lambda function: jax.jit(function).lower(types).compile(), functions))

    def make(seed: int) -> tuple[dict[str, jax.Array]]:
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(types))
        return ({key: jax.random.normal(k, x.shape, x.dtype) for k, (key, x) in zip(keys, types.items(), strict=True)},)

    sets = timing.input_sets(make, most=24)
    rotation = itertools.cycle(sets)
    each = [timing.records([(function, sets[0])]) for function in compiled]
    reps = SLOW_REPS if sum(us for _, us in each[0]) > SLOW_US else REPS
    order = [i for _ in range(reps) for i in random.sample(range(len(compiled)), len(compiled))]
    seen = iter(timing.records([(compiled[i], next(rotation)) for i in order], [(compiled[0], sets[0])]))
    samples: list[list[float]] = [[] for _ in compiled]
    for i in order:
        samples[i].append(sum(us for _, us in itertools.islice(seen, len(each[i]))))
    xla_us, *times = (round(float(np.median(us)), 2) for us in samples)
    defaults = dataclasses.asdict(cutjax.Config())
    configs = [{k: v for k, v in dataclasses.asdict(x.config).items() if v != defaults[k]} for x in chosen]
    row = dict(zip(("m", "n", "k", "layout"), shape, strict=True)) | {"epilogue": name, "xla_us": xla_us}
    return {**row, "xla_kernel": "+".join(n for n, _ in each[0]), "configs": list(zip(configs, times, strict=True))}


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fused_sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/fused-sweep.json"))
    parser.add_argument("--seconds", type=float, default=200, help="after which no other product is begun")
    parser.add_argument("--most", type=int, default=8, help="configs of each product, the predicted fastest first")
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="only so many, the first")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count(), help="that compile")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--list", action="store_true", help="only say what would be timed")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.seconds
    find = functools.partial(kernels, most=args.most)
    jobs = [(shape, name, find(shape, name)) for shape, name in JOBS[: args.jobs]]
    if args.list:
        for shape, name, chosen in jobs:
            print(*shape, name, *(kernel.name for kernel in chosen))
        return 0
    compile_all([kernel for *_, chosen in jobs for kernel in chosen], args.workers)
    rows = []
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for shape, name, chosen in jobs:
            if time.monotonic() > end:
                break
            rows.append(measure(shape, name, chosen, pool))
            best = min(us for _, us in rows[-1]["configs"])
            print(*shape, name, f"XLA {rows[-1]['xla_us']} us, best {best} us", flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({**report.environment(args.commit), "rows": rows}))
    return 0
