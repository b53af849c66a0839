"""Kernels of low precision that have not run on a device: "auto" leaves them alone and says so, backend="cuda" asks."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import cutjax
from cutjax import Quantized
from cutjax.runtime import settings

BF16, F32, F8, E8M0 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e8m0fnu
SIZES = jax.ShapeDtypeStruct((8,), jnp.int32)


@pytest.fixture(autouse=True)
def _promotion():
    """Strict promotion, which other tests have, refuses integers beside floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def aval(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def weights(dtype, scale, group, *shape, zeros=False):
    *batch, k, n = shape
    blocks = (*batch, k // group, n)
    zero = aval(*blocks, dtype=dtype) if zeros else None
    return Quantized(aval(*shape, dtype=dtype), aval(*blocks, dtype=scale), zero)


def gated(x, gate, up, sizes, **how):
    return cutjax.grouped_gemm(x, (gate, up), sizes, epilogue=lambda a, b: jax.nn.silu(a) * b, **how)


INT4 = weights(jnp.int4, BF16, 128, 8, 4096, 14336)
GATE = weights(jnp.int4, BF16, 128, 4096, 14336)
UINT4 = weights(jnp.uint4, jnp.float16, 128, 8192, 8192, zeros=True)
DEPTH = (Quantized(aval(8192, n, dtype=F8), aval(64, n, dtype=F32)) for n in (4096, 7168))
# What is asked, its arguments, the kernel's name, why "auto" leaves it ("" where it does not), and the types of the
# arguments of the launch.
CASES = {
    "gate": (
        gated,
        (aval(128, 4096), INT4, INT4, SIZES),
        r"sm90_bf16xs4by128bf16_nn_256x.*_swap_groups_m_e\w+$",
        "weights decoded of several products in groups or in a batch",
        ["128x4096xbf16", *["8x4096x14336xi4"] * 2, "8xi32", *["8x32x14336xbf16"] * 2],
    ),
    "gate of few rows": (
        functools.partial(cutjax.gemm, epilogue=lambda a, b: jax.nn.silu(a) * b),
        (aval(64, 4096), (GATE, GATE)),
        r"sm90_bf16xs4by128bf16_nn_256x64x64_.*_swap_k2_e\w+$",
        "",
        ["64x4096xbf16", *["4096x14336xi4"] * 2, *["32x14336xbf16"] * 2],
    ),
    "gate of more rows": (
        functools.partial(cutjax.gemm, epilogue=lambda a, b: jax.nn.silu(a) * b),
        (aval(512, 4096), (GATE, GATE)),
        r"sm90_bf16xs4by128bf16_nn_256x64x64_.*_swap_e\w+$",
        "weights decoded of several products beside more than 256 rows",
        ["512x4096xbf16", *["4096x14336xi4"] * 2, *["32x14336xbf16"] * 2],
    ),
    "gate of a token": (
        functools.partial(cutjax.gemm, epilogue=lambda a, b: jax.nn.silu(a) * b),
        (aval(1, 4096), (GATE, GATE)),
        r"sm90_bf16xs4by128bf16_nn_128x8x128_.*_warps_swap_e\w+_odd$",
        "",
        ["1x4096xbf16", *["4096x14336xi4"] * 2, *["32x14336xbf16"] * 2],
    ),
    "batch": (
        cutjax.gemm,
        (aval(8, 16, 4096), INT4),
        r"sm90_bf16xs4by128bf16_nn_256x16x128_.*_sliced_swap$",
        "",
        ["8x16x4096xbf16", "8x4096x14336xi4", "8x32x14336xbf16"],
    ),
    "batch of more rows": (
        cutjax.gemm,
        (aval(8, 256, 4096), INT4),
        r"sm90_bf16xs4by128bf16_nn_256x128x64_.*_swap$",
        "weights decoded in a batch beside more than 64 rows",
        ["8x256x4096xbf16", "8x4096x14336xi4", "8x32x14336xbf16"],
    ),
    "zero points": (
        cutjax.gemm,
        (aval(16, 8192), UINT4),
        r"sm90_bf16xu4by128f16z_nn_.*_swap",
        "",
        ["16x8192xbf16", "8192x8192xui4", "64x8192xf16", "64x8192xui4"],
    ),
    "mx": (
        cutjax.grouped_gemm,
        (aval(64, 4096), weights(jnp.float4_e2m1fn, E8M0, 32, 8, 4096, 4096), SIZES),
        r"sm90_bf16xf4_e2m1fnby32f8_e8m0fnu_nn_256x.*_swap_groups_m$",
        "",
        ["64x4096xbf16", "8x4096x4096xf4E2M1FN", "8xi32", "8x128x4096xf8E8M0FNU"],
    ),
    "groups of rows": (  # a tile of 64 rows took 1.4 times as long there (fp8-scaled-h200.json)
        functools.partial(cutjax.grouped_gemm, layout="nt", out_dtype=BF16),
        (
            Quantized(aval(8192, 7168, dtype=F8), aval(8192, 56, dtype=F32)),
            Quantized(aval(8, 4096, 7168, dtype=F8), aval(8, 32, 56, dtype=F32)),
            SIZES,
        ),
        r"sm90_f8_e4m3fnbf16_nt_128x256x64_s4_c1x1_coop_groups_m_scaled_1x128$",
        "",
        ["8192x7168xf8E4M3FN", "8x4096x7168xf8E4M3FN", "8xi32", "8192x56xf32", "8x32x56xf32"],
    ),
    "groups of k": (
        functools.partial(cutjax.grouped_outer, out_dtype=F32),
        (*DEPTH, SIZES),
        r"sm90_f8_e4m3fnf32_tn_.*_groups_k_scaled_1x1$",
        "f8_e4m3fn in groups of k",
        ["4096x8192xf8E4M3FN", "7168x8192xf8E4M3FN", "8xi32", "64x4096xf32", "64x7168xf32"],
    ),
}
# Gates whose products "auto" computes one by one, each by the kernel of such a name, and the rest in a pass.
ONE_BY_ONE = {
    "gate": r"sm90_bf16xs4by128bf16f32_nn_.*_swap_groups_m$",
    "gate of more rows": r"sm90_bf16xs4by128bf16f32_nn_256x128x64_.*_swap$",
}


@pytest.mark.parametrize("name", CASES)
def test_what_has_not_run_is_asked_for(name):
    """The launch reads values, scales and zero points as they are given; float8 along n is transposed before."""
    fn, args, kernel, why, taken = CASES[name]
    (auto,) = cutjax.explain(fn, device="NVIDIA H200")(*args).rows
    assert bool(re.match(kernel, auto.runs)) == (not why), auto.runs
    if name in ONE_BY_ONE:
        assert auto.count == 2
        assert re.match(ONE_BY_ONE[name], auto.runs), auto.runs
    elif why:
        assert f'{why}: that was not faster on a device yet, and is for backend="cuda"' in auto.why
    asked = functools.partial(fn, backend="cuda")
    (row,) = cutjax.explain(asked, device="NVIDIA H200")(*args).rows
    assert re.match(kernel, row.runs), row.runs
    assert (f"{why}: that was not faster on a device yet" in row.why) == bool(why)
    with settings.override(target_arch="sm_90a"):
        text = jax.jit(asked).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "@cutjax_launch" in line]
    assert re.findall(r"tensor<([\w]+)>", call.split(" : (")[1].split(") ->")[0]) == taken


def test_gradients_past_weights_in_groups():
    """That in x reads the same array along the other axis, which no kernel decodes: it is dequantized for it."""

    def loss(x, w, sizes):
        return (cutjax.grouped_gemm(x, w, sizes, backend="cuda").astype(F32) ** 2).sum()

    q = weights(jnp.int4, BF16, 128, 8, 4096, 1024)
    forward, back = cutjax.explain(jax.grad(loss), device="NVIDIA H200")(aval(128, 4096), q, SIZES).rows
    assert "swap_groups_m" in forward.runs
    assert "groups_m" in back.runs
    assert "b dequantized to bf16" in back.why


@pytest.mark.parametrize(("rows", "alone"), [(16, True), (128, False)])
def test_the_sum_of_parts_of_few_rows_is_a_pass_of_its_own(rows, alone):
    """XLA may not compute it again for each element of what reads it; of more rows it may fuse it."""
    config = cutjax.Config(bm=256, bn=16, bk=128, stages=8, schedule="sliced", swap=True, splits=2)

    def add(x, w, y):
        return cutjax.gemm(x, w, backend="cuda", config=config) + y

    with settings.override(target_arch="sm_90a"):
        args = aval(rows, 4096), weights(jnp.int4, BF16, 128, 4096, 1024), aval(rows, 1024)
        text = jax.jit(add).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert ("optimization_barrier" in text) == alone
