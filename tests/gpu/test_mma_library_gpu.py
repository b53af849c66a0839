"""Slim kernels and symmetric results of the mma family on the device: exact in every layout and epilogue, and Gaussian.

The configs are pinned, so that they run on devices too where another family goes first.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import syrk_problems as syrks
import test_swap_gpu as swaps

import cutjax
from benchmarks import oracle
from cutjax.kernels.mma import family, slim

pytestmark = pytest.mark.gpu

H, F32 = jnp.bfloat16, jnp.float32
# Of a slim kernel that has columns swapped, and of one with more rows than it holds, no reductions.
WITHOUT_REDUCTIONS = [name for name in swaps.EPILOGUES if not name.startswith("over")]


@dataclasses.dataclass(frozen=True)
class Slim(swaps.Item):
    """One product of few rows, or, swapped, of few columns."""

    @functools.cached_property
    def problem(self) -> cutjax.Problem:
        rng = np.random.default_rng([problems.SEED, self.index, 81, self.swap])
        few, many = self.index % 4 + 1, int(rng.integers(1, 3000))
        m, n = (many, few) if self.swap else (few, many)
        if self.index % 3 and not self.swap:
            n = 8 * -(-n // 8)
        layout = swaps.LAYOUTS[self.index // 4 % 4]
        if few > 2 and layout in (("tn", "tt") if self.swap else ("nn", "tn")):
            # Rows of the other matrix are whole words: of those that begin anywhere, kernels of 4 rows would spill.
            m, n = (m + m % 2, n) if self.swap else (m, n + n % 2)
        k = int(rng.integers(1, 3000)) if self.index % 2 else 8 * int(rng.integers(1, 400))
        dtype = (np.dtype(H), np.dtype(np.float16))[rng.integers(2)]
        out_dtype = (dtype, dtype, np.dtype(np.float32))[rng.integers(3)]
        batch, a_batch, b_batch = problems._batches(rng) if self.index % 5 == 2 else ((), (), ())
        return cutjax.Problem.of(m, n, k, layout, dtype, dtype, out_dtype, batch, a_batch, b_batch)

    @functools.cached_property
    def config(self) -> cutjax.MmaConfig:
        """A slim one that serves, with k divided in one of four."""
        avals = [jax.ShapeDtypeStruct(shape, self.problem.a.dtype) for shape in problems.shapes(self.problem)[:2]]
        (row,) = cutjax.explain(self.gemm("auto"), platform="cuda")(*avals, *self.operands()).rows
        assert row.choice is not None
        asked, rng = row.choice.problem, np.random.default_rng([problems.SEED, self.index, 83])
        found = [config for config in slim.configs(asked) if config.swap == self.swap]
        if rng.random() < 0.25:
            found = [dataclasses.replace(config, splits=3) for config in found]
        served = [config for config in found if not cutjax.reasons(config, asked)]
        assert served, f"no slim kernel for {asked}"
        return served[rng.integers(len(served))]


NAMES = [*swaps.EPILOGUES]
EXACT = [Slim(i, False, NAMES[i % len(NAMES)]) for i in range(20 * len(NAMES))]
EXACT += [Slim(i, True, WITHOUT_REDUCTIONS[i % len(WITHOUT_REDUCTIONS)]) for i in range(12 * len(WITHOUT_REDUCTIONS))]


@pytest.fixture(scope="module")
def prefetch(gpus):
    prefetch = problems.Prefetch(EXACT, swaps.prepare)
    yield prefetch
    prefetch.close()


@pytest.mark.parametrize("item", EXACT, ids=str)
def test_exact(item, prefetch):
    swaps.test_exact(item, prefetch)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("index", range(1000, 1020))
def test_gaussian(index, swap, gpus):
    item = Slim(index, swap)
    a, b = problems.gaussian(item)  # pyright: ignore[reportArgumentType]
    out = np.asarray(jax.jit(item.gemm())(a, b))
    error = oracle.compare(out, problems.reference(a, b, item.problem.layout, np.float64), item.problem.k)
    problems.note_worst(f"slim, {out.dtype}", error.worst)
    assert error.ok, f"{item.problem}, {item.config}: {error}"


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_few_rows_of_each_group(layout, gpus):
    """Groups of 0 to 5 rows, more than a slim tile has, and rows of no group."""
    rng = np.random.default_rng(0)
    sizes = np.array([3, 0, 5, 1, 4, 2, 0, 1], np.int32)
    x = rng.integers(-2, 3, (24, 200)).astype(H)
    w = rng.integers(-2, 3, (8, 200, 136) if layout == "nn" else (8, 136, 200)).astype(H)
    for config in family.configs(cutjax.Problem.of(24, 136, 200, layout, groups=8, ragged="m")):
        if config.slim:
            out = np.asarray(cutjax.grouped_gemm(x, w, sizes, layout=layout, backend="cuda", config=config))
            expected = swaps.grouped_oracle.multiply(x, w, sizes, layout=layout).astype(H)
            np.testing.assert_array_equal(out, expected, err_msg=str(config))


@pytest.mark.parametrize("index", range(60))
def test_symmetric(index, gpus):
    item = syrks.generate(index)
    served = [config for config in family.configs(item.problem) if not cutjax.reasons(config, item.problem)]
    config = served[np.random.default_rng(index).integers(len(served))]
    args = item.integers()
    results = item.run(item.compiled(config), *args)
    for out, ref, dtype in zip(results, item.expected(*args), item.dtypes, strict=True):
        np.testing.assert_array_equal(out, ref.astype(dtype), err_msg=str(config))
        np.testing.assert_array_equal(out, np.swapaxes(out, -1, -2), err_msg=str(config))
