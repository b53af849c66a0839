// What drain_each.cuh multiplies of A: elements of 4 bits, decoded to bytes of e4m3 in registers. Decoded
// ones are UNIT times as small, which what promotes them makes good: e4m3 counts from 0 to 16 in its lowest bits, and
// the exponent of e2m1 is the low bits of its own.
//
// In a slice of 32 of k, lane l of warp w has rows r = 16 w + l / 4 and r + 8 of each block of 64, at k 4 q to 4 q + 3
// and 16 on from there, with q = l % 4. ldmatrix transposes pairs of bytes, and reads rows of k in any order: a lane
// has rows 4 (l / 4) to 4 (l / 4) + 3 of 32, two in each block, and in two words the four k of a register.

static_assert(A_BITS == 4 && !A_K_MAJOR && M_BLOCKS == 2 && A_MATRICES == 1 && !RAGGED_K && COPIERS == 0);

// Of bytes that hold two elements each, the lower ones, or the higher.
DEVICE u32 decode(u32 pairs, bool high) {
  u32 low = high ? pairs >> 4 : pairs;
  if constexpr (NARROW == Narrow::e2m1)
    return ((high ? pairs >> 2 : pairs << 2) & 0x1c1c1c1c) | ((high ? pairs : pairs << 4) & 0x80808080);
  if constexpr (NARROW == Narrow::u4) return low & 0x0f0f0f0f;
  u32 negative = (high ? pairs >> 7 : pairs >> 3) & 0x01010101;  // 16 - x, and the sign
  return ((low & 0x0f0f0f0f) ^ negative * 0x8f) + negative;
}

struct StageOfA {
  static constexpr int SPAN = OperandA::SPAN, SLICES_OF_STAGE = BK / 32;
  u32 offset, words[SLICES_OF_STAGE][4], fragments[SLICES_OF_STAGE][4];

  DEVICE StageOfA(int row, int thread) {
    int lane = thread % 32, k = lane / 16 * 16 + lane / 8 % 2 + lane % 8 / 2 * 4 + lane % 2 * 2;
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
      for (int i = 0; i < 4; ++i)
        fragments[slice][i] = decode(__byte_perm(x[i / 2 * 2], x[i / 2 * 2 + 1], BLOCK == 0 ? 0x6240 : 0x7351), i % 2);
    }
  }

  template <int BLOCK>
  DEVICE const u32 (&at(int slice) const)[4] {
    return fragments[slice];
  }

  DEVICE static void finish(Accumulators& sums) { put_in_order(sums); }
};

// All sums are promoted (drain_each).
template <typename... Arguments>
DEVICE void multiply(Arguments&&...) {
  static_assert(sizeof...(Arguments) == 0);
}
