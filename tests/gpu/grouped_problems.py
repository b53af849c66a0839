"""Random grouped GEMMs from a seed, hostile sizes included, and what numpy makes of them. The tests' module problems.py
is the same for dense ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import problems
from problems import SEED

import cutjax
from cutjax.primitives.product import multiply
from cutjax.primitives.ragged import Depth, Rows

_PRODUCTS = 1 << 31  # keeps a problem's reference on one CPU core near 0.1 s
_ELEMENTS = 1 << 22  # of each array
_ROWS = (1, 7, 63, 64, 65, 127, 128, 129, 255, 256, 257)
_MOST = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Random:
    """One random grouped GEMM.

    Attributes:
      index: its number under the seed.
      problem: what is asked.
      kinds: two of ``KINDS``, for two runs of the same executable.
      pinned: which candidate to pin, as a share of their number; None for the cost model's choice.
    """

    index: int
    problem: cutjax.Problem
    kinds: tuple[str, str]
    pinned: float | None

    def __str__(self) -> str:
        p = self.problem
        batch = "".join(
            f"_{'x'.join(map(str, b))}" for b in (p.batch, p.a.batch, p.bs[0].batch, p.groups.batch) if p.batch
        )
        dtypes = f"{p.a.dtype.name}-{p.out_dtype.name}"
        leading = "_leading" if p.groups.leading else ""
        return f"{self.index}-{p.divided}_{p.m}x{p.n}x{p.k}_g{p.groups.count}_{p.layout}_{dtypes}{batch}{leading}"

    @property
    def config(self) -> cutjax.Config | None:
        """The pinned config."""
        return None if self.pinned is None else pick(self.problem, self.pinned)


def pick(problem: cutjax.Problem, share: float) -> cutjax.Config:
    """One of the configs that serve a problem; a change of the cost model does not change which."""
    served = problems._by_name(problem)
    return served[int(share * len(served))]


def rows(problem: cutjax.Problem) -> int:
    """The rows that the groups divide."""
    return problem.m if problem.divided == "m" else problem.k


def generate(index: int, seed: int = SEED) -> Random:
    """Random grouped GEMM number ``index``: every third is ``ragged="k"``, the others "nn" and "nt" in turn."""
    rng = np.random.default_rng([seed, index, 11])
    ragged = "k" if index % 3 == 2 else "m"
    layout = "tn" if ragged == "k" else ("nn", "nt")[index % 3]
    dtype = problems._INPUTS[int(rng.random() < 0.3)]
    out_dtype = (dtype, dtype, np.dtype(np.float32), *problems._INPUTS)[rng.integers(5)]
    count = int(rng.choice(_ROWS)) if rng.random() < 0.3 else int(np.exp(rng.uniform(0, np.log(3000))) + 0.5)
    groups = int(rng.integers(1, 81)) if rng.random() < 0.7 else int(rng.integers(1, 5))
    k, n = (8 * int(rng.integers(1, 101)) for _ in range(2))
    rank = int(rng.choice([0, 0, 0, 0, 0, 1, 1, 2]))
    batch = tuple(int(size) for size in rng.integers(1, 4, rank))
    moves = rng.random((3, rank)) < 0.6
    a_batch, b_batch, sizes_batch = (tuple(int(s) if m else 1 for s, m in zip(batch, x, strict=True)) for x in moves)
    batch = tuple(np.broadcast_shapes(a_batch, b_batch, sizes_batch))
    while True:
        results = (groups if ragged == "k" else 1) * np.prod(batch, dtype=int)
        weights = groups * k * n * np.prod(b_batch, dtype=int) if ragged == "m" else 0
        elements = max(weights, count * max(k, n) * np.prod(batch, dtype=int), k * n * results if ragged == "k" else 0)
        if count * k * n * np.prod(batch, dtype=int) <= _PRODUCTS and elements <= _ELEMENTS:
            break
        if rng.random() < 0.5:
            k, n = (max(8, size // 16 * 8) for size in (k, n))
        else:
            groups = max(1, groups // 2)
    m, k = (k, count) if ragged == "k" else (count, k)
    leading = bool(rng.random() < 0.25)
    kinds = ("dirichlet", str(rng.choice(KINDS)))
    pinned = float(rng.random()) if rng.random() < 0.75 else None
    dtypes = {"a_dtype": dtype, "b_dtype": dtype, "out_dtype": out_dtype}
    shape: dict[str, Any] = {"batch": batch, "a_batch": a_batch, "b_batch": b_batch, "sizes_batch": sizes_batch}
    problem = cutjax.Problem.of(m, n, k, layout, **dtypes, **shape, groups=groups, ragged=ragged, leading=leading)
    return Random(index, problem, kinds, pinned)


KINDS = ("dirichlet", "short", "sparse", "one", "rows", "edges", "zero", "negative", "past", "overflow")


def draw_sizes(rng: np.random.Generator, kind: str, m: int, count: int) -> np.ndarray:
    """int32[count] sizes for m rows: uneven, falling short of m, mostly empty, or hostile."""
    share = rng.dirichlet(np.full(count, 2.0))
    sizes = rng.multinomial(m, share).astype(np.int64)
    if kind == "short":
        sizes = rng.multinomial(int(m * rng.random()), share)
    elif kind == "sparse":
        sizes = np.zeros(count, np.int64)
        sizes[rng.integers(count, size=3)] = rng.multinomial(m, [0.2, 0.3, 0.5])
    elif kind == "one":
        sizes = np.where(np.arange(count) == rng.integers(count), m, 0)
    elif kind == "rows":
        sizes = rng.integers(0, 2, count)
    elif kind == "edges":
        sizes = rng.choice((0, *_ROWS), count)
    elif kind == "zero":
        sizes = np.zeros(count, np.int64)
    elif kind == "negative":
        sizes = np.where(rng.random(count) < 0.3, rng.choice((-1, -m, -_MOST, -_MOST - 1), count), sizes)
    elif kind == "past":
        sizes = rng.integers(0, m + 1, count)
    elif kind == "overflow":  # several: their sum wraps around to a small number, or a negative one
        sizes = np.where(rng.random(count) < 0.3, rng.choice((_MOST, _MOST - 1, 1 << 30), count), sizes)
    return sizes.astype(np.int32)


def all_sizes(item: Random, run: int) -> np.ndarray:
    """The sizes of one of the two runs of an item."""
    p = item.problem
    rng = np.random.default_rng([SEED, item.index, 12, run])
    count = p.groups.count + p.groups.leading
    drawn = [draw_sizes(rng, item.kinds[run], rows(p), count) for _ in range(int(np.prod(p.groups.batch)))]
    return np.stack(drawn).reshape(*p.groups.batch, count)


def spans(sizes: np.ndarray, m: int, leading: bool = False) -> list[tuple[int, int]]:
    """First row and end of each group: what the documentation says of any sizes, in integers that do not overflow."""
    ends = [0]
    for size in sizes:
        ends.append(min(ends[-1] + max(int(size), 0), m))
    return list(itertools.pairwise(ends))[int(leading) :]


def shapes(problem: cutjax.Problem) -> tuple[tuple[int, ...], ...]:
    """Shapes of a, b, the sizes and the result."""
    p = problem
    sizes = (*p.groups.batch, p.groups.count + p.groups.leading)
    if p.divided == "k":
        return (*p.a.batch, p.k, p.m), (*p.bs[0].batch, p.k, p.n), sizes, (*p.batch, p.groups.count, p.m, p.n)
    w = (p.k, p.n) if p.layout == "nn" else (p.n, p.k)
    return (*p.a.batch, p.m, p.k), (*p.bs[0].batch, p.groups.count, *w), sizes, (*p.batch, p.m, p.n)


def integers(problem: cutjax.Problem, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands of -2 to 2: every order of f32 summation is exact, so a right result is equal, bit for bit."""
    rng = np.random.default_rng([SEED, seed, 13])
    a, b, _, _ = shapes(problem)
    values = np.arange(-2, 3).astype(problem.a.dtype)
    return values[rng.integers(0, 5, a, dtype=np.int8)], values[rng.integers(0, 5, b, dtype=np.int8)]


def gaussian(problem: cutjax.Problem, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands of zero mean and unit variance, rounded to their dtype."""
    rng = np.random.default_rng([SEED, seed, 14])
    a, b, _, _ = shapes(problem)
    return tuple(rng.standard_normal(s, np.float32).astype(problem.a.dtype) for s in (a, b))  # pyright: ignore


def entries(problem: cutjax.Problem):
    """For each entry of the batch: its index, and those of a, b and the sizes."""
    for index in np.ndindex(problem.batch):
        parts = (problem.a.batch, problem.bs[0].batch, problem.groups.batch)
        yield index, *(tuple(i if size > 1 else 0 for i, size in zip(index, x, strict=True)) for x in parts)


def with_nan(problem: cutjax.Problem, a: np.ndarray, b: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """NaN in the rows of no group, and in the matrices of empty groups: nothing of them may reach a result."""
    a, b = a.copy(), b.copy()
    used_a = np.zeros(a.shape[:-1], bool)
    used_b = np.zeros(b.shape[:-1] if problem.divided == "k" else b.shape[:-2], bool)
    for _, at_a, at_b, at_sizes in entries(problem):
        for group, (start, end) in enumerate(spans(sizes[at_sizes], rows(problem), problem.groups.leading)):
            used_a[at_a][start:end] = True
            if problem.divided == "k":
                used_b[at_b][start:end] = True
            elif end > start:
                used_b[at_b][group] = True
    a[~used_a], b[~used_b] = np.nan, np.nan
    return [a, b]


def reference(problem: cutjax.Problem, a: np.ndarray, b: np.ndarray, sizes: np.ndarray, dtype: Any) -> np.ndarray:
    """A loop over the groups by numpy on the CPU, computed and returned in ``dtype``."""
    out = np.zeros(shapes(problem)[3], dtype)
    for index, at_a, at_b, at_sizes in entries(problem):
        x, y, d = a[at_a], b[at_b], out[index]
        for group, (start, end) in enumerate(spans(sizes[at_sizes], rows(problem), problem.groups.leading)):
            if start == end:
                continue
            part = x[start:end].astype(dtype)
            if problem.divided == "k":
                d[group] = part.T @ y[start:end].astype(dtype)
            else:
                w = y[group].astype(dtype)
                d[start:end] = part @ (w if problem.layout == "nn" else w.T)
    return out


def compiled(problem: cutjax.Problem, config: cutjax.Config | None, backend: str) -> jax.stages.Compiled:
    """The executable. It takes a fourth array, of the result's shape, and writes into its memory.

    Filled with NaN, that array shows any element the kernel does not write.
    """
    product = Depth(problem.groups.leading) if problem.divided == "k" else Rows(problem.groups.leading, problem.layout)
    params: dict[str, Any] = {"out_dtype": problem.out_dtype, "precision": None, "backend": backend, "config": config}

    @functools.partial(jax.jit, donate_argnums=3, keep_unused=True)
    def grouped(a, b, sizes, poison):
        return multiply(product, a, b, sizes, **params)

    dtypes = (problem.a.dtype, problem.bs[0].dtype, np.int32, problem.out_dtype)
    avals = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes(problem), dtypes, strict=True))
    return grouped.lower(*avals).compile()


def poison(problem: cutjax.Problem) -> np.ndarray:
    """NaN in the shape of the result."""
    return np.full(shapes(problem)[3], np.nan, problem.out_dtype)
