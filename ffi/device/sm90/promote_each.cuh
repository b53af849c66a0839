// Promotion (promote_never.cuh) of the sums of each block of k, as they are.

struct Promotion {
  static constexpr bool EVER = true, EACH = true;
  static constexpr u32 BYTES = 0;

  DEVICE void begin(const Work&, int m, int n, int row, int matrix_a, int matrix_b, u32 memory, int thread) {}
  struct Factors {};

  DEVICE void begin_group(int k, int count, int barrier) const {}

  template <int BLOCK, int PART>
  DEVICE Factors factors(int) const {
    return {};
  }

  template <int PART>
  DEVICE void add(Acc (&accumulators)[PRODUCTS * BN / 2], const PartSums& sums, const Factors&, int) const {
#pragma unroll
    for (int i = 0; i < PART_COLUMNS / 2; ++i) accumulators[PART * (PART_COLUMNS / 2) + i] += sums[i];
  }
};
