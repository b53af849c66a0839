"""Kernels that add up over rows what an expression makes, run on the CPU, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutjax.epilogue.trace import trace
from cutjax.kernels import row_sums
from cutjax.kernels.device import reference
from emulator import device


def activated(x, mean, scale, shift):
    t = (x - mean) * scale + shift
    return [t / (1 + jnp.exp(-t))]


def moments(x):
    return [x, x * x]


def backward(x, y, gate, mean, row):
    """With operands of full size, of a matrix, of all, and of rows."""
    d, t = x * gate + row, y - mean
    return [d, d * t, jnp.where(t > 0, d, 0)]


# The expression; the sizes, matrices, rows, columns; the dtype; the operands' shapes, 1 where they do not vary.
CASES = {
    "moments": (moments, (2, 300, 48), "bfloat16", ()),
    "one row": (moments, (3, 1, 8), "bfloat16", ()),
    "odd columns": (moments, (2, 37, 21), "float16", ()),
    "one column": (moments, (1, 700, 1), "float32", ()),
    "wide": (moments, (1, 33, 1300), "float32", ()),
    "an activation": (activated, (3, 50, 144), "bfloat16", ((1, 1, 144), (1, 1, 144), (3, 1, 144))),
    "backward": (backward, (2, 130, 96), "bfloat16", ((2, 130, 96), (2, 1, 96), (1, 1, 96), (2, 130, 1))),
    "rows alike": (backward, (2, 65, 40), "float32", ((1, 65, 40), (2, 1, 1), (1, 1, 1), (1, 65, 1))),
}


def problem_of(name, arch="sm_90a"):
    expression, sizes, dtype, shapes = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(sizes).astype(jnp.dtype(dtype))
    large = [shape[1:] == sizes[1:] for shape in shapes]
    given = [
        rng.standard_normal(shape).astype(jnp.dtype(dtype if full else "float32"))
        for shape, full in zip(shapes, large, strict=True)
    ]

    def sums(*arrays):
        return [y.sum(1) for y in expression(*(x.astype(jnp.float32) for x in arrays))]

    traced = trace(sums, [jax.ShapeDtypeStruct(sizes, x.dtype)], [jnp.asarray(y) for y in given])
    found = row_sums.Problem.of(x, expression=traced.epilogue.primal, device=reference(arch))
    wide = [y.astype(np.float64) for y in (x, *given)]
    return found, [x, *map(np.asarray, traced.operands)], wide


@pytest.mark.versions
@pytest.mark.parametrize("name", CASES)
def test_values(name):
    problem, arrays, wide = problem_of(name)
    assert not row_sums.why_not(problem)
    kernel = row_sums.Kernel(problem)
    with device.emulated():
        call = kernel.call()
    machine = device.Machine(seed=1, eagerness=3)
    shares = machine.execute(call, arrays, [device.poison(y.shape, y.dtype) for y in call.results])
    with jax.enable_x64(True):
        expected = [np.broadcast_to(y, CASES[name][1]).sum(1) for y in CASES[name][0](*map(jnp.asarray, wide))]
    for share, want in zip(shares, expected, strict=True):
        got = share.astype(np.float64).sum(1)
        # Sums in float32 of up to 700 terms of about 1, and a logistic function to 2^-21 of itself.
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-4)
