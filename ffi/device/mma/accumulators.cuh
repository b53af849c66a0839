// The accumulators of one warp: for each product, fragments of 16 rows and 8 columns. Acc carries a value of them.

// Where this warp's part of a tile lies.
struct Warp {
  int row, column, slice;

  DEVICE Warp() {
    int warp = uniform(threadIdx.x / 32);
    row = warp % WARPS_M * WM;
    column = warp / WARPS_M % WARPS_N * WN;
    slice = WARPS_K == 1 ? 0 : warp / (WARPS_M * WARPS_N);
  }
};

#if F16_ACCUMULATORS  // two columns in each word
using Acc = float;
using AccFragment = u32[2];

DEVICE Acc value_of(const AccFragment& x, int i) { return f16_to_f32(x[i / 2] >> i % 2 * 16 & 0xffff); }

DEVICE void add_to(AccFragment& x, const AccFragment& y) {
#pragma unroll
  for (int i = 0; i < 2; ++i) x[i] = add_f16x2(x[i], y[i]);
}

DEVICE void clear(AccFragment& x) { x[0] = x[1] = 0; }
#else
using Acc = ACCUMULATOR;
using AccFragment = Acc[4];

DEVICE const Acc& value_of(const AccFragment& x, int i) { return x[i]; }

DEVICE void add_to(AccFragment& x, const AccFragment& y) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = x[i] + y[i];
}

DEVICE void clear(AccFragment& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = Acc{};
}
#endif

using Accumulators = AccFragment[PRODUCTS][M_FRAGMENTS][N_FRAGMENTS];

DEVICE void clear(Accumulators& d) {
#pragma unroll
  for (int i = 0; i < PRODUCTS * M_FRAGMENTS * N_FRAGMENTS; ++i) clear((&d[0][0][0])[i]);
}

DEVICE void add_to(Accumulators& d, const Accumulators& other) {
#pragma unroll
  for (int i = 0; i < PRODUCTS * M_FRAGMENTS * N_FRAGMENTS; ++i) add_to((&d[0][0][0])[i], (&other[0][0][0])[i]);
}
