// Multiplies what the pipeline (tiles.cuh) holds by wgmma, A from registers, where its elements are decoded (decode.cuh).
//
// In a slice of 16 of k, lane l of warp w has rows r = 16 w + l / 4 and r + 8 of each block of 64, at k 2 q, 2 q + 1,
// 2 q + 8 and 2 q + 9, with q = l % 4. In a tile of bytes that is:
//
//   K-major      two bytes of a row at 2 q and two at 2 q + 8
//   MN-major     ldmatrix transposes pairs of bytes, so that a lane has rows 2 (l / 4) and 2 (l / 4) + 1 of its warp's 16.
//                The accumulators are put in order when all is added up.
//
// While the tensor cores multiply a step of SLICES, the next one is decoded to other registers.

constexpr int SLICES = M_BLOCKS == 1 && BK == 128 ? 4 : 2, STEPS = BK / 16 / SLICES;
static_assert(STEPS % 2 == 0, "the same registers in each k block");
static_assert(!RAGGED_K && COPIERS == 0 && A_BYTES == 1);

using Words = u32[M_BLOCKS][2 * SLICES];         // of a tile
using Fragments = u32[M_BLOCKS][SLICES][4];      // what wgmma takes

template <bool K_MAJOR>
struct Weights {
  u32 offset, swizzled;  // of a lane's first row, and of what its slices are exclusive-ored with

  DEVICE Weights(int row, int thread) {
    constexpr int SPAN = OperandA::SPAN;
    int first = row + thread / 32 * 16 + thread % 32 / 4;
    offset = first * SPAN + thread % 4 * 2;
    swizzled = swizzle<SPAN>(first * SPAN) - first * SPAN;
  }

  // Of a step, which is known to the compiler.
  DEVICE void load(Words& x, u32 tile, int step) const {
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
      u32 at = tile + offset + (swizzled ^ (step * SLICES + slice) * 16);
#pragma unroll
      for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 row = at + (block * 64 + half * 8) * OperandA::SPAN;
          x[block][2 * slice + half] = __byte_perm(ld_shared_u16(row), ld_shared_u16(row + 8), 0x5140);
        }
    }
  }

  static DEVICE void get(Fragments& to, const Words& x) {
#pragma unroll
    for (int i = 0; i < M_BLOCKS * SLICES * 4; ++i)
      to[i / 4 / SLICES][i / 4 % SLICES][i % 4] = decode(x[i / 4 / SLICES][i / 4 % SLICES * 2 + i % 2], i % 4 / 2);
  }

  static DEVICE void put_in_order(Accumulators&) {}
};

template <>
struct Weights<false> {
  u32 offset[M_BLOCKS];

  DEVICE Weights(int row, int thread) {
    constexpr int SPAN = OperandA::SPAN;
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block) {
      int first = row + block * 64 + thread / 32 * 16;
      offset[block] = first / SPAN * (BK * SPAN) + swizzle<SPAN>(thread % 32 * SPAN + first % SPAN);
    }
  }

  DEVICE void load(Words& x, u32 tile, int step) const {
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
      for (int i = 0; i < SLICES / 2; ++i)  // a lane of ldmatrix has a row of k of two slices
        ldmatrix_x4_trans(tile + offset[block] + (step * SLICES + 2 * i) * 16 * OperandA::SPAN, x[block][4 * i],
                          x[block][4 * i + 1], x[block][4 * i + 2], x[block][4 * i + 3]);
  }

  static DEVICE void get(Fragments& to, const Words& x) {
#pragma unroll
    for (int i = 0; i < M_BLOCKS * SLICES * 4; ++i)
      to[i / 4 / SLICES][i / 4 % SLICES][i % 4] = decode(x[i / 4 / SLICES][i / 4 % SLICES * 2 + i % 4 / 2], i % 2);
  }

  // The lanes of rows g and g + 8 have rows 2 g and 2 g + 1 of 16. Each gives a lane of even g and one of odd g a row.
  static DEVICE void put_in_order(Accumulators& sums) {
    int lane = threadIdx.x % 32, row = lane / 4, near = row / 2 * 4 + lane % 4, far = near ^ 16;
    bool low = row < 4, even = row % 2 == 0;
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
      for (int i = 0; i < PRODUCTS * BN / 2; i += 4)
#pragma unroll
        for (int e = i; e < i + 2; ++e) {
          Acc &first = sums[block][e], &second = sums[block][e + 2];
          Acc x = __shfl_sync(~0u, low ? first : second, even ? near : far);
          Acc y = __shfl_sync(~0u, low ? second : first, even ? far : near);
          first = even ? x : y;
          second = even ? y : x;
        }
  }
};

// One warpgroup: what multiply in multiply.cuh computes.
template <int BLOCKS, typename Begun, typename Issued>
DEVICE void multiply(Accumulators& sums, Pipeline& pipe, SharedTiles shared, int row, const Work&, int, int count,
                     int thread, int, Begun begun, Issued issued) {
  Weights<A_K_MAJOR> weights(row, thread);
  Words words;
  Fragments fragments;
  u32 previous = 0;
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
    for (int i = 0; i < PRODUCTS * BN / 2; ++i) sums[block][i] = 0;  // undefined, wgmmas would wait for each other
  mbarrier_wait(pipe.full_barrier(), pipe.phase);
  weights.load(words, shared.a(pipe.stage), 0);
  weights.get(fragments, words);
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    u32 tile = shared.a(pipe.stage), empty = pipe.empty_barrier();
    OperandB::Descriptor b(shared.b(pipe.stage));
    pipe.advance();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
          wgmma(sums[block], fragments[block][slice], b.at(OperandB::slice_offset(step * SLICES + slice)), 1);
      wgmma_commit_group();
      if (step + 1 < STEPS) {
        weights.load(words, tile, step + 1);
      } else if (k + 1 < count) {
        mbarrier_wait(pipe.full_barrier(), pipe.phase);
        weights.load(words, shared.a(pipe.stage), 0);
      }
      wgmma_wait_group<1>();  // the registers of the step before are free
      if (step == 0 && k > 0) release(previous, thread);
      weights.get(fragments, words);  // after the last one of nothing new: a branch would move the registers
    }
    previous = empty;
    if (k == min(2, count - 1)) begun();
  }
  issued();
  wgmma_wait_group<0>();
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) wgmma_done(sums[block]);
  release(previous, thread);
  weights.put_in_order(sums);
}
