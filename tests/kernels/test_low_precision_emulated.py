"""Weights decoded in groups, and operands along k in groups of k: whole kernels on the emulated device, to the bit."""

from __future__ import annotations

import functools

import grouped_weights as cases
import gxx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device
from grouped_weights import Weights

import cutjax
from cutjax import Config, Quantized
from cutjax.runtime import compiler

pytestmark = [
    pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing())),
    pytest.mark.skipif(not gxx.installed(), reason="needs g++"),
]


@pytest.fixture(autouse=True)
def _promotion():
    """Strict promotion, which other tests have, refuses integers beside floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def run(operation, *args, config, **more):
    fn = functools.partial(operation, backend="cuda", config=Config(**config), **more)
    with device.emulated():
        return jax.tree.map(np.asarray, jax.jit(fn)(*args))


SWAPPED = {"bm": 256, "bn": 16, "bk": 64, "stages": 3, "swap": True}
ROWS = {
    "int4": (Weights("int4", scale="bfloat16"), {"bk": 128}),
    "zero points": (Weights("uint4", scale="float16", zeros=True), {"bn": 8}),
    "mxfp4": (Weights("float4_e2m1fn", "float16", "float8_e8m0fnu"), {}),
    "bytes": (Weights("uint8", scale="float32", zeros=True), {"bm": 64, "cluster_m": 2}),
    "in turns, along k": (Weights("int8", "float16", layout="nt"), {"bm": 128, "schedule": "pingpong", "bn": 8}),
    "in a cluster": (Weights("float8_e4m3fn"), {"bm": 128, "bn": 8, "cluster_n": 2}),
    "of 16 bits": (Weights("bfloat16"), {"bm": 128, "bn": 8}),
    "shared k blocks": (Weights("int4", scale="float32"), {"bm": 128, "schedule": "sliced", "stages": 9}),
    "warps": (Weights("int4", scale="float32"), {"bm": 128, "bn": 8, "bk": 128, "schedule": "warps", "stages": 8}),
    "warps, zero points": (
        Weights("uint4", scale="float16", zeros=True),
        {"bm": 128, "bn": 8, "schedule": "warps", "stages": 8},
    ),
    "shared k blocks, bytes": (
        Weights("int8", scale="float32"),
        {"bm": 64, "bn": 8, "schedule": "sliced", "stages": 8},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_groups_of_rows(name):
    weights, config = ROWS[name]
    rng, sizes, (n, k) = np.random.default_rng(0), (3, 0, 18), (288 if "4" in weights.narrow else 80, 96)
    x, (w, wide) = cases.rows(rng, sizes, k, weights.wide), weights.drawn(rng, len(sizes), k, n)
    got = run(
        cutjax.grouped_gemm,
        x,
        w,
        np.array(sizes),
        config=SWAPPED | config,
        layout=weights.layout,
        out_dtype=jnp.float32,
    )
    np.testing.assert_array_equal(got, cases.in_groups(x, sizes, wide))


SLICED = {
    "pairs": ("uint4", {"bm": 256, "stages": 4, "cluster_k": 2}),
    "pairs, several tiles": ("int4", {"bm": 256, "stages": 4, "sms": 1}),
    "four": ("int4", {"bm": 128, "bn": 8, "bk": 128}),
    "three": ("int4", {"bm": 128, "bk": 128, "stages": 6}),
    "three, in a cluster": ("uint4", {"bm": 128, "stages": 6, "cluster_k": 2}),
    "four, several tiles": ("int8", {"bm": 64, "bn": 8, "sms": 1}),
    "in parts": ("int8", {"bm": 128, "splits": 2, "stages": 6}),
    "in a stream": ("int4", {"bm": 128, "stream_k": True, "sms": 2, "stages": 6}),
    "warps": ("int4", {"bm": 128, "bn": 8, "bk": 128, "schedule": "warps"}),
    "warps, pairs": ("uint4", {"bm": 256, "bn": 8, "stages": 4, "cluster_k": 2, "schedule": "warps"}),
    "warps, several tiles": ("int4", {"bm": 256, "bn": 8, "stages": 4, "sms": 1, "schedule": "warps"}),
    "warps, bytes": ("int8", {"bm": 64, "bn": 8, "sms": 1, "schedule": "warps"}),
    "warps, in a stream": ("int4", {"bm": 128, "bn": 8, "stream_k": True, "sms": 2, "schedule": "warps"}),
    "in a stream, pairs": ("uint4", {"bm": 256, "stages": 4, "stream_k": True, "sms": 3}),
}


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.parametrize("seed", [0, 1])
def test_warpgroups_that_share_k_blocks(name, seed):
    """Contractions of 9 or 5 blocks, which no number of groups divides, and results of the order of blocks."""
    narrow, config = SLICED[name]
    rng, (m, n, k) = np.random.default_rng(seed), (13, 288, 576)
    w, wide = Weights(narrow, scale="float32" if narrow == "int8" else "bfloat16", group=64).drawn(rng, 1, k, n)
    x = rng.integers(-2, 3, (m, k)).astype(jnp.bfloat16)
    config = SWAPPED | {"schedule": "sliced", "stages": 8} | config
    got = run(cutjax.gemm, x, jax.tree.map(lambda x: x[0], w), config=config, out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, x.astype(np.float32) @ wide[0])


def test_warpgroups_that_share_k_blocks_of_two_products():
    rng, (m, n, k) = np.random.default_rng(3), (13, 288, 576)
    (v, wide_v), (w, wide_w) = (
        Weights("uint4", scale="bfloat16", group=64, zeros=True).drawn(rng, 1, k, n) for _ in "vw"
    )
    x = rng.integers(-2, 3, (m, k)).astype(jnp.bfloat16)
    both = jax.tree.map(lambda x: x[0], (v, w))
    config = SWAPPED | {"bm": 128, "schedule": "sliced", "stages": 6}
    got = run(cutjax.gemm, x, both, config=config, out_dtype=jnp.float32, epilogue=lambda a, b: a - 2 * b)
    np.testing.assert_array_equal(got, x.astype(np.float32) @ (wide_v[0] - 2 * wide_w[0]))


def test_halves_of_float4_are_denormals_of_bfloat16_on_the_way():
    v = np.resize(np.array([0.5, -0.5], np.float32), (64, 256)).astype(jnp.float4_e2m1fn)
    x = np.eye(64)[:16].astype(jnp.bfloat16)
    got = run(cutjax.gemm, x, v, config=SWAPPED, out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, v[:16].astype(np.float32))


@pytest.mark.parametrize("seed", [0, 1])
def test_warpgroups_without_a_block_of_k_begin_the_epilogue(seed):
    """Contractions of two blocks between four warpgroups, and tiles one after the other: one that stores has none."""
    rng, (m, n, k), sizes = np.random.default_rng(seed), (11, 96, 128), (4, 7)
    w, wide = Weights("int8").drawn(rng, len(sizes), k, n)
    x, residual = (rng.integers(-2, 3, shape).astype(jnp.bfloat16) for shape in ((m, k), (m, n)))

    def added(x, w, residual, **how):
        def epilogue(acc, r):
            return acc + r.astype(acc.dtype)

        return cutjax.grouped_gemm(x, w, np.array(sizes), epilogue=epilogue, operands=(residual,), **how)

    config = SWAPPED | {"bm": 64, "bn": 8, "schedule": "sliced", "stages": 8, "sms": 1}
    got = run(added, x, w, residual, config=config, out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, cases.in_groups(x, sizes, wide) + residual.astype(np.float32))


# Slices that store tiles in turn: weights, and the config.
TURNS = {
    "four": ("int4", {"bm": 128, "bn": 8, "bk": 128, "stages": 8}),
    "three, narrow": ("int4", {"bm": 128, "bk": 128, "stages": 6}),
    "three": ("int4", {"bm": 128, "bn": 24, "stages": 6}),
    "three, wide": ("uint4", {"bm": 128, "bn": 32, "bk": 128, "stages": 6}),
    "three, bytes": ("int8", {"bm": 128, "bn": 32, "stages": 6}),
    "bytes": ("int8", {"bm": 64, "bn": 8, "stages": 8}),
    "warps": ("uint4", {"bm": 128, "bn": 8, "stages": 8, "schedule": "warps"}),
    "warps, pairs": ("int4", {"bm": 256, "bn": 8, "stages": 4, "schedule": "warps"}),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("seed", [0, 1])
def test_slices_store_in_turn(name, seed):
    """Tiles of groups one after the other on one SM, and rows of no group; each that stores awaits an operand."""
    narrow, config = TURNS[name]
    rng, sizes, (n, k) = np.random.default_rng(seed), (3, 0, 34, 20), (288, 576)
    weights = Weights(narrow, scale="float32", group=64)
    x, (w, wide) = cases.rows(rng, sizes, k, weights.wide), weights.drawn(rng, len(sizes), k, n)
    residual = rng.integers(-2, 3, (len(x), n)).astype(jnp.bfloat16)

    def added(x, w, residual, **how):
        def epilogue(acc, r):
            return acc + r.astype(acc.dtype)

        return cutjax.grouped_gemm(x, w, np.array(sizes), epilogue=epilogue, operands=(residual,), **how)

    config = SWAPPED | {"schedule": "sliced", "sms": 1} | config
    got = run(added, x, w, residual, config=config, out_dtype=jnp.float32)
    expected = cases.in_groups(x, sizes, wide)
    expected[: sum(sizes)] += residual[: sum(sizes)].astype(np.float32)
    np.testing.assert_array_equal(got, expected)


WARPS = {"bm": 128, "bn": 8, "schedule": "warps", "stages": 8, "sms": 1}


@pytest.mark.parametrize("config", [{"bn": 8}, WARPS], ids=str)
def test_an_epilogue_of_groups(config):
    """Operands of groups, of rows and of full size beside two products; groups from the second on."""
    rng, sizes, g, m, k, n = np.random.default_rng(1), np.array([2, 5, 0, 7, 3], np.int32), 3, 20, 64, 96
    (v, _), (w, _) = (Weights("uint4", scale="bfloat16", zeros=True).drawn(rng, g, k, n) for _ in range(2))
    x, residual = (
        rng.integers(-2, 3, (2, m, k)).astype(jnp.bfloat16),
        rng.integers(-4, 5, (2, m, n)).astype(jnp.bfloat16),
    )
    bias, by = rng.integers(-4, 5, (1, g, 1, n)).astype(np.float32), rng.integers(-2, 3, (m, 1)).astype(np.float32)

    def fused(x, v, w, *operands, **how):
        def epilogue(a, b, r, bias, by):
            return (a - b) * by + bias + r.astype(a.dtype), a + bias

        out = jnp.bfloat16, jnp.float32
        return cutjax.grouped_gemm(
            x, (v, w), sizes, group_offset=1, epilogue=epilogue, operands=operands, out_dtype=out, **how
        )

    args = x, v, w, residual, bias, by
    expected = jax.jit(functools.partial(fused, backend="xla"))(*args)
    for got, plain in zip(run(fused, *args, config=SWAPPED | config), expected, strict=True):
        np.testing.assert_array_equal(got, plain)


def test_a_batch_of_three_products():
    rng = np.random.default_rng(2)
    ws = [Weights("int4", scale="bfloat16").drawn(rng, 2, 64, 96)[0] for _ in range(3)]
    x = rng.integers(-2, 3, (2, 7, 64)).astype(jnp.bfloat16)

    def fused(x, *ws, **how):
        return jax.vmap(lambda x, *ws: cutjax.gemm(x, ws, epilogue=lambda a, b, c: a * b - c, **how))(x, *ws)

    got = run(fused, x, *ws, config=SWAPPED | {"bn": 8})
    np.testing.assert_array_equal(got, jax.jit(functools.partial(fused, backend="xla"))(x, *ws))


# Weights, elements of k with one scale of x, in groups or without, and the config.
BYTES = {
    "int4": ("int4", 128, False, {}),
    "in parts": ("uint4", 768, False, {"splits": 2}),
    "in a cluster along k": ("float4_e2m1fn", 128, False, {"cluster_k": 2}),
    "in turns": ("int4", 128, False, {"bm": 128, "schedule": "pingpong", "bn": 32}),
    "groups": ("int4", 768, True, {"cluster_m": 2}),
    "shared k blocks": ("uint4", 128, False, {"bm": 128, "bn": 24, "stages": 6, "schedule": "sliced"}),
    "shared k blocks, in turns": (
        "int4",
        128,
        True,
        {"bm": 128, "bn": 24, "stages": 6, "schedule": "sliced", "sms": 1},
    ),
}


@pytest.mark.parametrize("name", BYTES)
def test_weights_of_4_bits_beside_float8(name):
    narrow, block, grouped, config = BYTES[name]
    rng, sizes, (k, n) = np.random.default_rng(5), (3, 0, 15), (768, 288)
    x, wide_x = cases.scaled_rows(rng, sum(sizes) + cases.REST, k, block)
    w, wide = Weights(narrow, "float8_e4m3fn", "float32", 128).drawn(rng, len(sizes) if grouped else 1, k, n)
    how = {"config": SWAPPED | config, "out_dtype": jnp.float32}
    if grouped:
        got, expected = run(cutjax.grouped_gemm, x, w, np.array(sizes), **how), cases.in_groups(wide_x, sizes, wide)
    else:
        got, expected = run(cutjax.gemm, x, w[0], **how), wide_x @ wide[0]
    np.testing.assert_array_equal(got, expected)


F8 = "float8_e4m3fn"
DEPTH = {
    "in turns": (F8, True, True, Config(64, 64, stages=3, schedule="pingpong")),
    "shared": (F8, True, False, Config(256, 64, stages=3)),
    "in parts": (F8, True, True, Config(128, 64, stages=3, splits=3)),
    "without scales": (F8, False, False, Config(128, 64, stages=3)),
    "integers": ("int8", False, False, Config(128, 64, stages=3)),
}


@pytest.mark.parametrize("name", DEPTH)
def test_groups_of_k(name):
    """Groups begin and end within blocks of 128, some are empty; rows of no group, and their scales, are NaN."""
    dtype, of_a, of_b, config = DEPTH[name]
    rng, sizes = np.random.default_rng(3), (5, 0, 200, 51, 128, 0)
    (a, wide_a), (b, wide_b) = (cases.depth(rng, sizes, n, dtype, of) for n, of in ((80, of_a), (48, of_b)))
    fn = functools.partial(cutjax.grouped_outer, out_dtype=jnp.float32 if dtype == F8 else jnp.int32, backend="cuda")
    with device.emulated():
        got = jax.jit(functools.partial(fn, config=config))(a, b, np.array(sizes))
    np.testing.assert_array_equal(np.asarray(got), cases.outer(sizes, wide_a, wide_b))


@pytest.mark.parametrize("tile", [(128, 64), (256, 64), (128, 256), (64, 64)], ids=str)
def test_rows_of_groups_by_scales(tile):
    """Of a group's last tile one of two warpgroups may have no rows, or none in a block of 64: it passes its turns."""
    rng, sizes, (n, k) = np.random.default_rng(6), (5, 0, 70, 190), (256, 384)
    x, wide_x = cases.scaled_rows(rng, sum(sizes) + cases.REST, k, 128)
    w = rng.integers(-2, 3, (len(sizes), n, k)).astype(np.float32)
    scale = 2.0 ** rng.integers(-2, 3, (len(sizes), n // 128, k // 128))
    wide = w * scale.repeat(128, 1).repeat(128, 2)
    w = Quantized(jnp.asarray(w, F8), jnp.asarray(scale, jnp.float32))
    fn = functools.partial(cutjax.grouped_gemm, layout="nt", out_dtype=jnp.float32, backend="cuda")
    with device.emulated():
        got = np.asarray(jax.jit(functools.partial(fn, config=Config(*tile, stages=3)))(x, w, np.array(sizes)))
    np.testing.assert_array_equal(got, cases.in_groups(wide_x, sizes, wide.swapaxes(1, 2)))


def test_a_layer_of_experts():
    """Its products by the kernels that backend="cuda" picks, against those by XLA."""
    rng, weights = np.random.default_rng(4), Weights("int4", scale="bfloat16")
    gate, up, down = (weights.drawn(rng, 3, *shape)[0] for shape in ((64, 96), (64, 96), (96, 64)))
    x, logits = cases.rows(rng, (5, 6), 64, "bfloat16"), rng.standard_normal((14, 3)).astype(np.float32)

    def layer(x, gate, up, down, backend):
        gate, up, down = (Quantized(w.values, w.scale * jnp.bfloat16(2**-4)) for w in (gate, up, down))
        return cutjax.moe(x, logits, gate, up, down, backend=backend)

    args = x, gate, up, down
    of_kernels = functools.partial(layer, backend="cuda")
    runs = [row.runs for row in cutjax.explain(of_kernels, device="NVIDIA H200")(*args).rows]
    assert sum("swap_groups_m" in name for name in runs) == 2, runs
    with device.emulated():
        got = np.asarray(jax.jit(of_kernels)(*args)).astype(np.float64)
    plain = np.asarray(jax.jit(functools.partial(layer, backend="xla"))(*args)).astype(np.float64)
    assert np.max(np.abs(got - plain)) <= 2**-7 * np.max(np.abs(plain))
