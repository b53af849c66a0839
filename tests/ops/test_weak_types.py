"""Weak types of results and gradients: those of jnp.matmul for gemm, of jax.lax.ragged_dot for products in groups."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cutjax

pytestmark = pytest.mark.versions

DTYPES = ("bool", "int8", "uint8", "int32", "uint32", "bfloat16", "float16", "float32", "complex64")
WIDE = ("int64", "float64", "complex128")


def operands(x64: bool) -> list[jax.Array]:
    """A matrix of every dtype, strong, and weak where there is a weak one: also made without x64, used with it."""
    strong = [jax.device_put(np.ones((2, 2), dtype)) for dtype in (*DTYPES, *(WIDE if x64 else ()))]
    weak = [jnp.broadcast_to(value, (2, 2)) for value in (1, 1.0, 1j)]
    with jax.enable_x64(False):
        weak += [jnp.broadcast_to(value, (2, 2)) for value in (1, 1.0, 1j)] if x64 else []
    assert all(x.weak_type for x in weak)
    assert not any(x.weak_type for x in strong)
    return [*strong, *weak]


def pairs(x64: bool) -> list[tuple[jax.Array, jax.Array]]:
    """Each dtype by itself, and 60 pairs of the 225 to 324: all of them after a change of how dtypes are promoted."""
    found = operands(x64)
    drawn = random.Random(int(x64)).sample([*itertools.product(found, repeat=2)], 60)
    return [*zip(found, found, strict=True), *drawn]


def types(fn: Callable[..., Any], *args: jax.Array) -> Any:
    """Dtype and weak type of the result, and of the gradients where there are some; None where it is refused."""

    def gradients(*args):
        out = fn(*args)
        places = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
        if not places or not jnp.issubdtype(out.dtype, jnp.floating):
            return out, ()
        return out, jax.grad(lambda *args: fn(*args).sum(), places)(*args)

    try:
        found = jax.eval_shape(gradients, *args)
    except TypeError:
        return None
    return jax.tree.map(lambda x: (x.dtype.name, x.weak_type), found)


@pytest.mark.parametrize("out", [None, "float32"])
@pytest.mark.parametrize("x64", [False, True])
def test_gemm_as_matmul(x64, out):
    compared = 0
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        for a, b in pairs(x64):
            if {a.dtype.name, b.dtype.name} == {"bfloat16", "float16"}:
                continue  # refused
            expected = types(lambda a, b: jnp.matmul(a, b, preferred_element_type=out), a, b)
            got = types(lambda a, b: cutjax.gemm(a, b, out_dtype=out), a, b)
            if expected is None or (out and "complex" in f"{a.dtype} {b.dtype}"):  # which has no meaning in float32
                continue
            case = f"{a.dtype} {a.weak_type} x {b.dtype} {b.weak_type}"
            if out is None:
                assert got == expected, case
            assert got[0] == expected[0], case
            assert [dtype for dtype, _ in got[1]] == [dtype for dtype, _ in expected[1]], case
            compared += 1
    assert compared > 30


@pytest.mark.parametrize("out", [None, "float32"])
@pytest.mark.parametrize("x64", [False, True])
def test_groups_as_ragged_dot(x64, out):
    """Results are strong, for the sizes are; the gradients' dtypes are the operands'."""
    compared, sizes = 0, jnp.array([2])
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        for a, b in pairs(x64):
            expected = types(lambda a, b: lax.ragged_dot(a, b[None], sizes, preferred_element_type=out), a, b)
            if expected is None:
                continue
            case = f"{a.dtype} {a.weak_type} x {b.dtype} {b.weak_type}"
            got = types(lambda a, b: cutjax.ragged_dot(a, b[None], sizes, preferred_element_type=out), a, b)
            assert got[0] == expected[0], case
            assert [dtype for dtype, _ in got[1]] == [dtype for dtype, _ in expected[1]], case
            if a.dtype == b.dtype and (got := types(lambda a, b: cutjax.grouped_gemm(a, b[None], sizes), a, b)):
                assert not got[0][1], case
            compared += 1
    assert compared > 30


def test_cotangents_of_numpy():
    x, w, sizes = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.array([2])
    ones = np.ones((2, 4), np.float32)
    for product in (cutjax.gemm, lambda x, w: cutjax.grouped_gemm(x, w[None], sizes)):
        jax.tree.map(
            np.testing.assert_array_equal, jax.vjp(product, x, w)[1](ones), (np.full((2, 3), 4), np.full((3, 4), 2))
        )


def test_a_following_product_promotes_as_after_matmul():
    x, w, v = jnp.ones((2, 2), jnp.int8), jnp.broadcast_to(1.0, (2, 2)), jnp.ones((2, 2), jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        assert cutjax.gemm(cutjax.gemm(x, w), v).dtype == jnp.matmul(jnp.matmul(x, w), v).dtype == jnp.bfloat16


@pytest.mark.parametrize("captured", [False, True])
def test_gradients_of_numbers_in_epilogues(captured):
    """They were strong, so that what was updated by them was in another dtype."""
    x = jnp.ones((2, 2))

    def loss(product):
        def of(c):
            fn = (lambda acc: jnp.tanh(acc * c)) if captured else lambda acc, c: jnp.tanh(acc * c)
            return product(fn, () if captured else (c,)).sum()

        return of

    def types_of(product):
        first = jax.grad(loss(product))
        of_weak = jax.eval_shape(lambda c: (first(c), jax.grad(first)(c)), 2.0)
        return [(y.dtype, y.weak_type) for y in (*of_weak, jax.eval_shape(first, jnp.float32(2)))]

    expected = types_of(lambda fn, operands: fn(x @ x, *operands))
    products = {
        "gemm": lambda fn, operands: cutjax.gemm(x, x, epilogue=fn, operands=operands),
        "syrk": lambda fn, operands: cutjax.syrk(x, epilogue=fn, operands=operands),
        "groups": lambda fn, operands: cutjax.grouped_gemm(x, x[None], jnp.array([2]), epilogue=fn, operands=operands),
    }
    for name, product in products.items():
        assert types_of(product) == expected, name
