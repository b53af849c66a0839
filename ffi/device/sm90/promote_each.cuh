// Promotion (promote_never.cuh) of the sums of each block of k, as they are, or times UNIT.

struct Promotion {
  static constexpr bool EVER = true, EACH = true;
  static constexpr u32 BYTES = 0;
  static constexpr int COPIERS = 0, ARRIVALS = 0;

  struct Factors {};
  struct Columns {};

  template <int BLOCK, int PART>
  DEVICE Factors factors(u32) const {
    return {};
  }

  template <int PART>
  DEVICE Columns columns(u32) const {
    return {};
  }

  template <int PART>
  DEVICE void add(Acc (&accumulators)[PRODUCTS * BN / 2], const PartSums& sums, const Factors&, const Columns&) const {
#pragma unroll
    for (int i = 0; i < PART_COLUMNS / 2; ++i) accumulators[PART * (PART_COLUMNS / 2) + i] += sums[i] * UNIT;
  }
};
