"""Kernels of linear_cross_entropy on a GPU: loss and gradients beside float32 logits, exact where numbers are small."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from checks import integers, normal

import cutjax
from cutjax.primitives import vocabulary

pytestmark = pytest.mark.gpu

SIZES = {"small": (72, 64, 200), "odd": (1000, 512, 5003), "several chunks": (4096, 256, 50264)}
OPTIONS = {
    "plain": {},
    "bounded": {"softcap": 5.0, "z_loss": 0.01},
    "smoothed": {"label_smoothing": 0.1},
    "none": {"reduction": "none"},
}
# The largest error over the largest value: powers are rounded to the dtype, and the result, and sums of chunks.
ERRORS = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-9}


def drawn(sizes, dtype, scale=1.0):
    tokens, d, words = sizes
    x, w = normal(0, (tokens, d)) * scale, normal(1, (d, words)) / d**0.5
    labels = jnp.asarray(np.random.default_rng(2).integers(0, words, tokens), jnp.int32)
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(normal(3, (words,)), dtype), labels


def with_gradients(fn, labels, **options):
    """The loss by 64, whose gradients float16 holds with 11 bits, and its gradients by x, w and the bias."""

    def loss(x, w, b):
        found = fn(x, w, labels, bias=b, **options)
        return 64 * jnp.sum(found.astype(jnp.float32)) / found.size

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ERRORS)
def test_loss_and_gradients(dtype, sizes, options):
    *arrays, labels = drawn(SIZES[sizes], dtype)
    ours = functools.partial(cutjax.linear_cross_entropy, backend="cuda")
    value, got = with_gradients(ours, labels, **OPTIONS[options])(*arrays)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in arrays]
        exact, expected = with_gradients(oracles.linear_cross_entropy, labels, **OPTIONS[options])(*wide)
    assert abs(value - exact) <= (1e-5 if dtype != "float32" else 1e-4) * abs(exact)  # TF32's operands have 11 bits
    for mine, theirs in zip(got, expected, strict=True):
        theirs = np.asarray(theirs)
        assert np.abs(np.asarray(mine, np.float32) - theirs).max() <= ERRORS[dtype] * np.abs(theirs).max()
    again = with_gradients(ours, labels, **OPTIONS[options])(*arrays)
    jax.tree.map(np.testing.assert_array_equal, (value, got), again)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_that_spread_are_multiplied_again(dtype):
    """The first shift is too far from most rows' largest logit: a chunk is computed with the largest instead."""
    *arrays, labels = drawn((300, 128, 3000), dtype, scale=300.0)
    ours = functools.partial(cutjax.linear_cross_entropy, backend="cuda")
    value, got = with_gradients(ours, labels)(*arrays)
    with jax.default_matmul_precision("highest"):
        exact, expected = with_gradients(oracles.linear_cross_entropy, labels)(*(x.astype(jnp.float32) for x in arrays))
    assert abs(value - exact) <= 1e-3 * abs(exact)
    if dtype == "bfloat16":  # of float32, TF32's operands move logits of hundreds by tenths
        for mine, theirs in zip(got, expected, strict=True):
            theirs = np.asarray(theirs)
            assert np.abs(np.asarray(mine, np.float32) - theirs).max() <= 2**-6 * np.abs(theirs).max()


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_equal_logits_are_exact(layout):
    """Zero weights: each of 256 words is as likely, and every gradient is a sum of few bits."""
    x, labels = integers(0, (128, 64), jnp.bfloat16), jnp.arange(128) % 64
    w = jnp.zeros((64, 256) if layout == "nn" else (256, 64), jnp.bfloat16)
    fn = functools.partial(cutjax.linear_cross_entropy, labels=labels, layout=layout, reduction="sum", backend="cuda")
    loss, (of_x, of_w) = jax.jit(jax.value_and_grad(lambda x, w: fn(x, w), (0, 1)))(x, w)
    np.testing.assert_allclose(loss, 128 * np.log(256), rtol=1e-6)
    assert not np.asarray(of_x, np.float32).any()
    slopes = np.full((128, 256), 2.0**-8) - np.eye(256)[np.asarray(labels)]
    exact = np.asarray(x, np.float64).T @ slopes
    got = np.asarray(of_w, np.float64)
    np.testing.assert_allclose(got if layout == "nn" else got.T, exact, rtol=2**-8, atol=2**-8)


def test_chunks_agree(monkeypatch):
    """The loss of many chunks is that of one; a chunk's product may add up along k otherwise."""
    *arrays, labels = drawn((1024, 128, 4096), "bfloat16")
    found = []
    for size in (1 << 30, 1 << 21):
        monkeypatch.setattr(vocabulary, "CHUNK_BYTES", size)
        jax.clear_caches()
        found.append(with_gradients(functools.partial(cutjax.linear_cross_entropy, backend="cuda"), labels)(*arrays))
    (one, (of_x, *_)), (several, (chunked, *_)) = found
    np.testing.assert_allclose(one, several, rtol=1e-6)
    of_x, chunked = np.asarray(of_x, np.float32), np.asarray(chunked, np.float32)
    assert np.abs(of_x - chunked).max() <= 2**-8 * np.abs(of_x).max()
