// Drains the pipeline (tiles.cuh): a multiply_*.cuh does so for some k blocks, and drain_each.cuh where the sums of
// each are promoted.

// One warpgroup: accumulators, over all k blocks and pairs of terms, of the tile's first COLUMNS. Where sums are
// promoted, accumulators are sums of sums.
template <int COLUMNS = BN, typename Promotes, typename Begun, typename Issued>
DEVICE void drain(Accumulators& accumulators, Promotes& promotion, Changes& changes, Pipeline& pipe, SharedTiles shared,
                  int row, const Work& work, int thread, int barrier, Begun begun, Issued issued) {
  static_assert(Promotes::EVER || PAIRS == 1);
  if constexpr (Promotes::BYTES > 0) promotion.begin(work, row, thread);
  static_assert(!Changes::EVER || !Promotes::EVER);
  if constexpr (Promotes::EACH) {
    drain_each(accumulators, promotion, pipe, shared, row, work, thread, barrier, begun, issued);
  } else if constexpr (COLUMNS < BN) {
    static_assert(!Promotes::EVER);
    multiply<COLUMNS>(accumulators, changes, pipe, shared, row, work, 0, work.k_blocks, thread, barrier, begun, issued);
  } else if constexpr (!Promotes::EVER) {
    multiply(accumulators, changes, pipe, shared, row, work, 0, work.k_blocks, thread, barrier, begun, issued);
  } else {
    Accumulators sums = {};  // undefined, few of them would be moved between wgmmas, which then wait for each other
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
      for (int i = 0; i < PRODUCTS * BN / 2; ++i) accumulators[block][i] = 0;
    if (PHASED && work.k_blocks == 0) issued();
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
      multiply(sums, changes, pipe, shared, row, work, k, count, thread, barrier, begun_once, issued_once);
      promotion.add(accumulators, sums, k);
    }
  }
}

// One warpgroup none of whose rows belong to the tile.
DEVICE void skip(Pipeline& pipe, const Work& work, int thread, int barrier) {
  for (int k = 0; k < PAIRS * work.k_blocks; ++k) {
    if (pipe.stage % SLICED == slice_group()) {
      mbarrier_wait(pipe.full_barrier(), pipe.phase);
      if constexpr (RELEASING_WARPS == 1) bar_sync(barrier, 128);  // a warp two rounds behind would wait for ever
      release(pipe.empty_barrier(), thread);
    }
    pipe.advance();
  }
}
