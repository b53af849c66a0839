"""Convolutions of each channel by itself on the device, by direct kernels: of small integers, and of normal numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import launches
import numpy as np
import pytest
import windows
from windows import forward_view

from cutjax.binding.lowering import target
from cutjax.epilogue.trace import trace
from cutjax.kernels import convolution
from cutjax.kernels.device import device_of
from cutjax.kernels.direct import causal, family
from cutjax.primitives.causal import gradient_before

pytestmark = pytest.mark.gpu

SECONDS = 120
H, F32 = jnp.bfloat16, jnp.float32
VIEWS = {
    "7x7": forward_view(3, (30, 29), (7, 7), 96),
    "7x7 small": forward_view(9, (7, 7), (7, 7), 768),
    "3x3": forward_view(2, (57, 41), (3, 3), 32),
    "5x5": forward_view(5, (14, 15), (5, 5), 48),
    "5x5 /2": forward_view(3, (33, 34), (5, 5), 144, strides=(2, 2)),
    "3x3 /2 spread": forward_view(3, (17, 18), (3, 3), 72, low=(1, 1), high=(2, 2), spread=(2, 2)),
    "3x3 dilated": forward_view(2, (40, 33), (3, 3), 64, dilation=(6, 4)),
    "causal": forward_view(3, (513,), (4,), 1280, low=(3,), high=(0,)),
    "causal, odd": forward_view(2, (100,), (3,), 37, low=(2,), high=(0,)),
    "31": forward_view(2, (300,), (31,), 256),
    "3-D": forward_view(2, (7, 12, 13), (3, 3, 3), 54),
    "3-D /2": forward_view(2, (7, 12, 13), (3, 5, 3), 48, strides=(1, 2, 2)),
    "2 of each": forward_view(2, (20, 20), (3, 3), 48),
    "of 2": forward_view(2, (20, 20), (3, 3), 48, channels=2),
}


def columns(name, view):
    return view.groups * (2 if name == "2 of each" else 1)


def kernels(problem, count=3):
    """The fastest, as predicted, and some more."""
    found = [family.resolve(problem, config) for config in family.configs(problem)]
    found = sorted((one for one in found if not isinstance(one, tuple)), key=lambda one: one.time_us(problem.device))
    assert found
    return [*found[:count], *found[count :: max(1, len(found) // 3)]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", VIEWS)
def test_forward(name, dtype):
    view = VIEWS[name]
    n, rng, dtype = columns(name, view), np.random.default_rng(0), jnp.dtype(dtype)
    x = rng.integers(-2, 3, (view.images, *view.image, view.groups * view.channels)).astype(dtype)
    w = rng.integers(-2, 3, (*view.window, view.channels, n)).astype(dtype)
    problem = convolution.forward(view, n, dtype=dtype, out_dtype=F32)
    expected = windows.forward(x, w, view, n)
    for one in kernels(problem):
        assert not launches.wrong(launches.run(problem, one.call(), [x, w]), [expected]), one.name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", VIEWS)
def test_weight_gradients(name, dtype):
    """Twice, of which the second is the first, bit for bit."""
    view = VIEWS[name]
    n, rng, dtype = columns(name, view), np.random.default_rng(1), jnp.dtype(dtype)
    x = rng.integers(-2, 3, (view.images, *view.image, view.groups * view.channels)).astype(dtype)
    g = rng.integers(-2, 3, (view.rows, n)).astype(dtype)
    problem = convolution.weight_gradient(view, n, dtype=dtype, out_dtype=F32)
    expected = windows.weight_gradient(x, g, view, n)
    for one in kernels(problem):
        assert not launches.wrong(launches.run(problem, one.call(), [x, g]), [expected]), one.name
    x, g = (rng.standard_normal(of.shape, np.float32).astype(dtype) for of in (x, g))
    call = kernels(problem)[0].call()
    first, second = (launches.run(problem, call, [x, g])[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    expected = windows.weight_gradient(x, g, view, n)
    np.testing.assert_allclose(first, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["causal", "7x7", "3-D"])
def test_bias_and_silu(name):
    """Normal numbers in bfloat16, added up in float32: an error of rounding the result, once."""
    view = VIEWS[name]
    n, rng = view.groups, np.random.default_rng(2)
    arrays = [(view.images, *view.image, n), (*view.window, 1, n), (1, n)]
    x, w, bias = (rng.standard_normal(shape, np.float32).astype(H) for shape in arrays)
    plain = convolution.forward(view, n)
    acc = jax.ShapeDtypeStruct((plain.m, n), F32)
    traced = trace(lambda acc, bias: jax.nn.silu(acc + bias.astype(F32)).astype(H), [acc], [jnp.zeros((1, n), H)])
    problem = plain.fused(traced.epilogue)
    y = windows.forward(x, w, view, n) + np.asarray(bias, np.float64)
    expected = y / (1 + np.exp(-y))
    for one in kernels(problem, 1):
        got = np.asarray(launches.run(problem, one.call(), [x, w, bias])[0], np.float64)
        assert np.abs(got - expected).max() <= 2**-8 * np.abs(expected).max(), one.name
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ["3x3", "5x5", "5x5 /2", "3x3 /2 spread", "2 of each"])
def test_sums_beside_results(name, large):
    """Small integers, and normal numbers twice, bit for bit."""
    view = VIEWS[name]
    n, rng = columns(name, view), np.random.default_rng(4)
    plain = convolution.forward(view, n, out_dtype=F32)
    problem, given, function = windows.with_sums(plain, large)
    x, w = (rng.integers(-2, 3, shape).astype(H) for shape in windows.shapes(problem))
    expected = function(windows.product(problem, x, w), *(each.astype(F32) for each in given))
    for one in kernels(problem):
        got = launches.run(problem, one.call(), [x, w, *given])
        assert not launches.wrong([each.ravel() for each in got], [np.ravel(each) for each in expected]), one.name
    x, w = (rng.standard_normal(each.shape, np.float32).astype(H) for each in (x, w))
    call = kernels(problem)[0].call()
    first, second = (launches.run(problem, call, [x, w, *given]) for _ in range(2))
    assert not launches.wrong(first, second)


@pytest.mark.parametrize("sizes", [(2, 513, 1280, 4), (3, 100, 37, 3), (1, 9, 64, 2), (2, 40, 24, 7)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_of_a_causal_convolution(sizes, dtype):
    """By each way to divide it: small integers, of a square as the activation, and twice, bit for bit."""
    images, length, channels, width = sizes
    rng, dtype = np.random.default_rng(3), jnp.dtype(dtype)
    f = trace(lambda acc: acc * acc * 0.5, [jax.ShapeDtypeStruct((2, 2), F32)]).epilogue
    kinds = (dtype, (jnp.dtype(F32),) * 2, gradient_before(f, dtype), device_of(target()))
    problem = causal.Gradients(images, length, channels, width, kinds[0], kinds[0], *kinds[1:])
    x, dy = (rng.integers(-1, 2, (images, length, channels)).astype(dtype) for _ in range(2))
    w, bias = rng.integers(-1, 2, (width, channels)).astype(dtype), rng.integers(-1, 2, channels).astype(dtype)

    def half_squares(x, w, bias):
        padded = jnp.pad(x, [(0, 0), (width - 1, 0), (0, 0)])
        return (sum(padded[:, k : k + length] * w[k] for k in range(width)) + bias) ** 2 / 2

    _, pull = jax.vjp(half_squares, *(jnp.asarray(each, F32) for each in (x, w, bias)))
    expected = [np.asarray(each) for each in pull(jnp.asarray(dy, F32))]
    found = [causal.resolve(problem, config) for config in causal.configs(problem)]
    found = sorted((one for one in found if isinstance(one, causal.Kernel)), key=lambda one: one.time_us)
    for one in [*found[:3], *found[3 :: max(1, len(found) // 4)]]:
        call = one.call()
        memory = [launches.poison(each.shape, each.dtype) for each in one.results]
        first, second = (launches.on_device(call, [x, w, bias, dy], memory)[:3] for _ in range(2))
        for got, again, exact in zip(first, second, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), exact.astype(got.dtype).astype(np.float32))
            np.testing.assert_array_equal(got, again)
