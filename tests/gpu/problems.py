"""Random GEMMs from a seed: problem i of seed s is the same on every machine, so its test name reproduces a failure.

Run one again with ``CUTJAX_TEST_SEED=s pytest -m gpu "tests/gpu/test_exact.py::test_exact[...]"``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

SEED = int(os.environ.get("CUTJAX_TEST_SEED", "20"))
COUNT = int(os.environ.get("CUTJAX_TEST_PROBLEMS", "480"))

# Bounds that keep a problem's reference on one CPU core near 0.1 s.
_PRODUCTS = 4 << 30
_ELEMENTS = 1 << 23
_EDGES = (1, 7, 8, 16, 63, 64, 65, 72, 120, 127, 128, 129, 136, 192, 255, 256, 257, 264, 320, 384, 511, 512, 520, 1024)
# Worst error over its bound for each kind of check; printed at the end, so that the bounds can be calibrated.
WORST: dict[str, float] = {}

_INPUTS = (np.dtype(jnp.bfloat16), np.dtype(np.float16))


@dataclasses.dataclass(frozen=True)
class Random:
    """One random GEMM.

    Attributes:
      index: its number under the seed.
      problem: what is asked.
      aligned: drawn to satisfy the 16-byte rule, so a kernel must serve it.
      pinned: which candidate to pin, as a share of their number; None for the cost model's choice.
    """

    index: int
    problem: cutjax.Problem
    aligned: bool
    pinned: float | None

    def __str__(self) -> str:
        return f"{self.index}-{self.problem}".replace(" -> ", "-").replace(" ", "_")

    @property
    def config(self) -> cutjax.Config | None:
        """The pinned config."""
        if self.pinned is None or not self.aligned:
            return None
        served = _by_name(self.problem)
        return served[int(self.pinned * len(served))]


def _by_name(problem: cutjax.Problem) -> list[cutjax.Config]:
    # Not in the order of the cost model: a change of the model must not change which config a test pins.
    return sorted(cutjax.candidates(problem), key=lambda config: (config.name(problem), config.raster))


def _size(rng: np.random.Generator) -> int:
    kind = rng.random()
    if kind < 0.3:
        return int(rng.choice(_EDGES))
    if kind < 0.6:
        return int(rng.integers(1, 5001))
    return int(np.exp(rng.uniform(0, np.log(5000))) + 0.5)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def generate(index: int, seed: int = SEED) -> Random:
    """Random GEMM number ``index``: sizes 1 to 5000, every layout, dtype and way to batch."""
    rng = np.random.default_rng([seed, index])
    layout = ("nn", "nt", "tn", "tt")[index % 4]
    dtype = _INPUTS[int(rng.random() < 0.4)]
    out_dtype = (dtype, dtype, np.dtype(np.float32), _INPUTS[0], _INPUTS[1])[rng.integers(5)]
    batch, a_batch, b_batch = _batches(rng)
    batches = int(np.prod(batch, dtype=np.int64))
    aligned = rng.random() < 0.95
    sizes = [_size(rng), _size(rng), _size(rng)]
    while True:
        m, n, k = sizes
        if aligned:  # every row that TMA reads or writes is a multiple of 16 bytes
            n = _round_up(n, 8)
            k = _round_up(k, 8) if layout != "tn" else k
            m = _round_up(m, 8) if layout[0] == "t" else m
        products = m * n * k * batches
        elements = max(m * n * batches, m * k * batches, k * n * batches)
        if products <= _PRODUCTS and elements <= _ELEMENTS:
            break
        which = int(rng.integers(3))
        sizes[which] = max(1, sizes[which] // 2)
    pinned = float(rng.random()) if rng.random() < 0.75 else None
    return Random(
        index, cutjax.Problem.of(m, n, k, layout, dtype, dtype, out_dtype, batch, a_batch, b_batch), aligned, pinned
    )


def _batches(rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
    """Batch shapes of the result and of both operands: none, equal, or broadcast along some axes."""
    rank = int(rng.choice([0, 0, 0, 0, 1, 1, 2, 3]))
    batch = tuple(int(size) for size in rng.integers(1, 7, size=rank))
    which = rng.integers(3, size=rank)  # both operands move along the axis, only a, only b
    a_batch = tuple(1 if w == 2 else size for size, w in zip(batch, which, strict=True))
    b_batch = tuple(1 if w == 1 else size for size, w in zip(batch, which, strict=True))
    return batch, a_batch, b_batch


def shapes(problem: cutjax.Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of a, b and the result."""
    a = (problem.m, problem.k) if problem.layout[0] == "n" else (problem.k, problem.m)
    b = (problem.k, problem.n) if problem.layout[1] == "n" else (problem.n, problem.k)
    return (*problem.a.batch, *a), (*problem.bs[0].batch, *b), (*problem.batch, problem.m, problem.n)


def integers(item: Random) -> tuple[np.ndarray, np.ndarray]:
    """Operands of -2 to 2: every order of f32 summation is exact, so a right result is equal, bit for bit."""
    rng = np.random.default_rng([SEED, item.index, 1])
    a, b, _ = shapes(item.problem)
    values = np.arange(-2, 3).astype(item.problem.a.dtype)
    return values[rng.integers(0, 5, a, dtype=np.int8)], values[rng.integers(0, 5, b, dtype=np.int8)]


def gaussian(item: Random) -> tuple[np.ndarray, np.ndarray]:
    """Operands of zero mean and unit variance, rounded to their dtype."""
    rng = np.random.default_rng([SEED, item.index, 2])
    a, b, _ = shapes(item.problem)
    dtype = item.problem.a.dtype
    return rng.standard_normal(a, np.float32).astype(dtype), rng.standard_normal(b, np.float32).astype(dtype)


def reference(a: np.ndarray, b: np.ndarray, layout: str, dtype: Any) -> np.ndarray:
    """``a @ b`` by numpy on the CPU, computed and returned in ``dtype``: nothing in common with what is tested."""
    a, b = a.astype(dtype), b.astype(dtype)
    return np.matmul(a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT)


def compiled(problem: cutjax.Problem, config: cutjax.Config | None, backend: str) -> jax.stages.Compiled:
    """The executable of one GEMM. It takes a third array, of the result's shape, and writes into its memory.

    Filled with NaN, that array shows any element the kernel does not write.
    """

    @functools.partial(jax.jit, donate_argnums=2, keep_unused=True)
    def gemm(a, b, poison):
        return cutjax.gemm(a, b, layout=problem.layout, out_dtype=problem.out_dtype, backend=backend, config=config)

    dtypes = (problem.a.dtype, problem.bs[0].dtype, problem.out_dtype)
    avals = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes(problem), dtypes, strict=True))
    return gemm.lower(*avals).compile()


def poison(problem: cutjax.Problem) -> np.ndarray:
    """NaN in the shape of the result."""
    return np.full(shapes(problem)[2], np.nan, problem.out_dtype)


def note_worst(kind: str, share: float) -> None:
    """Remembers the largest share of a bound that was used up."""
    WORST[kind] = max(share, WORST.get(kind, 0.0))


def mismatch(out: np.ndarray, ref: np.ndarray) -> str:
    """Describes the difference of two results by the box around the wrong elements, which tells the tile."""
    wrong = np.argwhere(out != ref)
    first = tuple(int(i) for i in wrong[0])
    box = ", ".join(f"{low}..{high}" for low, high in zip(wrong.min(0), wrong.max(0), strict=True))
    unwritten = int(np.isnan(out).sum())
    return (
        f"{len(wrong)} of {out.size} elements differ ({unwritten} NaN), in the box [{box}] of {out.shape}; "
        f"first at {first}: {out[first]} for {ref[first]}"
    )


class Prefetch:
    """Prepares items in threads, a few ahead of the one asked for: compiling and references use every core.

    Args:
      items: in the order they will be asked for; skipping some, as ``pytest -k`` does, is fine.
      prepare: makes what a test needs of one item.
      ahead: items prepared before they are asked for; bounds the memory.
    """

    def __init__(self, items: Sequence[Any], prepare: Callable[[Any], Any], ahead: int = 32):
        self._items, self._prepare, self._ahead = list(items), prepare, ahead
        self._pool = concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1))
        self._futures: dict[int, concurrent.futures.Future] = {}

    def get(self, item: Any) -> Any:
        """Returns the result of ``prepare`` for the item, or raises the error that it raised."""
        at = self._items.index(item)
        for i in range(at, min(at + self._ahead, len(self._items))):
            if i not in self._futures:
                self._futures[i] = self._pool.submit(self._prepare, self._items[i])
        for skipped in [i for i in self._futures if i < at]:
            del self._futures[skipped]
        return self._futures.pop(at).result()

    def close(self) -> None:
        """Drops what nobody asked for."""
        self._pool.shutdown(cancel_futures=True)


def prefetching(items: Sequence[Any], prepare: Callable[[Any], Any], ahead: int = 32) -> Any:
    """Returns a fixture of a module: the items of its tests, prepared ahead."""

    @pytest.fixture(scope="module")
    def prefetch(gpus):
        prefetch = Prefetch(items, prepare, ahead)
        yield prefetch
        prefetch.close()

    return prefetch
