"""What gemm accepts and what it refuses: dtypes, weak types, shapes, and the text of every error."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.primitives.dense import reference


def ones(shape, dtype=jnp.float32):
    return jax.device_put(np.ones(shape, dtype))


STANDARD = jax.numpy_dtype_promotion("standard")
DTYPES = ("bfloat16", "float16", "float32", "int8", "uint8", "int32", "complex64", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_cuda", [False, True])
def test_every_dtype_as_matmul(dtype, on_cuda):
    """Both forms of the reference: the one other platforms lower, and XLA's on CUDA."""
    rng = np.random.default_rng(0)
    a, b = (jax.device_put(rng.integers(0, 3, shape).astype(dtype)) for shape in ((2, 4, 8), (8, 6)))
    got = cutjax.gemm(a, b)
    if on_cuda:
        got = reference(a[:, None], b[None, None], layout="nn", out_dtype=a.dtype, on_cuda=True)[:, 0]
    expected = jnp.matmul(a, b)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ("bfloat16", "float32", None),
        ("int8", "int32", None),
        ("bfloat16", "bfloat16", "float32"),
        ("int8", "int8", "int32"),
        ("float32", "float32", "bfloat16"),
        ("int8", "bfloat16", None),
    ],
)
def test_promotion_and_out_dtype(a, b, out):
    x, y = jnp.full((2, 300), 2, a), jnp.full((300, 3), 3, b)
    with STANDARD:
        got, expected = cutjax.gemm(x, y, out_dtype=out), jnp.matmul(x, y, preferred_element_type=out)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_accumulates_in_float32():
    """256 + 1 is lost in bfloat16, 2048 + 1 in float16."""
    for dtype, big in ((jnp.bfloat16, 256), (jnp.float16, 2048)):
        a = jnp.concatenate([jnp.full((1, 1), big, dtype), ones((1, 64), dtype)], 1)
        assert cutjax.gemm(a, ones((65, 1), dtype), out_dtype=jnp.float32)[0, 0] == big + 64


def test_gradients_have_the_operands_dtype():
    a, b = ones((4, 8), jnp.bfloat16), ones((8, 6), jnp.bfloat16)
    da, db = jax.grad(lambda a, b: cutjax.gemm(a, b, out_dtype=jnp.float32).sum(), (0, 1))(a, b)
    assert da.dtype == db.dtype == jnp.bfloat16
    problems = [
        row.choice.problem
        for row in cutjax.explain(jax.grad(lambda a: cutjax.gemm(a, b, out_dtype=jnp.float32).sum()))(a).rows
    ]
    assert [(p.a.dtype, p.out_dtype) for p in problems] == [(jnp.bfloat16, jnp.bfloat16)]  # a kernel can serve it


def test_broadcast_gradient_is_rounded_once():
    """The terms of a batch sum stay in float32: 257 is none of bfloat16's numbers, yet 257 - 256 is 1."""
    a = jnp.array([[[256, 1]], [[-256, 0]]], jnp.bfloat16)
    b = ones((1, 1), jnp.bfloat16)
    db = jax.grad(lambda b: cutjax.gemm(a, b, layout="tn", out_dtype=jnp.float32).sum())(b)
    assert db[0, 0] == 1


def test_weak_types():
    w = jnp.broadcast_to(jax.jit(lambda x: x)(2.0), (2, 2))
    assert w.weak_type
    strong = ones((2, 2), jnp.bfloat16)
    for x, y in ((w, strong), (strong, w), (w, w)):
        got, expected = cutjax.gemm(x, y), jnp.matmul(x, y)
        assert (got.dtype, got.weak_type) == (expected.dtype, expected.weak_type)
    got = cutjax.gemm(w, w, out_dtype=jnp.float32)
    assert not got.weak_type


def test_numpy_arrays_and_objects_with_a_jax_array():
    a = np.ones((2, 3), np.float32)

    class Parameter:
        def __jax_array__(self):
            return ones((3, 4))

    np.testing.assert_array_equal(cutjax.gemm(a, Parameter()), np.full((2, 4), 3))


def test_integer_operands_have_no_gradient():
    x, w = ones((2, 3), jnp.int8), ones((3, 4))
    with STANDARD:
        assert jax.grad(lambda w: cutjax.gemm(x, w).sum())(w).shape == (3, 4)


S, HALF, HALF2, C = ones((2, 2)), ones((2, 2), jnp.bfloat16), ones((2, 2), jnp.float16), ones((2, 2), jnp.complex64)
DIFFER = r"gemm: contracting dimensions differ: a is \(8, 16\), b is "
RANK = r"gemm: {} must have rank 2 or more, got "
BAD = [
    (ValueError, DIFFER + r"\(12, 4\), layout 'nn'", ones((8, 16)), ones((12, 4)), {}),
    (ValueError, DIFFER + r"\(16, 4\), layout 'tt'", ones((8, 16)), ones((16, 4)), {"layout": "tt"}),
    (
        ValueError,
        r"batch axes do not broadcast: a is \(2, 4, 8\), b is \(3, 8, 4\)",
        ones((2, 4, 8)),
        ones((3, 8, 4)),
        {},
    ),
    (ValueError, RANK.format("a") + r"shape \(8,\)", ones(8), ones((8, 4)), {}),
    (ValueError, RANK.format("b") + r"shape \(8,\)", ones((4, 8)), ones(8), {}),
    (ValueError, RANK.format("a") + r"the scalar 3.0", 3.0, S, {}),
    (ValueError, RANK.format("b") + r"the scalar", S, np.float32(2), {}),
    (TypeError, r"a must be an array, got list", [[1.0]], ones((1, 4)), {}),
    (TypeError, r"b must be an array, got NoneType", S, None, {}),
    (TypeError, r"b must be an array, got ShapeDtypeStruct", S, jax.ShapeDtypeStruct((2, 2), jnp.float32), {}),
    (
        TypeError,
        r"a must be an array of numbers, got dtype key",
        lambda: jax.random.split(jax.random.key(0), (2, 2)),
        S,
        {},
    ),
    (ValueError, r"unknown layout 'xy', expected one of \('nn', 'nt', 'tn', 'tt'\)", S, S, {"layout": "xy"}),
    (ValueError, r"unknown layout None", S, S, {"layout": None}),
    (ValueError, r"unknown backend 'gpu', expected one of \('auto', 'cuda', 'xla'\)", S, S, {"backend": "gpu"}),
    (TypeError, r"config must be a cutjax.Config or cutjax.MmaConfig, got dict", S, S, {"config": {"bm": 128}}),
    (TypeError, r"a is bfloat16, b is float16: no 16-bit dtype holds both", HALF, HALF2, {}),
    (TypeError, r"product of float32 has no meaning as out_dtype int32", S, S, {"out_dtype": jnp.int32}),
    (TypeError, r"product of complex64 has no meaning as out_dtype float32", C, C, {"out_dtype": "float32"}),
]


@pytest.mark.parametrize(("error", "match", "a", "b", "options"), BAD, ids=[case[1][:40] for case in BAD])
def test_refused(error, match, a, b, options):
    a = a() if callable(a) else a
    with pytest.raises(error, match=match):
        cutjax.gemm(a, b, **options)


def test_weak_types_differentiate():
    w = jnp.broadcast_to(jax.jit(lambda x: x)(2.0), (2, 2))
    expected, got = (jax.value_and_grad(lambda w: f(f(w, w), w).sum())(w) for f in (jnp.matmul, cutjax.gemm))  # noqa: B023
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_unknown_config_field():
    with pytest.raises(TypeError, match="tile_m"):
        cutjax.Config(tile_m=128)


def test_strict_promotion_is_respected():
    with pytest.raises(Exception, match=r"[Pp]romotion"):
        cutjax.gemm(ones((2, 2), jnp.bfloat16), ones((2, 2)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_batched_16_bit_products_run_on_a_cpu(dtype):
    """XLA's CPU backend in jax 0.12 has no kernel for this one with a wider result."""
    a, b = jnp.ones((1, 3200, 8), dtype), jnp.ones((5, 72, 3200), dtype)
    np.testing.assert_array_equal(np.asarray(cutjax.gemm(a, b, layout="tt"), np.float32), np.full((5, 8, 72), 3200.0))
