// The place of each pair among all pairs, sorted by expert: where those of its expert begin, how many of them other
// blocks have before, and how many this one.

constexpr int PITCH = (EXPERTS + 7) / 8 * 8;  // of what a block counts

// Writes the rows of pairs begin .. end, and the pairs of those rows. `inverse` has the place of a pair among those of
// its expert in this block, `before` how many others have before, and `count` how many there are of each expert. All
// threads call.
DEVICE void place(const int* indices, int* inverse, int* permutation, u32* before, const u32* count, int begin,
                  int end) {
  if (threadIdx.x < 32) {
    u32 start = 0;
    for (int base = 0; base < EXPERTS; base += 32) {
      int expert = base + threadIdx.x;
      u32 own = expert < EXPERTS ? count[expert] : 0, sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(~0u, sum, step);
        if (threadIdx.x >= step) sum += other;
      }
      if (expert < EXPERTS) before[expert] += start + sum - own;
      start += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
  constexpr int AT_ONCE = 4;  // whose loads are under way together
  for (int first = begin; first < end; first += AT_ONCE * THREADS) {
    int experts[AT_ONCE], rows[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      int pair = first + i * THREADS + threadIdx.x;
      if (pair < end) experts[i] = indices[pair], rows[i] = inverse[pair];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      int pair = first + i * THREADS + threadIdx.x;
      if (pair >= end) continue;
      u32 row = rows[i] + before[experts[i]];
      inverse[pair] = row, permutation[row] = pair;
    }
  }
}
