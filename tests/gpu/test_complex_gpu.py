"""complex64 by TF32 as pairs through wgmma, on the device: exact integers, and accuracy by complex128."""

from __future__ import annotations

import functools

import jax
import numpy as np
import problems
import pytest

import cutjax

pytestmark = pytest.mark.gpu

C64 = np.dtype(np.complex64)
SIZES = ((256, 192, 128, ()), (130, 70, 33, ()), (77, 1, 50, (3,)), (1, 40, 129, ()))
CONFIGS = (
    cutjax.Config(128, 128, 64, 4, cluster_m=2),
    cutjax.Config(128, 256, 64, 4),
    cutjax.Config(128, 96, 64, 4, schedule="pingpong", cluster_n=2),
    cutjax.Config(64, 64, 64, 8, cluster_k=4),
)


def multiply(a, b, layout, config):
    stored = [np.ascontiguousarray(x.swapaxes(-1, -2)) if t == "t" else x for x, t in zip((a, b), layout, strict=True)]
    gemm = functools.partial(cutjax.gemm, layout=layout, backend="cuda", config=config)
    return np.asarray(jax.jit(gemm)(*stored))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_exact(layout, config):
    rng = np.random.default_rng([problems.SEED, CONFIGS.index(config)])
    for m, n, k, batch in SIZES:
        shapes = (*batch, m, k), (*batch, k, n)
        a, b = ((rng.integers(-2, 3, x) + 1j * rng.integers(-2, 3, x)).astype(C64) for x in shapes)
        np.testing.assert_array_equal(multiply(a, b, layout, config), a @ b, err_msg=f"{m} {n} {k}")


def test_gaussian():
    """Both operands are rounded to 11 bits, and sums are truncated by the tensor cores: as the same real products."""
    rng = np.random.default_rng(problems.SEED)
    a, b = ((rng.standard_normal(x) + 1j * rng.standard_normal(x)).astype(C64) for x in ((260, 515), (515, 190)))
    a_wide, b_wide = a.astype(np.complex128), b.astype(np.complex128)
    off = np.abs(multiply(a, b, "nn", CONFIGS[0]) - a_wide @ b_wide)
    assert (off <= 2**-9 * (np.abs(a) @ np.abs(b))).all()
