// Drains the pipeline (tiles.cuh) by wgmma where the sums of each k block are promoted, in parts.

// One warpgroup: accumulators, over all k blocks, the sums of each of which are promoted. They are made in parts, of 64
// rows and PART_COLUMNS, one after the other. With two SUM_BUFFERS a part is added while the next is multiplied; with
// one, while another warpgroup multiplies, and tiles may be larger. Of slices (sliced.cuh) each has k blocks of its
// own.
template <typename Promotes, typename Begun, typename Issued>
DEVICE void drain_each(Accumulators& accumulators, const Promotes& promotion, Pipeline& all, SharedTiles shared,
                       int row, const Work& work, int thread, int barrier, Begun begun, Issued issued) {
  constexpr int PARTS = M_BLOCKS * COLUMN_PARTS, BUFFERS = PARTS < SUM_BUFFERS ? PARTS : SUM_BUFFERS;
  constexpr int SLICES_OF_STAGE = BK * B_BITS / 256;
  static_assert(BUFFERS <= 2 && PARTS % BUFFERS == 0 && PAIRS == 1);
  PartSums sums[BUFFERS] = {};
#pragma unroll
  for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
    for (int i = 0; i < PRODUCTS * BN / 2; ++i) accumulators[block][i] = 0;
  Pipeline pipe = all;
  int first = first_slice(slice_group(), all.stage), count = begin_slices(pipe, all, first, work.k_blocks);
  if (SLICED > 1 && count == 0) begun();
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
  auto factors = [&](auto part, int stage) {
    constexpr int PART = decltype(part)::value;
    return promotion.template factors<PART / COLUMN_PARTS, PART % COLUMN_PARTS>(shared.slot(stage, Promotes::BYTES));
  };
  auto wait = [&](int k) {
    mbarrier_wait(pipe.full_barrier(), pipe.phase);
    if constexpr (RAGGED_K) clear_block(shared, pipe.stage, row, work, k, thread, barrier);
    if constexpr (COPIERS > 0) fence_proxy_async();
  };
  // The part, when at most PENDING later ones are being multiplied.
  auto add = [&](auto part, auto pending, int stage, const auto& factors) {
    constexpr int PART = decltype(part)::value, COLUMNS = PART % COLUMN_PARTS;
    wgmma_wait_group<decltype(pending)::value>();
    wgmma_done(sums[PART % BUFFERS]);
    auto columns = promotion.template columns<COLUMNS>(shared.slot(stage, Promotes::BYTES));
    if constexpr (PART == PARTS - 1) release(pipe.empty_barrier(stage), thread);
    promotion.template add<COLUMNS>(accumulators[PART / COLUMN_PARTS], sums[PART % BUFFERS], factors, columns);
  };
  if constexpr (BUFFERS == 1) {
    // What a part needs is waited for and read while the one before it is multiplied: between them is no more than the
    // addition, which must not take longer than the other warpgroup's part is multiplied.
    typename Promotes::Factors by;
    if (count > 0) {
      wait(0);
      by = factors(Constant<0>(), pipe.stage);
    }
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      each<PARTS>([&](auto part) {
        constexpr int PART = decltype(part)::value;
        int stage = pipe.stage;
        issue(part);
        typename Promotes::Factors next = by;
        if constexpr (PART < PARTS - 1) {
          next = factors(Constant<PART + 1>(), stage);
        } else {
          pipe.advance_by<SLICED>();
          if (k + 1 < count) {
            wait(k + 1);
            next = factors(Constant<0>(), pipe.stage);
          } else {
            issued();
          }
        }
        add(part, Constant<0>(), stage, by);
        by = next;
      });
      if (k == 0) begun();
    }
  } else {
    auto run = [&](auto blocks, int k) {  // so many, from k on
      constexpr int STEPS = decltype(blocks)::value * PARTS;
      int before = 0;  // the stage
      each<STEPS>([&](auto step) {
        constexpr int STEP = decltype(step)::value, PART = STEP % PARTS;
        if constexpr (PART == 0) wait(k + STEP / PARTS);
        bool last = STEP == STEPS - 1 && k + decltype(blocks)::value == count;
        if constexpr (STEP > 0) {
          Constant<(STEP - 1) % PARTS> done;
          int stage = PART > 0 ? pipe.stage : before;
          auto by = factors(done, stage);
          issue(Constant<PART>());
          if (last) issued();
          add(done, Constant<1>(), stage, by);
        } else {
          issue(Constant<PART>());
          if (last) issued();
        }
        if constexpr (PART == PARTS - 1) {
          before = pipe.stage;
          pipe.advance_by<SLICED>();
        }
      });
      Constant<PARTS - 1> done;
      add(done, Constant<0>(), before, factors(done, before));
      if (k == 0) begun();
    };
    // A loop at whose end a part were still being multiplied would make the compiler wait for each wgmma.
    int k = 0;
#pragma unroll 1
    for (; k + GROUP <= count; k += GROUP) run(Constant<GROUP>(), k);
#pragma unroll 1
    for (; k < count; ++k) run(Constant<1>(), k);
  }
  if constexpr (SLICED == 1) all = pipe;
  if (add_slices(accumulators, shared, all, first)) StageOfA::finish(accumulators);
}
