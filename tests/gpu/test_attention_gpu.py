"""Attention of few query rows on the device, against plain JAX in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

pytestmark = pytest.mark.gpu
# Sequences, steps, heads, heads of keys, keys, and the sizes of a key and of a value.
SHAPES = [
    (2, 1, 8, 2, 1000, 128, 128),
    (1, 1, 4, 4, 77, 64, 64),
    (3, 1, 12, 3, 333, 96, 80),
    (2, 1, 4, 2, 500, 256, 256),
]
SHAPES += [
    (2, 4, 16, 4, 257, 128, 128),
    (1, 8, 8, 2, 1111, 64, 128),
    (2, 1, 64, 2, 300, 128, 128),
    (200, 1, 4, 2, 70, 64, 64),
]


def step(q, k, v, position, fill=-jnp.inf):
    """A step of decoding up to a position."""
    batch, time, heads, size = q.shape
    q = q.reshape(batch, time, k.shape[2], -1, size)
    scores = jnp.einsum("btkqd,bskd->bkqts", q, k).astype(jnp.float32) * size**-0.5
    visible = jnp.arange(k.shape[1]) <= (position + jnp.arange(time))[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, fill)).astype(v.dtype)
    return jnp.einsum("bkqts,bskd->btkqd", weights, v).reshape(batch, time, heads, -1)


def random(shape, dtype="bfloat16"):
    batch, time, heads, grouped, keys, key_size, value_size = shape
    shapes = (batch, time, heads, key_size), (batch, keys, grouped, key_size), (batch, keys, grouped, value_size)
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s, np.float32), dtype) for s in shapes]


def compared(fn, *args):
    """The results of a kernel, of plain JAX, and of plain JAX in float32; two runs of the kernel are equal."""
    fused = jax.jit(cutjax.fuse(fn, policy="always"))
    assert "attention_" in fused.lower(*args).as_text()
    got, again = (np.asarray(fused(*args), np.float32) for _ in range(2))  # NumPy takes no NaN of 16 bits for another
    np.testing.assert_array_equal(got, again)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(fn)(*(x.astype(np.float32) if x.dtype.itemsize == 2 else x for x in args))
    return got, *(np.asarray(x, np.float32) for x in (jax.jit(fn)(*args), exact))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, dtype):
    got, plain, exact = compared(step, *random(shape, dtype), jnp.int32(shape[4] - 5))
    assert np.abs(got - exact).max() <= 1.5 * np.abs(plain - exact).max() + 1e-3


@pytest.mark.parametrize("fill", [-np.inf, -1e30, float(np.finfo(np.float32).min)])
def test_no_key(fill):
    got, _, exact = compared(functools.partial(step, fill=fill), *random(SHAPES[1]), jnp.int32(-1))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    np.testing.assert_allclose(got, exact, atol=2**-7)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_nan(which):
    """Those of masked keys are not seen, those of values are: 0 times NaN is NaN."""
    q, k, v = random(SHAPES[0])
    q = q.at[0, 0, 1].set(np.nan) if which == "query" else q
    k = k.at[1, 900:].set(np.nan) if which == "key" else k
    v = v.at[1, 950, 1, 3].set(np.nan) if which == "value" else v
    got, _, exact = compared(step, q, k, v, jnp.int32(800))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    assert np.isnan(exact).any() == (which != "key")


def test_of_jax_with_a_bias_and_a_mask():
    q, k, v = random(SHAPES[0])
    keys = jax.random.split(jax.random.key(0))
    bias = jax.random.normal(keys[0], (2, 8, 1, 1000), jnp.bfloat16)
    mask = jax.random.bernoulli(keys[1], 0.7, (2, 1, 1, 1000))
    attention = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    with jax.numpy_dtype_promotion("standard"):
        got, plain, exact = compared(lambda *args: attention(*args), q, k, v, bias, mask)
    assert np.abs(got - exact).max() <= 1.5 * np.abs(plain - exact).max() + 1e-3
