"""The largest sizes that kernels of the mma family serve: their last tile on the host, in memory that is never touched.

Signed integers are watched: one that overflows, or an address outside of the arrays, ends the process.
"""

from __future__ import annotations

import dataclasses
import math
import mmap

import kernel_host
import numpy as np
import pytest

from cutjax.kernels.mma import family
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.kernels.problem import Problem

pytestmark = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")

LAST = 16  # rows, or columns, that are not zero
# dtype, layout, architecture, the axis that is large, whether few rows are streamed
CASES = (
    ("bfloat16", "nn", "sm_80", "m", False),
    ("bfloat16", "nn", "sm_80", "n", False),
    ("float16", "tn", "sm_75", "m", False),
    ("int32", "nn", "sm_80", "n", True),
    ("float64", "tn", "sm_80", "m", False),
)


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of which only what is written takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def largest(problem: Problem, axis: str, config: Config) -> Problem:
    """The problem with the largest size along an axis that the config serves, in steps of 8."""
    least, most = 1, 2**29
    while most - least > 1:
        middle = (least + most) // 2
        found = mma.resolve(dataclasses.replace(problem, **{axis: 8 * middle}), config)
        least, most = (least, middle) if isinstance(found, tuple) else (middle, most)
    return dataclasses.replace(problem, **{axis: 8 * least})


@pytest.mark.parametrize(("dtype", "layout", "arch", "axis", "slim"), CASES)
def test_the_last_tile(dtype, layout, arch, axis, slim, tmp_path):
    small = kernel_host.problem(dtype, "", layout, arch, **{"m": 2 if slim else 8, "n": 8, "k": 8, axis: 4096})
    fitting = (c for c in family.configs(small) if c.slim == slim and c.splits == 1 and not (c.tma or c.swap))
    config = min(fitting, key=lambda c: c.bm * c.bn * c.bk)  # the least to compile
    problem = largest(small, axis, config)
    kernel, size = mma.resolved(problem, config), getattr(problem, axis)
    along = (layout[0] == "t") if axis == "m" else (layout[1] == "n")  # a line in memory is as long
    assert size * (problem.a.dtype.itemsize if along else 1) > 2**31 - 2**20

    rng = np.random.default_rng(0)
    dtypes = problem.a.dtype, problem.bs[0].dtype, problem.out_dtype
    a, b, d = (zeros(shape, dtype) for shape, dtype in zip(problem.shapes, dtypes, strict=True))
    a_rows, b_columns = a if layout[0] == "n" else a.T, b if layout[1] == "n" else b.T
    d[-1] = 7  # what the kernel writes over
    a_rows[-LAST:] = rng.integers(-3, 4, a_rows[-LAST:].shape).astype(a.dtype)
    b_columns[:, -LAST:] = rng.integers(-3, 4, b_columns[:, -LAST:].shape).astype(b.dtype)
    kernel_host.run(kernel, [a, b, d], tmp_path, kernel.tiles, kernel.tiles - 1, sanitized=True)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    expected = a_rows[-LAST:].astype(wide) @ b_columns[:, -LAST:].astype(wide)
    tile = config.bm if axis == "m" else config.bn
    last = min((size - 1) % tile + 1, LAST)
    rows, columns = (last, 8) if axis == "m" else (problem.m, last)
    np.testing.assert_array_equal(d[-rows:, -columns:].astype(wide), expected[-rows:, -columns:])
