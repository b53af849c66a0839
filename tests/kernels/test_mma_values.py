"""Kernels of every dtype on the host: fragments, layouts of shared memory, edges, and what is not finite."""

import jax
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest

from cutjax.epilogue.trace import trace
from cutjax.kernels import results
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.kernels.problem import Problem

pytestmark = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")

# (dtype, math, layout, architecture, m, n, k, (bm, bn, bk, wm, wn, sliced_k, stages))
CASES = [
    ("float32", "", "nn", "sm_80", 70, 52, 45, (64, 64, 8, 32, 32, 1, 3)),
    ("float32", "", "tt", "sm_80", 33, 51, 7, (16, 64, 8, 16, 16, 1, 3)),
    ("float64", "", "tt", "sm_90a", 33, 51, 77, (64, 64, 32, 32, 32, 1, 3)),
    ("float64", "", "tn", "sm_90a", 40, 40, 40, (32, 32, 32, 32, 32, 2, 3)),
    ("float64", "", "nt", "sm_86", 33, 34, 19, (32, 32, 8, 16, 16, 1, 3)),
    ("complex64", "", "tn", "sm_75", 40, 33, 19, (64, 32, 8, 32, 32, 1, 2)),
    ("complex64", "tf32", "nt", "sm_80", 40, 33, 19, (32, 32, 16, 32, 32, 1, 2)),
    ("complex128", "", "tt", "sm_90a", 40, 40, 23, (32, 32, 16, 32, 16, 1, 3)),
    ("complex64", "", "nt", "sm_90a", 64, 33, 32, (64, 32, 16, 32, 32, 2, 2)),
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


@pytest.mark.parametrize("sizes", [(70, 52, 45), (33, 51, 20)], ids=str)
def test_reductions_alone(sizes, tmp_path):
    """Of rows, columns and both, to the matrix's edges; the tiles' shares are in the order that XLA reduces them in."""
    m, n, k = sizes
    acc = jax.ShapeDtypeStruct((m, n), jnp.float32)
    reduce = lambda acc: (acc.sum(1), acc.max(0), acc.min())  # noqa: E731
    epilogue = trace(reduce, [acc], []).epilogue.primal
    asked = Problem.of(m, n, k, "nn", jnp.float32, jnp.float32, epilogue=epilogue, arch="sm_80")
    kernel = mma.resolved(asked, Config(32, 32, 8, 16, 16, 1, 3))
    shares = results.written(kernel.multiplied, kernel.config.epilogue_columns, kernel.config.swap)
    found = [kernel_host.aligned(np.full(x.shape, 7, x.dtype)) for x in shares]
    a, b = (np.random.default_rng(i).integers(-8, 9, x).astype(np.float32) for i, x in enumerate(((m, k), (k, n))))
    kernel_host.run(kernel, [*map(kernel_host.aligned, (a, b)), *found], tmp_path)
    finished = results.finish(epilogue.outputs, [jnp.asarray(x) for x in found], ())
    for got, expected in zip(finished, reduce(a @ b), strict=True):
        np.testing.assert_array_equal(got, expected)
