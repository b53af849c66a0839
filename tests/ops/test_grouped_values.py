"""grouped_gemm and grouped_outer against a loop over the groups in numpy: any sizes, every dtype, NaN next door."""

from __future__ import annotations

import functools

import grouped_oracle as oracle
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers
from grouped_oracle import HOSTILE, MOST
from hypothesis import strategies as st

import cutjax
from cutjax.primitives import groups, ragged_reference

K, N = 5, 3
GEMM = {layout: jax.jit(functools.partial(cutjax.grouped_gemm, layout=layout)) for layout in ("nn", "nt")}
OUTER = jax.jit(cutjax.grouped_outer)


def operands(m: int, groups: int, layout: str = "nn") -> tuple[jax.Array, jax.Array]:
    return integers(0, (m, K)), integers(1, (groups, *((K, N) if layout == "nn" else (N, K))))


@st.composite
def some_sizes(draw) -> tuple[int, list[int]]:
    """Rows and group sizes: one row, all rows, none, hostile. The rows straddle the reference's blocks of 8 to 128."""
    m, count = draw(st.sampled_from(((1, 4), (9, 4), (130, 8), (300, 2))))  # few, because each is compiled for
    size = st.one_of(st.integers(0, m), st.sampled_from((0, 0, 1, m)), st.sampled_from(HOSTILE))
    return m, draw(st.lists(size, min_size=count, max_size=count))


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(some_sizes(), st.sampled_from(("nn", "nt")))
def test_any_sizes(drawn, layout):
    m, sizes = drawn
    x, w = operands(m, len(sizes), layout)
    dy = integers(2, (m, N))
    s = jnp.array(sizes, jnp.int32)
    np.testing.assert_array_equal(GEMM[layout](x, w, s), oracle.multiply(x, w, sizes, layout))
    np.testing.assert_array_equal(OUTER(x, dy, s), oracle.outer(x, dy, sizes))


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(some_sizes())
def test_rows_of_groups(drawn):
    m, sizes = drawn

    @jax.jit
    def both(sizes):
        of = groups.rows_of_groups, groups.group_of_row
        return [[f(sizes, m, leading) for f in of] for leading in (False, True)]

    for leading, ((starts, ends), (group, has)) in enumerate(both(np.array(sizes, np.int32))):
        spans = oracle.spans(sizes, m, leading)
        assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == spans
        expected = np.full(m, -1)
        for i, (start, end) in enumerate(spans):
            expected[start:end] = i
        np.testing.assert_array_equal(np.where(has, group, -1), expected)
        np.testing.assert_array_equal(np.where(has, 0, group), 0)


def test_rows_of_groups_where_all_of_int32_are_rows():
    """The running sum saturates before it overflows, at any number of rows an array can have."""
    sizes = jnp.array([MOST, MOST, 5, -1, MOST], jnp.int32)
    starts, ends = groups.rows_of_groups(sizes, MOST, False)
    np.testing.assert_array_equal(starts, [0, MOST, MOST, MOST, MOST])
    np.testing.assert_array_equal(ends, [MOST] * 5)
    _, ends = groups.rows_of_groups(jnp.array([1 << 30, (1 << 30) - 2, 1, 1], jnp.int32), MOST, False)
    np.testing.assert_array_equal(ends, [1 << 30, MOST - 1, MOST, MOST])


BATCHES = [
    ((), (), (2,)),
    ((2,), (), ()),
    ((), (2,), ()),
    ((2,), (2,), (2,)),
    ((2, 1), (3,), (1, 3)),
    ((1, 3), (2, 1), (3,)),
    ((2, 3), (2, 1), ()),
]


@pytest.mark.parametrize(
    ("x_batch", "w_batch", "sizes_batch", "layout"),
    [(*batches, ("nn", "nt")[i % 2]) for i, batches in enumerate(BATCHES)],
    ids=str,
)
def test_batch_axes_broadcast(x_batch, w_batch, sizes_batch, layout):
    m, groups = 20, 4
    x, w = integers(0, (*x_batch, m, K)), integers(1, (*w_batch, groups, *((K, N) if layout == "nn" else (N, K))))
    sizes = jnp.asarray(np.random.default_rng(2).integers(-1, 12, (*sizes_batch, groups)), jnp.int32)
    np.testing.assert_array_equal(GEMM[layout](x, w, sizes), oracle.multiply(x, w, sizes, layout))
    dy = integers(3, (*w_batch, m, N))
    np.testing.assert_array_equal(OUTER(x, dy, sizes), oracle.outer(x, dy, sizes))


@pytest.mark.parametrize(
    ("sizes", "local"), [((3, 0, 9, 4, 2), 2), ((3, -1, 9, MOST, 2), 5), ((0, 0, 0, 0, 30), 7)], ids=str
)
def test_group_offset(sizes, local):
    """The local weights are a window on all groups, which may lie past either end; other rows are zero."""
    x, w = operands(20, local)
    dy, s = integers(2, (20, N)), jnp.array(sizes, jnp.int32)
    gemm = jax.jit(lambda offset: cutjax.grouped_gemm(x, w, s, group_offset=offset))
    outer = jax.jit(lambda offset: cutjax.grouped_outer(x, dy, s, group_offset=offset, groups=local))
    for offset in (0, 1, 3, 5, 6, -1, -2, -9, MOST, -MOST - 1):
        window = np.zeros((5, K, N))
        products = np.zeros((local, K, N))
        all_products = oracle.outer(x, dy, sizes)
        for i in range(local):
            if 0 <= i + offset < 5:
                window[i + offset] = w[i]
                products[i] = all_products[i + offset]
        np.testing.assert_array_equal(gemm(offset), oracle.multiply(x, window, sizes))
        np.testing.assert_array_equal(outer(offset), products)


def test_group_offset_is_one_integer_of_any_kind():
    x, w = operands(20, 2)
    s = jnp.array([3, 5, 7, 1], jnp.int32)
    expected = cutjax.grouped_gemm(x, w, s, group_offset=1)
    assert np.any(expected)
    for offset in (np.uint8(1), np.array([1], np.int64), jnp.array([1]), jnp.int8(1)):
        np.testing.assert_array_equal(cutjax.grouped_gemm(x, w, s, group_offset=offset), expected)
    for offset in (1 << 40, -(1 << 40)):
        assert not np.any(cutjax.grouped_gemm(x, w, s, group_offset=offset))


def poisoned(sizes: tuple[int, ...], m: int, poison: float) -> tuple[np.ndarray, ...]:
    """x, w, dy: group 1 holds poison in its rows, group 2 in its matrix, and so do the rows of no group."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.integers(-2, 3, s).astype(np.float32) for s in ((m, K), (len(sizes), K, N), (m, N)))
    spans = oracle.spans(sizes, m)
    for rows in (x, dy):
        rows[slice(*spans[1])] = poison
        rows[spans[-1][1] :] = poison
    w[2] = poison
    return x, w, dy


@pytest.mark.parametrize(
    ("poison", "sizes"),
    [(np.nan, (3, 2, 4, 5, 3)), (np.inf, (3, 2, 0, 5, 3)), (np.inf, (0, 9, 1, 2, 2)), (np.nan, (70, 1, 60, 64, 3))],
    ids=str,
)
def test_poison_stays_in_its_group(poison, sizes):
    m = sum(sizes) + 3
    x, w, dy = poisoned(sizes, m, poison)
    s = jnp.array(sizes, jnp.int32)
    clean = tuple(np.where(np.isfinite(v), v, 0) for v in (x, w, dy))

    @jax.jit
    def both(x, w):
        y, vjp = jax.vjp(lambda x, w: cutjax.grouped_gemm(x, w, s), x, w)
        return y, *vjp(dy)

    y, dx, dw = both(x, w)
    spans = oracle.spans(sizes, m)
    touched = [*range(*spans[1]), *range(*spans[2])]  # rows with poison of their own or in their matrix
    expected = oracle.multiply(clean[0], clean[1], sizes)
    np.testing.assert_array_equal(np.delete(y, touched, 0), np.delete(expected, touched, 0))
    assert not np.isfinite(np.asarray(y)[touched]).any()
    expected = oracle.multiply(clean[2], clean[1], sizes, "nt")
    np.testing.assert_array_equal(np.delete(dx, touched, 0), np.delete(expected, touched, 0))
    expected = oracle.outer(clean[0], clean[2], sizes)
    np.testing.assert_array_equal(np.delete(dw, 1, 0), np.delete(expected, 1, 0))
    assert np.isfinite(dw[1]).all() == (sizes[1] == 0)


DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "uint8", "int32", "complex64", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_cuda", [False, True])
def test_every_dtype(dtype, on_cuda):
    """Both forms of the reference: the one other platforms lower, and XLA's on CUDA."""
    rng = np.random.default_rng(0)
    x, w, dy = (jax.device_put(rng.integers(0, 2, s).astype(dtype)) for s in ((20, K), (3, K, N), (20, N)))
    sizes = jnp.array([4, 0, 9])
    if on_cuda and dtype in ("float8_e4m3fn", "int8"):
        pytest.skip("XLA's CPU backend has no such product, which the form for CUDA leaves to XLA")
    params = {"out_dtype": x.dtype, "leading": False, "on_cuda": on_cuda}

    @jax.jit
    def both(x, w, dy):
        y = ragged_reference.reference_gemm(x, w, sizes, layout="nn", **params)
        return y, ragged_reference.reference_outer(x, dy, sizes, **params)

    y, dw = both(x, w, dy)
    for got, expected in ((y, oracle.multiply(x, w, sizes)), (dw, oracle.outer(x, dy, sizes))):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected.astype(dtype))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_sizes_of_any_integer_dtype(dtype):
    """A size that int32 does not hold is as large as one can be."""
    x, w = operands(300, 3)
    info = np.iinfo(dtype)
    for sizes in ((5, 0, 100), (5, info.max, 1), (info.min, 7, 1)):
        expected = oracle.multiply(x, w, sizes)
        numpy_sizes = np.array(sizes, dtype)
        np.testing.assert_array_equal(cutjax.grouped_gemm(x, w, numpy_sizes), expected)
        with jax.enable_x64(True):
            np.testing.assert_array_equal(cutjax.grouped_gemm(x, w, jnp.asarray(numpy_sizes)), expected)


def test_out_dtype_and_accumulation_in_float32():
    """256 + 1 is lost in bfloat16; the sum over k, and that over the rows of a group, keep it."""
    H = jnp.bfloat16
    x = jnp.concatenate([jnp.full((4, 1), 256, H), jnp.ones((4, 64), H)], 1)
    y = cutjax.grouped_gemm(x, jnp.ones((2, 65, 1), H), jnp.array([1, 3]), out_dtype=jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, 320)
    rows = jnp.concatenate([jnp.full((1, 1), 256, H), jnp.ones((299, 1), H)])
    dw = cutjax.grouped_outer(rows, jnp.ones((300, 1), H), jnp.array([300]), out_dtype=jnp.float32)
    assert dw[0, 0, 0] == 256 + 299


def test_accumulate():
    x, dy, sizes = integers(0, (20, K)), integers(2, (20, N)), jnp.array([4, 0, -3, 9])
    to = integers(3, (4, K, N))
    got = jax.jit(lambda *args: cutjax.grouped_outer(*args, sizes, accumulate=to))(x, dy)
    np.testing.assert_array_equal(got, to + oracle.outer(x, dy, sizes))
    # 16-bit operands add to a float32 array without rounding on the way, and round once to a 16-bit one.
    H = jnp.bfloat16
    big = jnp.full((1, 1, 1), 2.0**14 + 1)
    one = jnp.ones((3, 1), H)
    assert cutjax.grouped_outer(one, one, jnp.array([2]), accumulate=big)[0, 0, 0] == 2.0**14 + 3
    got = cutjax.grouped_outer(one, one, jnp.array([3]), accumulate=jnp.full((1, 1, 1), 256, H))
    assert (got.dtype, got[0, 0, 0]) == (H, 260)  # of 259; 256 had each 1 been added on its own
    got = cutjax.grouped_outer(one, one, jnp.array([1, 2]), accumulate=big, group_offset=1, groups=1)
    assert got[0, 0, 0] == 2.0**14 + 3


@pytest.mark.parametrize(
    ("m", "k", "n", "groups"), [(0, 5, 3, 2), (6, 0, 3, 2), (6, 5, 0, 2), (6, 5, 3, 0), (0, 0, 0, 0)], ids=str
)
@pytest.mark.parametrize(("layout", "offset"), [("nn", 1), ("nt", None)])
def test_zero_sizes(m, k, n, groups, layout, offset):
    x = np.ones((m, k), np.float32)
    w = np.ones((groups, *((k, n) if layout == "nn" else (n, k))), np.float32)
    sizes = np.full(groups, 2, np.int32)

    @jax.jit
    def program(x, w):
        y, pull = jax.vjp(lambda x, w: cutjax.grouped_gemm(x, w, sizes, layout=layout, group_offset=offset), x, w)
        return y, pull(jnp.ones_like(y))

    y, (dx, dw) = program(x, w)
    assert y.shape == (m, n)
    assert not np.any(y)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)
    if k:
        assert not np.any(dw) or (m, n, groups) == (6, 3, 2)
    batched = cutjax.grouped_gemm(np.ones((0, m, k), np.float32), w, sizes, layout=layout)
    assert batched.shape == (0, m, n)


def test_no_group_of_all_may_be_local():
    assert not np.any(
        cutjax.grouped_gemm(jnp.ones((4, K)), jnp.ones((2, K, N)), jnp.zeros(0, jnp.int32), group_offset=0)
    )
