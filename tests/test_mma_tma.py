"""Tiles of the mma family that TMA loads: on the host, what refuses it, what a launch is told, and the machine code."""

import dataclasses

import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest

from cutjax.kernels.mma.config import Config

needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")

# (dtype, math, layout, architecture, m, n, k, (bm, bn, bk, wm, wn, sliced_k, stages))
CASES = [
    ("float64", "", "nn", "sm_90a", 70, 52, 46, (64, 64, 16, 32, 32, 1, 3)),
    ("float64", "", "tt", "sm_100a", 34, 50, 78, (64, 64, 32, 32, 32, 1, 3)),
    ("float64", "", "tn", "sm_90a", 40, 40, 80, (32, 32, 32, 32, 32, 2, 2)),
    ("float64", "", "nt", "sm_90a", 150, 40, 40, (64, 16, 16, 16, 16, 1, 4)),
    ("complex64", "tf32", "nt", "sm_90a", 40, 34, 20, (32, 32, 16, 32, 32, 1, 2)),
    ("complex64", "tf32", "tn", "sm_120a", 34, 40, 20, (32, 32, 32, 16, 16, 1, 2)),
    ("complex64", "tf32", "nn", "sm_90a", 34, 40, 20, (32, 32, 32, 16, 16, 1, 2)),
    ("complex128", "", "nn", "sm_90a", 33, 51, 23, (32, 32, 8, 32, 16, 1, 3)),
    ("complex128", "", "tt", "sm_90a", 40, 40, 23, (32, 32, 16, 32, 16, 1, 3)),
    ("float32", "tf32", "nt", "sm_90a", 70, 52, 44, (64, 64, 32, 32, 32, 1, 3)),
    ("float32", "tf32", "tn", "sm_120a", 36, 52, 20, (16, 64, 16, 16, 16, 1, 3)),
    ("float32", "tf32x3", "nt", "sm_90a", 40, 40, 20, (32, 32, 16, 32, 32, 1, 3)),
    ("float32", "bf16x9", "tn", "sm_90a", 40, 40, 40, (32, 32, 32, 32, 32, 1, 3)),
    ("float16", "", "nn", "sm_90a", 40, 40, 40, (32, 32, 32, 32, 32, 1, 3)),
    ("bfloat16", "", "tt", "sm_120a", 40, 72, 200, (64, 64, 64, 32, 32, 2, 3)),
    ("bfloat16", "", "tn", "sm_90a", 80, 264, 136, (64, 128, 64, 32, 64, 1, 4)),
    ("int8", "", "nt", "sm_90a", 40, 48, 144, (32, 64, 64, 32, 32, 1, 3)),
    ("float8_e4m3fn", "", "nt", "sm_120a", 40, 48, 112, (32, 64, 64, 32, 32, 1, 3)),
]


@needs_gxx
@pytest.mark.parametrize(("dtype", "math", "layout", "arch", "m", "n", "k", "config"), CASES)
def test_products_of_small_integers_are_exact(dtype, math, layout, arch, m, n, k, config, tmp_path):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, shape).astype(np.float64) for shape in ((m, k), (k, n)))
    if dtype.startswith("complex"):
        a, b = a + 1j * rng.integers(-8, 9, (m, k)), b + 1j * rng.integers(-8, 9, (k, n))
    asked = kernel_host.problem(dtype, math, layout, arch, m, n, k)
    given = [x.astype(jnp.dtype(dtype)) for x in (a, b)]
    found = kernel_host.multiply(*given, asked, Config(*config, tma=True), tmp_path)
    np.testing.assert_array_equal(found.astype(a.dtype), a @ b)
