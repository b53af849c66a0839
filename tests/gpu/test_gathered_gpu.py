"""Products that read rows by index, of rows and of contractions in groups: exact on integers, near float64 else."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import launches
import numpy as np
import pytest

from cutjax import Config, Problem
from cutjax.kernels import families
from cutjax.kernels.operand import Gathered
from cutjax.kernels.sm90 import kernel as sm90

pytestmark = pytest.mark.gpu

TOKENS, PAIRS = 700, 4
ROWS = TOKENS * PAIRS
SIZES = np.array([7, 900, 0, 33, 1200, 1, 600], np.int32)  # the first are of no group, as are the last rows
STARTS = np.cumsum(SIZES)


def problem(divided: str, m: int, n: int, dtype: str) -> Problem:
    """Rows of tokens, m wide, by groups' matrices ``[m, n]``; or, transposed, by rows n wide."""
    if divided == "m":
        asked = Problem.of(ROWS, n, m, "nn", dtype, dtype, "float32", groups=6, ragged="m", leading=True)
    else:
        asked = Problem.of(m, n, ROWS, "tn", dtype, dtype, "float32", groups=6, ragged="k", leading=True)
    return dataclasses.replace(asked, a=dataclasses.replace(asked.a, view=Gathered(TOKENS, PAIRS)))


@functools.cache
def data(divided: str, m: int, n: int, dtype: str, integers: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """What a kernel reads, and the result in float64; rows of no group, and a token that none has, are NaN."""
    rng, asked = np.random.default_rng(0), problem(divided, m, n, dtype)

    def draw(*shape: int) -> np.ndarray:
        found = rng.integers(-2, 3, shape) if integers else rng.standard_normal(shape)
        return found.astype(np.float32).astype(asked.a.dtype)

    x, other = draw(TOKENS, m), draw(6, m, n) if divided == "m" else draw(ROWS, n)
    pairs = rng.permutation(ROWS).astype(np.int32)
    x[TOKENS - 1] = np.nan
    inside = np.zeros(ROWS, bool)
    inside[STARTS[0] : STARTS[-1]] = True
    pairs[inside & (pairs // PAIRS == TOKENS - 1)] = ROWS  # of no token: zeros
    if divided == "k":
        other[~inside] = np.nan
    wide = np.where((pairs < ROWS)[:, None], x.astype(np.float64)[np.minimum(pairs // PAIRS, TOKENS - 1)], 0)
    groups = list(itertools.pairwise(STARTS.tolist()))
    b = other.astype(np.float64)
    if divided == "m":
        expected = np.zeros((ROWS, n))
        for i, (first, last) in enumerate(groups):
            expected[first:last] = wide[first:last] @ b[i]
    else:
        expected = np.stack([wide[first:last].T @ b[first:last] for first, last in groups])
    return [x, other, SIZES, pairs, np.full((TOKENS, PAIRS), -1, np.int32)], expected


CONFIGS = [
    Config(64, 64, schedule="pingpong"),
    Config(64, 256, schedule="pingpong", stages=3),
    Config(128, 64, schedule="pingpong"),
    Config(128, 128, schedule="pingpong", stages=5),
    Config(64, 128),
    Config(128, 128),
    Config(128, 256),
    Config(256, 64),
    Config(256, 128, stages=3),
    Config(64, 128, 128, 3, schedule="pingpong"),
    Config(128, 256, 128, 2),
]


@pytest.mark.parametrize("integers", [True, False], ids=["integers", "normal"])
@pytest.mark.parametrize("divided", ["m", "k"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configs(config, divided, integers):
    asked = problem(divided, 328, 264, "bfloat16")
    arrays, expected = data(divided, 328, 264, "bfloat16", integers)
    (got,) = launches.run(asked, sm90.resolved(asked, config).call(), arrays)
    if integers:
        np.testing.assert_array_equal(got, expected)
    else:
        assert np.linalg.norm(got - expected) <= 5e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("shape", [(8, 8), (200, 72), (1032, 40)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("divided", ["m", "k"])
def test_sizes(divided, dtype, shape):
    asked = problem(divided, *shape, dtype)
    arrays, expected = data(divided, *shape, dtype, True)
    for config in (Config(128, 64), Config(64, 64, schedule="pingpong")):
        kernel = families.resolve(asked, config)
        assert not isinstance(kernel, tuple), kernel
        (got,) = launches.run(asked, kernel.call(), arrays)
        np.testing.assert_array_equal(got, expected)


def test_it_repeats():
    """A wrong wait shows once in many launches."""
    for divided in ("m", "k"):
        asked = problem(divided, 328, 264, "bfloat16")
        arrays, expected = data(divided, 328, 264, "bfloat16", True)
        call = sm90.resolved(asked, Config(128, 128)).call()
        for _ in range(20):
            np.testing.assert_array_equal(launches.run(asked, call, arrays)[0], expected)
