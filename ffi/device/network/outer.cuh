// Sums of outer products of rows that another kernel has left in memory (apart.cuh): a block adds up its share of the
// rows, one warp loads 64 at a time, and each warpgroup multiplies 64 columns of B by all of A.

constexpr u32 CHUNK = 64 * 128;  // bytes of 64 rows of 64 columns

// The column that lies at some place of a row. Where threads store planes, and not bulk copies: of 32, vectors of 8 are
// those of the four threads of a row.
DEVICE int column_at(int place) {
  if (IN_ORDER) return place;
  return place / 32 * 32 + place % 8 / 4 * 16 + place % 4 / 2 * 8 + place / 8 % 4 * 2 + place % 2;
}

// A pair of factors, by the first of their chunks of 64 columns; and whether columns of the second are added up.
struct Factors {
  int a, b;
  bool summed;
};

template <int A, int B, int PAIRS>
struct OuterSums {
  static constexpr int CHUNKS_A = (A + 63) / 64, CHUNKS_B = (B + 63) / 64;
  static constexpr u32 BYTES = (CHUNKS_A + CHUNKS_B) * CHUNK;
  static_assert(BYTES * STAGES <= ONES);

  // Of a multiple of 64 rows.
  static DEVICE void compute(const Factors (&pairs)[PAIRS], const char* planes, int rows, float* to, float* sums) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const u32 shared = shared_address(shared_memory), full = shared + ONES + 512, empty = full + 8 * STAGES;
    const int group = threadIdx.x / 128, steps = rows / 64;
    const int first = static_cast<i64>(steps) * blockIdx.x / gridDim.x;
    const int last = static_cast<i64>(steps) * (blockIdx.x + 1) / gridDim.x;
    if (threadIdx.x < 128)  // ones, and as many zeros
      st_shared_u32(shared + ONES + threadIdx.x * 4, threadIdx.x >= 64 ? 0 : F16 ? 0x3c003c00 : 0x3f803f80);
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; ++i) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, 4 * CHUNKS_B);
      fence_mbarrier_init();
    }
    fence_proxy_async();
    __syncthreads();
    int stage = 0, turn = 0;
    const auto next = [&] {
      if (++stage == STAGES) stage = 0, turn ^= 1;
    };
    if (group == THREADS / 128) {  // the warp that loads
      if (elect())
        for (const Factors& pair : pairs)
          for (int step = first; step < last; ++step, next()) {
            mbarrier_wait(empty + 8 * stage, turn ^ 1);
            mbarrier_arrive_expect_tx(full + 8 * stage, BYTES);
            const char* from = planes + step * i64(ALL_CHUNKS) * CHUNK;
            cp_async_bulk_load(shared + stage * BYTES, from + pair.a * CHUNK, CHUNKS_A * CHUNK, full + 8 * stage);
            cp_async_bulk_load(shared + stage * BYTES + CHUNKS_A * CHUNK, from + pair.b * CHUNK, CHUNKS_B * CHUNK,
                               full + 8 * stage);
          }
      return;
    }
    if (group >= CHUNKS_B) return;
    float x[32 * CHUNKS_A] = {}, totals[4] = {};
    const u64 ones = u64(128 >> 4) << 32 | u64(128 >> 4) << 16 | (shared + ONES) >> 4;
    for (const Factors& pair : pairs)
#pragma unroll 1  // of several steps at once each wgmma would be waited for
      for (int step = first; step < last; ++step, next()) {
        mbarrier_wait(full + 8 * stage, turn);
        const u32 of_a = shared + stage * BYTES;
        const WgmmaDescriptor<128, CHUNK, 1024> b(of_a), a(of_a + (CHUNKS_A + group) * CHUNK);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_outer(x, a.at(k * 2048), b.at(k * 2048), 1);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_ones(totals, a.at(k * 2048), pair.summed ? ones : ones + (256 >> 4), 1);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        if (elect()) mbarrier_arrive(empty + 8 * stage);
      }
    wgmma_done(x);
    wgmma_done(totals);
    const int m = group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int e = 0; e < 32 * CHUNKS_A; ++e) {
      int b = column_at(m + e / 2 % 2 * 8), a = column_at(e / 4 * 8 + threadIdx.x % 4 * 2 + e % 2);
      if (a < A && b < B) to[a * B + b] = x[e];
    }
    if (sums && threadIdx.x % 4 == 0)
      for (int half = 0; half < 2; ++half)
        if (int b = column_at(m + half * 8); b < B) sums[b] = totals[2 * half];
  }
};
