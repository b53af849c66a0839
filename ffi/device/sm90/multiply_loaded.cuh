// What drain_each (mainloop.cuh) multiplies of A: elements of 8 bits, in registers. Where a stage is multiplied in
// parts, each would read the rows of A in shared memory again, which is as busy as the tensor cores.

static_assert(A_BITS == 8 && A_K_MAJOR && OperandA::SPAN == 128 && BK == 128 && M_BLOCKS == 1 && A_MATRICES == 1);

struct StageOfA {
  u32 offset, fragments[BK / 32][4];

  // ldmatrix takes 8 rows of 16 bytes from as many lanes: rows r and r + 8 of k, then of k + 16.
  DEVICE StageOfA(int row, int thread) {
    int lane = thread % 32;
    offset = swizzle<128>((row + thread / 32 * 16 + lane % 16) * 128 + lane / 16 * 16);
  }

  template <int BLOCK>
  DEVICE void begin(u32 tile) {
#pragma unroll
    for (int slice = 0; slice < BK / 32; ++slice) {
      u32(&x)[4] = fragments[slice];
      ldmatrix_x4((tile + offset) ^ slice * 32, x[0], x[1], x[2], x[3]);
    }
  }

  template <int BLOCK>
  DEVICE const u32 (&at(int slice) const)[4] {
    return fragments[slice];
  }

  DEVICE static void finish(Accumulators&) {}
};

// All sums are promoted (drain_each).
template <int BLOCKS, typename... Arguments>
DEVICE void multiply(Arguments&&...) {
  static_assert(BLOCKS < 0);
}
