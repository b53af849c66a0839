"""Products of float8 by the scales of blocks on the device: integers and powers of two to the bit, normal numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax import Config, Quantized

pytestmark = pytest.mark.gpu

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
GROUPS = (100, 0, 333, 1, 514, 64)
PINGPONG = {"schedule": "pingpong"}

# layout, (m, n, k), rows of a and columns of b that share a scale, config; few SMs, so that blocks have several tiles.
CASES = {
    "blocks": ("nt", (333, 640, 1408), 1, 128, Config(128, 192)),
    "below": ("nt", (1000, 1280, 1408), 1, 128, Config(128, 192, cluster_m=2, sms=8)),
    "beside": ("nt", (1000, 1280, 896), 1, 128, Config(128, 176, cluster_n=2, sms=8)),
    "one buffer": ("nt", (1000, 1280, 1408), 1, 128, Config(128, 256, cluster_m=2, sms=8)),
    "one buffer, two blocks": ("nt", (1000, 1280, 1408), 1, 128, Config(256, 128, stages=3, cluster_n=2, sms=8)),
    "two blocks": ("nt", (1000, 1280, 384), 1, 128, Config(256, 96, sms=4)),
    "pingpong": ("nt", (1000, 1280, 1408), 1, 128, Config(64, 192, sms=4, **PINGPONG)),
    "short": ("nt", (1000, 1280, 256), 1, 128, Config(128, 96, cluster_m=2, sms=8, **PINGPONG)),
    "swapped": ("nt", (100, 1280, 1408), 1, 128, Config(128, 48, swap=True)),
    "in a cluster": ("nt", (128, 1280, 4096), 1, 128, Config(128, 128, cluster_k=2)),
    "split": ("nt", (128, 1280, 4096), 1, 128, Config(128, 128, swap=True, splits=3)),
    "streamed": ("nt", (2048, 2560, 2176), 1, 128, Config(128, 160, stream_k=True)),
    "rows of k": ("nn", (333, 640, 1408), 1, 128, Config(128, 192)),
    "columns": ("tn", (384, 640, 1408), 1, 1, Config(128, 176)),
    "columns in turns": ("nt", (384, 640, 1408), 1, 1, Config(64, 192, sms=2, **PINGPONG)),
    "of a alone": ("nt", (384, 640, 1408), 1, 0, Config(128, 144)),
    "of b alone": ("nt", (384, 640, 1408), 0, 128, Config(256, 112)),
    "of none": ("nt", (1000, 1280, 1408), 0, 0, Config(128, 192, sms=8)),
    "of none, one buffer": ("nt", (1000, 1280, 1408), 0, 0, Config(128, 256, sms=8)),
    "of none, in turns": ("nt", (1000, 1280, 1408), 0, 0, Config(128, 96, sms=4, **PINGPONG)),
}


def operand(rng, lead, size, k, share, turned, dtype):
    """Small integers, and scales that are powers of two where some share one; and the matrix ``[.., size, k]``."""
    x = rng.integers(-2, 3, (*lead, size, k)).astype(np.float32)

    def stored(y, dtype):
        return jnp.asarray(np.ascontiguousarray(np.swapaxes(y, -1, -2)) if turned else y, jnp.dtype(dtype))

    if not share:
        return stored(x, dtype), x
    scale = 2.0 ** rng.integers(-2, 3, (*lead, size // share, k // 128))
    wide = x * np.repeat(np.repeat(scale, share, -2), 128, -1)
    return Quantized(stored(x, dtype), stored(scale, "float32")), wide


def run(operation, *args, **more):
    return np.asarray(jax.jit(lambda *xs: operation(*xs, out_dtype=jnp.float32, backend="cuda", **more))(*args))


@pytest.mark.parametrize("case", CASES)
def test_products(case):
    layout, (m, n, k), of_a, of_b, config = CASES[case]
    rng = np.random.default_rng(0)
    a, wide_a = operand(rng, (), m, k, of_a, layout[0] == "t", E4M3)
    b, wide_b = operand(rng, (), n, k, of_b, layout[1] == "n", E4M3)
    np.testing.assert_array_equal(run(cutjax.gemm, a, b, layout=layout, config=config), wide_a @ wide_b.T)


@pytest.mark.parametrize(("of_a", "of_b"), [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
def test_dtypes_in_a_batch(of_a, of_b):
    rng = np.random.default_rng(1)
    a, wide_a = operand(rng, (3,), 333, 896, 1, False, of_a)
    b, wide_b = operand(rng, (3,), 640, 896, 128, False, of_b)
    d = run(cutjax.gemm, a, b, layout="nt", config=Config(128, 160, sms=4))
    np.testing.assert_array_equal(d, wide_a @ wide_b.swapaxes(1, 2))


@pytest.mark.parametrize("config", [Config(128, 160), Config(64, 128, **PINGPONG), Config(256, 64)], ids=str)
def test_groups_of_rows(config):
    rng, m = np.random.default_rng(2), 1100
    a, wide_a = operand(rng, (), m, 1408, 1, False, E4M3)
    b, wide_b = operand(rng, (len(GROUPS),), 640, 1408, 128, False, E4M3)
    sizes = jnp.array(GROUPS, jnp.int32)
    d = run(cutjax.grouped_gemm, a, b, sizes, layout="nt", config=config)
    expected, ends = np.zeros((m, 640), np.float32), np.cumsum(GROUPS)
    for group, (end, size) in enumerate(zip(ends, GROUPS, strict=True)):
        expected[end - size : end] = wide_a[end - size : end] @ wide_b[group].T
    np.testing.assert_array_equal(d, expected)


def test_epilogues():
    rng = np.random.default_rng(3)
    a, wide_a = operand(rng, (), 333, 1408, 1, False, E4M3)
    (b, wide_b), (c, wide_c) = (operand(rng, (), 640, 1408, 128, False, E4M3) for _ in range(2))
    bias = rng.integers(-4, 5, 640).astype(np.float32)
    d = run(cutjax.gemm, a, (b, c), layout="nt", epilogue=lambda x, y: x - 2 * y, config=Config(128, 64))
    np.testing.assert_array_equal(d, wide_a @ wide_b.T - 2 * (wide_a @ wide_c.T))
    config = Config(128, 128, sms=4)
    d = run(
        lambda *xs, **more: cutjax.gemm(*xs[:2], operands=xs[2:], **more),
        a,
        b,
        bias,
        layout="nt",
        config=config,
        epilogue=lambda x, y: x + y,
    )
    np.testing.assert_array_equal(d, wide_a @ wide_b.T + bias)


@pytest.mark.parametrize("config", [Config(128, 192), Config(128, 256), Config(64, 192, **PINGPONG)], ids=str)
def test_normal_numbers(config):
    """Sums of 128 products have 14 bits: each of them, cut off, is at most 2^-13 of the largest off."""
    rng = np.random.default_rng(4)
    x, w = (jnp.asarray(rng.standard_normal((512, 8192)), jnp.float32) for _ in range(2))
    a, b = cutjax.quantize(x, E4M3, block=(1, 128)), cutjax.quantize(w, E4M3, block=(128, 128))
    d = run(cutjax.gemm, a, b, layout="nt", config=config).astype(np.float64)
    wide_a, wide_b = (np.asarray(q.dequantize(jnp.float32), np.float64) for q in (a, b))
    assert np.max(np.abs(d - wide_a @ wide_b.T) / (np.abs(wide_a) @ np.abs(wide_b).T)) < 2**-12
