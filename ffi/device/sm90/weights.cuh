// Weights that are decoded: how a lane reads those of its rows, what makes fragments of them, and their factors.
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
// They are decoded in steps of SLICES. Of several matrices A each has a step of the same k, one after the other.

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

using Fragments = u32[M_BLOCKS][SLICES][4];  // what wgmma takes

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
template <int COLUMNS = BN>
DEVICE void add_scaled(Accumulators& sums, Accumulators& parts, const Factors (&factors)[A_MATRICES]) {
#pragma unroll
  for (int block = 0; block < M_BLOCKS; ++block) {
    wgmma_done(parts[block]);
#pragma unroll
    for (int i = 0; i < PRODUCTS * BN / 2; ++i) {
      if (i % (B_MATRICES * BN / 2) >= B_MATRICES * COLUMNS / 2) continue;
      float by = factor_of(factors[i / (B_MATRICES * BN / 2)].by[block][i / 2 % 2]);
      sums[block][i] = __fmaf_rn(parts[block][i], by, sums[block][i]);
    }
  }
}
