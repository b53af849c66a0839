"""Random convolutions as users call them, on the device: kernels wherever there is one, equal to numpy bit for bit."""

from __future__ import annotations

import convolutions
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

pytestmark = pytest.mark.gpu

COUNT, EACH = 60, 6  # 300 after a change of kernels; a program has some, for one compilation of XLA's
DTYPES = ("bfloat16", "float16", "float32")


def digits(seed, shape):
    """-1 to 1, mostly 0: sums have few bits, so that each is exact in 16."""
    return np.random.default_rng(seed).choice([-1, 0, 0, 1], shape).astype(np.float32)


def bound(conv):
    """The function, which takes a kernel for each product of it that has one."""
    return lambda x, w: cutjax.conv_general_dilated(x, w, **conv.arguments)


def products(conv, x, w, g):
    y, pull = jax.vjp(bound(conv), x, w)
    return y, *pull(g)


def served(conv, *avals) -> bool:
    """True if all three products have kernels, or nothing to compute."""
    with cutjax.use_backend("cuda"):
        return all(row.kernel != "error" for row in cutjax.explain(lambda *xs: products(conv, *xs))(*avals).rows)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("first", range(0, COUNT, EACH))
def test_values_and_gradients(first, wide):
    cases, inputs, expected = [], [], []
    for seed in range(first, first + EACH):
        conv = convolutions.drawn(seed, wide)
        shapes = conv.lhs, conv.rhs, convolutions.equation(conv).outvars[0].aval.shape
        arrays = [digits(3 * seed + i, shape) for i, shape in enumerate(shapes)]
        given = [jnp.asarray(x, DTYPES[seed % len(DTYPES)]) for x in arrays]
        cases.append((conv, served(conv, *given)))
        inputs.append(given)
        x, w, g = arrays
        expected.append((convolutions.convolved(x, w, conv), *convolutions.gradients(x, w, g, conv)))
    assert sum(has for _, has in cases) >= EACH - 2

    @jax.jit
    def program(inputs):
        found = []
        for (conv, has), arrays in zip(cases, inputs, strict=True):
            with cutjax.use_backend("cuda" if has else "auto"):
                found.append(products(conv, *arrays))
        return found

    got = program(inputs)
    for (conv, has), mine, theirs in zip(cases, got, expected, strict=True):
        for name, y, z in zip(("value", "of images", "of weights"), mine, theirs, strict=True):
            y, z = np.asarray(y.astype(jnp.float32)), np.asarray(jnp.asarray(z, y.dtype).astype(jnp.float32))
            assert np.array_equal(y, z), f"{name} of {conv}, by kernels: {has}, off by {np.abs(y - z).max()}"


def test_epilogues():
    """An activation, a residual, the moments of channels and a scale of images, of each view."""
    x, w = (jnp.asarray(digits(i, shape), jnp.bfloat16) for i, shape in enumerate([(4, 14, 14, 64), (3, 3, 64, 128)]))
    b, s = jnp.arange(128.0) % 5 - 2, jnp.asarray(digits(2, (4, 1, 1, 128)))

    def epilogue(acc, b, s, r=None):
        y = jnp.maximum(acc * s + b[None, None, None], 0)
        y = y if r is None else y + r.astype(y.dtype)
        return y, acc.sum((0, 1, 2)), (acc * acc).sum((0, 1, 2))

    def ours(x, w, strides):
        residual = jnp.ones((4, *(-(-14 // strides),) * 2, 128), jnp.bfloat16)
        how = {"window_strides": strides, "out_dtype": jnp.float32}
        return cutjax.conv(x, w, epilogue=epilogue, operands=(b, s, residual), **how)

    for strides in (1, 2):
        numbers = {"window_strides": (strides,) * 2, "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        acc = convolutions.convolved(
            *(a.astype(jnp.float32) for a in (x, w)), convolutions.Convolution(x.shape, w.shape, numbers)
        )
        wanted = epilogue(jnp.asarray(acc, jnp.float32), b, s, jnp.ones(acc.shape))
        with cutjax.use_backend("cuda"):
            got = jax.jit(lambda x, w, strides=strides: ours(x, w, strides))(x, w)
        for y, z in zip(got, wanted, strict=True):
            assert np.array_equal(y, z)


def test_batches():
    """vmap of images, of weights and of both: by kernels where there are some."""
    conv = convolutions.Convolution(
        (2, 3, 9, 9, 16),
        (3, 3, 3, 16, 32),
        {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")},
    )
    x, w = (jnp.asarray(digits(i, shape), jnp.bfloat16) for i, shape in enumerate([(3, 2, 9, 9, 16), conv.rhs]))
    one = conv._replace(lhs=(2, 9, 9, 16), rhs=(3, 3, 16, 32))
    fn = bound(one)
    for axes in ((0, None), (None, 0), (0, 0)):
        args = [v if axis == 0 else v[0] for v, axis in zip((x, w), axes, strict=True)]
        pairs = [[v if axis is None else v[i] for v, axis in zip(args, axes, strict=True)] for i in range(3)]
        expected = np.stack([convolutions.convolved(*(np.asarray(v, np.float32) for v in pair), one) for pair in pairs])
        got = np.asarray(jax.jit(jax.vmap(fn, axes))(*args).astype(jnp.float32))
        assert np.array_equal(got, np.asarray(jnp.asarray(expected, jnp.bfloat16).astype(jnp.float32)))
