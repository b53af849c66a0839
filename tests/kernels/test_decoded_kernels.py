"""Weights that are decoded in registers in front of wgmma: the main loop on the host, its kernels, what is refused."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re

import gxx
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest
from cubin import check_lean

import cutjax
from cutjax import Config
from cutjax.epilogue.expression import Epilogue, Node, Output, identity
from cutjax.kernels.operand import Scale
from cutjax.kernels.sm90 import decode
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
needs_host = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")
BM, BK, K_BLOCKS = 128, 128, 2

# wgmma is computed by what each lane shows: rows of A are those of the PTX ISA's register fragment, of 16 k each.
_WGMMA = """
struct Work {};
template <int SPAN, u32 LEADING, u32 STRIDE>
struct WgmmaDescriptor {
  u32 base;
  u32 at(u32 bytes) const { return base + bytes; }
};
static void wgmma_fence() {}
static void wgmma_commit_group() {}
template <int PENDING>
void wgmma_wait_group() {}
template <typename T>
void wgmma_done(T&) {}
static void mbarrier_arrive_cluster(u32, u32) {}
static void bar_sync(int, int) {}
static void bar_arrive(int, int) {}
static u32 word_of(float x) { return __float_as_uint(x); }
template <typename T>
T of_word(u32 x) {
  return __uint_as_float(x);
}
static float wide(u32 half) { return WIDE == Dtype::bf16 ? __uint_as_float(half << 16) : f16_to_f32(half); }
template <int COUNT>
void wgmma(float (&d)[COUNT], const u32 (&a)[4], u32 b, int accumulate) {
  if (!accumulate) std::fill(d, d + COUNT, 0);
  for (int q = 0; q < 4; ++q)
    for (int i = 0; i < 4; ++i) {
      u32 pair = __shfl_sync(~0u, a[i], lane() / 4 * 4 + q);
      for (int e = 0; e < 2; ++e)
        for (int column = 0; column < 2 * COUNT; ++column) {
          int k = i / 2 * 8 + 2 * q + e;
          if (column % 8 / 2 != lane() % 4) continue;
          d[column / 8 * 4 + i % 2 * 2 + column % 2] +=
              wide(pair >> 16 * e & 0xffff) * wide(load_shared<u16>(swizzle<128>(b + column * 128 + k * 2)));
        }
    }
}
"""
_RUN = """
static float* found;
static int done;
static void thread() {
  Accumulators sums;
  for (auto& block : sums) std::fill(block, block + PRODUCTS * BN / 2, NAN);
  Pipeline pipe{STAGES * STAGE_BYTES, STAGES * STAGE_BYTES + STAGES * 8, 0, 0};
  int warpgroup = threadIdx.x / 128, row = warpgroup * ROWS_PER_CONSUMER, t = threadIdx.x % 128;
  Changes changes{Told{}};
  multiply(sums, changes, pipe, SharedTiles{0}, row, Work{}, 0, STAGES, t, 0, [] {}, [] {});
  constexpr int COLUMNS = PRODUCTS * BN;
  for (int i = 0; i < M_BLOCKS * COLUMNS / 2; ++i) {
    int j = i % (COLUMNS / 2), at = row + i / (COLUMNS / 2) * 64 + t / 32 * 16 + t % 32 / 4 + j / 2 % 2 * 8;
    found[at * COLUMNS + j / 4 * 8 + t % 4 * 2 + j % 2] = sums[i / (COLUMNS / 2)][j];
  }
  ++done;
  while (true) wait_for_others();
}
extern "C" void run(const void* tiles, float* to) {
  constexpr int COUNT = CONSUMERS_PER_TILE * 128;
  std::vector<char> stacks(COUNT << 18);
  std::memcpy(shared_memory, tiles, STAGES * STAGE_BYTES);
  found = to, done = 0, block_threads = COUNT, contexts.assign(COUNT, {}), mbarriers.clear();
  for (int i = 0; i < STAGES; ++i) {
    mbarrier_init(STAGES * STAGE_BYTES + i * 8, 1);
    mbarrier_init(STAGES * STAGE_BYTES + (STAGES + i) * 8, CONSUMERS_PER_TILE);
    mbarrier_arrive(STAGES * STAGE_BYTES + i * 8);
  }
  for (int i = 0; i < COUNT; ++i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = &stacks[i << 18], contexts[i].uc_stack.ss_size = 1 << 18;
    makecontext(&contexts[i], thread, 0);
  }
  while (done < COUNT)
    for (threadIdx.x = 0; threadIdx.x < COUNT; ++threadIdx.x) swapcontext(&outside, &contexts[threadIdx.x]);
}
"""
_KEPT = (
    "common/integers",
    "common/math",
    "common/elements",
    "narrow",
    "sm90/halves",
    "sm90/decode",
    "sm90/factor",
    "sm90/zero",
)
_KEPT += ("sm90/change_none", "sm90/tiles", "sm90/sliced", "sm90/row_order", "sm90/weights")
_KEPT += ("sm90/multiply_registers",)
F32, E4M3 = np.dtype(np.float32), np.dtype(jnp.float8_e4m3fn)
_ACCS = tuple(Node("acc", (), "float32", (i,)) for i in range(2))
PAIR = Epilogue(2, (), _ACCS, (Output(0, "float32"), Output(1, "float32")))  # two products as they are


def problem_of(narrow, layout, wide, scale, sizes, zeros=False, products=1, groups=0):
    """A product of weights with scales of a dtype and a depth, with zero points in the weights' dtype or without."""
    more = {"groups": groups, "ragged": "m"} if groups else {}
    epilogue = PAIR if products == 2 else identity(F32, F32)
    problem = cutjax.Problem.of(*sizes, layout, wide, narrow, F32, epilogue=epilogue, **more)
    if scale:
        of = Scale(np.dtype(jnp.dtype(scale[0])), 1, scale[1], problem.bs[0].dtype if zeros else None)
        problem = dataclasses.replace(problem, bs=(dataclasses.replace(problem.bs[0], scale=of),) * products)
    return problem


def kernel(narrow="int8", layout="nn", wide="bfloat16", scale=None, sizes=(16, 512, 1024), zeros=False, **fields):
    problem = problem_of(narrow, layout, wide, scale, sizes, zeros, fields.pop("products", 1), fields.pop("groups", 0))
    return sm90.resolved(problem, Config(**{"bm": BM, "bn": 16, "bk": BK, "stages": K_BLOCKS, "swap": True} | fields))


def swizzled(rows, span):
    """Rows of so many bytes as TMA lays them."""
    flat = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    at = np.arange(flat.size)
    out = np.empty_like(flat)
    out[at ^ ((at >> 7) & (span // 16 - 1)) << 4] = flat
    return out


def packed(x):
    """Elements of 4 bits as they lie in memory, two a byte, the first in the low half."""
    nibbles = x.view(np.uint8) & 15
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def tiles(kernel, ws, x, factors):
    """The stages of each ``w[n, k]`` and its factors and zero points ``[n, groups]``, then those of ``x[m, k]``."""
    p, c = kernel.multiplied, kernel.config
    depth, chunk, found = c.depth(p), c.decoded_chunk(p), []
    places = decode.factor_places(c, p)
    for k in range(0, ws[0].shape[1], depth):
        for w in ws:
            part = w[:, k : k + depth]
            pieces = np.split(part.T, c.bm // chunk, 1) if p.a.contiguous == "mn" else [part]
            pieces = [packed(np.ascontiguousarray(piece)) if p.a.bits == 4 else piece for piece in pieces]
            found.append(np.concatenate([swizzled(piece, p.a.bytes(chunk)) for piece in pieces]))
        behind = np.zeros(decode.factor_bytes(c, p), np.uint8)
        for i, arrays in enumerate(factors if p.a.scale else ()):
            for place, array in zip(places, arrays, strict=False):
                of_stage = np.ascontiguousarray(array[:, k // p.a.scale.k :][:, : decode.factor_rows(c, p)].T)
                of_stage = packed(of_stage) if array.dtype.name.endswith("int4") else of_stage.view(np.uint8)
                at = i * places[-1] + place
                behind[at : at + of_stage.size] = of_stage.reshape(-1)
        found.append(behind)
    for k in range(0, ws[0].shape[1], 64):
        found.append(swizzled(x[:, k : k + 64], 128))
    return np.concatenate(found)


def multiplied(kernel, ws, x, folder, factors=None):
    """The sums ``float32[n, products * m]`` that the main loop of a kernel makes of one tile."""
    parts = re.split(r'^(?=#line 1 ")', kernel.source, flags=re.M)
    kept = [part for part in parts if part.startswith(tuple(f'#line 1 "{name}' for name in _KEPT))]
    constants = "\n".join(re.findall(r"^constexpr (?:int|bool|Dtype) [A-Z_]+ = .*;.*$", parts[0] + parts[1], re.M))
    device = gxx.NATIVE / "device_shim.h", kernel_host.DEVICE / kernel_host.MATH, gxx.NATIVE / "kernel_shim.h"
    shims = "\n".join(path.read_text() for path in device)
    ahead = next(i for i, part in enumerate(kept) if part.startswith('#line 1 "sm90/tiles'))
    text = "\n".join([
        "#define __CUDA_ARCH__ 900", shims, constants, "using Acc = float; constexpr int COPIERS = 0;", *kept[:ahead],
        _WGMMA, *kept[ahead:], _RUN,
    ])  # fmt: skip
    text = re.sub(r"^#line.*$", "", text, flags=re.M)
    library = gxx.build(folder, text, "-w")
    found = np.zeros((kernel.config.bm, len(ws) * kernel.config.bn), np.float32)
    given = kernel_host.aligned(tiles(kernel, ws, x, factors))
    library.run(ctypes.c_void_p(given.ctypes.data), found.ctypes.data_as(ctypes.c_void_p))
    return found


def every_value(narrow):
    if narrow.endswith("int4"):
        return np.arange(-8 if narrow == "int4" else 0, 8 if narrow == "int4" else 16).astype(jnp.dtype(narrow))
    found = np.arange(16 if "float4" in narrow else 256, dtype=np.uint8).view(jnp.dtype(narrow))
    return found[np.isfinite(found.astype(np.float32))]


@needs_host
@pytest.mark.parametrize(
    ("narrow", "wide", "fields", "layout"),
    [
        ("int8", "bfloat16", {}, "nn"),
        ("int8", "bfloat16", {}, "nt"),
        ("uint8", "bfloat16", {"bm": 64}, "nn"),
        ("float8_e4m3fn", "bfloat16", {"bm": 256, "bk": 64}, "nt"),
        ("float8_e4m3fn", "bfloat16", {"bm": 256, "bk": 64}, "nn"),
        ("float8_e5m2", "bfloat16", {"bk": 64, "bn": 32}, "nt"),
        ("int8", "float16", {"bm": 256}, "nn"),
        ("uint8", "float16", {"bn": 8}, "nt"),
        ("float8_e4m3fn", "float16", {"bm": 64, "bk": 64}, "nn"),
    ],
    ids=str,
)
def test_a_tile_is_exact(narrow, wide, fields, layout, tmp_path):
    rng, of = np.random.default_rng(1), kernel(narrow, layout, wide, **fields)
    c, k = of.config, K_BLOCKS * of.config.depth(of.multiplied)
    w = rng.permutation(np.resize(every_value(narrow), c.bm * k)).reshape(c.bm, k)
    x = np.zeros((c.bn, k), jnp.dtype(wide))  # each row picks some k: nothing is rounded
    several = [1, 2, -1] if narrow != "float8_e5m2" else [2]
    x[np.arange(c.bn)[:, None], rng.permutation(k)[: c.bn * len(several)].reshape(c.bn, -1)] = several
    expected = (w.astype(np.float64) @ x.astype(np.float64).T).astype(np.float32)
    np.testing.assert_array_equal(multiplied(of, [w], x, tmp_path), expected)


@needs_host
@pytest.mark.parametrize(
    ("narrow", "wide", "scale", "fields"),
    [
        ("int4", "bfloat16", None, {"bm": 256}),
        ("uint4", "float16", None, {"schedule": "pingpong", "bk": 64, "bn": 24}),
        ("float4_e2m1fn", "bfloat16", ("bfloat16", 32), {"bm": 256}),
        ("int4", "bfloat16", ("bfloat16", 128), {"bm": 256, "bk": 64}),
        ("int4", "bfloat16", ("bfloat16", 128), {"bm": 256, "bk": 64, "bn": 72}),
        ("uint4", "bfloat16", ("float32", 64), {"schedule": "pingpong"}),
        ("uint4", "bfloat16", ("float32", 64), {"schedule": "pingpong", "bn": 72}),
        ("int4", "float16", ("float32", 32), {"schedule": "pingpong", "bk": 64, "bn": 72}),
        ("int4", "float16", ("float32", 256), {"schedule": "pingpong", "bk": 64}),
        ("int8", "bfloat16", ("bfloat16", 32), {}),
        ("int8", "float16", ("float8_e8m0fnu", 32), {"bn": 144}),
        ("float8_e4m3fn", "bfloat16", ("float32", 64), {"bm": 64}),
        ("uint4", "bfloat16", ("bfloat16", 32), {"bm": 256, "zeros": True}),
        ("int4", "float16", ("float32", 128), {"schedule": "pingpong", "zeros": True}),
        ("int8", "bfloat16", ("bfloat16", 32), {"bm": 64, "zeros": True}),
        ("int8", "float16", ("float16", 128), {"zeros": True}),
        ("uint8", "float16", ("float8_e8m0fnu", 32), {"zeros": True}),
        ("uint4", "bfloat16", ("float16", 64), {"bm": 256, "zeros": True}),
        ("uint4", "bfloat16", ("float16", 64), {"bm": 256, "zeros": True, "bn": 72}),
        ("int8", "float16", ("bfloat16", 32), {"bm": 64}),
        ("float4_e2m1fn", "bfloat16", ("float8_e8m0fnu", 32), {"bm": 256}),
        ("uint4", "bfloat16", ("bfloat16", 128), {"bm": 256, "zeros": True, "products": 2}),
        ("float4_e2m1fn", "bfloat16", ("float8_e8m0fnu", 32), {"bm": 256, "products": 2, "bk": 64}),
        ("uint4", "bfloat16", ("bfloat16", 64), {"bm": 256, "products": 2, "bn": 40, "zeros": True}),
        ("int8", "bfloat16", None, {"bm": 64, "products": 2}),
    ],
    ids=str,
)
def test_a_tile_with_factors(narrow, wide, scale, fields, tmp_path):
    """Elements times factors are rounded once; where a thread has few sums, these are multiplied, in float32."""
    rng, of = np.random.default_rng(2), kernel(narrow, "nn", wide, scale, **fields)
    c, p = of.config, of.multiplied
    k = K_BLOCKS * c.depth(p)
    x = np.zeros((c.bn, k), jnp.dtype(wide))
    x[np.arange(c.bn), rng.permutation(k)[: c.bn]] = 2
    ws, factors, expected = [], [], []
    for _ in range(p.products):
        w = rng.permutation(np.resize(every_value(narrow), c.bm * k)).reshape(c.bm, k)
        wide_w, shape = w.astype(np.float32), (c.bm, -(-k // scale[1]) if scale else 1)
        along = functools.partial(np.repeat, repeats=scale[1] if scale else k, axis=1)
        arrays = []
        if scale:
            powers = "e8m0" in scale[0]
            by = 2.0 ** rng.integers(-6, 7, shape) if powers else rng.standard_normal(shape)
            if powers:
                by[:2, 0] = np.nan, 2.0**-127  # the last of its bits, and the least number
            arrays.append(by.astype(jnp.dtype(scale[0])))
        if fields.get("zeros"):
            arrays.append(np.resize(every_value(narrow), shape))
            wide_w = wide_w - along(arrays[1].astype(np.float32))[:, :k]
        if scale:
            wide_w = wide_w * along(arrays[0].astype(np.float32))[:, :k]
            wide_w = wide_w if c.by_sums(p) else wide_w.astype(jnp.dtype(wide))
        ws.append(w)
        factors.append(arrays)
        expected.append((wide_w.astype(np.float64) @ x.astype(np.float64).T).astype(np.float32))
    expected = np.concatenate(expected, 1)
    found = multiplied(of, ws, x, tmp_path, factors)
    if p.a.bits == 4:  # both blocks of a warp are rows beside each other
        found = found.reshape(-1, 2, 4, 16, found.shape[1]).swapaxes(1, 2).reshape(found.shape)
    np.testing.assert_array_equal(found, expected)


@needs_nvrtc
@pytest.mark.parametrize(
    ("narrow", "layout", "scale", "fields"),
    [
        ("int8", "nt", None, {"bn": 256, "bk": 64, "stages": 4}),
        ("float8_e4m3fn", "nn", None, {"bm": 64, "bn": 64, "stages": 4}),
        ("int4", "nn", ("bfloat16", 128), {"bm": 256, "bn": 128, "bk": 64, "stages": 5, "stream_k": True}),
        ("int4", "nn", ("float32", 64), {"bm": 256, "bn": 64, "bk": 128, "stages": 5, "cluster_k": 2}),
        ("uint4", "nn", ("bfloat16", 128), {"bm": 256, "bn": 32, "stages": 5, "zeros": True, "groups": 8}),
        ("float4_e2m1fn", "nn", ("float8_e8m0fnu", 32), {"bm": 256, "bn": 16, "products": 2, "groups": 8, "stages": 4}),
        ("int8", "nt", None, {"bn": 64, "stages": 3, "groups": 8, "cluster_m": 2, "products": 2}),
        ("uint4", "nn", ("float32", 128), {"bm": 256, "schedule": "sliced", "stages": 8, "zeros": True}),
        ("int8", "nt", None, {"schedule": "sliced", "stages": 9, "cluster_k": 2}),
        ("int4", "nn", ("bfloat16", 128), {"bn": 16, "schedule": "sliced", "stages": 9}),
        ("uint4", "nn", ("float32", 128), {"bn": 16, "products": 2, "schedule": "sliced", "stages": 6, "zeros": True}),
        ("uint4", "nn", ("float32", 128), {"bn": 8, "schedule": "sliced", "stages": 8, "groups": 8, "zeros": True}),
        ("uint4", "nn", ("float32", 128), {"bn": 8, "schedule": "warps", "stages": 8, "groups": 8, "zeros": True}),
        ("uint4", "nn", ("float32", 128), {"bn": 8, "schedule": "warps", "products": 2, "stages": 8, "zeros": True}),
        ("float4_e2m1fn", "nn", ("bfloat16", 32), {"bn": 8, "schedule": "warps", "stages": 8}),
        ("int8", "nn", None, {"bm": 64, "bn": 8, "schedule": "warps", "stages": 8, "cluster_k": 2}),
        ("int8", "nt", None, {"schedule": "sliced", "stages": 6, "groups": 8}),
        ("int4", "nn", ("float32", 128), {"bn": 32, "schedule": "sliced", "stages": 6, "groups": 8}),
        ("uint4", "nn", ("float32", 128), {"bn": 32, "schedule": "sliced", "stages": 6, "groups": 8, "zeros": True}),
    ],
    ids=str,
)
def test_wgmmas_do_not_wait_for_each_other(narrow, layout, scale, fields):
    of = kernel(narrow, layout, "bfloat16", scale, (512, 4096, 4096), **fields)
    check_lean(of.problem, [of.config], 56_000)


def scaled_bytes(narrow="int4", products=1, groups=0, k_block=128, layout="nn"):
    """Weights of 4 bits beside float8, with scales of both."""
    problem = problem_of(narrow, layout, "float8_e4m3fn", None, (64, 512, 4096), products=products, groups=groups)
    of = functools.partial(dataclasses.replace, scale=Scale(F32, 1, k_block))
    return dataclasses.replace(problem, a=of(problem.a), bs=tuple(map(of, problem.bs)))


@needs_nvrtc
@pytest.mark.parametrize(
    ("groups", "fields"),
    [
        (0, {"bn": 64, "stages": 4}),
        (8, {"bn": 32, "stages": 6}),
        (0, {"bm": 128, "bn": 32, "schedule": "pingpong"}),
        (8, {"bm": 128, "bn": 32, "stages": 9, "schedule": "sliced"}),
    ],
    ids=str,
)
def test_wgmmas_of_bytes_do_not_wait_for_each_other(groups, fields):
    config = Config(**{"bm": 256, "bk": 64, "stages": 4, "swap": True} | fields)
    check_lean(scaled_bytes(groups=groups), [config], 56_000)


def test_what_is_refused():
    def why(narrow, layout="nn", scale=None, sizes=(16, 512, 1024), zero=None, **fields):
        problem = problem_of(narrow, layout, "bfloat16", None, sizes)
        if scale:
            scale = Scale(np.dtype(jnp.dtype(scale[0])), scale[1], scale[2], zero)
            problem = dataclasses.replace(problem, bs=(dataclasses.replace(problem.bs[0], scale=scale),))
        config = Config(**{"bm": 256, "bn": 16, "bk": BK, "stages": 2, "swap": True} | fields)
        return "; ".join(sm90.resolve(problem, config) or ())

    assert "operands are swapped" in why("int8", swap=False)
    assert "rows along n" in why("int4", "nt")
    assert "rows along n" in why("int8", "nt", ("float32", 1, 128))
    assert "whole units of 16 bytes" in why("int4", sizes=(16, 528, 1024))
    assert "a warpgroup holds 128 rows" in why("int4", bm=128)
    assert "each has as many of its own" in why("int4", schedule="sliced", stages=5)
    assert 'schedule="warps" of 16 columns' in why("int4", bm=128, bn=16, schedule="warps", stages=4)
    assert "4 stages of 4 groups" in why("int8", bm=64, schedule="sliced", stages=4)
    assert "decoding weights" in why("bfloat16", schedule="sliced", stages=4)
    in_place = problem_of("float8_e5m2", "nn", "float16", None, (16, 64, 64))  # ptxas serializes its wgmmas
    found = sm90.resolve(in_place, Config(64, 8, 64, 8, schedule="sliced", swap=True))
    assert isinstance(found, tuple)
    assert "wgmmas wait for registers" in found[0]
    config = Config(256, 8, 64, 8, schedule="sliced", swap=True)
    assert "too few registers" in "; ".join(
        sm90.resolve(problem_of("int8", "nn", "bfloat16", None, (16, 64, 64), groups=2), config)
    )
    assert "scales of 1 x 96" in why("int4", scale=("float32", 1, 96), sizes=(16, 512, 960))
    assert "scales of 2 x 128" in why("int4", scale=("float32", 2, 128))
    assert "zero points" in why("uint4", scale=("float32", 1, 128), zero=np.dtype(np.float32))
    assert "zero points in s8 of u4" in why("uint4", scale=("float32", 1, 128), zero=np.dtype(np.int8))
    assert "zero points in f8_e4m3fn" in why("float8_e4m3fn", scale=("float32", 1, 128), zero=E4M3, bm=128)
    config = Config(256, 16, 64, 4, swap=True)
    assert "2 products of weights in 4 bits beside float8" in "; ".join(sm90.resolve(scaled_bytes(products=2), config))
    assert "b with scales of 64 elements" in "; ".join(sm90.resolve(scaled_bytes(k_block=64), config))
    assert "scales in f8_e4m3fn" in why("int4", scale=("float8_e4m3fn", 1, 128))
