"""The programs that tests/gpu/stress.py repeats: of every family of kernels, several tiles for every block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import grouped_epilogues
import grouped_problems
import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from cutjax.primitives.product import multiply
from cutjax.primitives.ragged import Depth, Rows

SCHEDULES, CLUSTERS, LAYOUTS = ("coop", "pingpong"), ((1, 1), (2, 1), (1, 2)), ("nn", "nt", "tn", "tt")
SHAPES = [(schedule, cluster) for schedule in SCHEDULES for cluster in CLUSTERS]
H = np.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """One function and its arguments.

    Attributes:
      name: says what is special about it.
      fn: a function of arrays; any tree of arrays is its result.
      arrays: makes its arguments, on the host.
    """

    name: str
    fn: Callable[..., Any]
    arrays: Callable[[], tuple[Any, ...]]


def gaussian(seed: int, *shapes: tuple[int, ...], dtype: Any = H) -> list[np.ndarray]:
    """Arrays of unit variance."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


# With the shapes of their operands and how many products they take.
EPILOGUES: dict[str, tuple[Callable[..., Any], int, list[str]]] = {
    "scalar": (lambda acc, s: acc * s, 1, ["11"]),
    "column": (lambda acc, c: jax.nn.gelu(acc + c), 1, ["1n"]),
    "row": (lambda acc, r: jax.nn.silu(acc * r), 1, ["m1"]),
    "residual": (lambda acc, f: (acc + f).astype(H), 1, ["mn"]),
    "every operand": (lambda acc, s, c, r, f: ((acc * s + c + r + f).astype(H), acc), 1, ["11", "1n", "m1", "mn"]),
    "reductions": (
        lambda acc, f: ((y := acc + f).astype(H), y.sum(-2), y.sum(-1), y.max((-2, -1)), acc.min(-2)),
        1,
        ["mn"],
    ),
    "bias gradient": (
        lambda acc, z: ((t := (acc * jax.nn.sigmoid(z)).astype(H)), t.astype(jnp.float32).sum(-2)),
        1,
        ["mn"],
    ),
    "products": (lambda g, u, c: (jax.nn.silu(g) * u + c).astype(H), 2, ["1n"]),
}


def _pick(problem: cutjax.Problem, schedule: str, cluster: tuple[int, int], number: int) -> cutjax.Config | None:
    served = [
        config
        for config in cutjax.candidates(problem)
        if config.schedule == schedule and (config.cluster_m, config.cluster_n) == cluster
    ]
    served.sort(key=lambda config: (config.bm, config.bn))
    return served[number * 7 % len(served)] if served else None


def dense(tiny: bool) -> Iterator[Program]:
    """Plain products in every layout, schedule and cluster, and every epilogue in every schedule and cluster."""
    k, batch = (8, 2) if tiny else (136, 70)
    cases = [(layout, None, shape) for layout in LAYOUTS for shape in SHAPES]
    cases += [(LAYOUTS[i % 4], name, shape) for i, name in enumerate(EPILOGUES) for shape in SHAPES]
    for number, (layout, name, shape) in enumerate(cases):
        fn, products, operands = EPILOGUES[name] if name else (None, 1, [])

        def shapes(m: int, n: int, layout=layout, products=products, operands=operands) -> list[tuple[int, ...]]:
            a, b = (m, k) if layout[0] == "n" else (k, m), (k, n) if layout[1] == "n" else (n, k)
            axes = [tuple({"1": 1, "m": m, "n": n}[axis] for axis in operand) for operand in operands]
            return [(batch, *x) for x in (a, *[b] * products, *axes)]

        def gemm(*arrays, config=None, fn=fn, products=products, layout=layout, backend="auto"):
            a, rest = arrays[0], arrays[1:]
            params: dict[str, Any] = {"layout": layout, "backend": backend, "config": config}
            if fn is not None:
                params |= {"operands": rest[products:], "out_dtype": np.float32}
                params["epilogue"] = lambda *xs: fn(*(x.astype(jnp.float32) for x in xs))
            return cutjax.gemm(a, rest[0] if products == 1 else rest[:products], **params)

        m, n, config = 24, 16, None
        if not tiny:
            avals = [jax.ShapeDtypeStruct(x, H) for x in shapes(4096, 4096)]
            (row,) = cutjax.explain(gemm, platform="cuda")(*avals).rows
            config = _pick(row.choice.problem, *shape, number)
            if config is None:
                continue
            m, n = config.bm * config.cluster_m + 8, config.bn * config.cluster_n + 8
        backend = "xla" if tiny else "cuda"
        label = "xla" if config is None else config.name(row.choice.problem.bare)
        yield Program(
            f"gemm {name or 'plain'} {layout} {label}",
            functools.partial(gemm, config=config, backend=backend),
            functools.partial(lambda *args: tuple(gaussian(*args)), number, *shapes(m, n)),
        )


def symmetric(tiny: bool) -> Iterator[Program]:
    """Symmetric products in both layouts and every schedule and cluster."""
    k, batch = (8, 2) if tiny else (136, 70)
    for number, (layout, shape) in enumerate((layout, shape) for layout in "nt" for shape in SHAPES):
        full, config, m = "nt" if layout == "n" else "tn", None, 24
        if not tiny:
            problem = cutjax.Problem.of(4096, 4096, k, full, symmetric=True)
            config = _pick(problem, *shape, number)
            if config is None:
                continue
            m = config.bm * config.cluster_m + config.bn * config.cluster_n + 8
        fn = functools.partial(cutjax.syrk, layout=layout, config=config, backend="xla" if tiny else "cuda")
        shape_of_a = (batch, m, k) if layout == "n" else (batch, k, m)
        yield Program(f"syrk {layout} {config}", fn, functools.partial(gaussian, number, shape_of_a))


def grouped(tiny: bool) -> Iterator[Program]:
    """Rows in groups, their weights' gradient, alone and added to memory, and epilogues of groups."""
    backend = "xla" if tiny else "cuda"
    for number, (layout, shape) in enumerate((x, shape) for x in ("nn", "nt", "tn", "add") for shape in SHAPES):
        ragged = "m" if layout[0] == "n" else "k"
        groups = 4 if tiny else 70 if ragged == "k" else 140
        kind: dict[str, Any] = {"groups": groups, "ragged": ragged, "leading": layout == "tn"}
        out = np.dtype(np.float32) if layout == "add" else H
        sides = (layout.replace("add", "tn"), H, H, out)
        probe = cutjax.Problem.of(4096, 4096, 4096, *sides, **kind)
        config = None if tiny else _pick(probe, *shape, number)
        if config is None and (not tiny or shape != SHAPES[0]):
            continue
        m, n = (config.bm * config.cluster_m + 8, config.bn * config.cluster_n + 8) if config else (24, 16)
        sizes = (groups * m // 2, n, 136) if ragged == "m" else (m, n, groups * 40)
        problem = cutjax.Problem.of(*sizes, *sides, **kind)
        label = config.name(problem) if config else "xla"

        def arrays(problem=problem, groups=groups, number=number, layout=layout):
            a, b, of_groups, to = grouped_problems.shapes(problem)
            rng = np.random.default_rng(number)
            rows = grouped_problems.rows(problem) - 5
            drawn = rng.multinomial(rows, rng.dirichlet(np.full(of_groups[-1], 1.0))).astype(np.int32)
            found = (*gaussian(number, a, b), drawn)
            return (*found, *gaussian(number, to, dtype=np.float32)) if layout == "add" else found

        params: dict[str, Any] = {"backend": backend, "config": config}
        if layout == "add":
            fn = functools.partial(
                lambda a, b, s, to, **kw: cutjax.grouped_outer(a, b, s, accumulate=to, **kw), **params
            )
        else:
            product = Rows(layout == "tn", layout) if ragged == "m" else Depth(layout == "tn")
            fn = functools.partial(multiply, product, out_dtype=out, precision=None, **params)
        yield Program(f"grouped {layout} {label}", fn, arrays)
    for number, name in enumerate(grouped_epilogues.EPILOGUES):
        size: dict[str, int] = {"m": 60, "n": 16, "k": 8, "groups": 5} if tiny else {}
        item = grouped_epilogues.Fused(name, ("nn", "nt")[number % 2], **size)
        yield Program(f"grouped {name}", item.gemm(None, backend), item.with_nan)


def layers(tiny: bool) -> Iterator[Program]:
    """mlp and moe, forward and backward: mlp with the arguments of test_mlp_gpu.py."""
    backend = "xla" if tiny else "cuda"
    m, k, f, n = (16, 8, 24, 16) if tiny else (264, 136, 392, 200)
    names = {"plain": (), "gated": ("gate",), "biases": ("b1", "b2"), "gated, biases": ("gate", "b1", "b2")}
    for name, extra in names.items():
        for layout in ("nn", "nt"):
            for save in ("default", "recompute"):
                for activation in (jax.nn.silu, jax.nn.gelu):
                    keys = ("x", "w1", "w2", *extra)

                    def arrays(keys=keys, layout=layout):
                        shapes = {"x": (m, k), "w1": (k, f), "gate": (k, f), "w2": (f, n), "b1": (f,), "b2": (n,)}
                        drawn = dict(zip(keys, gaussian(len(keys), *(shapes[key] for key in keys)), strict=True))
                        for key in drawn.keys() & {"w1", "w2", "gate"}:
                            w = drawn[key] * np.float32(shapes[key][0] ** -0.5)
                            drawn[key] = np.ascontiguousarray(w if layout == "nn" else w.mT).astype(H)
                        return drawn, gaussian(9, (m, n))[0]

                    def fn(args, g, params=(layout, save, activation)):
                        layout, save, activation = params
                        how: dict[str, Any] = {"layout": layout, "save": save, "activation": activation}
                        out, pull = jax.vjp(lambda args: cutjax.mlp(**args, **how, backend=backend), args)
                        return out, pull(g)

                    yield Program(f"mlp {name} {layout} {save} {activation.__name__}", fn, arrays)
    tokens, d, f2, experts = (16, 8, 16, 4) if tiny else (1000, 264, 392, 16)
    for layout in ("nn", "nt"):
        for save in ("default", "recompute"):

            def arrays(layout=layout):
                w = [(experts, d, f2), (experts, d, f2), (experts, f2, d)]
                w = w if layout == "nn" else [(e, b, a) for e, a, b in w]
                return *gaussian(1, (tokens, d), (tokens, experts), *w), gaussian(2, (tokens, d))[0]

            def fn(*args, layout=layout, save=save):
                moe = functools.partial(cutjax.moe, k=3, layout=layout, save=save, backend=backend)
                out, pull = jax.vjp(moe, *args[:-1])
                return out, pull(args[-1])

            yield Program(f"moe {layout} {save}", fn, arrays)


def programs(only: Callable[[str], Any], tiny: bool = False) -> list[Program]:
    """The programs whose name is asked for; ``tiny`` ones run on any platform, by XLA."""
    return [p for family in (dense, symmetric, grouped, layers) for p in family(tiny) if only(p.name)]
