"""Quantized rows: both operands with scales, or the first alone; what is multiplied, derivatives, devices, errors."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from checks import close, integers, mesh_of, normal, same, scaled

import cutjax
from cutjax import Quantized

P, BF16, F32, I8, F8 = jax.P, jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn
ROUNDING = 2**-7
M, K, N = 12, 32, 24


def rows(dtype=I8, shape=(M, K), seed=0):
    return Quantized(integers(seed, shape).astype(dtype), jnp.abs(normal(seed + 10, (*shape[:-1], 1))) / 8)


def columns(dtype=I8, shape=(K, N), seed=1):
    return Quantized(integers(seed, shape).astype(dtype), jnp.abs(normal(seed + 10, (*shape[:-2], 1, shape[-1]))) / 8)


def turned(q):
    return Quantized(q.values.mT, q.scale.mT)


def exact(a, b):
    """Sums of small integers, exact in float32, times both scales, as the epilogue multiplies."""
    return (a.values.astype(F32) @ b.values.astype(F32)) * a.scale * b.scale


@pytest.mark.parametrize("dtype", [I8, F8])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_both_operands(dtype, layout):
    """In integers or float8, scaled afterwards: the values' sums are exact, and rounded once."""
    a, b = rows(dtype), columns(dtype)
    given = turned(a) if layout[0] == "t" else a, turned(b) if layout[1] == "t" else b
    multiply = jax.jit(functools.partial(cutjax.gemm, layout=layout), static_argnames="out_dtype")
    same(multiply(*given), exact(a, b))  # in the scales' dtype
    same(multiply(*given, out_dtype=BF16), exact(a, b).astype(BF16))


def test_integers_are_added_up_in_integers():
    """Sums past 2^24, which float32 does not hold one by one."""
    k = 2048
    a, b = jnp.full((1, k), 127, I8).at[0, 0].set(1), jnp.full((k, 1), 127, I8)
    found = cutjax.gemm(Quantized(a, jnp.float32(1)), Quantized(b, jnp.float32(1)), epilogue=lambda acc: acc - 2.0**24)
    assert found == np.float32((k - 1) * 127 * 127 + 127) - 2.0**24
    (eqn,) = [x for x in jax.make_jaxpr(product)(rows(), columns()).jaxpr.eqns if "epilogue" in x.params]
    assert eqn.params["epilogue"].accumulator == np.int32


def product(a, b):
    return cutjax.gemm(a, b, out_dtype=BF16)


@pytest.mark.parametrize("dtype", [I8, F8])
def test_quantized_by_an_array(dtype):
    a, b = rows(dtype), integers(1, (K, N), BF16)
    expected = ((a.values.astype(F32) @ b.astype(F32)) * a.scale).astype(BF16)
    for n in (N, 3):  # few columns are multiplied transposed
        same(cutjax.gemm(a, b[:, :n]), expected[:, :n])
        same(cutjax.gemm(turned(a), b[:, :n].mT, layout="tt"), expected[:, :n])
    same(cutjax.gemm(a, b, epilogue=lambda acc, c: acc * c, operands=(jnp.full((N,), 2.0),)), 2 * expected)
    close(cutjax.gemm(a, b.astype(F32)), expected.astype(F32), ROUNDING)


@pytest.mark.parametrize("n", [8, 24])  # of few columns the transposed product is computed
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_narrow_rows_by_wider_ones(layout, n):
    def product(a, b):
        return cutjax.gemm(a, b, layout=layout)

    a, b = rows(), columns(BF16, (K, n))
    exact = a.dequantize() @ b.dequantize()
    a, b = (jax.tree.map(jnp.matrix_transpose, x) if layout == "tt" else x for x in (a, b))
    close(product(a, b), exact, 1e-6)
    gradient = jax.grad(lambda scale: product(a, Quantized(b.values, scale)).sum())(b.scale)
    close(gradient.ravel() * b.scale.ravel(), exact.sum(0), 1e-5)


def test_integers_by_quantized_ones():
    """Of integers no dtype of the scale's came out before, but zeros."""
    a, b = rows(), columns()
    same(cutjax.gemm(a.values, b), (a.values.astype(F32) @ b.values.astype(F32)) * b.scale)
    mixed = cutjax.gemm(a, columns(F8))  # multiplied in bfloat16, which holds both
    close(mixed, exact(a, columns(F8)), 1e-6)


@pytest.mark.parametrize(("a", "b", "k"), [("int8", "int8", 2**17), ("uint8", "uint8", 66100), ("int16", "int8", 600)])
def test_sums_that_would_wrap(a, b, k):
    """They did: integers were added up in 32 bits whatever became of the sums."""
    low, one = jnp.iinfo(a).min or jnp.iinfo(a).max, jnp.ones((1, 1))
    x, w = jnp.full((2, k), low, a), jnp.full((k, 3), jnp.iinfo(b).min or jnp.iinfo(b).max, b)
    expected = jnp.full((2, 3), float(int(x[0, 0]) * int(w[0, 0]) * k))
    quantized = cutjax.Quantized(x, one), cutjax.Quantized(w, one)
    for args in (quantized, (x, quantized[1])):
        close(cutjax.gemm(*args), expected, 1e-4)  # of sums in float32, as long as they are
        close(cutjax.gemm(*args, epilogue=lambda acc: (acc, -acc), out_dtype=(F32, None))[1], -expected, 1e-4)
    close(cutjax.gemm(turned(quantized[0]), quantized[1], layout="tn"), expected, 1e-4)
    grouped = cutjax.Quantized(w[None], one[None])
    close(cutjax.grouped_gemm(quantized[0], grouped, jnp.array([2])), expected, 1e-4)
    close(cutjax.mlp(*quantized, jnp.ones((3, 1)), activation=lambda v: v), 3 * expected[:, :1], 1e-4)


def test_batches_and_several_weights():
    a, b, c = rows(shape=(3, M, K)), columns(shape=(3, K, N)), columns(seed=2)
    close(jax.vmap(cutjax.gemm)(a, b), exact(a, b), 1e-6)
    close(cutjax.gemm(a, c), exact(a, c), 1e-6)
    close(jax.vmap(cutjax.gemm, (0, None))(a, jnp.ones((K, 2), BF16)), cutjax.gemm(a, jnp.ones((K, 2), BF16)), ROUNDING)
    gated = cutjax.gemm(a, (c, c), epilogue=lambda gate, up, x: jax.nn.silu(gate) * up + x, operands=(jnp.ones(N),))
    close(gated, jax.nn.silu(exact(a, c)) * exact(a, c) + 1, 1e-5)


@pytest.mark.parametrize("dtype", [I8, F8])
def test_gradients(dtype):
    """As those of a quantized b: integers have none, float8 values and scales theirs."""
    a, b, how = rows(dtype), columns(dtype), {"allow_int": True} if dtype == I8 else {}

    def ours(a, b):
        return (cutjax.gemm(a, b, epilogue=jnp.tanh) ** 2).mean()

    def plain(a, b):
        return (jnp.tanh(exact(a, b)) ** 2).mean()

    got, expected = (jax.jit(jax.grad(f, (0, 1), **how))(a, b) for f in (ours, plain))
    for mine, other, given in zip(got, expected, (a, b), strict=True):
        close(mine.scale, other.scale, 2 * ROUNDING)
        assert mine.scale.shape == given.scale.shape
        if dtype == I8:
            assert mine.values.dtype == jax.dtypes.float0
        else:
            close(mine.values, other.values, 2**-3)


@pytest.mark.parametrize("n", [N, 4])
def test_gradients_beside_an_array(n):
    """The mirror image of a quantized b: that of the transposed product, transposed."""
    a, b = rows(F8), scaled(3, (K, n), BF16)

    def ours(a, b):
        return (cutjax.gemm(a, b).astype(F32) ** 2).mean()

    def mirrored(a, b):
        return (cutjax.gemm(b.mT, turned(a)).astype(F32) ** 2).mean()

    (da, db), (da_other, db_other) = (jax.jit(jax.grad(f, (0, 1)))(a, b) for f in (ours, mirrored))
    close(db, db_other, 2 * ROUNDING)
    close(da.scale, da_other.scale, 2 * ROUNDING)
    close(da.values, da_other.values, 2**-2)


def test_layers():
    sizes = jnp.array([5, 0, 6], jnp.int32)
    x, groups = rows(), columns(shape=(3, K, N))
    wide, weights = x.dequantize(), groups.dequantize()
    got = cutjax.grouped_gemm(x, groups, sizes, epilogue=jnp.tanh)
    expected = jnp.tanh(oracles.masked_multiply(wide, weights, sizes))
    close(got, expected, 1e-5)
    got = cutjax.grouped_gemm(x, weights.astype(BF16), sizes).astype(F32)
    close(got, oracles.masked_multiply(wide, weights.astype(BF16).astype(F32), sizes), ROUNDING)

    w, v = columns(), scaled(4, (N, K), BF16)
    got = cutjax.mlp(x, w, v, gate=w, activation=jax.nn.silu)  # in v's dtype, the only array's
    assert got.dtype == BF16
    h = exact(x, w)
    close(got.astype(F32), (jax.nn.silu(h) * h) @ v.astype(F32), 2 * ROUNDING)
    down = columns(shape=(3, N, K), seed=5)
    got = cutjax.grouped_mlp(x, groups, down, sizes, activation=jnp.tanh)
    close(got, oracles.grouped_mlp(wide, weights, down.dequantize(), sizes, activation=jnp.tanh), 1e-4)


def test_over_devices():
    """Rows and their scales are divided together, columns and theirs, and in shard_map the contraction."""
    a, b = rows(shape=(16, K)), columns(shape=(K, 32))
    mesh = mesh_of(i=8)
    put = lambda q, *spec: jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(mesh, P(*spec))), q)  # noqa: E731
    expected = cutjax.gemm(a, b)
    out = jax.jit(cutjax.gemm)(put(a, "i", None), put(b, None, None))
    same(out, expected)
    assert out.sharding.spec[0] == "i"
    same(jax.jit(cutjax.gemm)(put(a, None, None), put(b, None, "i")), expected)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "i"), P("i"), P(), P()), out_specs=P())
    def parts(x, y, s, t):
        return jax.lax.psum(cutjax.gemm(Quantized(x, s), Quantized(y, t)), "i")

    close(jax.jit(parts)(a.values, b.values, a.scale, b.scale), expected, 1e-6)


# What a kernel reads.


def aval(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


A, B, S, T = aval(64, 512, dtype=I8), aval(512, 512, dtype=I8), aval(64, 1, dtype=F32), aval(1, 512, dtype=F32)
READ = {
    "both": (lambda a, b, s, t: cutjax.gemm(Quantized(a, s), Quantized(b, t)), (A, B, S, T), ("i8", "i8")),
    "groups": (
        lambda a, b, s, t, z: cutjax.grouped_gemm(Quantized(a, s), Quantized(b, t), z),
        (A, aval(4, 512, 512, dtype=I8), S, aval(4, 1, 512, dtype=F32), aval(4, dtype=jnp.int32)),
        ("i8", "i8"),
    ),
    "few columns": (lambda a, b, s: cutjax.gemm(Quantized(a, s), b), (A, aval(512, 4), S), ("bf16", "i8")),
    "more columns": (lambda a, b, s: cutjax.gemm(Quantized(a, s), b), (A, aval(512, 64), S), ("bf16", "bf16")),
}


@pytest.mark.parametrize("name", READ)
def test_kernels_read_values(name):
    fn, args, expected = READ[name]
    with cutjax.use_backend("cuda"):
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        (row,) = cutjax.explain(fn, platform="cuda")(*args).rows
    found = re.findall(r"@cutjax_launch.* : \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>", text)
    assert found == [expected]
    said = {"few columns": "the result is transposed", "more columns": "a is converted to bfloat16"}.get(name, "")
    assert said in row.why


REFUSED = {
    "blocks": (lambda b: cutjax.gemm(Quantized(jnp.ones((M, K), I8), jnp.ones((M, 5))), b), "scale of a is .* divide"),
    "groups": (
        lambda b: cutjax.grouped_gemm(Quantized(jnp.ones((M, K), I8), jnp.ones(K + 1)), b[None], jnp.array([M])),
        "scale of x",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    fn, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        fn(jnp.ones((K, N), BF16))


@pytest.mark.parametrize("block", [(-1, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_float8_arrays_beside_quantized_ones(dtype, block):
    """The result is in the scales' dtype: in float8, as the array is, it would be NaN past 448."""
    x = jnp.full((4, 64), 20, jnp.float8_e4m3fn)
    q = cutjax.quantize(jnp.full((64, 32), 3.0), dtype, block=block)
    for found in (cutjax.gemm(x, q), cutjax.gemm(cutjax.Quantized(q.values.mT, q.scale.mT), x.mT).mT):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, np.full((4, 32), 64 * 60.0), rtol=1e-5)
    other = cutjax.gemm(x.astype(jnp.float8_e4m3), q)  # a kind that no kernel multiplies
    np.testing.assert_allclose(other, np.full((4, 32), 64 * 60.0), rtol=1e-5)


def test_wide_scales_along_k():
    """Of two quantized operands factors are in the dtype that the scales have, if that is wider than float32."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        a, b = (jnp.asarray(rng.integers(-7, 7, (8, 8)), jnp.int8) for _ in range(2))
        scale, zero = jnp.asarray(rng.normal(size=(1, 8))), jnp.asarray(rng.integers(-2, 2, (1, 8)), jnp.int8)
        one = cutjax.Quantized(b, jnp.ones((1, 1), jnp.float64))
        for q in (cutjax.Quantized(a, scale), cutjax.Quantized(a, scale, zero)):
            got, grouped = (
                cutjax.gemm(q, one),
                cutjax.grouped_gemm(q, jax.tree.map(lambda x: x[None], one), jnp.array([8])),
            )
            want = np.asarray(q.dequantize(jnp.float64)) @ np.asarray(b, np.float64)
            for found in (got, grouped):
                assert found.dtype == jnp.float64
                np.testing.assert_allclose(found, want, rtol=1e-13, atol=1e-13)
