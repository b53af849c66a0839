"""What products are added up in: all pairs of an operand's and a result's dtype, against exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cutjax
from cutjax.primitives.accumulators import accumulator

# One number, and how many of it have a sum of squares that 32 bits do not hold (where so many are no burden).
SUMS = {
    "bool": [1] * 300,
    "int4": [7] * 300,
    "int8": [127] * 140_000,
    "uint8": [255] * 70_000,
    "int16": [30_000] * 8,
    "uint16": [60_000] * 8,
    "int32": [2_000_000] * 8,
    "uint32": [2_000_000_000] * 2,
    "int64": [2_000_000_000] * 2,
    "uint64": [2_000_000_000] * 2,
}
# Floats of which a sum of squares in 32 bits loses the ones: 2^24 + 63.
SUMS |= {dtype: [4096] + [1] * 63 for dtype in ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")}
SUMS |= {"float8_e5m2": [4096] + [1] * 63, "float8_e4m3fn": [256] + [1] * 63}
DTYPES = list(SUMS)
PREFIXED = lax.RaggedDotDimensionNumbers((((0, 1), (0, 1)), ((), ())), [1], [])

Sum = Callable[[jax.Array, str], jax.Array]
OPERATIONS: dict[str, Sum] = {
    "gemm": lambda x, out: cutjax.gemm(x[None], x[:, None], out_dtype=out),
    "grouped_gemm": lambda x, out: cutjax.grouped_gemm(x[None], x[None, :, None], jnp.array([1]), out_dtype=out),
    "grouped_outer": lambda x, out: cutjax.grouped_outer(x[:, None], x[:, None], jnp.array([x.size]), out_dtype=out),
    "accumulate": lambda x, out: cutjax.grouped_outer(
        x[:, None], x[:, None], jnp.array([x.size]), accumulate=jnp.zeros((1, 1, 1), out)
    ),
    "ragged_dot": lambda x, out: cutjax.ragged_dot(
        x[None], x[None, :, None], jnp.array([1]), preferred_element_type=out
    ),
    "ragged_dot_general": lambda x, out: cutjax.ragged_dot_general(
        x.reshape(2, -1, 1),
        x.reshape(2, -1, 1),
        jnp.array([x.size // 2]),
        PREFIXED,
        preferred_element_type=out,
    ),
}


def expected(numbers: list[int], out: str) -> np.ndarray:
    """The sum of squares, in Python's integers; modulo 2^bits where that is how it is stored."""
    exact = sum(n * n for n in numbers)
    if out == "bool":
        return np.array(exact > 0)
    dtype = jnp.dtype(out)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.array((exact - int(info.min)) % (1 << info.bits) + int(info.min)).astype(dtype)
    with np.errstate(over="ignore"):
        return np.array(float(exact)).astype(dtype)


def pairs(dtype: str) -> list[tuple[str, str]]:
    """Each operation with a result of the dtype, and of others that hold it: gemm of half of them, the rest of few."""
    found = []
    for turn, name in enumerate(OPERATIONS):
        every = 2 if name == "gemm" else 7
        for i, out in enumerate(DTYPES):
            drawn = kind(out) >= kind(dtype) and (i - DTYPES.index(dtype) - 1 - turn) % every == 0
            found += [(name, out)] * (out == dtype or drawn)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_results(dtype):
    """64 bits are exact; in 32 the order of a long sum shows, but not a sum that wrapped."""
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(SUMS[dtype]).astype(jnp.dtype(dtype)))
        both = [(name, out) for name, out in pairs(dtype) if accepted(OPERATIONS[name], x, out)]
        assert {name for name, out in both if out == dtype} == {*OPERATIONS}
        found = jax.jit(lambda x: [OPERATIONS[name](x, out) for name, out in both])(x)
    for (name, out), got in zip(both, found, strict=True):
        wanted = expected(SUMS[dtype], out)
        assert got.dtype == jnp.dtype(out)
        got = np.asarray(got).reshape(())
        if kind(out) < 2 or out in ("float64", "complex128"):
            np.testing.assert_array_equal(got, wanted, err_msg=f"{name} {out}")
        else:
            wide = np.complex64 if kind(out) == 3 else np.float32
            np.testing.assert_allclose(got.astype(wide), wanted.astype(wide), rtol=2e-2, err_msg=f"{name} {out}")


def kind(dtype: str) -> int:
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(i for i, kind in enumerate(kinds) if jnp.issubdtype(jnp.dtype(dtype), kind))


def accepted(operation: Sum, x: jax.Array, out: str) -> bool:
    """False where jax.lax refuses fewer bits."""
    try:
        return bool(jax.eval_shape(lambda x: operation(x, out), x))
    except TypeError:
        return False


FLOATS = ("bfloat16", "float16", "float32", "float64")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["gemm", "grouped_gemm", "grouped_outer"])
def test_gradients(name, dtype):
    """Sums over columns, and over a batch that shares an operand, are rounded once, whatever the result's dtype."""
    numbers = jnp.asarray(np.array([4096] + [1] * 63).astype(jnp.dtype(dtype)))
    with jax.enable_x64(True):
        x, row, one = numbers.astype(dtype), numbers.astype(dtype)[None], jnp.ones((1, 1), dtype)
        batch, sizes = x[:, None, None], jnp.array([1])

        def sums(out):
            """Of a over columns, of b over the batch of a; numbers of which each is the sum of x."""
            how = {"out_dtype": out}
            if name == "gemm":
                columns = jax.grad(lambda a: cutjax.gemm(a, row, **how).sum())(one)
                return columns, jax.grad(lambda b: cutjax.gemm(batch, b[None], layout="tn", **how).sum())(one)
            if name == "grouped_gemm":
                columns = jax.grad(lambda a: cutjax.grouped_gemm(a, row[None], sizes, **how).sum())(one)
                return columns, jax.grad(lambda b: cutjax.grouped_gemm(batch, b[None], sizes, **how).sum())(one)
            columns = jax.grad(lambda a: cutjax.grouped_outer(a, row, sizes, **how).sum())(one)
            return columns, jax.grad(lambda b: cutjax.grouped_outer(batch, b[None], sizes, **how).sum())(one)

        found = jax.jit(lambda: [sums(out) for out in {dtype, "float32", "bfloat16"}])()
    for got in jax.tree.leaves(found):
        np.testing.assert_array_equal(got, np.array([[4159]]).astype(jnp.dtype(dtype)))


def test_int16_in_float32():
    x = jnp.full((2, 8), 30_000, jnp.int16)
    results = (
        cutjax.gemm(x, x.T, out_dtype=jnp.float32),
        cutjax.ragged_dot(x, x.T[None], jnp.array([2]), preferred_element_type=jnp.float32),
    )
    for got in results:
        np.testing.assert_allclose(got, np.full((2, 2), 7.2e9), rtol=1e-6)


def test_accumulates_to_complex():
    x, to = jnp.ones((2, 1)), jnp.full((1, 1, 1), 3j)
    assert cutjax.grouped_outer(x, x, jnp.array([2]), accumulate=to)[0, 0, 0] == 2 + 3j


def test_accumulators_hold_both():
    """At least 32 bits, as many as the result's, and complex only where an operand is."""
    with jax.enable_x64(True):
        for dtype in DTYPES:
            for out in DTYPES:
                wide, least = accumulator(jnp.dtype(dtype), jnp.dtype(out)), 4
                if kind(out) == 3:
                    least = jnp.dtype(out).itemsize // 2
                elif kind(out) == kind(dtype):
                    least = max(4 * (dtype != "bool"), jnp.dtype(out).itemsize)
                assert wide.itemsize >= least, (dtype, out)
                assert (wide.kind == "c") == (kind(dtype) == 3), (dtype, out)


@pytest.mark.parametrize(("dtype", "grouped"), [("float64", True), ("complex128", False)])
def test_layers_keep_all_bits(dtype, grouped):
    """Between two products, too, and in every gradient."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 4)
        x, w, v = (jax.random.normal(k, s, dtype) for k, s in zip(keys, ((6, 8), (2, 8, 16), (2, 16, 8)), strict=False))
        sizes, scale = jnp.array([4, 2]), jax.random.normal(keys[3], (6, 1), "float64")

        def fused(x, w, v, scale):
            if grouped:
                return cutjax.grouped_mlp(x, w, v, sizes, activation=jnp.tanh, row_scale=scale.astype(x.dtype))
            return cutjax.mlp(x, w[0], v[0], activation=jnp.tanh, b1=w[1, 0], b2=v[1, 0])

        def plain(x, w, v, scale):
            if grouped:
                both = [jnp.tanh(x[at] @ w[i]) @ v[i] for i, at in enumerate((slice(0, 4), slice(4, 6)))]
                return scale.astype(x.dtype) * jnp.concatenate(both)
            return jnp.tanh(x @ w[0] + w[1, 0]) @ v[0] + v[1, 0]

        def gradients(f):
            return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.abs(f(*args)) ** 2), (0, 1, 2, 3)))(x, w, v, scale)

        for got, wanted in zip(gradients(fused), gradients(plain), strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)  # float32 would be off by 1e-6
