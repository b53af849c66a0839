"""Products of other operands than of 16 bits through wgmma, on the device: exact integers, and accuracy by float64."""

from __future__ import annotations

import concurrent.futures
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from wide_cases import E4M3, E5M2, KINDS, call, fused, problem

import cutjax
from cutjax.kernels.sm90 import kernel as sm90

pytestmark = pytest.mark.gpu

Config = cutjax.Config
SECONDS = 120  # a test takes a few: longer is a kernel that waits for ever
LAYOUTS = ("nn", "nt", "tn", "tt")
SIZES = ((256, 256, 512), (200, 136, 72), (130, 70, 33), (1, 40, 129), (77, 1, 1000), (512, 384, 4100))
CONFIGS = (
    Config(128, 128, 64, 4, cluster_m=2),
    Config(128, 96, 64, 4, schedule="pingpong", cluster_n=2),
    Config(128, 192, 64, 4, stream_k=True),
    Config(64, 64, 64, 8, cluster_k=4),
    Config(128, 64, 64, 6, splits=3),
    Config(128, 24, 64, 6, swap=True),
    Config(128, 128, 128, 3),
)


DIVIDED = [
    (kind, sizes)
    for kind in ("tf32", "bf16x3", "bf16x6", "s8", "u8", "s8xu8", "e4m3", "e4m3xe5m2")
    for sizes in ((512, 512, 2048), (300, 200, 4100), (2048, 1536, 1000))
]


@pytest.fixture(scope="module", autouse=True)
def compiled(gpus):
    """Compiles most kernels beforehand, on every core."""
    kernels = {}
    exact = itertools.product(KINDS, SIZES, LAYOUTS)
    for asked, configs in (
        *((problem(kind, *sizes, layout), ()) for kind, sizes, layout in exact),
        *((problem(kind, *sizes, "nt"), CONFIGS) for kind, sizes in DIVIDED),
    ):
        for config in configs or cutjax.candidates(asked)[:1]:
            if not isinstance(kernel := sm90.resolve(asked, config), tuple):
                kernels[kernel.name] = kernel
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(sm90.Kernel.compile, kernels.values()))


def integers(rng, kind, shape, which):
    """Small integers; unsigned ones from 0 on."""
    dtype = KINDS[kind].a if which == "a" else KINDS[kind].b
    low = 0 if dtype == np.uint8 else -2
    return rng.integers(low, 3, shape).astype(dtype)


def expected(asked, a, b, dtype=np.float64):
    a, b = np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)
    with np.errstate(invalid="ignore"):
        return np.matmul(a.mT if asked.layout[0] == "t" else a, b.mT if asked.layout[1] == "t" else b)


def run(asked, config, *arrays):
    """The results, in memory that was full of NaN just before, as far as the allocator gives that again."""
    function = call(asked, config)
    jax.block_until_ready(jnp.full((*asked.batch, asked.groups_along("k"), asked.m, asked.n), jnp.nan))
    return [np.asarray(x) for x in function(*jax.device_put(arrays))]


def check_exact(asked, config, a, b):
    (out,) = run(asked, config, a, b)
    ref = expected(asked, a, b).astype(out.dtype)
    assert np.array_equal(out, ref), f"{asked} {config}: {problems.mismatch(out, ref)}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_exact(kind, layout, gpus):
    rng = np.random.default_rng(0)
    for sizes in SIZES:
        asked = problem(kind, *sizes, layout)
        check_exact(asked, None, *(integers(rng, kind, shape, x) for x, shape in zip("ab", asked.shapes, strict=False)))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("kind", "sizes"), DIVIDED)
def test_exact_in_every_way_to_divide_it(kind, sizes, config, gpus):
    rng, asked = np.random.default_rng(1), problem(kind, *sizes, "nt")
    if config.bk == 128 and asked.a.dtype == E4M3:
        pytest.skip("sums of float8 are of one stage of 64")
    check_exact(asked, config, *(integers(rng, kind, x, i) for i, x in zip("ab", asked.shapes, strict=False)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["tf32", "bf16x6", "s8", "e4m3"])
def test_exact_batched(kind, layout, gpus):
    rng = np.random.default_rng(2)
    for a_batch, b_batch in (((3,), (3,)), ((3,), (1,)), ((2, 1), (1, 3))):
        batch = np.broadcast_shapes(a_batch, b_batch)
        asked = problem(kind, 100, 72, 50, layout, batch=batch, a_batch=a_batch, b_batch=b_batch)
        check_exact(asked, None, *(integers(rng, kind, x, i) for i, x in zip("ab", asked.shapes, strict=False)))


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_groups_of_rows(kind, layout, gpus):
    rng = np.random.default_rng(3)
    sizes = np.array([0, 130, 1, 64, 200, 77], np.int32)
    m, n, k = 500, 136, 200
    asked = problem(kind, m, n, k, layout, groups=len(sizes), ragged="m")
    a = integers(rng, kind, (m, k), "a")
    b = integers(rng, kind, (len(sizes), *((k, n) if layout[1] == "n" else (n, k))), "b")
    (out,) = run(asked, None, a, b, sizes)
    ref, row = np.zeros((m, n), out.dtype), 0
    for group, size in enumerate(sizes):
        ref[row : row + size] = expected(asked, a[row : row + size], b[group]).astype(out.dtype)
        row += size
    assert np.array_equal(out, ref), problems.mismatch(out, ref)


@pytest.mark.parametrize("kind", ["bf16", "bf16x3", "bf16x6", "bf16x9"])  # what TMA can begin anywhere
def test_exact_groups_of_k(kind, gpus):
    rng = np.random.default_rng(4)
    sizes = np.array([0, 130, 1, 64, 200, 77], np.int32)
    m, n, k = 200, 136, 500
    asked = problem(kind, m, n, k, "tn", groups=len(sizes), ragged="k")
    a, b = integers(rng, kind, (k, m), "a"), integers(rng, kind, (k, n), "b")
    if KINDS[kind].math:
        a[sizes.sum() :] = np.nan  # of no group
    (out,) = run(asked, None, a, b, sizes)
    at = np.cumsum([0, *sizes])
    ref = np.stack([expected(asked, a[i:j], b[i:j]) for i, j in itertools.pairwise(at)]).astype(out.dtype)
    assert np.array_equal(out, ref), problems.mismatch(out, ref)


@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("kind", ["tf32", "bf16x6", "s8"])
def test_exact_symmetric(kind, layout, gpus):
    rng = np.random.default_rng(5)
    asked = problem(kind, 300, 300, 200, layout, symmetric=True)
    a = integers(rng, kind, asked.shapes[0], "a")
    (out,) = run(asked, None, a)
    ref = expected(asked, a, a).astype(out.dtype)
    assert np.array_equal(out, ref), problems.mismatch(out, ref)


@pytest.mark.parametrize("kind", ["bf16x6", "bf16x9"])
def test_numbers_of_24_bits_are_whole(kind, gpus):
    """One of 24 bits in each row, by small ones: each product is exact in float32 only if all parts are there."""
    rng = np.random.default_rng(6)
    m, n, k = 256, 128, 512
    a = np.zeros((m, k), np.float32)
    a[np.arange(m), rng.integers(0, k, m)] = rng.integers(2**22, 2**23, m) | 1
    b = rng.integers(-1, 2, (k, n)).astype(np.float32)
    check_exact(problem(kind, m, n, k), None, a, b)
    check_exact(problem(kind, n, m, k, "tt"), None, b, a)


# Bounds of ||out - ref|| / ||ref|| at k = 4096, on Gaussian data: of rounding both operands, 2.8e-4 for tf32 and 2.2e-3
# for bf16 (tf32 cut off, as the tensor cores do it, would make 6e-4), of what the last part leaves, and of adding up.
RELATIVE = {"tf32": 3.5e-4, "bf16": 2.7e-3, "bf16x3": 1e-5, "tf32x3": 2e-6, "bf16x6": 2e-6, "bf16x9": 2e-6}
RELATIVE |= {"e4m3": 5e-4, "e5m2": 5e-4}  # of sums of 14 bits, of 128 of k each


@pytest.mark.parametrize("kind", RELATIVE)
def test_accuracy(kind, gpus):
    rng = np.random.default_rng(7)
    asked = problem(kind, 512, 512, 4096)
    a, b = (
        rng.standard_normal(shape, np.float32).astype(dtype)
        for shape, dtype in zip(asked.shapes, (asked.a.dtype, asked.bs[0].dtype), strict=False)
    )
    (out,) = run(asked, None, a, b)
    ref = expected(asked, a, b)
    relative = np.linalg.norm(out - ref) / np.linalg.norm(ref)
    problems.note_worst(f"norm, {kind}", relative / RELATIVE[kind])
    assert relative <= RELATIVE[kind]


def test_tf32_is_rounded_to_nearest(gpus):
    """By TMA: the tensor cores would cut off, to 1."""
    a = np.full((64, 64), 1 + 2.0**-11 + 2.0**-12, np.float32)
    (out,) = run(problem("tf32", 64, 64, 64, "nt"), None, a, np.eye(64, dtype=np.float32))
    assert (out == 1 + 2.0**-10).all()


@pytest.mark.parametrize("kind", ["tf32", "tf32x3", "bf16", "bf16x3", "bf16x6", "bf16x9"])
def test_what_is_not_finite(kind, gpus):
    """Infinity times a number is infinity, also where the number's lower parts have the other sign, or are zero."""
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((64, 64), np.float32), rng.standard_normal((64, 64), np.float32)
    a[3, 5], a[4, 6], b[7, 9] = np.inf, np.nan, -np.inf
    b[5, :32] = 1.0
    (out,) = run(problem(kind, 64, 64, 64), None, a, b)
    ref = expected(problem(kind, 64, 64, 64), a, b)
    assert np.array_equal(np.isnan(out), np.isnan(ref))
    assert np.array_equal(np.isposinf(out), np.isposinf(ref))
    assert np.array_equal(np.isneginf(out), np.isneginf(ref))


@pytest.mark.parametrize("kind", ["tf32", "bf16x6", "e4m3"])
def test_epilogue(kind, gpus):
    rng = np.random.default_rng(9)
    m, n, k = 300, 200, 500
    row, residual = rng.standard_normal((1, n), np.float32), rng.standard_normal((m, n), np.float32)

    def epilogue(acc, row, residual):
        y = jnp.maximum(acc + row, 0) + residual
        return y, y.sum(1, keepdims=True)

    asked = fused(kind, m, n, k, epilogue, jnp.asarray(row), jnp.asarray(residual))
    a, b = (integers(rng, kind, shape, x) for x, shape in zip("ab", asked.shapes, strict=False))
    results = run(asked, None, a, b, row, residual)
    y = np.maximum(expected(asked, a, b, np.float32) + row, 0) + residual
    assert np.array_equal(results[0], y)
    assert np.abs(results[1] - y.sum(1, dtype=np.float64)).max() < 1e-2  # 200 of about 30, in float32


def test_float8_in_every_dtype_of_result(gpus):
    rng = np.random.default_rng(10)
    for kind in ("e4m3", "e5m2"):
        for out in (jnp.bfloat16, np.float16, E4M3, E5M2):
            asked = problem(kind, 256, 256, 64, "nt", out)
            check_exact(asked, None, *(rng.integers(-1, 2, (256, 64)).astype(asked.a.dtype) for _ in "ab"))
