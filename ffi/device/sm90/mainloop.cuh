// Drains the pipeline (tiles.cuh) by wgmma: multiply.cuh, or multiply_registers.cuh, does so for some k blocks.

// One warpgroup: accumulators, over all k blocks and pairs of terms. Where sums are promoted, accumulators are sums of
// sums.
template <int BLOCKS, typename Promotes, typename Begun, typename Issued>
DEVICE void drain(Accumulators& accumulators, Promotes& promotion, Pipeline& pipe, SharedTiles shared, int row,
                  const Work& work, int thread, int barrier, Begun begun, Issued issued) {
  static_assert(Promotes::EVER || PAIRS == 1);
  promotion.begin(work, row, thread);
  if constexpr (!Promotes::EVER) {
    multiply<BLOCKS>(accumulators, pipe, shared, row, work, 0, work.k_blocks, thread, barrier, begun, issued);
  } else {
    Accumulators sums = {};  // undefined, few of them would be moved between wgmmas, which then wait for each other
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
      for (int i = 0; i < PRODUCTS * BN / 2; ++i) accumulators[block][i] = 0;
    int k_blocks = PAIRS * work.k_blocks, count = promotion.first(k_blocks, work.k_blocks);
#pragma unroll 1
    for (int k = 0; k < k_blocks; k += count) {
      count = promotion.count(count, k, k_blocks);
      auto begun_once = [&] {
        if (k == 0) begun();
      };
      auto issued_once = [&] {
        if (k + count == k_blocks) issued();
      };
      multiply<BLOCKS>(sums, pipe, shared, row, work, k, count, thread, barrier, begun_once, issued_once);
      promotion.template add<BLOCKS>(accumulators, sums, k);
    }
  }
}

// One warpgroup none of whose rows belong to the tile.
DEVICE void skip(Pipeline& pipe, const Work& work, int thread) {
  for (int k = 0; k < PAIRS * work.k_blocks; ++k) {
    mbarrier_wait(pipe.full_barrier(), pipe.phase);
    release(pipe.empty_barrier(), thread);
    pipe.advance();
  }
}
