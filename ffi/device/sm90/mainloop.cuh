// Drains the pipeline (tiles.cuh) by wgmma: multiply.cuh, or multiply_registers.cuh, does so for some k blocks.

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// Calls a function with the constants 0 to COUNT - 1.
template <int COUNT, int I = 0, typename F>
DEVICE void each(F f) {
  if constexpr (I < COUNT) {
    f(Constant<I>());
    each<COUNT, I + 1>(f);
  }
}

// One warpgroup: accumulators, over all k blocks, the sums of each of which are promoted. They are made in parts, of 64
// rows and PART_COLUMNS, one after the other. With two SUM_BUFFERS a part is added while the next is multiplied; with
// one, while another warpgroup multiplies, and tiles may be larger.
template <int BLOCKS, typename Promotes, typename Begun, typename Issued>
DEVICE void drain_each(Accumulators& accumulators, const Promotes& promotion, Pipeline& pipe, SharedTiles shared,
                       int row, const Work& work, int thread, int barrier, Begun begun, Issued issued) {
  constexpr int PARTS = BLOCKS * COLUMN_PARTS, BUFFERS = PARTS < SUM_BUFFERS ? PARTS : SUM_BUFFERS;
  constexpr int SLICES_OF_STAGE = BK * B_BITS / 256;
  static_assert(BUFFERS <= 2 && PARTS % BUFFERS == 0 && PAIRS == 1);
  PartSums sums[BUFFERS] = {};
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
    for (int i = 0; i < PRODUCTS * BN / 2; ++i) accumulators[block][i] = 0;
  StageOfA a(row, thread);
  auto issue = [&](auto part) {
    constexpr int PART = decltype(part)::value, BLOCK = PART / COLUMN_PARTS;
    if constexpr (PART % COLUMN_PARTS == 0) a.template begin<BLOCK>(shared.a(pipe.stage));
    OperandB::Descriptor b(shared.b(pipe.stage));
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < SLICES_OF_STAGE; ++slice)
      wgmma(sums[PART % BUFFERS], a.template at<BLOCK>(slice),
            b.at(OperandB::slice_offset(slice) + OperandB::row_offset(PART % COLUMN_PARTS * PART_COLUMNS)), slice != 0);
    wgmma_commit_group();
  };
  // The factors of a part of a block in a stage are read before another is multiplied: a warp that waited for them
  // between two wgmmas would let those of the other warpgroup in, and both would be done, and add, at the same time.
  auto factors = [&](auto part, int stage) {
    constexpr int PART = decltype(part)::value;
    return promotion.template factors<PART / COLUMN_PARTS, PART % COLUMN_PARTS>(shared.slot(stage, Promotes::BYTES));
  };
  // The part, when at most PENDING later ones are being multiplied.
  auto add = [&](auto part, auto pending, int stage, const auto& factors) {
    constexpr int PART = decltype(part)::value, COLUMNS = PART % COLUMN_PARTS;
    u32 slot = shared.slot(stage, Promotes::BYTES);
    wgmma_wait_group<decltype(pending)::value>();
    wgmma_done(sums[PART % BUFFERS]);
    if constexpr (PART == PARTS - 1 && !Promotes::BY_COLUMN) release(pipe.empty_barrier(stage), thread);
    promotion.template add<COLUMNS>(accumulators[PART / COLUMN_PARTS], sums[PART % BUFFERS], factors, slot);
    if constexpr (PART == PARTS - 1 && Promotes::BY_COLUMN) release(pipe.empty_barrier(stage), thread);
  };
  auto run = [&](auto blocks, int k) {  // so many, from k on
    constexpr int STEPS = decltype(blocks)::value * PARTS;
    int before = 0;  // the stage
    each<STEPS>([&](auto step) {
      constexpr int STEP = decltype(step)::value, PART = STEP % PARTS;
      if constexpr (PART == 0) {
        mbarrier_wait(pipe.full_barrier(), pipe.phase);
        if constexpr (RAGGED_K) clear_block(shared, pipe.stage, row, work, k + STEP / PARTS, thread, barrier);
        if constexpr (COPIERS > 0) fence_proxy_async();
      }
      bool last = STEP == STEPS - 1 && k + decltype(blocks)::value == work.k_blocks;
      if constexpr (STEP >= BUFFERS - 1) {
        Constant<(STEP + 1 - BUFFERS) % PARTS> done;
        int stage = BUFFERS == 1 || PART > 0 ? pipe.stage : before;
        auto by = factors(done, stage);
        issue(Constant<PART>());
        if (last) issued();
        add(done, Constant<BUFFERS - 1>(), stage, by);
      } else {
        issue(Constant<PART>());
        if (last) issued();
      }
      if constexpr (PART == PARTS - 1) {
        before = pipe.stage;
        pipe.advance();
      }
    });
    if constexpr (BUFFERS == 2) {
      Constant<PARTS - 1> done;
      add(done, Constant<0>(), before, factors(done, before));
    }
    if (k == 0) begun();
  };
  // A loop at whose end a part were still being multiplied would make the compiler wait for each wgmma.
  int k = 0;
  if constexpr (BUFFERS == 2)
#pragma unroll 1
    for (; k + GROUP <= work.k_blocks; k += GROUP) run(Constant<GROUP>(), k);
#pragma unroll 1
  for (; k < work.k_blocks; ++k) run(Constant<1>(), k);
  StageOfA::finish(accumulators);
}

// One warpgroup: accumulators, over all k blocks and pairs of terms. Where sums are promoted, accumulators are sums of
// sums.
template <int BLOCKS, typename Promotes, typename Begun, typename Issued>
DEVICE void drain(Accumulators& accumulators, Promotes& promotion, Changes& changes, Pipeline& pipe, SharedTiles shared,
                  int row, const Work& work, int thread, int barrier, Begun begun, Issued issued) {
  static_assert(Promotes::EVER || PAIRS == 1);
  if constexpr (Promotes::BYTES > 0) promotion.begin(work, row, thread);
  static_assert(!Changes::EVER || !Promotes::EVER);
  if constexpr (Promotes::EACH) {
    drain_each<BLOCKS>(accumulators, promotion, pipe, shared, row, work, thread, barrier, begun, issued);
  } else if constexpr (!Promotes::EVER) {
    multiply<BLOCKS>(accumulators, changes, pipe, shared, row, work, 0, work.k_blocks, thread, barrier, begun, issued);
  } else {
    Accumulators sums = {};  // undefined, few of them would be moved between wgmmas, which then wait for each other
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
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
      multiply<BLOCKS>(sums, changes, pipe, shared, row, work, k, count, thread, barrier, begun_once, issued_once);
      promotion.template add<BLOCKS>(accumulators, sums, k);
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
