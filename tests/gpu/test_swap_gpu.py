"""Swapped operands, and rows that TMA cannot store, on the device: exact in every layout and epilogue, and Gaussian.

The configs are pinned: tiles of every shape, both schedules, all clusters. A kernel that hangs ends its process after a
minute; with ``-n 1`` another takes over, and only that test is lost.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import itertools
from collections.abc import Callable
from typing import Any

import grouped_oracle
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import cutjax
from benchmarks import oracle

pytestmark = pytest.mark.gpu

H, F32, S8 = jnp.bfloat16, jnp.float32, jnp.int8
LAYOUTS = ("nn", "nt", "tn", "tt")
KEY = np.array([7, 9], np.uint32)


def places(acc):
    axes = [jax.lax.broadcasted_iota(jnp.int32, acc.shape, axis) for axis in range(acc.ndim)]
    return acc + (axes[-2] * 2 - axes[-1] + 3 * axes[0]).astype(F32)


def dropout(acc):
    kept = jax.random.bernoulli(jax.random.wrap_key_data(jnp.asarray(KEY)), 0.5, acc.shape)
    return jnp.where(kept, 2 * acc, 0)


# The function, and its operands: along rows "r", columns "c", both "f" or neither "s". On integers all of it is exact.
EPILOGUES: dict[str, tuple[Callable[..., Any] | None, tuple[tuple[str, Any], ...]]] = {
    "plain": (None, ()),
    "bias": (lambda acc, c: (acc + c.astype(F32)).astype(H), (("c", H),)),
    "scales": (lambda acc, r, c: acc * r - c, (("r", F32), ("c", F32))),
    "residual": (lambda acc, s, x: (acc * s + x.astype(F32)).astype(H), (("s", F32), ("f", H))),
    "residual in f32": (lambda acc, x, r: acc + x * r, (("f", F32), ("r", F32))),
    "two": (lambda acc, x: (acc + x.astype(F32), acc.astype(H)), (("f", H),)),
    "bytes": (lambda acc, x: (jnp.clip(acc, -99, 99).astype(S8), (acc - x.astype(F32)).astype(H)), (("f", S8),)),
    "places": (places, ()),
    "dropout": (dropout, ()),
    "over rows": (lambda acc, c: ((acc + c).astype(H), acc.sum(-2), jnp.abs(acc).max(-2)), (("c", F32),)),
    "over columns": (lambda acc, r: (acc, (acc * r).sum(-1), acc.min(-1)), (("r", F32),)),
    "over both": (lambda acc, x: ((t := acc + x.astype(F32)).astype(H), t.sum((-2, -1)), t.max((-2, -1))), (("f", H),)),
}


def tiles() -> list[dict[str, Any]]:
    """The fields of configs of every tile, in both schedules, in clusters in turn."""
    found = []
    sizes = itertools.product((64, 128, 256), (8, 16, 24, 48, 72, 128, 160, 192, 248, 256), ("coop", "pingpong"))
    for i, (bm, bn, schedule) in enumerate(sizes):
        cluster_m, cluster_n = ((1, 1), (2, 1), (1, 2))[i % 3]
        fields = {"bm": bm, "bn": bn, "schedule": schedule, "cluster_m": cluster_m, "cluster_n": cluster_n}
        if bn % 16:
            fields["cluster_m"] = 1
        try:
            cutjax.Config(**fields, stages=2)
        except ValueError:
            continue
        found.append(fields)
    return found


TILES = tiles()


@dataclasses.dataclass(frozen=True)
class Item:
    """One product with a pinned config: number ``index`` of its kind."""

    index: int
    swap: bool = True
    name: str = "plain"

    def __str__(self) -> str:
        return f"{self.index}-{'swap' if self.swap else 'odd'}-{self.name}".replace(" ", "_")

    @functools.cached_property
    def problem(self) -> cutjax.Problem:
        """Sizes, layout, dtypes and batch; its epilogue is the identity."""
        rng = np.random.default_rng([problems.SEED, self.index, 71, self.swap])
        layout = LAYOUTS[self.index % 4]
        if self.index % 3 == 0:  # few rows, many columns
            m, n = int(rng.integers(1, 41)), int(rng.integers(500, 4000))
        elif self.index % 3 == 1:  # several tiles for each SM, for small ones
            m, n = (int(rng.integers(300, 1500)) for _ in range(2))
        else:
            m, n = (int(np.exp(rng.uniform(0, np.log(400))) + 0.5) for _ in range(2))
        if rng.random() < 0.5:  # else rows of b in "nn", and of the result, are of whole units of 16 bytes
            n |= 1
        elif self.swap:
            n = 8 * -(-n // 8)
        k = 8 * int(rng.integers(1, 20 if self.index % 3 == 1 else 60)) - int(rng.random() < 0.2)
        dtype = (np.dtype(H), np.dtype(np.float16))[rng.integers(2)]
        out_dtype = (dtype, dtype, np.dtype(np.float32))[rng.integers(3)]
        batch, a_batch, b_batch = problems._batches(rng) if self.index % 3 == 2 else ((), (), ())
        return cutjax.Problem.of(m, n, k, layout, dtype, dtype, out_dtype, batch, a_batch, b_batch)

    def operands(self) -> list[np.ndarray]:
        """The epilogue's operands: integers, with the result's batch axes where their kind has any."""
        rng = np.random.default_rng([problems.SEED, self.index, 72])
        p, found = self.problem, []
        for kind, dtype in EPILOGUES[self.name][1]:
            core = {"s": (), "r": (p.m, 1), "c": (1, p.n), "f": (p.m, p.n)}[kind]
            batch = p.batch if kind != "s" and self.index % 2 else ()
            found.append(rng.integers(-3, 4, (*batch, *core)).astype(dtype))
        return found

    def gemm(self, backend: str = "cuda") -> Callable[..., Any]:
        """The product as a function of a, b and the operands."""
        fn, p = EPILOGUES[self.name][0], self.problem
        how: dict[str, Any] = {"layout": p.layout, "backend": backend, "config": None}
        if backend == "cuda":
            how["config"] = self.config
        how["out_dtype"] = p.out_dtype if fn is None else (None,) * len(self.expected_of(jnp.zeros((1,) * 3)))
        return lambda a, b, *operands: cutjax.gemm(a, b, epilogue=fn, operands=operands, **how)

    def expected_of(self, acc: Any, *operands: Any) -> list[Any]:
        """The results, of accumulators in f32."""
        fn, kinds = EPILOGUES[self.name]
        if fn is None:
            return [acc.astype(self.problem.out_dtype)]
        operands = operands or tuple(jnp.zeros((), dtype) for _, dtype in kinds)
        return jax.tree.leaves(fn(acc, *operands))

    @functools.cached_property
    def config(self) -> cutjax.Config:
        """The first that serves, of the tiles in random order; of one in four, with k divided in some way."""
        avals = [jax.ShapeDtypeStruct(shape, self.problem.a.dtype) for shape in problems.shapes(self.problem)[:2]]
        (row,) = cutjax.explain(self.gemm("auto"), platform="cuda")(*avals, *self.operands()).rows
        assert row.choice is not None
        rng = np.random.default_rng([problems.SEED, self.index, 73])
        more = {"stages": int(rng.integers(2, 5)), "raster": int(rng.choice([1, 3, 8, -4])), "swap": self.swap}
        ways = ({"cluster_k": 2}, {"cluster_k": 4}, {"splits": 3}, {"stream_k": True})
        divided = ways[rng.integers(4)] if rng.random() < 0.25 else {}
        for at, depth in itertools.product(rng.permutation(len(TILES)), dict.fromkeys((more["stages"], 2))):
            fields = TILES[at] | more | {"stages": depth} | divided
            try:
                config = cutjax.Config(**fields)
            except ValueError:  # only some tiles can be shared
                continue
            if not cutjax.reasons(config, row.choice.problem):
                return config
        raise AssertionError(f"no config with {more} and {divided} for {row.choice.problem}")


def prepare(item: Item) -> tuple[Any, ...]:
    """The executable, its arguments, the first of them arrays that become results, and what is expected."""
    a, b = problems.integers(item)  # pyright: ignore[reportArgumentType]  # it has an index and a problem
    operands = item.operands()
    acc = problems.reference(a, b, item.problem.layout, np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = [np.asarray(x) for x in item.expected_of(jnp.asarray(acc), *map(jnp.asarray, operands))]
    gemm = item.gemm()

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def fn(poison, *args):
        return gemm(*args)

    poison = [
        np.full(x.shape, 111 if x.dtype.kind == "i" else np.nan, x.dtype) for x in expected if x.shape == acc.shape
    ]
    args = (poison, a, b, *operands)
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return fn.lower(*avals).compile(), args, expected


NAMES = [*EPILOGUES]
EXACT = [Item(i, True, "plain") for i in range(2 * len(TILES))]
EXACT += [Item(1000 + i, True, NAMES[i % len(NAMES)]) for i in range(14 * len(NAMES))]
EXACT += [Item(2000 + i, False, NAMES[i % len(NAMES)]) for i in range(4 * len(NAMES))]


@pytest.fixture(autouse=True)
def deadline(request):
    """Ends the process where a kernel hangs."""
    faulthandler.dump_traceback_later(90, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def prefetch(gpus):
    prefetch = problems.Prefetch(EXACT, prepare)
    yield prefetch
    prefetch.close()


@pytest.mark.parametrize("item", EXACT, ids=str)
def test_exact(item, prefetch):
    executable, args, expected = prefetch.get(item)
    results = jax.tree.leaves(executable(*jax.device_put(args)))
    for i, (out, ref) in enumerate(zip(map(np.asarray, results), expected, strict=True)):
        assert (out.dtype, out.shape) == (ref.dtype, ref.shape)
        where = problems.mismatch(out, ref) if out.ndim and not np.array_equal(out, ref) else (out, ref)
        assert np.array_equal(out, ref), f"result {i} of {item.problem}, {item.config}: {where}"


@pytest.mark.parametrize("index", range(3000, 3024))
def test_gaussian(index, gpus):
    item = Item(index)
    a, b = problems.gaussian(item)  # pyright: ignore[reportArgumentType]
    out = np.asarray(jax.jit(item.gemm())(a, b))
    error = oracle.compare(out, problems.reference(a, b, item.problem.layout, np.float64), item.problem.k)
    problems.note_worst(f"swapped, {out.dtype}", error.worst)
    assert error.ok, f"{item.problem}, {item.config}: {error}"


@pytest.mark.parametrize("m", [1, 63, 65, 333, 1001])
def test_symmetric_results_of_odd_size(m, gpus):
    """Their transposes are stored without TMA too."""
    a = np.random.default_rng(m).integers(-2, 3, (3, m, 136)).astype(H)
    expected = np.matmul(a.astype(np.float32), a.astype(np.float32).mT)
    for dtype in (H, F32):
        out = np.asarray(cutjax.syrk(a, out_dtype=dtype, backend="cuda"))
        np.testing.assert_array_equal(out, expected.astype(dtype))


@pytest.mark.parametrize("n", [1, 100, 333, 514])
def test_rows_of_groups_of_odd_size(n, gpus):
    """Partial blocks of rows, whole ones and rows of no group: none is a whole unit of 16 bytes."""
    rng = np.random.default_rng(n)
    sizes = np.array([0, 1, 130, 64, 257], np.int32)
    x = rng.integers(-2, 3, (500, 72)).astype(H)
    w = rng.integers(-2, 3, (5, n, 72)).astype(H)
    out = np.asarray(cutjax.grouped_gemm(x, w, sizes, layout="nt", backend="cuda"))
    np.testing.assert_array_equal(out, grouped_oracle.multiply(x, w, sizes, layout="nt").astype(H))
