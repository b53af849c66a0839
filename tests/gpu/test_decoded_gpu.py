"""Weights decoded in registers in front of wgmma, on the device: 8 and 4 bits, with scales of columns and of groups.

Configs are pinned. Small integers: equal to numpy's product, bit for bit. Normal numbers: errors against float64.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from test_quantized_gpu import ERRORS, F32, LAYOUTS, check_every_value

import cutjax
from cutjax import Quantized
from cutjax.dtypes import EIGHT_BITS
from cutjax.kernels.sm90 import family

pytestmark = pytest.mark.gpu

SIZES = ((1, 96, 64), (16, 512, 4096), (300, 2080, 528))
CONFIGS = {  # of few rows and of many, in every way to divide k
    "few": {"bm": 256, "bn": 16, "bk": 128, "stages": 5},
    "cluster along k": {"bm": 256, "bn": 16, "bk": 128, "stages": 5, "cluster_k": 4},
    "splits": {"bm": 256, "bn": 24, "bk": 128, "stages": 5, "splits": 8},
    "many": {"bm": 256, "bn": 128, "bk": 64, "stages": 5, "cluster_n": 2},
    "pairs": {"bm": 256, "bn": 64, "bk": 64, "stages": 4, "cluster_m": 2},
    "stream": {"bm": 256, "bn": 64, "bk": 128, "stages": 3, "stream_k": True},
    "in turn": {"bm": 128, "bn": 96, "bk": 64, "stages": 5, "schedule": "pingpong"},
    "sliced": {"bm": 128, "bn": 16, "bk": 128, "stages": 9, "schedule": "sliced", "sms": 6},
    "sliced in four": {"bm": 128, "bn": 8, "bk": 64, "stages": 8, "schedule": "sliced"},
    "sliced in a cluster": {"bm": 128, "bn": 8, "bk": 128, "stages": 8, "schedule": "sliced", "cluster_k": 2},
}


def pinned(rng, problem, count):
    """Some of the family's configs."""
    found = [config for config in family.configs(problem) if not isinstance(family.resolve(problem, config), tuple)]
    found = sorted(set(found), key=repr)
    return [found[i] for i in rng.choice(len(found), min(count, len(found)), replace=False)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("narrow", EIGHT_BITS)
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
def test_every_value_is_exact(wide, narrow, layout):
    sizes = [(-(-m // 8) * 8 if layout[0] == "t" else m, n, k) for m, n, k in SIZES]
    check_every_value(41, wide, narrow, layout, sizes, pinned)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("wide", "narrow", "scale", "group"),
    [
        ("bfloat16", "int4", "bfloat16", 128),
        ("bfloat16", "uint4", "float32", 64),
        ("float16", "int4", "float16", 32),
        ("bfloat16", "float4_e2m1fn", "bfloat16", 32),
        ("bfloat16", "int4", "float32", 0),
        ("bfloat16", "int8", "bfloat16", 128),
    ],
)
def test_groups_of_k_are_exact(wide, narrow, scale, group, name):
    """Scales are powers of 2; without a group, one a column."""
    rng = np.random.default_rng([problems.SEED, 42, list(CONFIGS).index(name)])
    config = cutjax.Config(swap=True, **CONFIGS[name])
    gemm = jax.jit(functools.partial(cutjax.gemm, out_dtype=F32, backend="cuda", config=config))
    for m, n, k in ((16, 512, 4096), (70, 2080, 1152)):
        x = rng.integers(-2, 3, (m, k)).astype(jnp.dtype(wide))
        low, high = (0, 16) if narrow == "uint4" else (-4, 5) if "float" in narrow else (-8, 8)
        w = rng.integers(low, high, (k, n)).astype(np.float32).astype(jnp.dtype(narrow))
        s = (2.0 ** rng.integers(-2, 2, (k // group if group else 1, n))).astype(jnp.dtype(scale))
        wide_w = w.astype(np.float64) * np.repeat(s.astype(np.float64), group or k, 0)
        np.testing.assert_array_equal(np.asarray(gemm(x, Quantized(w, s))), x.astype(np.float64) @ wide_w)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("wide", ERRORS)
def test_gaussian(wide, name):
    """Against the same numbers multiplied in float64: weights times scales are rounded once, and the result."""
    rng = np.random.default_rng([problems.SEED, 43, list(CONFIGS).index(name)])
    config = cutjax.Config(swap=True, **CONFIGS[name])
    for m, n, k in ((33, 512, 2048), (256, 2080, 512)):
        x = rng.standard_normal((m, k)).astype(jnp.dtype(wide))
        w = rng.integers(-8, 8, (k, n)).astype(jnp.int4)
        s = rng.standard_normal((k // 128, n)).astype(jnp.dtype(wide))
        rounded = (w.astype(np.float32) * np.repeat(s.astype(np.float32), 128, 0)).astype(jnp.dtype(wide))
        a, b = x.astype(np.float64), rounded.astype(np.float64)
        out = jax.jit(functools.partial(cutjax.gemm, backend="cuda", config=config))(x, Quantized(w, s))
        worst = np.max(np.abs(np.asarray(out).astype(np.float64) - a @ b) / (np.abs(a) @ np.abs(b))) / ERRORS[wide]
        problems.note_worst(f"decoded {wide} {name}", worst)
        assert worst <= 1
