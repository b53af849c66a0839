"""Programs that dequantize weights, inside cutjax.fuse: their products read the weights as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, scaled

import cutjax

pytestmark = pytest.mark.versions

BF16, F32 = jnp.bfloat16, jnp.float32
M, K, N = 16, 64, 32
X = scaled(0, (M, K), BF16)


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def columns(x, q):
    return x @ (q.values.astype(BF16) * q.scale.astype(BF16))


def rows_first(x, q):
    return (q.values.astype(F32) * q.scale).astype(BF16).T @ x.T


def vector(x, q):
    return jnp.dot(x, q.values.astype(F32) * q.scale.reshape(-1))


def groups(x, q):
    values = q.values.reshape(K // 16, 16, N).astype(BF16) * q.scale[:, None, :].astype(BF16)
    return x @ values.reshape(K, N)


def squares(x, q):
    values = q.values.reshape(K // 16, 16, N // 16, 16).astype(F32) * q.scale[:, None, :, None]
    return x @ values.reshape(K, N).astype(BF16)


def zeros(x, q):
    values = q.values.reshape(K // 16, 16, N).astype(BF16) - q.zero_point[:, None, :].astype(BF16)
    return x @ (values * q.scale[:, None, :].astype(BF16)).reshape(K, N)


def heads(x, q):
    """The weights of one einsum, with axes of their own."""
    w = (q.values.astype(BF16) * q.scale.astype(BF16)).reshape(K, 4, N // 4)
    return jnp.einsum("mk,khd->mhd", x, w)


def layer(x, q):
    return jax.nn.gelu(columns(x, q) + jnp.ones(N, BF16))


BLOCKS = {
    columns: ("int8", (-1, 1)),
    rows_first: ("int8", (-1, 1)),
    vector: ("float8_e4m3fn", (-1, 1)),
    groups: ("int4", (16, 1)),
    squares: ("float8_e4m3fn", (16, 16)),
    zeros: ("uint4", (16, 1)),
    heads: ("int8", (-1, 1)),
    layer: ("int8", (-1, 1)),
}


@pytest.mark.parametrize("fn", BLOCKS, ids=lambda fn: fn.__name__)
def test_products_of_dequantized_weights(fn):
    """Values are those of the program to what it rounds, and no product is left that reads wide weights."""
    dtype, block = BLOCKS[fn]
    q = cutjax.quantize(scaled(1, (K, N)), dtype, block=block, zero_point=dtype.startswith("u"))
    fused = cutjax.fuse(fn)
    found, wanted = fused(X, q), jax.jit(fn)(X, q)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(found.astype(F32), wanted.astype(F32), rtol=0, atol=0.03)
    assert " dot_general[" not in str(jax.make_jaxpr(fused)(X, q)).replace("cutjax_dot_general", "")
    (row,) = cutjax.explain(fused, platform="cuda")(X, q).rows
    assert dtype in (row.choice.problem.a.dtype.name, row.choice.problem.bs[0].dtype.name)


def test_a_number_less_an_array_is_no_operand():
    """As in the derivative of tanh: what is subtracted from has no dtype to decode."""
    a = jnp.full((8, 8), 0.5)
    for fn in (lambda a: ((1.0 - a) * a) @ a, lambda a: jax.jvp(lambda x: jnp.tanh(x @ x) @ x, (a,), (a,))[1]):
        close(cutjax.fuse(fn, policy="always")(a), fn(a), 1e-5)


def test_what_is_read_twice_stays():
    """Wide weights that something else reads too, and what only looks like a scale, are left to XLA."""
    q = cutjax.quantize(scaled(1, (K, N)), "int8", block=(-1, 1))

    def twice(x, q):
        w = q.values.astype(BF16) * q.scale.astype(BF16)
        return x @ w, w.sum()

    def masked(x, q):
        return x @ (q.values.astype(BF16) * (q.values > 0))

    for fn in (twice, masked):
        shown = str(jax.make_jaxpr(cutjax.fuse(fn))(X, q))
        assert "dot_general" in shown
        jax.tree.map(np.testing.assert_array_equal, cutjax.fuse(fn)(X, q), jax.jit(fn)(X, q))


def test_gradients_of_what_is_fused():
    """The program's own, of an array beside integers."""
    q = cutjax.quantize(scaled(1, (K, N)), "int8", block=(-1, 1))

    def loss(fn, x):
        return (fn(x, q).astype(F32) ** 2).sum()

    ours, plain = (jax.jit(jax.grad(lambda x, f=f: loss(f, x)))(X) for f in (cutjax.fuse(layer), layer))
    ours, plain = ours.astype(F32), plain.astype(F32)
    assert jnp.linalg.norm(ours - plain) / jnp.linalg.norm(plain) < 0.02


def _of_blocks(dequantized):
    """A product of what a function makes of values, scales and zero points, each with an axis of blocks."""

    def fn(x, values, scale, zero):
        w = dequantized(values.reshape(K // 16, 16, N), scale[:, None], zero[:, None])
        return x @ w.reshape(K, N).astype(BF16)

    return jax.jit(fn)


# What a program computes that is not (values - zero) * scale: wrapped around, cut off or rounded on the way.
CHANGED = {
    "int8 less int8": ("int8", "int8", lambda v, s, z: (v - z).astype(F32) * s),
    "uint8 less uint8": ("uint8", "uint8", lambda v, s, z: (v - z).astype(F32) * s),
    "uint4 less uint4": ("uint4", "uint4", lambda v, s, z: (v - z).astype(F32) * s),
    "then of a sign": ("uint4", "uint4", lambda v, s, z: (v - z).astype(jnp.int4).astype(F32) * s),
    "without a sign": ("uint8", "uint8", lambda v, s, z: (v.astype("uint32") - z.astype("uint32")).astype(F32) * s),
    "values without a sign": ("int8", "int8", lambda v, s, z: (v.astype("uint32").astype(F32) - z.astype(F32)) * s),
    "values of bool": ("int8", "int8", lambda v, s, z: (v.astype(bool).astype(F32) - z.astype(F32)) * s),
    "zero cut off": ("int8", "float32", lambda v, s, z: (v.astype("int32") - z.astype("int32")).astype(F32) * s),
    "zero without a sign": ("int8", "int8", lambda v, s, z: (v.astype("int16") - z.astype("uint8")).astype(F32) * s),
    "scale cut off": ("int8", "int8", lambda v, s, z: (v.astype("int32") * s.astype("int32")).astype(F32) + z * 0.0),
    "result cut off": ("int8", "int8", lambda v, s, z: (v.astype(F32) * s).astype("int32").astype(F32)),
    "in float8": ("float8_e4m3fn", "int8", lambda v, s, z: (v * s.astype(v.dtype)).astype(F32)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_conversions_that_change_numbers(name):
    """The program's numbers count, odd as they may be."""
    dtype, of_zero, dequantized = CHANGED[name]
    random = np.random.default_rng(0)
    values = jnp.asarray(random.integers(-128, 128, (K, N))).astype("int8").astype(dtype)
    zero = jnp.asarray(random.uniform(-99, 99, (K // 16, N))).astype("float32" if of_zero == "float32" else "int8")
    args = X, values, jnp.asarray(random.uniform(0.5, 3, (K // 16, N)), F32), zero.astype(of_zero)
    fn = _of_blocks(dequantized)
    expected, got = (np.asarray(f(*args), np.float32) for f in (fn, cutjax.fuse(fn, policy="always")))
    np.testing.assert_allclose(got, expected, atol=2**-6 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (N,)], ids=str)
def test_one_scale_of_any_rank(shape):
    q = cutjax.quantize(scaled(1, (K, N)), "int8")
    scale = jnp.broadcast_to(q.scale[0, 0], shape)

    def fn(x, values, scale):
        return x @ (values.astype(BF16) * scale.astype(BF16))

    expected, got = (np.asarray(f(X, q.values, scale), np.float32) for f in (fn, cutjax.fuse(fn)))
    np.testing.assert_allclose(got, expected, atol=2**-6 * np.abs(expected).max())
