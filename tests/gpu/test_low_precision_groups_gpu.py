"""Weights decoded in groups of rows, and float8 in groups of k, on the device: to the bit, and normal numbers.

Configs are pinned; small ones of the same kernels run on the emulated device, in tests/kernels.
"""

from __future__ import annotations

import functools

import grouped_weights as cases
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from grouped_weights import Weights
from test_quantized_gpu import ERRORS

import cutjax
from cutjax import Config, Quantized

pytestmark = pytest.mark.gpu

F8, E5M2 = "float8_e4m3fn", "float8_e5m2"
SIZES = {"few": (5, 0, 33, 1, 64, 0, 7, 18), "many": (300, 0, 513, 64, 0, 1, 129, 17), "one": (0, 0, 128, 0)}
WEIGHTS = (
    Weights("int4", scale="bfloat16", group=128),
    Weights("uint4", scale="bfloat16", group=128, zeros=True),
    Weights("uint4", "float16", "float16", 64, zeros=True),
    Weights("uint4", scale="float16", group=128, zeros=True),
    Weights("float4_e2m1fn", scale="float8_e8m0fnu"),
    Weights("float4_e2m1fn", "float16", "float8_e8m0fnu"),
    Weights("int8", scale="float32", group=64, zeros=True),
    Weights("uint8", "float16", "float32", 32, zeros=True),
)
CONFIGS = {
    "few": {"bm": 256, "bn": 16, "bk": 128, "stages": 4},
    "wide": {"bm": 256, "bn": 64, "bk": 64, "stages": 4},
    "pairs": {"bm": 256, "bn": 32, "bk": 64, "stages": 4, "cluster_m": 2},
    "beside": {"bm": 256, "bn": 24, "bk": 64, "stages": 4, "cluster_n": 2},
    "few SMs": {"bm": 256, "bn": 32, "bk": 128, "stages": 3, "sms": 4},
}


@pytest.fixture(autouse=True)
def _promotion():
    """Strict promotion, which other tests have, refuses integers beside floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def pinned(name):
    return Config(swap=True, **CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_groups_of_rows_are_exact(weights, name):
    rng = np.random.default_rng([problems.SEED, 61, WEIGHTS.index(weights)])
    for sizes in SIZES.values():
        for n, k in ((512, 1024), (2080, 384)):
            x, (w, wide) = cases.rows(rng, sizes, k, weights.wide), weights.drawn(rng, len(sizes), k, n)
            run = functools.partial(cutjax.grouped_gemm, out_dtype=jnp.float32, backend="cuda", config=pinned(name))
            got = np.asarray(jax.jit(run)(x, w, np.array(sizes)))
            np.testing.assert_array_equal(got, cases.in_groups(x, sizes, wide))


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("narrow", ["int8", "uint8", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_groups_of_bytes_are_exact(narrow, layout):
    rng, weights = np.random.default_rng([problems.SEED, 62]), Weights(narrow, layout=layout)
    configs = (Config(64, 16, 64, 4, swap=True), Config(128, 32, 64, 4, swap=True), Config(256, 64, 64, 3, swap=True))
    for sizes, config in zip(SIZES.values(), configs, strict=True):
        x, (w, wide) = cases.rows(rng, sizes, 416, "bfloat16"), weights.drawn(rng, len(sizes), 416, 1104)
        how = {"layout": layout, "out_dtype": jnp.float32, "backend": "cuda", "config": config}
        got = np.asarray(jax.jit(functools.partial(cutjax.grouped_gemm, **how))(x, w, np.array(sizes)))
        np.testing.assert_array_equal(got, cases.in_groups(x, sizes, wide))


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_products_beside_each_other_are_exact(weights, dense):
    """Two products of one x, and three, in groups or without, with an epilogue."""
    rng, sizes = np.random.default_rng([problems.SEED, 63, WEIGHTS.index(weights)]), SIZES["few"]
    for count, bn in ((2, 32), (3, 16)):
        found = [weights.drawn(rng, len(sizes), 640, 736) for _ in range(count)]
        x, ws = cases.rows(rng, sizes, 640, weights.wide), tuple(w for w, _ in found)
        epilogue = lambda *accs: (accs[0] - accs[1], accs[-1])  # noqa: E731
        how = {"epilogue": epilogue, "out_dtype": (jnp.float32,) * 2, "backend": "cuda"}
        how["config"] = Config(256, bn, 64, 3, swap=True)
        if dense:
            got = jax.jit(functools.partial(cutjax.gemm, **how))(x, tuple(w[3] for w in ws))
            wide = [x.astype(np.float64) @ of[3] for _, of in found]
        else:
            got = jax.jit(functools.partial(cutjax.grouped_gemm, **how))(x, ws, np.array(sizes))
            wide = [cases.in_groups(x, sizes, of) for _, of in found]
        np.testing.assert_array_equal(np.asarray(got[0]), wide[0] - wide[1])
        np.testing.assert_array_equal(np.asarray(got[1]), wide[-1])


@pytest.mark.parametrize(
    ("dtype", "scale", "zeros"),
    [("uint4", "", True), ("int4", "float32", False), ("float4_e2m1fn", "float8_e8m0fnu", False)],
)
@pytest.mark.parametrize("wide", ERRORS)
def test_gaussian(wide, dtype, scale, zeros):
    """Against the same numbers multiplied in float64: weights times scales are rounded once, and the result."""
    rng, sizes, (k, n) = np.random.default_rng([problems.SEED, 64]), (40, 0, 300, 9), (2048, 512)
    x = rng.standard_normal((sum(sizes), k)).astype(jnp.dtype(wide))
    w = jnp.asarray(rng.standard_normal((len(sizes), k, n)), jnp.float32)
    q = cutjax.quantize(w, dtype, block=(64, 1), scale_dtype=scale or wide, zero_point=zeros)
    rounded = np.asarray(q.dequantize(wide)).astype(np.float64)
    exact, size = (cases.in_groups(f(x.astype(np.float64)), sizes, f(rounded)) for f in (np.asarray, np.abs))
    for name in CONFIGS:
        run = functools.partial(cutjax.grouped_gemm, backend="cuda", config=pinned(name))
        got = np.asarray(jax.jit(run)(x, q, np.array(sizes))).astype(np.float64)
        worst = np.max(np.abs(got - exact) / size) / ERRORS[wide]
        problems.note_worst(f"decoded in groups {wide} {dtype}", worst)
        assert worst <= 1


@pytest.mark.parametrize("weights", [x for x in WEIGHTS if x.wide == "bfloat16"], ids=str)
def test_a_layer_of_experts(weights):
    """What backend="cuda" picks, against XLA's products of what was dequantized."""
    rng = np.random.default_rng([problems.SEED, 65])
    shapes = (512, 1024), (512, 1024), (1024, 512)
    given = [weights.drawn(rng, 8, *shape)[0] for shape in shapes]
    ws = [Quantized(w.values, (w.scale.astype(np.float32) / 64).astype(w.scale.dtype), w.zero_point) for w in given]
    x, logits = rng.standard_normal((128, 512)).astype(jnp.bfloat16), rng.standard_normal((128, 8)).astype(np.float32)
    got, plain = (
        np.asarray(jax.jit(functools.partial(cutjax.moe, backend=backend))(x, logits, *ws)).astype(np.float64)
        for backend in ("cuda", "xla")
    )
    assert np.max(np.abs(got - plain)) <= 2**-6 * np.max(np.abs(plain))


BYTES_CONFIGS = {
    "few": Config(256, 16, 64, 6, swap=True),
    "wide": Config(256, 32, 64, 4, swap=True),
    "pairs": Config(256, 32, 64, 4, cluster_m=2, swap=True),
    "in turns": Config(128, 32, 64, 4, schedule="pingpong", swap=True),
    "few SMs": Config(256, 24, 64, 4, sms=4, swap=True),
}


@pytest.mark.parametrize("name", BYTES_CONFIGS)
@pytest.mark.parametrize("block", [128, 1024])
@pytest.mark.parametrize("narrow", ["int4", "uint4", "float4_e2m1fn"])
def test_weights_of_4_bits_beside_float8_are_exact(narrow, block, name):
    rng, sizes, (k, n) = np.random.default_rng([problems.SEED, 68]), SIZES["few"], (1024, 736)
    x, wide_x = cases.scaled_rows(rng, sum(sizes) + cases.REST, k, block)
    w, wide = Weights(narrow, "float8_e4m3fn", "float32", 128).drawn(rng, len(sizes), k, n)
    how = {"out_dtype": jnp.float32, "backend": "cuda", "config": BYTES_CONFIGS[name]}
    got = jax.jit(functools.partial(cutjax.grouped_gemm, **how))(x, w, np.array(sizes))
    np.testing.assert_array_equal(np.asarray(got), cases.in_groups(wide_x, sizes, wide))
    got = jax.jit(functools.partial(cutjax.gemm, **how))(x, w[0])
    np.testing.assert_array_equal(np.asarray(got), wide_x @ wide[0])


def test_weights_of_4_bits_beside_float8_of_normal_numbers():
    """Sums of 128 products have 14 bits: each of four steps cuts terms off at 2^-13 of the largest.

    2^-11.8 of the sum of magnitudes was the most on an H200.
    """
    rng = np.random.default_rng([problems.SEED, 69])
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((100, 4096), (4096, 512)))
    a, b = cutjax.quantize(x, F8, block=(1, 128)), cutjax.quantize(w, "int4", block=(128, 1))
    wide_a, wide_b = (np.asarray(q.dequantize(), np.float64) for q in (a, b))
    for config in BYTES_CONFIGS.values():
        run = functools.partial(cutjax.gemm, out_dtype=jnp.float32, backend="cuda", config=config)
        got = np.asarray(jax.jit(run)(a, b)).astype(np.float64)
        assert np.max(np.abs(got - wide_a @ wide_b) / (np.abs(wide_a) @ np.abs(wide_b))) < 2**-12


DEPTH_CONFIGS = {
    "shared": Config(128, 96, stages=4),
    "two blocks": Config(256, 64, stages=4),
    "in turns": Config(64, 96, stages=4, schedule="pingpong"),
    "below": Config(128, 128, stages=4, cluster_m=2),
    "beside": Config(128, 64, stages=4, cluster_n=2),
    "in a cluster": Config(128, 64, stages=4, cluster_k=4),
    "in parts": Config(128, 128, stages=4, splits=3),
}


@pytest.mark.parametrize("name", DEPTH_CONFIGS)
@pytest.mark.parametrize(("of_a", "of_b"), [(True, True), (True, False), (False, False)])
def test_groups_of_k_are_exact(of_a, of_b, name):
    rng, sizes = np.random.default_rng([problems.SEED, 66]), (5, 0, 700, 60, 128, 1, 0, 1000)
    for dtypes in ((F8, F8), (E5M2, F8), *[("int8", "int8")] * (not of_a)):
        (a, wide_a), (b, wide_b) = (
            cases.depth(rng, sizes, n, dtype, of) for n, dtype, of in zip((400, 336), dtypes, (of_a, of_b), strict=True)
        )
        out = jnp.int32 if dtypes[0] == "int8" else jnp.float32
        run = functools.partial(cutjax.grouped_outer, out_dtype=out, backend="cuda", config=DEPTH_CONFIGS[name])
        got = np.asarray(jax.jit(run)(a, b, np.array(sizes)))
        np.testing.assert_array_equal(got, cases.outer(sizes, wide_a, wide_b))


def test_groups_of_k_of_normal_numbers():
    """Sums of 128 products have 14 bits: each of four steps cuts terms off at 2^-13 of the largest.

    2^-11.8 of the sum of magnitudes was the most on an H200.
    """
    rng, sizes = np.random.default_rng([problems.SEED, 67]), (1000, 0, 3000, 96)
    a, b = (
        cutjax.quantize(jnp.asarray(rng.standard_normal((sum(sizes), n)), jnp.float32), F8, block=(128, 1))
        for n in (512, 768)
    )
    run = functools.partial(cutjax.grouped_outer, out_dtype=jnp.float32, backend="cuda")
    got = np.asarray(jax.jit(run)(a, b, np.array(sizes))).astype(np.float64)
    wide_a, wide_b = (np.asarray(q.dequantize(), np.float64) for q in (a, b))
    exact, size = (cases.outer(sizes, f(wide_a), f(wide_b)) for f in (np.asarray, np.abs))
    assert np.max(np.abs(got - exact) / np.where(size == 0, 1, size)) < 2**-11
