"""Promotion by the scales of blocks: what a warp copies and a warpgroup adds, on the host; its kernels, compiled."""

import ctypes
import dataclasses
import re

import gxx
import jax.numpy as jnp
import numpy as np
import pytest
from cubin import check_lean

import cutjax
from cutjax.kernels.operand import Scale
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler
from cutjax.runtime.launch import Int32

compiled = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


def problem(m, n, k, layout="nt", of_a=1, of_b=128, a=E4M3, b=E4M3, **more):
    """A product of float8 with scales of so many rows of a, and columns of b, and of 128 elements of k; 0 is none."""
    plain = cutjax.Problem.of(m, n, k, layout, a, b, jnp.bfloat16, **more)

    def scaled(operand, mn):
        return dataclasses.replace(operand, scale=Scale(np.dtype(np.float32), mn, 128)) if mn else operand

    return dataclasses.replace(plain, a=scaled(plain.a, of_a), bs=tuple(scaled(b, of_b) for b in plain.bs))


_RUN = """
template <int... PART>
static void add_all(Promotion& promotion, Accumulators& accumulators, const float* sums,
                    std::integer_sequence<int, PART...>) {
  ([&] {
    constexpr int BLOCK = PART / COLUMN_PARTS, COLUMNS = PART % COLUMN_PARTS;
    auto factors = promotion.template factors<BLOCK, COLUMNS>(0);
    PartSums part;
    for (int i = 0; i < PART_COLUMNS / 2; ++i) {
      int row = BLOCK * 64 + promotion.thread / 32 * 16 + promotion.thread % 32 / 4 + i / 2 % 2 * 8;
      int column = COLUMNS * PART_COLUMNS + i / 4 * 8 + promotion.thread % 4 * 2 + i % 2;
      part[i] = sums[row * (PRODUCTS * BN) + column];
    }
    auto columns = promotion.template columns<COLUMNS>(0);
    promotion.template add<COLUMNS>(accumulators[BLOCK], part, factors, columns);
  }(), ...);
}

// sums [k_blocks][rows of a warpgroup][PRODUCTS * BN] of a tile; result alike, without k_blocks.
extern "C" void run(const char* const* buffers, const int* numbers, const float* sums, float* result) {
  auto [m, n, k_end, tile_m, tile_n, k, k_blocks, row, matrix_a, matrix_b] =
      *reinterpret_cast<const std::array<int, 10>*>(numbers);
  Work work{tile_m, tile_n, BM, k, k_end, k_blocks, 0, 0};
  std::vector<Promotion> threads(128, Promotion{PROMOTION_ARGUMENTS});
  std::vector<Promotion> copiers(Promotion::COPIERS, Promotion{PROMOTION_ARGUMENTS});
  for (threadIdx.x = 0; threadIdx.x < Promotion::COPIERS; ++threadIdx.x)
    copiers[threadIdx.x].begin_copies(work, m, n, matrix_a, matrix_b);
  static Accumulators accumulators[128];
  memset(accumulators, 0, sizeof accumulators);
  for (int t = 0; t < 128; ++t) threads[t].begin(work, row, t);
  for (int block = 0; block < k_blocks; ++block) {
    shared_memory.assign(Promotion::BYTES, 0xff);  // NaN
    for (threadIdx.x = 0; threadIdx.x < Promotion::COPIERS; ++threadIdx.x) {
      copiers[threadIdx.x].load(block);
      copiers[threadIdx.x].copy(0, block);
    }
    for (int t = 0; t < 128; ++t)
      add_all(threads[t], accumulators[t], sums + block * ROWS_PER_CONSUMER * PRODUCTS * BN,
              std::make_integer_sequence<int, M_BLOCKS * COLUMN_PARTS>());
  }
  for (int t = 0; t < 128; ++t)
    for (int block = 0; block < M_BLOCKS; ++block)
      for (int i = 0; i < PRODUCTS * BN / 2; ++i) {
        int row = block * 64 + t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
        result[row * (PRODUCTS * BN) + i / 4 * 8 + t % 4 * 2 + i % 2] = accumulators[t][block][i];
      }
}
"""


def promotion(kernel, arrays, folder):
    """A function of a tile and its sums ``[k_blocks, rows, columns]``: the accumulators of one of its warpgroups."""
    parts = re.split(r'^(?=#line 1 ")', kernel.source, flags=re.M)
    kept = [
        part for part in parts if re.match('#line 1 "(constants of|common/scheduler|sm90/tiles|sm90/promote)', part)
    ]
    body = re.sub(r"^#line.*$", "", "".join(kept), flags=re.M)
    constants, code = re.split(r"(?=^// Which tile next)", body, maxsplit=1, flags=re.M)
    defined = re.findall(r"^#define PROMOTION_ARGUMENTS .*$", kernel.source, flags=re.M)
    values = []
    for argument in kernel.arguments:
        if argument.to == "promotion":
            of_int = isinstance(argument.value, Int32)
            value = str(argument.value.value) if of_int else f"buffers[{argument.value.buffer}]"
            defined.append(f"#define {argument.name} {value}")
    types = (gxx.NATIVE / "promotion_shim.h").read_text()
    text = "\n".join([constants, types, "using Acc = float;", code, *values, *defined, _RUN])
    library = gxx.build(folder, text, "-Wno-narrowing")
    pointers = (ctypes.c_void_p * len(arrays))(*(None if x is None else x.ctypes.data for x in arrays))

    def promote(tile, sums):
        result, numbers = np.zeros(sums.shape[1:], np.float32), np.array(tile, np.int32)
        library.run(pointers, *(x.ctypes.data_as(ctypes.c_void_p) for x in (numbers, sums, result)))
        return result

    return promote


CASES = {
    # layout, rows of a and columns of b that share a scale, config; and blocks of k, of which 4 are loaded at once
    "blocks": ("nt", 1, 128, cutjax.Config(128, 128)),
    "blocks across tiles": ("nt", 1, 128, cutjax.Config(128, 192)),
    "narrow runs": ("nn", 1, 128, cutjax.Config(128, 176)),
    "one buffer": ("nt", 1, 128, cutjax.Config(128, 256, stages=3)),
    "blocks of rows": ("tn", 1, 128, cutjax.Config(256, 96)),
    "columns": ("nt", 1, 1, cutjax.Config(128, 160)),
    "columns, rows of k": ("tn", 1, 1, cutjax.Config(64, 96, schedule="pingpong")),
    "swapped": ("nt", 1, 128, cutjax.Config(128, 24, swap=True)),
    "swapped, rows of k": ("tn", 1, 128, cutjax.Config(128, 48, swap=True)),
    "columns, of fours": ("nt", 1, 1, cutjax.Config(256, 112), 12),
    "of a alone": ("nt", 1, 0, cutjax.Config(128, 128)),
    "of b alone": ("nn", 0, 64, cutjax.Config(128, 96)),
    "the whole": ("nt", 384, 512, cutjax.Config(128, 96)),
}


@pytest.mark.skipif(not gxx.installed(), reason="needs g++")
@pytest.mark.parametrize("case", CASES)
def test_sums_are_multiplied_by_their_scales(case, tmp_path):
    layout, of_a, of_b, config, blocks = (*CASES[case], 11)[:5]
    m, n, batch = 384, 512, 3
    asked = problem(m, n, blocks * 128, layout, of_a, of_b, batch=(batch,), a_batch=(batch,), b_batch=(batch,))
    kernel = sm90.resolved(asked, config)
    rng, arrays, scales = np.random.default_rng(0), [None, None], []
    for operand, size in ((asked.a, m), (asked.bs[0], n)):
        found = 2.0 ** rng.integers(-3, 4, (batch, blocks, size // (operand.scale.mn if operand.scale else size)))
        if operand.scale:
            stored = found if operand.contiguous == "mn" else found.swapaxes(1, 2)
            arrays.append(np.ascontiguousarray(stored, np.float32))
        scales.append(np.repeat(found if operand.scale else np.ones_like(found), size // found.shape[2], 2))
    if config.swap:
        (m, n), scales = (n, m), scales[::-1]
    rows, promote = config.m_blocks * 64, promotion(kernel, arrays, tmp_path)
    last = m // config.bm * config.bm, n // config.bn * config.bn, config.bm - rows
    for first_m, first_n, row, first, count, matrix in (
        (0, 0, 0, 0, blocks, 0),
        (config.bm, config.bn, 0, 0, blocks, 2),
        (*last, 3, blocks - 5, 1),
    ):
        sums = rng.integers(-8, 9, (count, rows, config.bn)).astype(np.float32)
        tile = (m, n, blocks * 128, first_m, first_n, first * 128, count, row, matrix, matrix)
        got = promote(tile, sums)
        of_k = slice(first, first + count)
        of_rows, of_columns = (x[matrix, of_k] for x in scales)
        at_m, at_n = np.arange(rows) + first_m + row, np.arange(config.bn) + first_n
        there = np.ix_(at_m < m, at_n < n)
        of_rows = of_rows[:, np.minimum(at_m, m - 1)][:, :, None]
        of_columns = of_columns[:, np.minimum(at_n, n - 1)][:, None]
        np.testing.assert_array_equal(got[there], (sums * of_rows * of_columns).sum(0)[there])


CONFIGS = [
    cutjax.Config(128, 192, stages=4, cluster_m=2),
    cutjax.Config(128, 176, stages=4),
    cutjax.Config(128, 256),
    cutjax.Config(256, 96, stages=4, cluster_n=2),
    cutjax.Config(256, 128, stages=3),
    cutjax.Config(64, 192, stages=4, schedule="pingpong"),
    cutjax.Config(128, 96, stages=4, schedule="pingpong"),
    cutjax.Config(128, 48, stages=4, swap=True),
    cutjax.Config(128, 128, stages=4, cluster_k=2),
    cutjax.Config(128, 160, stages=4, stream_k=True),
]
SCALED = [(0, 0), (1, 1), (1, 128), (0, 1)]  # rows of a, and columns of b


@pytest.mark.versions  # of NVRTC
@compiled
@pytest.mark.parametrize(("of_a", "of_b"), SCALED)
def test_kernels_compile_lean(of_a, of_b):
    """Nor does the compiler wait for each wgmma. Code is of four blocks of k beside each other, and of one.

    Each tile with one of the ways to scale, and one of many accumulators with all.
    """
    asked = problem(4096, 4096, 4096, "nt", of_a, of_b)
    configs = [config for config in CONFIGS if not isinstance(sm90.resolve(asked, config), tuple)]
    assert len(configs) >= 7
    check_lean(asked, {CONFIGS[1]: None} | dict.fromkeys(configs[SCALED.index((of_a, of_b)) :: 3]), 48 << 10)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k": 64}, "a with scales of 64 elements of k: sums of 128 are promoted"),
        ({"dtype": np.dtype(jnp.bfloat16)}, "bf16 scales: kernels multiply by f32 scales alone"),
        ({"zero": np.dtype(jnp.bfloat16)}, "zero points: kernels multiply by f32 scales alone"),
    ],
)
def test_what_no_kernel_reads(change, match):
    asked = problem(256, 256, 512)
    a = dataclasses.replace(asked.a, scale=dataclasses.replace(asked.a.scale, **change))
    assert match in "; ".join(cutjax.reasons(cutjax.Config(), dataclasses.replace(asked, a=a)))


def test_scales_of_other_dtypes():
    asked = problem(256, 256, 512, a=jnp.bfloat16, b=jnp.bfloat16)
    assert "kernels promote sums of float8" in "; ".join(cutjax.reasons(cutjax.Config(), asked))
