// What drain_each.cuh does, by mma.sync (multiply_warps.cuh): weights in 4 bits beside float8, both of which are exact
// in f16. A k block is a stage, which has the slot of its scales.

static_assert(BK == 16 * SLICES * SHARING && COLUMN_PARTS == 1);

template <int BLOCKS, typename Promotes, typename Begun, typename Issued>
DEVICE void drain_each(Accumulators& accumulators, const Promotes& promotion, Pipeline& pipe, SharedTiles shared,
                       int row, const Work& work, int thread, int, Begun begun, Issued issued) {
  auto promote = [&](Accumulators& parts, const Factors(&)[A_MATRICES], int stage) {
    u32 slot = shared.slot(stage, Promotes::BYTES);
    each<BLOCKS>([&](auto block) {
      constexpr int BLOCK = decltype(block)::value;
      promotion.template add<0>(accumulators[BLOCK], parts[BLOCK], promotion.template factors<BLOCK, 0>(slot), slot);
    });
  };
  multiply_by_warps<BLOCKS, true>(accumulators, pipe, shared, row, work.k_blocks, thread, promote, begun, issued);
}
