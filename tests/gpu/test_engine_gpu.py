"""Lines that leave L2 first, widest tiles in pairs, staging in turns, DMMA of half as deep.

Small integers, bit for bit, and normal numbers near float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import launches
import numpy as np
import pytest
from products import Item

import cutjax
from cutjax import Config, MmaConfig
from cutjax.kernels import families

pytestmark = pytest.mark.gpu

SECONDS = 120  # a test takes a few: longer is a CTA that waits for another for ever
CASES = {
    "256x192 in a pair": (Item("bf16", "dense", "nn", 1032, 1160, 264), Config(256, 192, 64, 3, cluster_n=2)),
    "evicted, pair along m": (
        Item("bf16", "dense", "tn", 520, 392, 200),
        Config(256, 192, 64, 3, cluster_m=2, evict_first="abd"),
    ),
    "evicted, ping-pong": (
        Item("f16", "dense", "nt", 520, 392, 200),
        Config(128, 192, 64, 4, schedule="pingpong", evict_first="bd"),
    ),
    "evicted, swapped": (
        Item("bf16", "dense", "nn", 72, 520, 264),
        Config(128, 48, 64, 6, swap=True, evict_first="ad", schedule="pingpong"),
    ),
    "evicted, several tiles a block": (
        Item("bf16", "dense", "nn", 2056, 2056, 72, "residual"),
        Config(64, 64, 64, 4, evict_first="bd", raster=3),
    ),
    "float32 in turns": (Item("bf16", "dense", "nn", 264, 264, 136, "sums", out="float32"), Config(128, 128, 64, 4)),
    "int32 in turns": (Item("s8", "dense", "nt", 264, 528, 264), Config(128, 256, 64, 4, cluster_m=2)),
    "operands in turns": (Item("f32tf32", "dense", "nt", 264, 136, 136, "operands"), Config(128, 64, 64, 4)),
    "narrow in turns": (Item("bf16", "dense", "nt", 72, 48, 72, "sum", out="float32"), Config(64, 16, 64, 4)),
    "f64 64x32": (Item("f64", "dense", "nn", 264, 136, 200, "sum"), MmaConfig(128, 64, 16, 64, 32, stages=3, blocks=2)),
    "f64 32x64": (Item("f64", "dense", "tn", 136, 264, 201), MmaConfig(64, 128, 16, 32, 64, stages=3, blocks=2)),
    "f64 64x32, deep": (Item("f64", "k", "tn", 136, 136, 264), MmaConfig(128, 128, 32, 64, 32, stages=3)),
}


@pytest.mark.parametrize("name", CASES)
def test_integers(name):
    item, config = CASES[name]
    kernel = families.resolve(item.problem, config)
    assert not isinstance(kernel, tuple), kernel
    arrays, expected = item.data()
    assert not (wrong := launches.wrong(launches.run(item.problem, kernel.call(), arrays), expected)), wrong


@pytest.mark.parametrize("name", ["256x192 in a pair", "evicted, ping-pong", "f64 64x32", "f64 32x64"])
def test_normal_numbers(name):
    item, config = CASES[name]
    dtype = item.problem.a.dtype
    with jax.enable_x64(dtype == np.float64):
        a, b = (
            jax.random.normal(jax.random.key(i), shape, jnp.dtype(dtype)) for i, shape in enumerate(((520, 520),) * 2)
        )
        precision = None if dtype.itemsize != 4 else "highest"
        out = cutjax.gemm(a, b, config=config, backend="cuda", precision=precision)
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    error = np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact)
    assert error < {2: 4e-3, 4: 2e-6, 8: 1e-14}[dtype.itemsize]
