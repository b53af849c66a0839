"""grouped_gemm with an epilogue: its values, those of rows of no group, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers

from cutjax import grouped_gemm
from cutjax.epilogue.expression import OperandSpec
from cutjax.primitives.derivative import SAVE

M, N, K, G = 9, 6, 8, 4
H = jnp.bfloat16
SIZES = (3, 0, 4, 1)  # the last row is of no group


X, W, V = integers(0, (M, K)), integers(1, (G, K, N)), integers(2, (G, K, N))


def group_of_rows(sizes, m: int = M) -> np.ndarray:
    """The group of each row that has one, clamped as the operation does."""
    return np.repeat(np.arange(len(sizes)), np.clip(sizes, 0, m))[:m]


def plain(fn, x, ws, operands=(), sizes=SIZES):
    """The full-size results in plain JAX: those rows alone that have a group, then zeros."""
    group = group_of_rows(sizes, x.shape[0])
    rows = len(group)

    def row_operand(v):
        v = jnp.asarray(v)
        if v.ndim == 3:
            return v[group, 0]
        return v[:rows] if v.ndim == 2 and v.shape[0] != 1 else v

    @jax.jit
    def program(x, ws, operands):
        accs = [jnp.einsum("mk,mkn->mn", x[:rows], w[group]) for w in ws]
        results = fn(*accs, *map(row_operand, operands))
        return jax.tree.map(lambda y: jnp.pad(y, ((0, x.shape[0] - rows), (0, 0))), results)

    return program(x, ws, operands)


def bias_relu(acc, b):
    return jax.nn.relu(acc + b) + 1


SHAPES = [(), (N,), (1, N), (M, 1), (M, N), (G, 1, N), (G, 1, 1)]


@pytest.mark.parametrize(("layout", "shape"), [(("nn", "nt")[i % 2], x) for i, x in enumerate(SHAPES)], ids=str)
def test_operands_broadcast(layout, shape):
    b = integers(3, shape)
    w = W if layout == "nn" else W.mT
    got = grouped_gemm(X, w, jnp.array(SIZES), layout=layout, epilogue=bias_relu, operands=(b,))
    np.testing.assert_array_equal(got, plain(bias_relu, X, [W], [b]))


BIG = np.iinfo(np.int32).max
HOSTILE = [(0, 0, 0, 0), (9, 0, 0, 0), (2, 3, 4, 5), (-3, 4, -1, 2), (BIG, BIG, BIG, BIG), (-BIG, 3, BIG, -5)]


def test_any_sizes():
    b, r = integers(3, (G, 1, N)), integers(4, (M, 1))

    def fn(acc, b, r):
        return (acc + b) * r + 1

    product = jax.jit(lambda sizes: grouped_gemm(X, W, sizes, epilogue=fn, operands=(b, r)))
    for sizes in HOSTILE:
        np.testing.assert_array_equal(product(jnp.array(sizes)), plain(fn, X, [W], [b, r], sizes), err_msg=str(sizes))


@pytest.mark.parametrize("count", [2, 3])
def test_several_products_and_results(count):
    ws = (W, V, W - V)[:count]
    b, c = integers(3, (G, 1, N)), integers(4, (G, 1, N), H)

    def fn(*args):
        *accs, b, c = args
        y = jax.nn.relu(accs[0] + b) * accs[1]
        return {"y": y, "more": (accs[-1] - c.astype(y.dtype), y > 0)}

    got = grouped_gemm(X, ws, jnp.array(SIZES), epilogue=fn, operands=(b, c))
    jax.tree.map(np.testing.assert_array_equal, got, plain(fn, X, ws, [b, c]))


@pytest.mark.parametrize("shapes", [((2,), (2,), (2,), (2,)), ((2,), (), (2,), ()), ((), (2,), (), (1,))], ids=str)
def test_batches(shapes):
    x_batch, w_batch, sizes_batch, b_batch = shapes
    x, w, b = integers(0, (*x_batch, M, K)), integers(1, (*w_batch, G, K, N)), integers(3, (*b_batch, G, 1, N))
    sizes = jnp.array([SIZES, (0, 5, 0, 2)])[: 2 if sizes_batch else 1].reshape(*sizes_batch, G)
    c = integers(4, (2, M, 1))
    got = grouped_gemm(x, w, sizes, epilogue=lambda acc, b, c: acc * c + b, operands=(b.reshape(-1, G, 1, N), c))

    def of(v, rank, i):
        return v[min(i, v.shape[0] - 1)] if v.ndim > rank else v

    for i in range(2):
        ops = of(b, 3, i), c[i]
        one = plain(lambda acc, b, c: acc * c + b, of(x, 2, i), [of(w, 3, i)], ops, np.asarray(of(sizes, 1, i)))
        np.testing.assert_array_equal(got[i], one)


def test_an_offset_selects_the_operands_of_local_groups():
    sizes, b = jnp.array([2, *SIZES[:2], 1, 2]), integers(3, (2, 1, N))
    got = grouped_gemm(X, W[:2], sizes, epilogue=bias_relu, operands=(b,), group_offset=1)
    whole = plain(bias_relu, X, [jnp.concatenate([W[:1], W[:2], W[:2]])], [jnp.pad(b, ((1, 2), (0, 0), (0, 0)))], sizes)
    np.testing.assert_array_equal(got, whole.at[:2].set(0).at[5:].set(0))


def test_reductions_leave_out_rows_of_no_group():
    b = integers(3, (G, 1, N))
    rows = sum(SIZES)

    def fn(acc, b):
        y = acc + b - 20  # so that a row of zeros would be the largest
        others = y.astype(jnp.int32).max(0), (y > -21).min(0)
        return y.sum(0), y.max(0), y.min(), y.sum(1), y.max(1, keepdims=True), *others

    def plain_reductions():
        group = group_of_rows(SIZES)
        found = fn(jnp.einsum("mk,mkn->mn", X[:rows], W[group]), b[group, 0])
        return [jnp.pad(y, ((0, 1), *[(0, 0)] * (y.ndim - 1))) if y.shape[:1] == (rows,) else y for y in found]

    got = grouped_gemm(X, W, jnp.array(SIZES), epilogue=fn, operands=(b,))
    jax.tree.map(np.testing.assert_array_equal, list(got), plain_reductions())
    none = grouped_gemm(X, W, jnp.zeros(G, jnp.int32), epilogue=lambda acc: (acc.sum(0), acc.max()))
    np.testing.assert_array_equal(none[0], np.zeros(N))
    assert none[1] == -np.inf


def test_positions_are_those_in_x():
    def fn(acc):
        i, j = jnp.arange(M)[:, None], jnp.arange(N)
        return jnp.where(i >= j, acc, -1)

    got = grouped_gemm(X, W, jnp.array(SIZES), epilogue=fn)
    product = plain(lambda acc: acc, X, [W])
    np.testing.assert_array_equal(got, fn(product).at[sum(SIZES) :].set(0))


def test_nothing_reaches_other_rows():
    """NaN in rows of no group, in another group, and in an empty group's operands."""
    sizes, b = jnp.array(SIZES), integers(3, (G, 1, N))
    r = integers(4, (M, 1))
    clean = grouped_gemm(X, W, sizes, epilogue=lambda acc, b, r: (acc + b) * r, operands=(b, r))
    x, w = X.at[-1].set(jnp.nan).at[:3].set(jnp.inf), W.at[jnp.array([0, 1])].set(jnp.nan)
    b, r = b.at[jnp.array([0, 1])].set(jnp.nan), r.at[-1].set(jnp.nan)
    got = grouped_gemm(x, w, sizes, epilogue=lambda acc, b, r: (acc + b) * r, operands=(b, r))
    np.testing.assert_array_equal(got[3:], clean[3:])
    assert np.isnan(got[:3]).all()
    assert not np.any(grouped_gemm(X, W, sizes, epilogue=jnp.log)[-1])


def test_dtypes_of_results():
    x, w = X.astype(H), W.astype(H)

    def dtypes(**options):
        found = grouped_gemm(x, w, jnp.array(SIZES), epilogue=lambda acc: (acc, acc > 0, acc.max()), **options)
        return [y.dtype.name for y in found]

    assert dtypes() == ["bfloat16", "bool", "float32"]
    assert dtypes(out_dtype=jnp.float32) == ["float32", "bool", "float32"]
    assert dtypes(out_dtype=(None, jnp.int8, H)) == ["float32", "int8", "bfloat16"]


def test_computes_in_float32_from_narrow_operands():
    x, w, b = jnp.ones((2, 300), H), jnp.ones((1, 300, 2), H), jnp.full((1, 1, 2), 299)
    y = grouped_gemm(x, w, jnp.array([2]), epilogue=lambda acc, b: acc - b.astype(acc.dtype), operands=(b,))
    np.testing.assert_array_equal(y, jnp.ones((2, 2)))


@pytest.mark.parametrize(("m", "k", "n", "g"), [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)])
def test_sizes_of_zero(m, k, n, g):
    b = jnp.full((g, 1, n), 2.0)
    x, w, sizes = jnp.ones((m, k)), jnp.ones((g, k, n)), jnp.array([2, 2][:g], jnp.int32)
    y = grouped_gemm(x, w, sizes, epilogue=jnp.add, operands=(b,))
    np.testing.assert_array_equal(y, jnp.full((m, n), k + 2 if g else 0))


def test_equal_functions_give_equal_programs_and_no_function_the_plain_product():
    b = integers(3, (G, 1, N))

    def product(b, **options):
        def fn(x, w, sizes, b):
            return grouped_gemm(x, w, sizes, **({"epilogue": lambda acc, b: acc + b, "operands": (b,)} | options))

        found = [x for x in jax.make_jaxpr(fn)(X, W, jnp.array(SIZES), b).eqns if x.primitive.name.startswith("cutjax")]
        assert len(found) == 1
        return found[0]

    assert not product(b).params["epilogue"].plain
    assert product(b, epilogue=None, operands=()).params["epilogue"].plain
    assert product(b, epilogue=lambda acc: acc, operands=()).params["epilogue"].plain
    epilogue = product(b).params["epilogue"]
    assert epilogue == product(b).params["epilogue"]
    assert str(epilogue) == "acc + x0"
    assert epilogue.operands == (OperandSpec("float32", row=False, col=True, batch=(), group=True),)
    assert product(b[..., :1]).params["epilogue"].operands == (OperandSpec("float32", False, False, (), group=True),)
    assert product(b[0]).params["epilogue"].operands == (OperandSpec("float32", False, True, ()),)


B, C = integers(3, (G, 1, N)), integers(4, (N,))
SQUARE = integers(4, (G, 1, M))
REFUSED = [
    (ValueError, r"float32\[3,1,6\].*one of groups: expected \(4, 1, 6\)", {"operands": (B[:3],)}),
    (ValueError, r"float32\[4,6,1\].*one of groups", {"operands": (B.mT,)}),
    (ValueError, r"float32\[4,1,5\].*one of groups", {"operands": (B[..., :5],)}),
    (ValueError, "[Ii]ncompatible shapes|got incompatible|broadcast", {"operands": (C[:5],)}),
    (NotImplementedError, "sort at .* needs an operand of groups", {"epilogue": lambda acc, b: acc + jax.lax.sort(b)}),
    (
        NotImplementedError,
        "reduce_max at .* needs an operand",
        {"epilogue": lambda acc, b: acc + b.max(1, keepdims=True)},
    ),
    (NotImplementedError, "mul at .* needs an operand", {"epilogue": lambda acc, b: acc.sum(1, keepdims=True) * b}),
    (
        NotImplementedError,
        "of groups is used with its axes exchanged",
        {"w": integers(1, (G, K, M)), "operands": (SQUARE,), "epilogue": lambda acc, b: acc + b.T},
    ),
    (TypeError, "called with 1 accumulator.* and 0 operand", {"operands": ()}),
    (TypeError, "grouped_gemm: operands must be a tuple, got ArrayImpl", {"operands": B}),
    (TypeError, "grouped_gemm: epilogue must be a function, got str", {"epilogue": "relu"}),
    (ValueError, "grouped_gemm: 1 operands, but no epilogue", {"epilogue": None}),
    (ValueError, f"grouped_gemm: unknown save 'all', expected one of .*{SAVE[1]}", {"save": "all"}),
    (TypeError, "grouped_gemm: w is a tuple, so the product needs", {"w": (W, V), "epilogue": None, "operands": ()}),
    (ValueError, "grouped_gemm: w is a tuple of 1: two or three", {"w": (W,)}),
    (
        ValueError,
        r"grouped_gemm: .* w\[0\] is float32\[4, 8, 6\], w\[1\] is float32\[4, 8, 5\]",
        {"w": (W, W[..., :5])},
    ),
    (TypeError, "out_dtype is a tuple", {"epilogue": None, "operands": (), "out_dtype": (None,)}),
    (NotImplementedError, "slice", {"epilogue": lambda acc, b: acc[0]}),
]


@pytest.mark.parametrize(("error", "match", "options"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_refused(error, match, options):
    options = {"x": X, "w": W, "epilogue": bias_relu, "operands": (B,)} | options
    with pytest.raises(error, match=match):
        grouped_gemm(options.pop("x"), options.pop("w"), jnp.array(SIZES), **options)


def test_strict_backend_says_why():
    if "cuda" in {device.platform for device in jax.devices()}:
        pytest.skip("a kernel may serve it")
    with pytest.raises(NotImplementedError, match="cutjax_grouped_gemm: backend 'cuda' needs an NVIDIA GPU"):
        grouped_gemm(X, W, jnp.array(SIZES), epilogue=bias_relu, operands=(B,), backend="cuda")
