"""What grouped_gemm and grouped_outer accept and what they refuse: the text of every error."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax


def ones(shape, dtype=jnp.float32):
    return jax.device_put(np.ones(shape, dtype))


X, W, DY, S = ones((8, 16)), ones((3, 16, 4)), ones((8, 4)), jnp.array([2, 3, 1], jnp.int32)
H = jnp.bfloat16
DIFFER = r"grouped_gemm: contracting dimensions differ: x is \(8, 16\), w is "
BAD_GEMM = [
    (ValueError, DIFFER + r"\(3, 4, 16\), layout 'nn'", X, ones((3, 4, 16)), S, {}),
    (ValueError, DIFFER + r"\(3, 16, 4\), layout 'nt'", X, W, S, {"layout": "nt"}),
    (ValueError, r"unknown layout 'tn', expected one of \('nn', 'nt'\)", X, W, S, {"layout": "tn"}),
    (ValueError, r"grouped_gemm: x must have rank 2 or more, got shape \(16,\)", ones(16), W, S, {}),
    (ValueError, r"grouped_gemm: w must have rank 3 or more, got shape \(16, 4\)", X, ones((16, 4)), S, {}),
    (ValueError, r"numbers of groups differ: group_sizes is \(2,\), w is \(3, 16, 4\); group_offset=", X, W, S[:2], {}),
    (TypeError, r"group_sizes must be an array of integers, got list", X, W, [2, 3, 1], {}),
    (TypeError, r"group_sizes must be integers \[..., g\], got float32\[3\]", X, W, ones(3), {}),
    (TypeError, r"group_sizes must be integers \[..., g\], got bool\[3\]", X, W, S > 1, {}),
    (TypeError, r"group_sizes must be integers \[..., g\], got int32\[\]", X, W, S[0], {}),
    (
        ValueError,
        r"batch axes do not broadcast: x is \(2, 8, 16\), w is \(3, 16, 4\), group_sizes is \(5, 3\)",
        ones((2, 8, 16)),
        W,
        jnp.zeros((5, 3), jnp.int32),
        {},
    ),
    (TypeError, r"group_offset must be one integer, got float", X, W, S, {"group_offset": 1.0}),
    (TypeError, r"group_offset must be one integer, got int32\[2\]", X, W, S, {"group_offset": S[:2]}),
    (ValueError, r"grouped_gemm: unknown backend 'gpu'", X, W, S, {"backend": "gpu"}),
    (
        TypeError,
        r"grouped_gemm: config must be a cutjax.Config or cutjax.MmaConfig, got dict",
        X,
        W,
        S,
        {"config": {"bm": 128}},
    ),
    (TypeError, r"grouped_gemm: .*: no 16-bit dtype holds both", X.astype(H), W.astype(jnp.float16), S, {}),
    (
        TypeError,
        r"grouped_gemm: a product of float32 has no meaning as out_dtype int32",
        X,
        W,
        S,
        {"out_dtype": jnp.int32},
    ),
]


@pytest.mark.parametrize(("error", "match", "x", "w", "sizes", "options"), BAD_GEMM, ids=[c[1][:40] for c in BAD_GEMM])
def test_grouped_gemm_refuses(error, match, x, w, sizes, options):
    with pytest.raises(error, match=match):
        cutjax.grouped_gemm(x, w, sizes, **options)


LIKE = r"accumulate must be \(3, 16, 4\), like the result, got \({}\): x is \(8, 16\), dy is \(8, 4\), group_sizes"
BAD_OUTER = [
    (ValueError, r"grouped_outer: the numbers of rows differ: x is \(8, 16\), dy is \(7, 4\)", X, DY[:7], S, {}),
    (ValueError, r"grouped_outer: dy must have rank 2 or more, got shape \(8,\)", X, ones(8), S, {}),
    (
        ValueError,
        r"batch axes do not broadcast: x is \(2, 8, 16\), dy is \(3, 8, 4\)",
        ones((2, 8, 16)),
        ones((3, 8, 4)),
        S,
        {},
    ),
    (ValueError, r"groups=2 without group_offset", X, DY, S, {"groups": 2}),
    (ValueError, r"groups must be an int of at least 0, got -1", X, DY, S, {"groups": -1, "group_offset": 0}),
    (ValueError, LIKE.format("3, 4, 16"), X, DY, S, {"accumulate": ones((3, 4, 16))}),
    (ValueError, LIKE.format("1, 16, 4"), X, DY, S, {"accumulate": ones((1, 16, 4))}),
    (ValueError, r"out_dtype and accumulate, whose dtype is the result's", X, DY, S, {"accumulate": W, "out_dtype": H}),
    (TypeError, r"grouped_outer: accumulate must be an array, got list", X, DY, S, {"accumulate": [1.0]}),
    (TypeError, r"product of float32 has no meaning as out_dtype int32", X, DY, S, {"accumulate": W.astype(jnp.int32)}),
    (TypeError, r"grouped_outer: group_sizes must be an array of integers, got NoneType", X, DY, None, {}),
]


@pytest.mark.parametrize(
    ("error", "match", "x", "dy", "sizes", "options"), BAD_OUTER, ids=[c[1][:40] for c in BAD_OUTER]
)
def test_grouped_outer_refuses(error, match, x, dy, sizes, options):
    with pytest.raises(error, match=match):
        cutjax.grouped_outer(x, dy, sizes, **options)


@pytest.mark.parametrize(
    ("x", "w", "out", "expected"),
    [
        ("bfloat16", "float32", None, "float32"),
        ("bfloat16", "bfloat16", "float32", "float32"),
        ("float32", "float32", "bfloat16", "bfloat16"),
        ("int8", "bfloat16", None, "bfloat16"),
        ("int8", "int8", "int32", "int32"),
    ],
)
def test_promotion_and_out_dtype(x, w, out, expected):
    with jax.numpy_dtype_promotion("standard"):
        y = cutjax.grouped_gemm(X.astype(x), W.astype(w), S, out_dtype=out)
        d = cutjax.grouped_outer(X.astype(x), DY.astype(w), S, out_dtype=out)
    assert y.dtype == d.dtype == expected
    np.testing.assert_array_equal(y[:6], np.full((6, 4), 16))
    np.testing.assert_array_equal(d[:, 0, 0], S)


def test_strict_promotion_is_respected():
    with pytest.raises(Exception, match=r"[Pp]romotion"):
        cutjax.grouped_gemm(X.astype(H), W, S)


def test_numpy_arrays():
    got = cutjax.grouped_gemm(np.ones((8, 16), np.float32), np.ones((3, 16, 4), np.float32), np.array([2, 3, 1]))
    np.testing.assert_array_equal(got[:, 0], [16] * 6 + [0] * 2)


def test_weak_types():
    weak = jnp.broadcast_to(jax.jit(lambda x: x)(2.0), (2, 2))
    sizes = jnp.array([1, 1])
    assert not cutjax.grouped_gemm(weak, weak[None], sizes[:1]).weak_type  # as jax.lax.ragged_dot
    assert not cutjax.grouped_gemm(weak, weak[None], sizes[:1], out_dtype=jnp.float32).weak_type
    got = cutjax.grouped_gemm(weak, ones((2, 2, 2), H), sizes)
    assert (got.dtype, got.weak_type) == (H, False)
    grads = jax.grad(lambda x, w: cutjax.grouped_gemm(cutjax.grouped_gemm(x, w, sizes[:1]), w, sizes[:1]).sum(), (0, 1))
    assert [g.shape for g in grads(weak, weak[None])] == [(2, 2), (1, 2, 2)]
