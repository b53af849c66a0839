"""Slim kernels, swapped operands and symmetric results on the host: whole kernels of every kind, and their edges."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config

pytestmark = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")


def slim(bm, bn, sliced_k, swap=False, wn=0):
    return Config(bm, bn, 128, bm, wn or min(bn, 32), sliced_k, stages=1, blocks=1, swap=swap)


# (dtype, layout, architecture, m, n, k, config): b along k and across it, elements of every size, rows of odd length.
SLIM = [
    ("float32", "nt", "sm_80", 3, 37, 131, slim(4, 16, 4)),
    ("float32", "tt", "sm_75", 4, 40, 77, slim(4, 32, 8)),
    ("float64", "tn", "sm_89", 2, 51, 67, slim(2, 16, 2)),
    ("float16", "nn", "sm_75", 2, 133, 259, slim(2, 64, 2)),
    ("bfloat16", "nt", "sm_80", 2, 64, 264, slim(2, 32, 4)),
    ("int8", "nn", "sm_80", 2, 67, 133, slim(2, 64, 2)),
    ("complex128", "nt", "sm_80", 3, 21, 19, slim(4, 16, 4)),
    ("bfloat16", "nn", "sm_80", 133, 3, 131, slim(4, 32, 4, True)),
    ("complex64", "tt", "sm_80", 51, 2, 33, slim(2, 16, 2, True)),
]


def integers(dtype, *shapes):
    rng = np.random.default_rng(0)
    found = [rng.integers(-4, 5, shape).astype(np.float64) for shape in shapes]
    if dtype.startswith("complex"):
        found = [x + 1j * rng.integers(-4, 5, x.shape) for x in found]
    return found


@pytest.mark.parametrize(("dtype", "layout", "arch", "m", "n", "k", "config"), SLIM)
def test_few_rows_and_few_columns(dtype, layout, arch, m, n, k, config, tmp_path):
    a, b = integers(dtype, (m, k), (k, n))
    asked = kernel_host.problem(dtype, "", layout, arch, m, n, k)
    kernel = mma.resolved(asked, config)
    result = kernel_host.aligned(np.full((m, n), 7).astype(asked.out_dtype))
    arrays = [x.T if turned == "t" else x for x, turned in zip((a, b), layout, strict=True)]
    kernel_host.run(kernel, [*(kernel_host.aligned(x.astype(jnp.dtype(dtype))) for x in arrays), result], tmp_path)
    np.testing.assert_array_equal(result.astype(a.dtype), a @ b)


@pytest.mark.parametrize("swap", [False, True])
def test_epilogues_of_few_rows(swap, tmp_path):
    m, n, k = (37, 3, 40) if swap else (3, 37, 40)
    a, b, x, row, column = integers("float32", (m, k), (k, n), (m, n), (m, 1), (n,))
    operands = [v.astype(np.float32) for v in (x, row, column)]

    def function(acc, x, row, column):
        return acc * row + x - column

    asked = kernel_host.problem("float32", "", "nn", "sm_80", m, n, k)
    traced = trace(function, [jax.ShapeDtypeStruct((m, n), jnp.float32)], operands)
    asked = dataclasses.replace(asked, epilogue=traced.epilogue)
    kernel = mma.resolved(asked, slim(4, 32, 4, swap))
    result = kernel_host.aligned(np.full((m, n), 7, np.float32))
    given = [a, b, *traced.operands]
    kernel_host.run(kernel, [*(kernel_host.aligned(np.asarray(v, np.float32)) for v in given), result], tmp_path)
    np.testing.assert_array_equal(result, (a @ b) * row + x - column)


@pytest.mark.parametrize(
    ("dtype", "layout", "m", "config"),
    [
        ("float32", "nt", 133, Config(64, 64, 8, 32, 32, 1, 2)),
        ("float64", "tn", 68, Config(64, 64, 16, 32, 32, 1, 3)),
        ("bfloat16", "nt", 200, Config(64, 128, 32, 32, 64, 1, 2)),
        ("bfloat16", "tn", 77, Config(128, 64, 32, 64, 32, 1, 2)),
        ("complex128", "nt", 70, Config(64, 64, 8, 32, 16, 1, 2)),
    ],
)
def test_symmetric_results(dtype, layout, m, config, tmp_path):
    (a,) = integers(dtype, (m, 40))
    asked = kernel_host.problem(dtype, "", layout, "sm_80", m, m, 40, symmetric=True)
    result = kernel_host.aligned(np.full((m, m), 7).astype(asked.out_dtype))
    given = (a if layout == "nt" else a.T).astype(jnp.dtype(dtype))
    kernel_host.run(mma.resolved(asked, config), [kernel_host.aligned(given), result], tmp_path)
    np.testing.assert_array_equal(result.astype(a.dtype), a @ a.T)


def test_reductions_of_few_rows(tmp_path):
    """Sums over rows, as the kernel writes them: of each 16 rows, and of even columns two at a time."""
    m, n, k = 3, 70, 40
    a, b = integers("float32", (m, k), (k, n))
    asked = kernel_host.problem("float32", "", "nn", "sm_80", m, n, k)
    traced = trace(lambda acc: (acc, acc.sum(-2)), [jax.ShapeDtypeStruct((m, n), jnp.float32)], [])
    kernel = mma.resolved(dataclasses.replace(asked, epilogue=traced.epilogue), slim(4, 32, 4))
    arrays = [a, b, np.full((m, n), 7), np.full((1, n), 7)]
    arrays = [kernel_host.aligned(x.astype(np.float32)) for x in arrays]
    kernel_host.run(kernel, arrays, tmp_path)
    np.testing.assert_array_equal(arrays[2], a @ b)
    np.testing.assert_array_equal(arrays[3][0], (a @ b).sum(0))


@pytest.mark.parametrize("config", [slim(4, 32, 4), Config(32, 32, 8, 16, 16, 1, 2)], ids=["slim", "tiles"])
def test_rows_of_groups(config, tmp_path):
    """Groups that end in tiles of their own, one without rows, and rows of no group, which are zero."""
    sizes = np.array([5, 0, 37, 3], np.int32)
    a, b = integers("float32", (50, 20), (4, 20, 36))
    asked = kernel_host.problem("float32", "", "nn", "sm_80", 50, 36, 20, groups=4, ragged="m")
    arrays = [kernel_host.aligned(x.astype(np.float32)) for x in (a, b, np.full((50, 36), 7))]
    arrays.insert(2, kernel_host.aligned(sizes))
    kernel_host.run(mma.resolved(asked, config), arrays, tmp_path)
    group = np.repeat(np.arange(4), sizes)
    np.testing.assert_array_equal(arrays[3][:45], np.einsum("mk,mkn->mn", a[:45], b[group]))
    assert not arrays[3][45:].any()


@pytest.mark.parametrize("dtype", ["int32", "int8", "int64", "uint32"])
def test_all_lanes_exchange_the_extremes_of_integers(dtype):
    """No shuffle is in a branch of a comparison, where some lanes would wait for ever."""
    asked = kernel_host.problem(dtype, "", "nt", "sm_80")
    with jax.enable_x64(dtype == "int64"):
        acc = jax.ShapeDtypeStruct((64, 64), asked.accumulator)
        traced = trace(lambda acc: (acc, acc.max(-1), acc.min(-2), acc.max((-2, -1))), [acc], [])
    asked = dataclasses.replace(asked, epilogue=traced.epilogue)
    source = mma.resolved(asked, cutjax.candidates(asked)[0]).source
    assert "__shfl_xor_sync" in source
    assert not re.search(r"\?[^;]*__shfl_xor_sync", source)
