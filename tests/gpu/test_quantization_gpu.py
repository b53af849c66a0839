"""Matrices quantized in one pass on the device, beside XLA's fusions: equal to the bit; and products of either."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.primitives.quantization import quantize_p

pytestmark = pytest.mark.gpu
ORDERS = {"own": (True, False), "turned": (False, True), "both": (True, True)}


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, -1), (-1, -1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(256, 384), (2, 128, 256), (4096, 1024)])
def test_bits_are_those_of_xla(shape, dtype, block, orders):
    own, turned = ORDERS[orders]
    to = jnp.dtype("float8_e5m2" if dtype == "float16" else "float8_e4m3fn")
    x = np.array(jax.random.normal(jax.random.key(1), shape))
    x[..., 3:5, :] = 0
    if block[0] == 1 or shape != (4096, 1024):  # of which one scale for all would be NaN
        x[..., 7, 9] = np.inf
    x = jnp.asarray(x, dtype)
    run = functools.partial(quantize_p.bind, dtype=to, block=block, own=own, turned=turned)
    ours = jax.jit(functools.partial(run, backend="cuda"))
    assert [row.kernel[:9] for row in cutjax.explain(ours, platform="cuda")(x).rows] == ["quantize_"]
    for got, wanted in zip(ours(x), jax.jit(functools.partial(run, backend="xla"))(x), strict=True):
        got, wanted = np.asarray(got), np.asarray(wanted)
        lost = np.isnan(wanted.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), lost)
        np.testing.assert_array_equal(got[~lost], wanted[~lost])


def test_a_layer():
    """Its products and gradients are those of operands that XLA quantizes, to the order of sums."""
    shapes = (128, 256), (128, 256), (128, 128)
    x, w, dy = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    dot = cutjax.fp8_dot_general("block", policy="always")

    def run(x, w):
        y, back = jax.vjp(lambda x, w: dot(x, w, (((1,), (1,)), ((), ()))), x, w)
        return y, *back(dy)  # not y: where its last bit differs, float8 rounds it elsewhere

    with cutjax.use_backend("cuda"):
        rows = cutjax.explain(run, platform="cuda")(x, w).rows
        got = jax.jit(lambda x, w: run(x, w))(x, w)
    assert sum(row.count for row in rows if row.kernel.startswith("quantize_bf16")) == 6
    with cutjax.use_backend("xla"):  # which may leave a rounding out that it sees undone: forward that of x, 2.6e-2
        options = {"xla_allow_excess_precision": False}
        wanted = jax.jit(lambda x, w: run(x, w), compiler_options=options)(x, w)
    for y, z in zip(got, wanted, strict=True):
        y, z = (np.asarray(a, np.float32) for a in (y, z))
        assert np.linalg.norm(y - z) < 2**-7 * np.linalg.norm(z)
