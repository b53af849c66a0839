"""Products of complex64 by TF32 on wgmma: pairs of real numbers, of which the copies of b hold four for each."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.kernels import families, prepared, xla
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90 import operands
from cutjax.kernels.sm90.config import Config

C64 = np.dtype(np.complex64)


def problem(m: int, n: int, k: int, layout: str = "nn", **fields) -> Problem:
    return Problem.of(m, n, k, layout, C64, C64, C64, arch="sm_90a", math="tf32", **fields)


def complex_integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.integers(-5, 6, shape) + 1j * rng.integers(-5, 6, shape)).astype(C64)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(("m", "n", "k", "batch"), [(6, 5, 8, ()), (3, 4, 7, (2,)), (8, 1, 5, ())])
def test_the_real_product_of_the_copies_is_the_complex_one(layout, m, n, k, batch):
    """The rows of a are read as pairs; one product of real matrices has pairs of the result in its rows."""
    rng = np.random.default_rng(0)
    a, b = complex_integers(rng, *batch, m, k), complex_integers(rng, *batch, k, n)
    asked = problem(m, n, k, layout, batch=batch, a_batch=batch, b_batch=batch)
    given = [np.swapaxes(x, -1, -2) if letter == "t" else x for x, letter in zip((a, b), layout, strict=True)]
    real = operands.as_multiplied(asked)
    found, more = prepared.make(operands.prepared(asked), [jnp.asarray(x) for x in given])
    assert not more
    assert (real.m, real.n, real.k) == (m, 2 * n, 2 * k)
    rows = [np.asarray(x).view(np.float32) for x in found]
    assert [x.shape[-1] * 4 for x in rows] == [operands.row_bytes(x, 0, real.k) for x in (real.a, real.bs[0])]
    product = rows[0][..., : real.k] @ np.swapaxes(rows[1][..., : real.k], -1, -2)
    np.testing.assert_array_equal(np.ascontiguousarray(product).view(C64), a @ b)


def test_the_copies_are_told():
    assert sm90.resolved(problem(512, 512, 512), Config()).notes == ("b transposed and made real",)
    assert sm90.resolved(problem(512, 512, 512, "nt"), Config()).notes == ("b made real",)
    (copy,) = operands.prepared(problem(512, 512, 512, "nt"))
    assert copy.moved == 512 * 512 * (8 + 16)


def test_results_are_stored_as_pairs():
    kernel = sm90.resolved(problem(512, 300, 512), Config())
    (stored,) = [x.value for x in kernel.arguments if x.name == "map_d0"]
    assert (stored.dtype, stored.dims[:2]) == (np.float32, (600, 512))


def test_what_is_refused():
    def why(asked: Problem, config: Config | None = None) -> str:
        found = sm90.resolve(asked, config or Config())
        assert isinstance(found, tuple)
        return " ".join(found)

    assert "wgmma multiplies their parts, in dense products" in why(problem(64, 64, 64, "nt", symmetric=True))
    assert "parts of complex numbers" in why(problem(64, 64, 4096), Config(splits=4))
    assert "swap of complex numbers" in why(problem(64, 64, 64), Config(bm=128, bn=64, swap=True))


@pytest.mark.parametrize("result", ["bool", "uint8", "int32", "int64", "bfloat16", "float32", "float64"])
def test_no_kernel_has_real_results(result):
    """As ``preferred_element_type`` asks of drop-ins: a kernel's elements would be larger than the array's."""
    for arch, math, dtype in itertools.product(("sm_80", "sm_90a"), ("", "tf32"), (np.complex64, np.complex128)):
        asked = Problem.of(4096, 4096, 4096, "nn", dtype, dtype, np.dtype(result), arch=arch, math=math)
        assert not cutjax.candidates(asked)


def test_large_products_are_predicted_faster_than_xlas():
    asked = problem(2048, 2048, 2048)
    kernel, time_us, _ = families.fastest(asked)
    assert kernel.name.startswith("sm90_c64tf32_nn_")
    assert time_us < xla.time_us(asked)


def test_lowering():
    x = jax.ShapeDtypeStruct((512, 512), C64)
    f = jax.jit(functools.partial(cutjax.gemm, backend="cuda", config=Config()))
    text = f.trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "@cutjax_launch(%arg0, " in text  # a is read as it is
    assert text.count("-> tensor<512x512xcomplex<f32>>") >= 2
