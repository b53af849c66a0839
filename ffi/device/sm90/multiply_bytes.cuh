// What drain_each (mainloop.cuh) multiplies of A: elements of 4 bits, decoded to bytes in registers by a table of 16.
//
// In a slice of 32 of k, lane l of warp w has rows r = 16 w + l / 4 and r + 8 of each block of 64, at k 4 q to 4 q + 3
// and 16 on from there, with q = l % 4. ldmatrix transposes pairs of bytes, and reads rows of k in any order: a lane
// has rows 4 (l / 4) to 4 (l / 4) + 3 of 32, two in each block, and in two words the four k of a register.

static_assert(A_BITS == 4 && !A_K_MAJOR && M_BLOCKS == 2 && A_MATRICES == 1 && !RAGGED_K && COPIERS == 0);

// The elements i of each half of two words, in the order of k.
DEVICE u32 decode(u32 first, u32 second, int i) {
  u32 x = (first >> 4 * i & 0x000f000f) | (second >> 4 * i & 0x000f000f) << 8;
  x |= x >> 12;  // a nibble each, in 16 bits
  u32 low = x & 0x7777, half = 0x3210 | (x & 0x8888) >> 1;
  return __byte_perm(__byte_perm(TABLE0, TABLE1, low), __byte_perm(TABLE2, TABLE3, low), half);
}

struct StageOfA {
  static constexpr int SPAN = OperandA::SPAN, SLICES_OF_STAGE = BK / 32;
  u32 offset, words[SLICES_OF_STAGE][4], fragments[SLICES_OF_STAGE][4];

  DEVICE StageOfA(int row, int thread) {
    int lane = thread % 32, k = lane / 16 * 16 + lane / 8 % 2 * 2 + lane % 8 / 2 * 4 + lane % 2;
    int first = (row + thread / 32 * 32) / 2;
    offset = first / SPAN * (BK * SPAN) + swizzle<SPAN>(k * SPAN + first % SPAN);
  }

  template <int BLOCK>
  DEVICE void begin(u32 tile) {
#pragma unroll
    for (int slice = 0; slice < SLICES_OF_STAGE; ++slice) {
      u32(&x)[4] = words[slice];
      if constexpr (BLOCK == 0) ldmatrix_x4_trans(tile + offset + slice * 32 * SPAN, x[0], x[1], x[2], x[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) fragments[slice][i] = decode(x[i / 2 * 2], x[i / 2 * 2 + 1], 2 * BLOCK + i % 2);
    }
  }

  template <int BLOCK>
  DEVICE const u32 (&at(int slice) const)[4] {
    return fragments[slice];
  }

  DEVICE static void finish(Accumulators& sums) { put_in_order(sums); }
};

// All sums are promoted (drain_each).
template <int BLOCKS, typename... Arguments>
DEVICE void multiply(Arguments&&...) {
  static_assert(BLOCKS < 0);
}
