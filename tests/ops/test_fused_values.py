"""gemm with an epilogue: its values, its results' dtypes, and what it refuses."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers

import cutjax

M, N, K = 4, 6, 8
H = jnp.bfloat16


X, W, V = integers(0, (M, K)), integers(1, (K, N)), integers(2, (K, N))


def bias_relu(acc, b):
    return jax.nn.relu(acc + b)


@pytest.mark.parametrize(
    ("layout", "shape"), [("nn", ()), ("nt", (N,)), ("tn", (1, N)), ("tt", (M, 1)), ("nn", (M, N))], ids=str
)
def test_operands_broadcast(layout, shape):
    b = integers(3, shape)
    x, w = X if layout[0] == "n" else X.T, W if layout[1] == "n" else W.T
    got = cutjax.gemm(x, w, layout=layout, epilogue=bias_relu, operands=(b,))
    np.testing.assert_array_equal(got, bias_relu(X @ W, b))


@pytest.mark.parametrize("a_batch", [(), (3,), (2, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("b_batch", [(), (3,), (2, 1)], ids=str)
def test_batches(a_batch, b_batch):
    x, w = np.asarray(integers(0, (*a_batch, M, K))), np.asarray(integers(1, (*b_batch, K, N)))
    batch = np.broadcast_shapes(a_batch, b_batch)
    for k in range(len(batch) + 1):
        for kept in itertools.combinations(range(len(batch)), k):
            shape = [size if i in kept else 1 for i, size in enumerate(batch)]
            tail = ((1, N), (M, 1), (M, N))[(len(a_batch) + len(kept) + sum(kept)) % 3]
            b = np.asarray(integers(3, (*shape, *tail)))
            got = cutjax.gemm(x, w, epilogue=bias_relu, operands=(b,))
            np.testing.assert_array_equal(got, np.maximum(np.matmul(x, w) + b, 0))


def test_shared_weights_make_one_plain_problem():
    """Also with operands, unless rows mean something to the epilogue."""
    x, r = integers(0, (3, M, K)), integers(3, (3, M, N))

    def sizes(fn):
        (row,) = cutjax.explain(fn)(x, W, r).rows
        return row.choice.problem.m, row.choice.problem.batch

    assert sizes(lambda x, w, r: cutjax.gemm(x, w, epilogue=jnp.add, operands=(r,))) == (3 * M, ())
    assert sizes(lambda x, w, r: cutjax.gemm(x, w, epilogue=jnp.add, operands=(r[0, 0],))) == (3 * M, ())
    assert sizes(lambda x, w, r: cutjax.gemm(x, w, epilogue=jnp.add, operands=(r[:, :1],))) == (M, (3,))
    assert sizes(lambda x, w, r: cutjax.gemm(x, w, epilogue=lambda acc: (acc, acc.sum(-2)))) == (M, (3,))
    assert sizes(lambda x, w, r: cutjax.gemm(x, w, epilogue=lambda acc: (acc, acc.sum(-1)))) == (3 * M, ())

    def triangle(acc):
        return jnp.where(jnp.arange(M)[:, None] > jnp.arange(N), acc, 0)

    np.testing.assert_array_equal(cutjax.gemm(x, W, epilogue=triangle), triangle(x @ W))

    def dropout(acc):  # of each element of the result a bit, so that no row means anything
        return jnp.where(jax.random.bernoulli(jax.random.key(7), 0.5, acc.shape), acc, 0)

    def rows_alike(acc):
        return jnp.where(jax.random.bernoulli(jax.random.key(7), 0.5, acc.shape[1:]), acc, 0)

    for fn, expected in ((dropout, (3 * M, ())), (rows_alike, (M, (3,)))):
        assert sizes(lambda x, w, r, fn=fn: cutjax.gemm(x, w, epilogue=fn)) == expected
        np.testing.assert_array_equal(cutjax.gemm(x, W, epilogue=fn), fn(x @ W))


@pytest.mark.parametrize("count", [2, 3])
def test_several_products(count):
    ws = (W, V, W - V)[:count]

    def combine(*accs):
        return jax.nn.relu(accs[0]) * accs[1] - accs[-1]

    for batch in ((), (3,)):
        x = integers(0, (*batch, M, K))
        got = cutjax.gemm(x, ws, epilogue=combine)
        np.testing.assert_array_equal(got, combine(*(x @ w for w in ws)))


def test_results_keep_the_structure_the_function_returns():
    def fn(acc, b):
        return {"y": jax.nn.relu(acc + b), "more": (acc, acc.max(), acc.sum(0), acc.min(1, keepdims=True))}

    b = integers(3, (N,))
    got, expected = cutjax.gemm(X, W, epilogue=fn, operands=(b,)), fn(X @ W, b)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    (only,) = cutjax.gemm(X, W, epilogue=lambda acc: (acc,))
    np.testing.assert_array_equal(only, X @ W)


def test_dtypes_of_results():
    """float32 becomes that of the operands, or out_dtype; what the function cast stays, and so do reductions."""
    x, w = X.astype(H), W.astype(H)

    def fn(acc):
        return acc, acc.astype(jnp.float16), acc > 0, acc.max()

    def dtypes(**options):
        return [y.dtype.name for y in cutjax.gemm(x, w, epilogue=fn, **options)]

    assert dtypes() == ["bfloat16", "float16", "bool", "float32"]
    assert dtypes(out_dtype=jnp.float32) == ["float32", "float16", "bool", "float32"]
    assert dtypes(out_dtype=(None, None, jnp.int8, H)) == ["float32", "float16", "int8", "bfloat16"]
    assert cutjax.gemm(x, w, epilogue=lambda acc: acc, out_dtype=(jnp.float8_e4m3fn,)).dtype == jnp.float8_e4m3fn


def test_what_operands_may_be():
    def fn(acc, tree, number, array):
        return tree["scale"] * acc + tree["bias"] * number + array

    tree = {"scale": np.float32(2), "bias": integers(3, (N,))}
    expected = fn(X @ W, tree, 2, np.ones((M, 1), np.float32))
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        got = cutjax.gemm(X, W, epilogue=wrap(fn), operands=(tree, 2, np.ones((M, 1), np.float32)))
        np.testing.assert_array_equal(got, expected)
    b = np.asarray(tree["bias"])
    np.testing.assert_array_equal(cutjax.gemm(X, W, epilogue=lambda acc: acc + b), X @ W + b)


def test_a_last_cast_is_the_dtype_of_the_result():
    def epilogue(fn, **options):
        jaxpr = jax.make_jaxpr(lambda x, w: cutjax.gemm(x, w, epilogue=fn, **options))(X, W)
        return jaxpr.eqns[0].params["epilogue"]

    assert epilogue(lambda acc: jnp.tanh(acc).astype(H)) == epilogue(jnp.tanh, out_dtype=H)


def test_scaled_float8_with_its_largest_value():
    x, w, s = X.astype(H), W.astype(H), jnp.float32(0.5)

    def fn(acc, s):
        return (acc * s).astype(jnp.float8_e4m3fn), jnp.max(jnp.abs(acc))

    y, amax = cutjax.gemm(x, w, epilogue=fn, operands=(s,))
    acc = X @ W
    assert y.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(y.astype(jnp.float32), (acc * s).astype(jnp.float8_e4m3fn).astype(jnp.float32))
    assert amax == jnp.abs(acc).max()


def test_computes_in_float32_from_narrow_operands():
    x, w = jnp.full((2, 300), 1, H), jnp.ones((300, 2), H)
    y = cutjax.gemm(x, w, epilogue=lambda acc: acc - 299)  # 300 is none of bfloat16's numbers
    np.testing.assert_array_equal(y, jnp.ones((2, 2)))


def test_equal_functions_are_compiled_once():
    f = jax.jit(lambda x, w, b: cutjax.gemm(x, w, epilogue=lambda acc, b: jax.nn.gelu(acc + b), operands=(b,)))
    b = integers(3, (N,))
    jaxprs = [str(jax.make_jaxpr(f)(X, W, b).eqns[0].params["jaxpr"].eqns[-1].params["epilogue"]) for _ in range(2)]
    assert jaxprs[0] == jaxprs[1]


def test_without_an_epilogue_the_primitive_is_the_plain_product():
    jaxpr = jax.make_jaxpr(cutjax.gemm)(X, W)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["cutjax_gemm"]


def test_sizes_of_zero():
    for m, k, n in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        y = cutjax.gemm(jnp.ones((m, k)), jnp.ones((k, n)), epilogue=lambda acc: acc + 1)
        np.testing.assert_array_equal(y, jnp.full((m, n), 1 + k))


B = integers(3, (N,))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "float64", "complex64", "complex128"])
def test_accumulators_of_every_dtype(dtype):
    """The function sees sums in the dtype in which XLA adds them up; results in that dtype become the operands'."""
    wide = {"int8": "int32", "uint8": "uint32"}.get(dtype, dtype)
    with jax.enable_x64(True):
        x, w = (jnp.arange(y.size).reshape(y.shape).astype(dtype) for y in (X, W))
        seen = []

        def fn(acc, b):
            seen.append(acc.dtype.name)
            return acc * 2 + b.astype(acc.dtype), acc > 3

        got, compared = cutjax.gemm(x, w, epilogue=fn, operands=(jnp.ones(N, dtype),))
        acc = np.asarray(x, wide) @ np.asarray(w, wide)
        assert set(seen) == {wide}
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, (acc * 2 + 1).astype(dtype))
        np.testing.assert_array_equal(compared, acc > 3 if not np.iscomplexobj(acc) else acc > 3 + 0j)


REFUSED = [
    (ValueError, "does not broadcast|[Ii]ncompatible shapes|got incompatible", {"operands": (integers(0, (M + 3,)),)}),
    (TypeError, "called with 1 accumulator.* and 0 operand", {}),
    (TypeError, "called with 1 accumulator.* and 2 operand", {"operands": (B, B)}),
    (TypeError, "operands must be a tuple, got ArrayImpl; write operands=\\(x,\\)", {"operands": B}),
    (TypeError, "epilogue must be a function, got str", {"epilogue": "relu", "operands": (B,)}),
    (ValueError, "1 operands, but no epilogue", {"epilogue": None, "operands": (B,)}),
    (ValueError, "unknown save 'all'", {"save": "all", "operands": (B,)}),
    (ValueError, "out_dtype has 2 entries, the epilogue returns 1", {"out_dtype": (None, None), "operands": (B,)}),
    (TypeError, "out_dtype is a tuple", {"epilogue": None, "out_dtype": (None,)}),
    (TypeError, "b is a tuple, so the product needs an epilogue", {"epilogue": None, "b": (W, W)}),
    (ValueError, "b is a tuple of 1: two or three", {"b": (W,), "operands": (B,)}),
    (ValueError, "b is a tuple of 4: two or three", {"b": (W,) * 4, "operands": (B,)}),
    (ValueError, r"b\[0\] is float32\[8, 6\], b\[1\] is float32\[8, 5\]", {"b": (W, W[:, :5]), "operands": (B,)}),
    (ValueError, r"b\[1\] is bfloat16\[8, 6\]", {"b": (W, W.astype(H)), "operands": (B,)}),
    (ValueError, r"b\[1\] must have rank 2", {"b": (W, B), "operands": (B,)}),
    (ValueError, "contracting dimensions differ", {"b": (W.T, W.T), "operands": (B,)}),
    (ValueError, r"returns shape \(6,\), expected", {"epilogue": lambda acc, b: b, "operands": (B,)}),
    (NotImplementedError, "slice", {"epilogue": lambda acc: acc[0]}),
    (NotImplementedError, "sort", {"epilogue": lambda acc: jnp.sort(acc)}),
    (NotImplementedError, "dot_general", {"epilogue": lambda acc: acc @ acc.T}),
    (NotImplementedError, "cumsum", {"epilogue": lambda acc: jnp.cumsum(acc, 1)}),
    (NotImplementedError, "debug", {"epilogue": lambda acc: (jax.debug.print("{}", acc), acc)[1]}),
]


@pytest.mark.parametrize(("error", "match", "options"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_refused(error, match, options):
    options = {"a": X, "b": W, "epilogue": bias_relu} | options
    with pytest.raises(error, match=match):
        cutjax.gemm(options.pop("a"), options.pop("b"), **options)


def test_strict_backend_says_why():
    if "cuda" in {device.platform for device in jax.devices()}:
        pytest.skip("a kernel may serve it")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        cutjax.gemm(X, W, epilogue=bias_relu, operands=(B,), backend="cuda")
