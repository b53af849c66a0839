"""Convolutions of quantized images and weights, and integers quantized again in an epilogue: exact to one rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers, normal, same

import cutjax
from cutjax import Quantized
from cutjax.ops.convolution_plan import planned

BF16, F32 = jnp.bfloat16, jnp.float32
NUMBERS = {"last": None, "first": ("NCHW", "OIHW", "NCHW")}


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def narrow(seed, shape, dtype):
    if dtype == "int8":
        return jnp.asarray(np.random.default_rng(seed).integers(-127, 128, shape), dtype)
    return normal(seed, shape).astype(dtype)


def exact(x, w, numbers, **how):
    """In float64."""
    with jax.enable_x64(True):
        x, w = (jnp.asarray(np.asarray(y, np.float64)) for y in (x, w))
        numbers = numbers or ("NHWC", "HWIO", "NHWC")
        return np.asarray(
            jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, **how), np.float64
        )


@pytest.mark.versions
@pytest.mark.parametrize("of_w", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("of_x", ["int8", "float8_e5m2"])
@pytest.mark.parametrize("order", NUMBERS)
def test_both_quantized(order, of_x, of_w):
    """Sums of values, in int32 or float32, are multiplied by both scales in float32: nothing is rounded before."""
    numbers = NUMBERS[order]
    x, w = narrow(0, (2, 6, 6, 8), of_x), narrow(1, (3, 3, 8, 16), of_w)
    s, t = jnp.abs(normal(2, (2, 1, 1, 1), BF16)), jnp.abs(normal(3, (1, 1, 1, 16), BF16))
    if numbers:
        x, s = (jnp.moveaxis(y, 3, 1) for y in (x, s))
        w, t = (jnp.transpose(y, (3, 2, 0, 1)) for y in (w, t))
    a, b = Quantized(x, s), Quantized(w, t)

    @jax.jit
    def run(a, b):
        def of(**how):
            return cutjax.conv(a, b, dimension_numbers=numbers, **how)

        return of(), of(out_dtype=F32), of(epilogue=lambda acc: jnp.maximum(acc, 0), out_dtype=F32)

    wanted = exact(np.asarray(x, F32) * np.asarray(s, F32), np.asarray(w, F32) * np.asarray(t, F32), numbers)
    rounded, wide, fused = run(a, b)
    assert rounded.dtype == BF16
    size = np.abs(wanted).max()
    np.testing.assert_allclose(wide, wanted, rtol=2**-21, atol=2**-21 * size)
    np.testing.assert_allclose(fused, np.maximum(wanted, 0), rtol=2**-21, atol=2**-21 * size)
    np.testing.assert_allclose(rounded.astype(F32), wanted, rtol=2**-8, atol=2**-21 * size)


def test_one_quantized_and_scales_that_no_sum_has():
    x, w = normal(0, (2, 6, 6, 8), BF16), narrow(1, (3, 3, 8, 16), "int8")
    by_rows = Quantized(w, jnp.abs(normal(2, (1, 1, 8, 1))))  # of channels that are added up: dequantized
    found = cutjax.conv(x, by_rows, out_dtype=F32)
    wide = by_rows.dequantize(BF16)
    np.testing.assert_allclose(found, exact(x.astype(F32), wide.astype(F32), None), rtol=1e-4, atol=1e-3)
    images = Quantized(narrow(3, (2, 6, 6, 8), "int8"), jnp.abs(normal(4, (2, 1, 1, 1))))
    both = cutjax.conv(images, by_rows)
    assert both.dtype == F32
    wanted = exact(images.dequantize(), by_rows.dequantize(), None)
    np.testing.assert_allclose(both, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    by_image = cutjax.conv(images, normal(5, (3, 3, 8, 16), BF16))
    assert by_image.dtype == BF16
    # Images of the result are of several images: their scales are multiplied into them.
    grouped = cutjax.conv(images, normal(5, (3, 3, 8, 16)), batch_group_count=2)
    wanted = exact(images.dequantize(), normal(5, (3, 3, 8, 16)), None, batch_group_count=2)
    np.testing.assert_allclose(grouped, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("k", [8, 200, 4000])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers_by_floats(dtype, k):
    """XLA has no convolution of integers on GPUs: what it computes there are float32 parts, exact to the last bit."""
    rng, info = np.random.default_rng(0), jnp.iinfo(dtype)
    shapes = (1, 4, 4, k), (2, 2, k, 3)
    x, w = (jnp.asarray(rng.integers(info.min, info.max + 1, shape), dtype) for shape in shapes)
    x, w = x.at[0, 0].set(info.min), w.at[0].set(info.min)
    given = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    (eqn,) = jax.make_jaxpr(lambda x, w: jax.lax.conv_general_dilated(x, w, **given))(x, w).eqns
    plan = planned(eqn.params, x.shape, w.shape, (1, 3, 3, 3))
    out = np.dtype("int32" if dtype == "int8" else "uint32")
    found, wanted = (
        jax.jit(lambda x, w, on=on: plan.product.reference(x, w, out_dtype=out, precision=None, on_cuda=on))(x, w)
        for on in (True, False)
    )
    same(found, wanted)


def requantized(acc, scale):
    """int32 sums, times a scale, rounded and cut off: int8."""
    return jnp.clip(jnp.round(acc.astype(F32) * scale), -128, 127).astype(jnp.int8)


def test_integers_quantized_again():
    """Sums stay int32 in the whole epilogue, as a bias that is added to them, until it rounds them to int8."""
    x, w, bias = narrow(0, (32, 64), "int8"), narrow(1, (64, 48), "int8"), integers(2, (48,), jnp.int32) * 1000
    scale, sizes = jnp.abs(normal(3, (48,))) / 4096, jnp.array([10, 22])

    def epilogue(acc, bias, scale):
        assert acc.dtype == jnp.int32
        return requantized(jnp.maximum(acc + bias, 0), scale)

    @jax.jit
    def run(x, w, bias, scale):
        images = x.reshape(2, 4, 4, 64)
        return (
            cutjax.gemm(x, w, epilogue=epilogue, operands=(bias, scale)),
            cutjax.grouped_gemm(x, jnp.stack([w, -w]), sizes, epilogue=epilogue, operands=(bias, scale)),
            cutjax.conv(images, w[None, None], epilogue=epilogue, operands=(bias, scale)),
        )

    def wanted(sums):
        wide = np.maximum(sums + np.asarray(bias), 0).astype(np.float32) * np.asarray(scale)
        return np.clip(np.round(wide), -128, 127).astype(np.int8)

    sums = np.asarray(x, np.int32) @ np.asarray(w, np.int32)
    dense, grouped, convolved = run(x, w, bias, scale)
    assert dense.dtype == jnp.int8
    np.testing.assert_array_equal(dense, wanted(sums))
    np.testing.assert_array_equal(grouped, wanted(np.concatenate([sums[:10], -sums[10:]])))
    np.testing.assert_array_equal(convolved.reshape(32, 48), dense)


def test_the_drop_in():
    """In lax's own order of axes, by default."""
    x, w = narrow(0, (2, 8, 6, 6), "int8"), narrow(1, (16, 8, 3, 3), "int8")
    a, b = Quantized(x, jnp.float32(0.5)), Quantized(w, jnp.abs(normal(3, (16, 1, 1, 1))))
    found = jax.jit(lambda a, b: cutjax.conv_general_dilated(a, b, (1, 1), "SAME"))(a, b)
    wanted = exact(a.dequantize(), b.dequantize(), ("NCHW", "OIHW", "NCHW"))
    np.testing.assert_allclose(found, wanted, rtol=2**-21, atol=2**-21 * np.abs(wanted).max())
