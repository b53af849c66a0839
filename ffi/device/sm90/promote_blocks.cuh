// Promotion (promote_never.cuh) of sums as they are: of all pairs of terms but the last, and then of every
// PROMOTED_BLOCKS k blocks. Of the former, what is not finite counts as zero: a highest term was not, and says so.

struct Promotion {
  static constexpr bool EVER = true, EACH = false;
  static constexpr u32 BYTES = 0;
  static constexpr int COPIERS = 0, ARRIVALS = 0;
  static_assert(PROMOTED_BLOCKS > 0);

  // How many of the first k blocks are summed before they are added, of `blocks` in all pairs, `of_pair` in each.
  DEVICE int first(int blocks, int of_pair) const { return PAIRS > 1 ? blocks - of_pair : PROMOTED_BLOCKS; }

  // How many from `k` on, where the last time it was so many.
  DEVICE int count(int before, int k, int blocks) const {
    if (k > 0 || PAIRS == 1) return min(PROMOTED_BLOCKS, blocks - k);
    return before;
  }

  // The sums of those from `k` on.
  DEVICE void add(Accumulators& accumulators, const Accumulators& sums, int k) const {
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < PRODUCTS * BN / 2; ++i) {
        Acc x = sums[block][i];
        if (PAIRS > 1 && k == 0) x = (word_of(x) & 0x7f800000) == 0x7f800000 ? 0 : x;
        accumulators[block][i] += x;
      }
    }
  }
};
