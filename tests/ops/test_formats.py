"""cutjax.formats: arrays of others' checkpoints against plain decoders, loops over the published definitions."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, normal

import cutjax
from cutjax import formats

K, N, GROUP = 64, 16, 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
RNG = np.random.default_rng(0)


def words(*shape):
    return RNG.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)


def nibble(word, place):
    return (int(word) & 0xFFFFFFFF) >> 4 * place & 15


def gptq_decoded(qweight, scales, zeros):
    """Rows 8 i to 8 i + 7 are the digits of row i, the lowest first; zeros are those of rows of groups."""
    found = np.zeros((K, N), np.float32)
    for row in range(K):
        for column in range(N):
            value = nibble(qweight[row // 8, column], row % 8)
            group = row // GROUP
            found[row, column] = (value - zeros[group][column]) * np.float32(scales[group, column])
    return found


def scales_of(*batch):
    return (RNG.uniform(0.5, 1.5, (*batch, K // GROUP, N)) / 16).astype(np.float16)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq(version):
    qweight, qzeros, scales = words(K // 8, N), words(K // GROUP, N // 8), scales_of()
    more = 2 - version
    zeros = [[(nibble(row[c // 8], c % 8) + more) % 16 for c in range(N)] for row in qzeros]
    q = formats.gptq(qweight, scales, qzeros, np.arange(K, dtype=np.int32) // GROUP, version=version)
    assert (q.values.dtype, q.zero_point.dtype, q.scale.dtype) == (jnp.uint4, jnp.uint4, jnp.float16)
    np.testing.assert_array_equal(q.dequantize(), gptq_decoded(qweight, scales, zeros))


def test_gptq_without_zero_points_is_symmetric():
    """As with zero points of 8, and what is multiplied is int4; under jit, of several layers."""
    qweight, scales = words(2, K // 8, N), scales_of(2)
    q = jax.jit(formats.gptq)(qweight, scales)
    assert (q.values.dtype, q.scale.dtype, q.zero_point) == (jnp.int4, jnp.float32, None)
    for layer in range(2):
        expected = gptq_decoded(qweight[layer], scales[layer], np.full((K // GROUP, N), 8))
        np.testing.assert_array_equal(q[layer].dequantize(), expected)
    x = normal(0, (4, K))
    close(cutjax.gemm(x, q[1]), x @ q[1].dequantize(), 1e-5)


def test_awq():
    qweight, qzeros, scales = words(K, N // 8), words(K // GROUP, N // 8), scales_of()
    columns = (0, 2, 4, 6, 1, 3, 5, 7)  # from the lowest digit of a word on
    values, zeros = np.zeros((K, N), np.float32), np.zeros((K // GROUP, N), np.float32)
    for packed, found in ((qweight, values), (qzeros, zeros)):
        for row, line in enumerate(packed):
            for i, word in enumerate(line):
                for place, column in enumerate(columns):
                    found[row, 8 * i + column] = nibble(word, place)
    expected = (values - zeros.repeat(GROUP, 0)) * scales.astype(np.float32).repeat(GROUP, 0)
    q = formats.awq(qweight, scales, qzeros)
    assert (q.values.dtype, q.zero_point.dtype) == (jnp.uint4, jnp.uint4)
    np.testing.assert_array_equal(q.dequantize(), expected)


def test_mxfp4():
    """Of experts; every code and exponents from the least to the greatest that float32 has, and NaN."""
    blocks, scales = (
        RNG.integers(0, 256, (2, N, K // 32, 16), np.uint8),
        RNG.integers(100, 150, (2, N, K // 32), np.uint8),
    )
    scales[:, 0] = 1, 250
    decoded = np.zeros((2, N, K), np.float32)
    for expert, row, group, byte in np.ndindex(blocks.shape):
        code, exponent = int(blocks[expert, row, group, byte]), int(scales[expert, row, group]) - 127
        for half, digit in enumerate((code & 15, code >> 4)):
            value = E2M1[digit & 7] * (-1.0 if digit & 8 else 1.0)
            decoded[expert, row, 32 * group + 2 * byte + half] = np.ldexp(value, exponent)
    q = jax.jit(formats.mxfp4)(blocks, scales)
    assert (q.values.dtype, q.scale.dtype) == (jnp.float4_e2m1fn, jnp.bfloat16)
    decoded = decoded.swapaxes(1, 2)
    normal_ones = np.abs(decoded) >= np.finfo(np.float32).tiny  # XLA may flush others
    np.testing.assert_array_equal(np.where(normal_ones, q.dequantize(), 0), np.where(normal_ones, decoded, 0))
    assert np.isnan(formats.mxfp4(blocks[0], np.full_like(scales[0], 255)).dequantize()).all()
    x = normal(0, (3, K))
    found = cutjax.grouped_gemm(x, q, jnp.array([1, 2], jnp.int32))
    expected = np.concatenate([x[:1] @ decoded[0], x[1:] @ decoded[1]])
    close(found[:, 1:], expected[:, 1:], 1e-5)  # row 0 has numbers as large as float32's


@pytest.mark.parametrize("shape", [(256, 128), (576, 128), (64, 200), (2, 128, 384)], ids=str)
def test_deepseek_fp8(shape):
    """576 rows are those of DeepSeek-V3's latent keys and values: the last block has 64."""
    weight = np.asarray(normal(0, shape)).astype(jnp.float8_e4m3fn)
    squares = tuple(-(-size // 128) for size in shape[-2:])
    factors = RNG.uniform(0.5, 1.5, (*shape[:-2], *squares)).astype(np.float32)
    expected = np.zeros(shape, np.float32)
    for i, j in np.ndindex(squares):
        square = np.s_[..., 128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        expected[square] = weight[square].astype(np.float32) * factors[..., i : i + 1, j : j + 1]
    q = formats.deepseek_fp8(weight, factors)
    np.testing.assert_array_equal(q.dequantize(), expected)
    x = normal(1, (*shape[:-2], 2, shape[-1]))
    close(cutjax.gemm(x, q, layout="nt"), x @ expected.swapaxes(-1, -2), 1e-5)


W, Z, S = np.zeros((8, 16), np.int32), np.zeros((2, 2), np.int32), np.ones((2, 16), np.float16)
BYTES = np.zeros((4, 2, 16), np.uint8)
F8 = np.zeros((128, 256), jnp.float8_e4m3fn)
MIXED = np.arange(K)[::-1] // GROUP
REFUSED = {
    "packed otherwise": (
        lambda: formats.gptq(W.astype(np.uint8), S),
        TypeError,
        "gptq: qweight must be int32, got uint8",
    ),
    "shuffled": (lambda: formats.gptq(W, S, Z, MIXED), ValueError, r"g_idx is not in order: .* i // 32.*desc_act"),
    "g_idx": (lambda: formats.gptq(W, S, Z, MIXED[1:]), ValueError, r"g_idx is \(63,\), expected \(64,\)"),
    "version": (lambda: formats.gptq(W, S, Z, version=3), ValueError, "version must be 1 or 2, got 3"),
    "scales": (
        lambda: formats.gptq(W, S[:, :8], Z),
        ValueError,
        r"scales are \(2, 8\), but the weights are \(64, 16\)",
    ),
    "groups": (lambda: formats.awq(W[:, :2], S[[0, 0, 0]], Z), ValueError, r"scales are \(3, 16\).*'k / group', 16"),
    "zeros": (lambda: formats.awq(W[:, :2], S, Z[:1]), ValueError, r"qzeros are \(1, 2\), expected \(2, 2\)"),
    "integers": (lambda: formats.awq(W[:, :2], Z, Z), TypeError, "scales must be floating-point numbers, got int32"),
    "blocks": (
        lambda: formats.mxfp4(BYTES, BYTES[..., 0][:3]),
        ValueError,
        r"blocks are \(4, 2, 16\), expected \(3, 2,",
    ),
    "squares": (lambda: formats.deepseek_fp8(F8, np.ones((2, 1))), ValueError, r"is \(2, 1\), expected \(1, 2\)"),
    "float8": (lambda: formats.deepseek_fp8(F8.astype(np.float32), S), TypeError, "must be float8_e4m3fn, got float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name):
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


READ = {"gptq": lambda: formats.gptq(words(32, 128), np.ones((2, 128), np.float16))}
READ["mxfp4"] = lambda: formats.mxfp4(np.zeros((128, 8, 16), np.uint8), np.zeros((128, 8), np.uint8))


@pytest.mark.parametrize(("name", "kind"), [("gptq", "s4"), ("mxfp4", "f4_e2m1fn")])
def test_kernels_read_what_is_made(name, kind):
    """On Hopper, beside bfloat16, and where scales are float32 beside float16: no pass dequantizes the weights."""
    q = READ[name]()
    for dtype in (jnp.bfloat16, jnp.float16)[: 2 if q.scale.dtype == jnp.float32 else 1]:
        x = jax.ShapeDtypeStruct((16, 256), dtype)
        shown = str(cutjax.explain(lambda x, q: cutjax.gemm(x, q, backend="cuda"), platform="cuda")(x, q))
        assert re.search(rf"sm90_b?f16x{kind}by.* is decoded to b?f16 in registers", shown), shown
