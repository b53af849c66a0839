"""Gaussian data against float64 on the CPU, within the tolerance calibrated for each output dtype."""

from __future__ import annotations

import jax
import numpy as np
import problems
import pytest

from benchmarks import oracle

pytestmark = pytest.mark.gpu

# Other problems than the exact test's.
ITEMS = [problems.generate(index) for index in range(10_000, 10_000 + 80)]


def _prepare(item):
    a, b = problems.gaussian(item)
    executable = problems.compiled(item.problem, item.config, "cuda" if item.aligned else "auto")
    return executable, a, b, problems.reference(a, b, item.problem.layout, np.float64)


@pytest.fixture(scope="module")
def prefetch(gpus):
    prefetch = problems.Prefetch(ITEMS, _prepare)
    yield prefetch
    prefetch.close()


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_gaussian(item, prefetch):
    executable, a, b, expected = prefetch.get(item)
    args = jax.device_put((a, b, problems.poison(item.problem)))
    error = oracle.compare(np.asarray(executable(*args)), expected, item.problem.k)
    problems.note_worst(f"norm, {item.problem.out_dtype}", error.relative / error.tolerance)
    problems.note_worst(f"element, {item.problem.out_dtype}", error.worst)
    assert error.ok, f"{item.config}: {error}"


def test_the_same_bits_every_time(gpus):
    item = next(item for item in ITEMS if item.aligned and item.problem.k > 500)
    a, b = jax.device_put(problems.gaussian(item))
    executable = problems.compiled(item.problem, item.config, "cuda")
    first = np.asarray(executable(a, b, jax.device_put(problems.poison(item.problem))))
    for _ in range(20):
        again = np.asarray(executable(a, b, jax.device_put(problems.poison(item.problem))))
        assert np.array_equal(again, first)
