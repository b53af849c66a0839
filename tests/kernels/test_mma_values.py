"""Kernels of every dtype on the host: fragments, layouts of shared memory, edges, and what is not finite."""

import kernel_host
import numpy as np
import pytest

from cutjax.kernels.mma.config import Config

pytestmark = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")

# (dtype, math, layout, architecture, m, n, k, (bm, bn, bk, wm, wn, sliced_k, stages))
CASES = [
    ("float32", "", "nn", "sm_80", 70, 52, 45, (64, 64, 8, 32, 32, 1, 3)),
    ("float32", "", "tt", "sm_80", 33, 51, 7, (16, 64, 8, 16, 16, 1, 3)),
    ("float32", "", "nt", "sm_90a", 60, 130, 20, (64, 128, 8, 64, 64, 1, 2)),
    ("float64", "", "nn", "sm_80", 70, 52, 45, (64, 64, 16, 32, 32, 1, 3)),
    ("float64", "", "tt", "sm_90a", 33, 51, 77, (64, 64, 32, 32, 32, 1, 3)),
    ("float64", "", "tn", "sm_90a", 40, 40, 40, (32, 32, 32, 32, 32, 2, 3)),
    ("float64", "", "nt", "sm_86", 33, 34, 19, (32, 32, 8, 16, 16, 1, 3)),
    ("complex64", "", "tn", "sm_75", 40, 33, 19, (64, 32, 8, 32, 32, 1, 2)),
    ("complex64", "tf32", "nt", "sm_80", 40, 33, 19, (32, 32, 16, 32, 32, 1, 2)),
    ("complex64", "tf32", "tn", "sm_90a", 33, 40, 19, (32, 32, 32, 16, 16, 1, 2)),
    ("complex128", "", "nn", "sm_80", 33, 51, 23, (32, 32, 8, 32, 16, 1, 3)),
    ("complex128", "", "tt", "sm_90a", 40, 40, 23, (32, 32, 16, 32, 16, 1, 3)),
    ("complex64", "", "nt", "sm_90a", 64, 33, 32, (64, 32, 16, 32, 32, 2, 2)),
    ("float32", "tf32", "nn", "sm_80", 70, 52, 45, (64, 64, 32, 32, 32, 1, 3)),
    ("float32", "tf32", "tt", "sm_80", 33, 51, 20, (16, 64, 16, 16, 16, 1, 3)),
    ("float32", "tf32x3", "nn", "sm_80", 40, 40, 20, (32, 32, 16, 32, 32, 1, 3)),
    ("float32", "bf16x9", "tt", "sm_80", 40, 40, 40, (32, 32, 32, 32, 32, 1, 3)),
    ("float16", "f16", "nt", "sm_75", 40, 40, 40, (32, 32, 32, 32, 32, 1, 3)),
    ("int8", "", "nn", "sm_80", 40, 51, 133, (32, 64, 64, 32, 32, 1, 3)),
    ("uint8", "", "tt", "sm_75", 40, 48, 64, (32, 64, 64, 32, 32, 1, 3)),
    ("float8_e4m3fn", "", "nt", "sm_89", 40, 40, 100, (32, 64, 64, 32, 32, 1, 3)),
    ("int32", "", "nn", "sm_75", 33, 51, 9, (32, 64, 8, 32, 32, 1, 2)),
    ("int64", "", "tn", "sm_80", 33, 51, 9, (32, 32, 8, 16, 16, 1, 3)),
]


@pytest.mark.parametrize(("dtype", "math", "layout", "arch", "m", "n", "k", "config"), CASES)
def test_products_of_small_integers_are_exact(dtype, math, layout, arch, m, n, k, config, tmp_path):
    asked = kernel_host.problem(dtype, math, layout, arch, m, n, k)
    kernel_host.check_small_integers(asked, Config(*config), tmp_path)


# Errors of a product of two normal numbers: 2^-22 where parts have 21 bits and more, 2^-16 where they have 16.
@pytest.mark.parametrize(
    ("math", "bk", "error"), [("tf32x3", 16, 2**-20), ("bf16x3", 32, 2**-15), ("bf16x6", 32, 2**-21)]
)
def test_parts_multiply_what_is_not_finite(math, bk, error, tmp_path):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 40), (40, 24)))
    a[3, 5], a[20, 1], b[7, 9], b[5, 2], b[:, 20] = np.inf, -np.inf, np.nan, 0, 1  # 1 and 0 have one part alone
    a[11, 39], b[39], b[39, 4] = 3.4028e38, 1e-3, 1.5  # rounds to infinity in bf16 and TF32
    asked = kernel_host.problem("float32", math, "nn", "sm_80", 40, 24, 40)
    found = kernel_host.multiply(a, b, asked, Config(32, 32, bk, 32, 32, 1, 3), tmp_path)
    with np.errstate(all="ignore"):
        exact = a.astype(np.float64) @ b.astype(np.float64)
        expected = exact.astype(np.float32)
        bound = error * (np.abs(a).astype(np.float64) @ np.abs(b))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite])
    assert (np.abs(found[finite] - exact[finite]) <= bound[finite]).all()
