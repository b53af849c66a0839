"""Hundreds of random problems on small integers, where a right result is equal to the reference, bit for bit."""

from __future__ import annotations

import jax
import numpy as np
import problems
import pytest

import cutjax

pytestmark = pytest.mark.gpu

ITEMS = [problems.generate(index) for index in range(problems.COUNT)]


def _prepare(item):
    a, b = problems.integers(item)
    backend = "cuda" if item.aligned else "auto"
    executable = problems.compiled(item.problem, item.config, backend)
    # f32 holds these sums exactly; numpy then rounds to nearest even, as the kernel must.
    expected = problems.reference(a, b, item.problem.layout, np.float32).astype(item.problem.out_dtype)
    return executable, a, b, expected


@pytest.fixture(scope="module")
def prefetch(gpus):
    prefetch = problems.Prefetch(ITEMS, _prepare)
    yield prefetch
    prefetch.close()


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_exact(item, prefetch):
    executable, a, b, expected = prefetch.get(item)
    out = np.asarray(executable(*jax.device_put((a, b, problems.poison(item.problem)))))
    assert out.dtype == expected.dtype
    assert np.array_equal(out, expected), f"{item.config}: {problems.mismatch(out, expected)}"


def test_poison_is_the_result(gpus):
    """The array of NaN really is the memory the kernel writes: else unwritten elements would not be seen."""
    item = next(item for item in ITEMS if item.aligned and item.problem.m * item.problem.n > 1000)
    a, b = problems.integers(item)
    a, b, poison = jax.device_put((a, b, problems.poison(item.problem)))
    address = poison.unsafe_buffer_pointer()
    out = problems.compiled(item.problem, item.config, "cuda")(a, b, poison)
    assert out.unsafe_buffer_pointer() == address
    assert poison.is_deleted()


def test_kernels_serve_what_is_aligned():
    """No aligned problem falls back to XLA, and every schedule and cluster shape is drawn."""
    pinned = {item.config for item in ITEMS if item.config is not None}
    assert all(cutjax.candidates(item.problem) for item in ITEMS if item.aligned)
    assert {config.schedule for config in pinned} == {"coop", "pingpong"}
    assert {(config.cluster_m, config.cluster_n) for config in pinned} == {(1, 1), (2, 1), (1, 2)}
