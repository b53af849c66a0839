"""cutjax.quantize: values, scales and zero points of every dtype and block, against numpy; what is special, errors."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import normal, same

import cutjax
from cutjax import Quantized
from cutjax.dtypes import NARROW, bits_of

F32 = jnp.float32
R, C = 64, 32
BLOCKS = {None: (1, 1), (-1, 1): (1, C), (1, -1): (R, 1), (16, 8): (4, 4), (1, 16): (R, 2), (32, 1): (2, C)}
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn")


def blocks(x, counts):
    """The matrix as blocks: ``[rows of blocks, columns of blocks, rows * columns of one]``."""
    r, c = x.shape[-2] // counts[0], x.shape[-1] // counts[1]
    return x.reshape(counts[0], r, counts[1], c).swapaxes(1, 2).reshape(*counts, r * c)


@pytest.mark.parametrize("dtype", NARROW)
def test_values_are_within_a_step(dtype):
    """Half a step of integers, half a unit in the last place of floats, of the block's range; zero stays zero."""
    x = np.array(normal(0, (R, C)))
    x[:16, :8], x[16, :] = 0, 100 * x[16, :]
    integers = jnp.issubdtype(jnp.dtype(dtype), jnp.integer)
    zeros = (False, True) if integers and not dtype.startswith("u") else (integers,)
    cases = list(itertools.product(BLOCKS, SCALES[: 5 if dtype in ("int8", "float4_e2m1fn") else 1], zeros))

    @jax.jit
    def all_of(x):
        found = []
        for block, scale_dtype, zero in cases:
            q = cutjax.quantize(x, dtype, block=block, scale_dtype=scale_dtype, zero_point=zero)
            found.append((q, q.dequantize(F32)))
        return found

    for (block, scale_dtype, zero), (q, wide) in zip(cases, all_of(x), strict=True):
        counts = BLOCKS[block]
        assert (q.values.dtype, q.values.shape) == (jnp.dtype(dtype), (R, C))
        assert (q.scale.dtype, q.scale.shape) == (jnp.dtype(scale_dtype), counts)
        assert (q.zero_point is not None) == zero
        given, got = blocks(x, counts), blocks(np.asarray(wide), counts)
        scale = np.asarray(q.scale, np.float64)[..., None]
        assert (got[given == 0] == 0).all()
        if integers:  # zero points are rounded too: the ends of the range may be cut off
            step = scale if zero else scale / 2
        else:
            info = jnp.finfo(dtype)
            least = float(info.smallest_subnormal) * scale / 2
            step = np.maximum(np.abs(given) * float(info.eps) / 2, least)
        if scale_dtype in ("bfloat16", "float16", "float8_e4m3fn"):  # a scale that is rounded down cuts the largest off
            lengths = np.ptp(given, -1) if zero else np.abs(given).max(-1)
            step = step + lengths[..., None] * float(jnp.finfo(scale_dtype).eps) / 2
        # XLA's CPU backend may round to 16 bits on the way to floats of fewer.
        slack = 1e-5 if integers else 2**-7
        assert (np.abs(got - given) <= step * (1 + slack)).all(), (block, scale_dtype, zero)
        if not zero and scale_dtype == "float32":
            most = float(jnp.iinfo(dtype).max if integers else jnp.finfo(dtype).max)
            reached = blocks(np.abs(np.asarray(q.values, np.float64)), counts).max(-1)
            assert set(np.unique(reached)) <= {0.0, most}


def test_what_is_special():
    x = np.array(normal(0, (8, 8)))
    x[0, 0], x[2, 2], x[4:6, 4:6] = np.nan, np.inf, 1e-42
    for dtype, scale_dtype in itertools.product(("int8", "float8_e4m3fn", "float4_e2m1fn"), SCALES):
        q = cutjax.quantize(x, dtype, block=(2, 2), scale_dtype=scale_dtype)
        wide = np.asarray(q.dequantize())
        for i, j in ((0, 0), (2, 2)):
            assert np.isnan(wide[i : i + 2, j : j + 2]).all()
        rest = np.ones((8, 8), bool)
        rest[:2, :2] = rest[2:4, 2:4] = False
        assert np.isfinite(wide[rest]).all()
        assert (np.asarray(q.scale, np.float32)[2, 2] > 0).all()
    powers = np.asarray(
        cutjax.quantize(x, "float8_e4m3fn", block=(1, 1), scale_dtype="float8_e8m0fnu").scale, np.float32
    )
    finite = np.isfinite(x) & (np.abs(x) > 1e-30)
    assert (np.abs(x[finite]) <= 448 * powers[finite]).all()
    assert (np.abs(x[finite]) > 224 * powers[finite]).all()
    assert (np.frexp(powers[finite])[0] == 0.5).all()


def test_four_bits_are_the_problem_s():
    assert {name: bits_of(jnp.dtype(name)) for name in ("int4", "uint4", "float4_e2m1fn", "int8")} == {
        "int4": 4,
        "uint4": 4,
        "float4_e2m1fn": 4,
        "int8": 8,
    }


def test_dequantize_is_rounded_once():
    q = cutjax.quantize(normal(0, (R, C)), "int8", block=(16, 8))
    exact = np.asarray(q.values, np.float64) * np.repeat(np.repeat(np.asarray(q.scale, np.float64), 16, 0), 8, 1)
    same(q.dequantize(jnp.bfloat16), exact.astype(F32).astype(jnp.bfloat16))


def test_of_matrices_in_a_batch():
    x = normal(0, (3, R, C))
    q = cutjax.quantize(x, "uint4", block=(32, 1), zero_point=True)
    assert q.scale.shape == q.zero_point.shape == (3, 2, C)
    each = jax.vmap(lambda x: cutjax.quantize(x, "uint4", block=(32, 1), zero_point=True))(x)
    jax.tree.map(same, each, q)


X = jnp.ones((R, C))
REFUSED = {
    "dtype": (lambda: cutjax.quantize(X, "int16"), TypeError, "dtype must be one of int8"),
    "scale": (
        lambda: cutjax.quantize(X, "int8", scale_dtype="float64"),
        TypeError,
        "scale_dtype must be one of float32",
    ),
    "integers": (lambda: cutjax.quantize(X.astype(int), "int8"), TypeError, "must be floating-point numbers, got int"),
    "vector": (lambda: cutjax.quantize(X[0], "int8"), ValueError, "rank 2"),
    "block": (lambda: cutjax.quantize(X, "int8", block=(5, 1)), ValueError, r"\(5, 1\) does not divide \(64, 32\)"),
    "zero": (lambda: cutjax.quantize(X, "int8", block=(0, 1)), ValueError, "a divisor, or -1"),
    "one size": (lambda: cutjax.quantize(X, "int8", block=128), ValueError, "two sizes"),
    "no integer": (lambda: cutjax.quantize(X, "int8", block=(1.5, 1)), TypeError, "must be an int, got float"),
    "no sign": (lambda: cutjax.quantize(X, "uint4"), ValueError, "expected zero_point=True"),
    "zero points": (
        lambda: cutjax.quantize(X, "float8_e5m2", zero_point=True),
        ValueError,
        "zero points are of integers",
    ),
    "shape": (lambda: Quantized(X, jnp.ones((3, 1))).dequantize(), ValueError, "says the blocks"),
    "rank": (lambda: Quantized(X, jnp.ones((1, 1, 1))).dequantize(), ValueError, "says the blocks"),
    "zeros": (lambda: Quantized(X, jnp.ones((1, 1)), jnp.ones(3)).dequantize(), ValueError, "zero points of"),
    "kind": (lambda: Quantized(X, jnp.ones((1, 1), int)).dequantize(), TypeError, "floating-point"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    fn, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        fn()


class Codes:
    """What Qwix's QArray has."""

    def __init__(self, qvalue, scale, qtype, zero_point=None):
        self.qvalue, self.scale, self.qtype, self.zero_point = qvalue, scale, qtype, zero_point


def test_codes_of_other_tools():
    """Codes of "nf4" are read from its table: as numbers they would be silently wrong. Others are refused."""
    codes, x = jnp.arange(16, dtype=jnp.uint8).astype(jnp.uint4).reshape(8, 2), jnp.eye(8)
    found = cutjax.gemm(x, Codes(codes, jnp.full((1, 2), 2.0), "nf4"))
    assert float(found[0, 0]) == -2.0
    assert float(found[3, 1]) == 0.0
    assert float(found[7, 1]) == 2.0
    np.testing.assert_allclose(found[1], [2 * -0.5250730514526367, 2 * -0.39491748809814453], rtol=1e-6)
    linear = Codes(jnp.ones((8, 2), jnp.float8_e4m3fn), jnp.ones((1, 2)), "mxfp8")
    assert float(cutjax.gemm(x, linear)[0, 0]) == 1.0
    with pytest.raises(TypeError, match="codes of 'lut4'"):
        cutjax.gemm(x, Codes(codes, jnp.ones((1, 2)), "lut4"))
