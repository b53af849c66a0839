"""Operands of any two dtypes, both ways round: the values, dtypes, gradients and refusals of jax's own products."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cutjax

COUNT = 8  # pairs drawn beside those of float8, with three operations each; all 784 were drawn of dot_general
INTEGERS = ("int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16", "uint32", "uint64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
TINY = ("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", *FLOAT8)
FLOATS = (*TINY, "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16", "float32", "float64")
DTYPES = ("bool", *INTEGERS, *FLOATS, "complex64", "complex128")
DIMS = (((1,), (0,)), ((), ()))
M, K, N = 3, 8, 5
Function = Callable[[Any, Any], jax.Array]


def values(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Numbers that the dtype holds and others do not: of its own largest magnitudes, and of its last bits."""
    rng, kind = np.random.default_rng(seed), jnp.dtype(dtype)
    if dtype == "bool":
        return jax.device_put(rng.integers(0, 2, shape).astype(bool))
    if jnp.issubdtype(kind, jnp.integer):
        most, least = min(int(jnp.iinfo(dtype).max), 200), max(int(jnp.iinfo(dtype).min), -200)
        return jax.device_put(rng.integers(least, most + 1, shape).astype(dtype))
    last = 2.0 ** -min(jnp.finfo(dtype).nmant, 7)
    found = rng.choice([0.5, 1.0, 2.0, 4.0], shape) * (1 + last * rng.integers(0, 2, shape))
    found *= 1 if dtype == "float8_e8m0fnu" else rng.choice([-1, 1], shape)
    if kind.kind == "c":
        found = found + 1j * rng.choice([-1.0, 0.5, 2.0], shape)
    return jax.device_put(found.astype(dtype))


def products(out: Any) -> dict[str, tuple[Function, Function]]:
    """Ours and jax's own of each operation, with results in a dtype asked for."""
    sizes, depth = np.array([M], np.int32), np.array([K], np.int32)
    how = {"preferred_element_type": out}
    matmul = functools.partial(jnp.matmul, **how)
    fused = functools.partial(cutjax.gemm, epilogue=lambda acc: acc * 1, out_dtype=out)
    return {
        "dot_general": (
            lambda x, y: cutjax.dot_general(x, y, DIMS, **how),
            lambda x, y: lax.dot_general(x, y, DIMS, **how),
        ),
        "matmul": (lambda x, y: cutjax.matmul(x, y, **how), matmul),
        "einsum": (lambda x, y: cutjax.einsum("mk,kn->nm", x, y, **how), lambda x, y: matmul(x, y).T),
        "fuse": (cutjax.fuse(matmul, policy="always"), matmul),
        "ragged_dot": (
            lambda x, y: cutjax.ragged_dot(x, y[None], sizes, **how),
            lambda x, y: lax.ragged_dot(x, y[None], sizes, **how),
        ),
        "gemm": (lambda x, y: cutjax.gemm(x, y, out_dtype=out), matmul),
        "nt": (lambda x, y: cutjax.gemm(x, y.T, layout="nt", out_dtype=out), matmul),
        "epilogue": (fused if out is not None else lambda x, y: cutjax.gemm(x, y), matmul),
        "grouped_gemm": (lambda x, y: cutjax.grouped_gemm(x, y[None], sizes, out_dtype=out), matmul),
        "grouped_outer": (lambda x, y: cutjax.grouped_outer(x.T, y, depth, out_dtype=out)[0], matmul),
    }


NAMES = tuple(products(None))


def traced(f: Function, x: jax.Array, y: jax.Array) -> Any:
    """The result's dtype, or the error's type."""
    try:
        return jax.eval_shape(f, x, y).dtype
    except (TypeError, ValueError) as error:
        return type(error)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def asked_for(a: str, b: str) -> list[Any]:
    """None, and a dtype that holds sums of products."""
    kinds = [jnp.dtype(x) for x in (a, b)]
    if any(jnp.issubdtype(x, jnp.complexfloating) for x in kinds):
        return [None, jnp.complex128]
    return [None, jnp.float64 if {a, b} & {"float64", "int64", "uint64"} else jnp.float32]


def check(a: str, b: str, names: Sequence[str] = NAMES) -> None:
    x, y = values(0, (M, K), a), values(1, (K, N), b)
    for out in asked_for(a, b):
        both = {name: products(out)[name] for name in names}
        found = {name: [traced(f, x, y) for f in pair] for name, pair in both.items()}
        halves = {a, b} == {"bfloat16", "float16"}  # of which gemm asks what to do
        for name, (got, want) in found.items():
            own = name in ("gemm", "nt", "epilogue", "grouped_gemm", "grouped_outer")
            if own and halves:
                assert got is TypeError
            elif own and out is None and isinstance(want, type) and isinstance(got, np.dtype):
                assert {a, b} & {*FLOAT8, "int8", "uint8"}  # narrow beside 16 bits
            else:
                assert got == want, f"{name} of {a} by {b} in {out}: {got}, expected {want}"
        served = [name for name, pair in found.items() if all(isinstance(dtype, np.dtype) for dtype in pair)]
        try:
            theirs = jax.jit(lambda x, y, names=served, both=both: [both[name][1](x, y) for name in names])(x, y)
        except jax.errors.JaxRuntimeError:
            assert any(t.startswith(("int2", "uint2", "int4", "uint4", "float4")) for t in (a, b))
            continue  # XLA's CPU backend has no such product
        ours = jax.jit(lambda x, y, names=served, both=both: [both[name][0](x, y) for name in names])(x, y)
        for name, got, want in zip(served, ours, theirs, strict=True):
            if a != b and want.dtype.itemsize <= 2:  # XLA rounds operands, and sums, to it, or does not
                continue
            np.testing.assert_array_equal(wide(got), wide(want), f"{name} of {a} by {b} in {out}")


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        yield


PAIRS = list(itertools.product(DTYPES, DTYPES))


@pytest.mark.parametrize("seed", range(COUNT))
def test_any_two_dtypes(seed):
    rng = np.random.default_rng(seed)
    check(*PAIRS[int(rng.integers(len(PAIRS)))], [NAMES[i] for i in rng.permutation(len(NAMES))[:3]])


@pytest.mark.parametrize(("a", "b"), [*itertools.permutations(FLOAT8), ("int8", FLOAT8[0]), (FLOAT8[1], "int8")])
def test_both_kinds_of_float8(a, b):
    check(a, b)
