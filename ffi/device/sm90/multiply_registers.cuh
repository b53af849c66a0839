// Multiplies what the pipeline (tiles.cuh) holds by wgmma, A from registers, where its elements are decoded.
//
// Files of their own, of which a kernel has one of each kind, say how: of two elements of a word, in the two halves of
// what `decode` returns (decode_*.cuh), what it subtracts for each row (zero_*.cuh), and by what they are multiplied
// then (factor_*.cuh). A zero point and a factor are for a row and FACTOR_K of k. Where a thread has few sums, a factor
// multiplies those of its k instead (FACTORS_OF_SUMS): they are fewer than the elements, and nothing is rounded.
//
// In a slice of 16 of k, lane l of warp w has rows r = 16 w + l / 4 and r + 8 of each block of 64, at k 2 q, 2 q + 1,
// 2 q + 8 and 2 q + 9, with q = l % 4. In a tile that is:
//
//   K-major      two bytes of a row at 2 q and two at 2 q + 8
//   MN-major     ldmatrix transposes pairs of bytes: of 8 bits, a lane has rows 2 (l / 4) and 2 (l / 4) + 1 of its
//   warp's
//                16; of 4 bits, rows 4 (l / 4) to 4 (l / 4) + 3 of 32, two in each of two blocks. The accumulators are
//                put in order when all is added up; of 4 bits, both blocks of a warp are 32 rows beside each other then
//                (WARP_ROWS).
//
// While the tensor cores multiply a step of SLICES, the next one is decoded to other registers. Of several matrices A
// each has a step of the same k, one after the other.

constexpr int STEPS = BK / 16 / SLICES * A_MATRICES;
static_assert(STEPS % 2 == 0, "the same registers in each k block");
static_assert(!RAGGED_K && COPIERS == 0 && (A_BITS == 8 || (A_BITS == 4 && !A_K_MAJOR && M_BLOCKS == 2)));
static_assert(FACTOR_ROWS == 0 || (!A_K_MAJOR && FACTOR_K % (16 * SLICES) == 0), "a step has one factor");

// Steps that share a factor, where it multiplies their sums.
constexpr bool BY_SUMS = FACTOR_ROWS > 0 && FACTORS_OF_SUMS;
constexpr int SHARING = (FACTOR_K < BK ? FACTOR_K : BK) / 16 / SLICES * A_MATRICES;

using Words = u32[A_BITS == 4 ? 1 : M_BLOCKS][2 * SLICES];  // of a tile

struct Factors {  // of a lane's rows, and what is subtracted before
  u32 by[M_BLOCKS][2], less[M_BLOCKS][2];
};

using ProductSums = Acc[B_MATRICES * BN / 2];  // of a block of 64 rows, by one A
using Fragments = u32[M_BLOCKS][SLICES][4];    // what wgmma takes

template <bool K_MAJOR>
struct Weights {
  u32 magic = in_register(MAGIC);
  u32 offset, swizzled;  // of a lane's first row, and of what its slices are exclusive-ored with

  DEVICE Weights(int row, int thread) {
    constexpr int SPAN = OperandA::SPAN;
    int first = row + thread / 32 * 16 + thread % 32 / 4;
    offset = first * SPAN + thread % 4 * 2;
    swizzled = swizzle<SPAN>(first * SPAN) - first * SPAN;
  }

  // Of slices from the `first` on, which is known to the compiler.
  DEVICE void load(Words& x, u32 tile, int first) const {
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
      u32 at = tile + offset + (swizzled ^ (first + slice) * 16);
#pragma unroll
      for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 row = at + (block * 64 + half * 8) * OperandA::SPAN;
          x[block][2 * slice + half] = __byte_perm(ld_shared_u16(row), ld_shared_u16(row + 8), 0x5140);
        }
    }
  }

  DEVICE void load(Factors&, u32, int) const {}

  DEVICE void get(Fragments& to, const Words& x, const Factors&) const {
#pragma unroll
    for (int i = 0; i < M_BLOCKS * SLICES * 4; ++i)
      to[i / 4 / SLICES][i / 4 % SLICES][i % 4] =
          decode(x[i / 4 / SLICES][i / 4 % SLICES * 2 + i % 2], i % 4 / 2, magic, LESS);
  }
};

template <>
struct Weights<false> {
  static constexpr int SPAN = OperandA::SPAN, LANE_ROWS = 16 / A_BITS, LOADS = A_BITS == 4 ? 1 : M_BLOCKS;
  u32 magic = in_register(MAGIC);
  u32 offset[LOADS];
  int lane_row;

  DEVICE Weights(int row, int thread) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      int first = (row + i * 64 + thread / 32 * WARP_ROWS) * A_BITS / 8;
      offset[i] = first / SPAN * (BK * SPAN) + swizzle<SPAN>(thread % 32 * SPAN + first % SPAN);
    }
    lane_row = row + thread / 32 * WARP_ROWS + thread % 32 / 4 * LANE_ROWS;
  }

  DEVICE void load(Words& x, u32 tile, int first) const {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
      for (int j = 0; j < SLICES / 2; ++j)  // a lane of ldmatrix has a row of k of two slices
        ldmatrix_x4_trans(tile + offset[i] + (first + 2 * j) * 16 * SPAN, x[i][4 * j], x[i][4 * j + 1], x[i][4 * j + 2],
                          x[i][4 * j + 3]);
  }

  // Those of slices from the `first` on, where they are others than of the step before.
  DEVICE void load(Factors& x, u32 factors, int first) const {
    if constexpr (FACTOR_ROWS > 0) {
      int k = first * 16;
      if (k % FACTOR_K != 0) return;
#pragma unroll
      for (int block = 0; block < M_BLOCKS; ++block) {
        int place = k / FACTOR_K * OperandA::ROWS_EACH + lane_row + (A_BITS == 4 ? 2 * block : 64 * block);
        load_factors(factors + place * FACTOR_BITS / 8, x.by[block]);
        load_zeros(factors + ZERO_PLACE + place * ZERO_BITS / 8, x.less[block], magic);
      }
    }
  }

  DEVICE void get(Fragments& to, const Words& x, const Factors& factors) const {
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
      for (int i = 0; i < SLICES * 4; ++i) {
        u32 word = x[A_BITS == 4 ? 0 : block][i / 2];
        u32 less = ZERO_BITS > 0 ? factors.less[block][i % 2] : LESS;
        u32 found = decode(word, (A_BITS == 4 ? 2 * block : 0) + i % 2, magic, less);
        to[block][i / 4][i % 4] = BY_SUMS ? found : scaled(found, factors.by[block][i % 2]);
      }
  }
};

// Adds sums of a k that share factors, times these.
template <int BLOCKS>
DEVICE void add_scaled(Accumulators& sums, Accumulators& parts, const Factors (&factors)[A_MATRICES]) {
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    wgmma_done(parts[block]);
#pragma unroll
    for (int i = 0; i < PRODUCTS * BN / 2; ++i) {
      float by = factor_of(factors[i / (B_MATRICES * BN / 2)].by[block][i / 2 % 2]);
      sums[block][i] = __fmaf_rn(parts[block][i], by, sums[block][i]);
    }
  }
}

// One warpgroup: what multiply in multiply.cuh computes, of the k blocks of its group (sliced.cuh).
template <int BLOCKS, typename Begun, typename Issued>
DEVICE void multiply(Accumulators& sums, Changes& changes, Pipeline& all, SharedTiles shared, int row, const Work&, int,
                     int k_blocks, int thread, int barrier, Begun begun, Issued issued) {
  static_assert(SLICED == 1 || !Changes::EVER);
  Weights<A_K_MAJOR> weights(row, thread);
  Words words;
  Factors factors[A_MATRICES], of_sums[A_MATRICES];
  Fragments fragments;
  Accumulators own = {};  // sums of steps that share a factor; undefined, they would be moved between wgmmas
  Accumulators& parts = BY_SUMS ? own : sums;
  // Of the matrix and the slices of a step.
  auto load = [&](u32 tile, int step) {
    int matrix = step % A_MATRICES, first = step / A_MATRICES * SLICES;
    weights.load(words, tile + matrix * (OperandA::BYTES / A_MATRICES), first);
    weights.load(factors[matrix], tile + OperandA::BYTES + matrix * FACTORS_EACH, first);
  };
  u32 previous = 0;
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
    for (int i = 0; i < PRODUCTS * BN / 2; ++i) sums[block][i] = 0;  // undefined, wgmmas would wait for each other
  Pipeline pipe = all;
  int first = first_slice(slice_group(), all.stage), count = k_blocks;
  if constexpr (SLICED > 1) {
    pipe.advance(first);
    all.advance(k_blocks);
    count = max(0, (k_blocks - first + SLICED - 1) / SLICED);
  }
  if (SLICED == 1 || count > 0) {
    mbarrier_wait(pipe.full_barrier(), pipe.phase);
    load(shared.a(pipe.stage), 0);
    if constexpr (Changes::EVER) changes.block(shared.b(pipe.stage), barrier);
    weights.get(fragments, words, factors[0]);
  } else {
    begun();
  }
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    u32 tile = shared.a(pipe.stage), empty = pipe.empty_barrier();
    OperandB::Descriptor b(shared.b(pipe.stage));
    pipe.advance_by<SLICED>();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step % SHARING < A_MATRICES) of_sums[step % A_MATRICES] = factors[step % A_MATRICES];
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
          wgmma(reinterpret_cast<ProductSums&>(parts[block][step % A_MATRICES * (B_MATRICES * BN / 2)]),
                fragments[block][slice], b.at(OperandB::slice_offset(step / A_MATRICES * SLICES + slice)),
                !BY_SUMS || step % SHARING >= A_MATRICES || slice > 0);
      wgmma_commit_group();
      if (step + 1 < STEPS) {
        load(tile, step + 1);
      } else if (k + 1 < count) {
        mbarrier_wait(pipe.full_barrier(), pipe.phase);
        load(shared.a(pipe.stage), 0);
        if constexpr (Changes::EVER) changes.block(shared.b(pipe.stage), barrier);
      }
      wgmma_wait_group<1>();  // the registers of the step before are free
      if (step == 0 && k > 0) release(previous, thread);
      // After the last one of nothing new: a branch would move the registers.
      weights.get(fragments, words, factors[(step + 1) % STEPS % A_MATRICES]);
      if (BY_SUMS && step % SHARING == SHARING - 1) {
        wgmma_wait_group<0>();
        add_scaled<BLOCKS>(sums, parts, of_sums);
      }
    }
    previous = empty;
    if (k == min(2, count - 1)) begun();
  }
  issued();
  wgmma_wait_group<0>();
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) wgmma_done(sums[block]);
  if (SLICED == 1 || count > 0) release(previous, thread);
  if constexpr (SLICED == 1) all = pipe;
  bool whole = add_slices(sums, shared, first);
  if (!A_K_MAJOR && whole) put_in_order(sums);
}
