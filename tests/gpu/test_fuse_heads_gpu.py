"""Heads that cutjax.fuse finds, by their kernels on a GPU: losses and gradients beside float32 logits."""

from __future__ import annotations

import functools

import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers, normal
from head_cases import CASES, hard

import cutjax
from cutjax.primitives import vocabulary

pytestmark = pytest.mark.gpu

always = functools.partial(cutjax.fuse, policy="always")
ALL = (0, 1, 3)
# The largest error over the largest value: powers are rounded to the dtype, and the result, and sums of chunks.
ERRORS = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-9}


def check(fn, args, dtype, rounding=1e-5):
    """Asserts that losses and gradients are near those of float32; returns those."""
    x, w, y, b = args
    fused = always(jax.value_and_grad(fn, ALL))
    given = [z.astype(dtype) for z in (x, w, b)]
    loss, got = jax.jit(fused)(given[0], given[1], y, given[2])
    wide = [z.astype(jnp.float32) for z in given]
    with jax.default_matmul_precision("highest"):
        exact, expected = jax.jit(jax.value_and_grad(fn, ALL))(wide[0], wide[1], y, wide[2])
    limit = max(rounding, 1e-4 if dtype == "float32" else 0)  # TF32's operands have 11 bits
    assert abs(float(loss) - float(exact)) <= limit * abs(float(exact))
    for mine, theirs in zip(got, expected, strict=True):
        theirs = np.asarray(theirs)
        assert np.abs(np.asarray(mine, np.float32) - theirs).max() <= ERRORS[dtype] * np.abs(theirs).max()
    return fused, (given[0], given[1], y, given[2])


@pytest.mark.parametrize("name", CASES)
def test_as_people_write_it(name):
    x, w, y, b = head_cases.inputs()
    rounded = name in ("in_its_dtype", "temperature")  # the loss, or a number in it, is of 16 bits
    fused, args = check(CASES[name], (x, w, y, b), "bfloat16", 2**-7 if rounded else 1e-5)
    rows = cutjax.explain(fused)(*args).rows
    assert all(row.kernel.startswith(("sm90_", "mma_")) for row in rows if row.epilogue)


def drawn(tokens, d, words):
    x, w = normal(0, (tokens, d)), normal(1, (d, words)) / d**0.5
    labels = jnp.asarray(np.random.default_rng(2).integers(0, words, tokens), jnp.int32)
    return x, w, labels, normal(3, (words,))


def plain(x, w, y, b):
    return 64 * hard(x @ w + b, y).mean()


def capped(x, w, y, b):
    logits = 5 * jnp.tanh((x @ w).astype(jnp.float32) / 5)
    lse = jax.nn.logsumexp(logits, -1)
    return 64 * (lse - jnp.take_along_axis(logits, y[:, None], 1)[:, 0] + 0.01 * lse**2).mean()


@pytest.mark.parametrize("fn", [plain, capped], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("sizes", [(72, 64, 200), (1000, 512, 5003), (4096, 256, 50264)], ids=str)
@pytest.mark.parametrize("dtype", ERRORS)
def test_sizes(dtype, sizes, fn):
    check(fn, drawn(*sizes), dtype)


def test_equal_logits_are_exact():
    """Zero weights: each of 256 words is as likely, and every gradient is a sum of few bits."""
    x, w, y = integers(0, (128, 64), jnp.bfloat16), jnp.zeros((64, 256), jnp.bfloat16), jnp.arange(128) % 64
    gradient = always(jax.value_and_grad(lambda x, w: hard(x @ w, y).sum(), (0, 1)))
    loss, (of_x, of_w) = jax.jit(gradient)(x, w)
    np.testing.assert_allclose(loss, 128 * np.log(256), rtol=1e-6)
    assert not np.asarray(of_x, np.float32).any()
    exact = np.asarray(x, np.float64).T @ (np.full((128, 256), 2.0**-8) - np.eye(256)[np.asarray(y)])
    np.testing.assert_allclose(np.asarray(of_w, np.float64), exact, rtol=2**-8, atol=2**-8)


def test_chunks_agree(monkeypatch):
    """The loss of many chunks is that of one; a chunk's product may add up along k otherwise."""
    args = [z.astype(jnp.bfloat16) if z.dtype == jnp.float32 else z for z in drawn(1024, 128, 4096)]
    found = []
    for size in (1 << 30, 1 << 21):
        monkeypatch.setattr(vocabulary, "CHUNK_BYTES", size)
        found.append(jax.jit(always(jax.value_and_grad(plain)))(*args))
    (one, of_x), (several, chunked) = found
    np.testing.assert_allclose(one, several, rtol=1e-6)
    of_x, chunked = np.asarray(of_x, np.float32), np.asarray(chunked, np.float32)
    assert np.abs(of_x - chunked).max() <= 2**-8 * np.abs(of_x).max()
