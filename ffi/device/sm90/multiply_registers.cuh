// Multiplies what the pipeline (tiles.cuh) holds by wgmma, A from registers, where its elements are decoded
// (weights.cuh): while the tensor cores multiply a step of SLICES, the next one is decoded to other registers.

// One warpgroup: what multiply in multiply.cuh computes, of the k blocks of its group (sliced.cuh). Sums of columns
// beyond COLUMNS are zero.
template <int COLUMNS = BN, typename Begun, typename Issued>
DEVICE void multiply(Accumulators& sums, Changes& changes, Pipeline& all, SharedTiles shared, int row, const Work&, int,
                     int k_blocks, int thread, int barrier, Begun begun, Issued issued) {
  static_assert(SLICED == 1 || !Changes::EVER);
  using ProductSums = Acc[B_MATRICES * COLUMNS / 2];  // of a block of 64 rows, by one A
  Weights<A_K_MAJOR> weights(row, thread);
  Words words;
  Factors factors[A_MATRICES], of_sums[A_MATRICES];
  Fragments fragments;
  Accumulators own = {};  // sums of steps that share a factor; undefined, they would be moved between wgmmas
  Accumulators& parts = BY_SUMS ? own : sums;
  // Of the matrix and the slices of a step.
  auto load = [&](u32 tile, int step) {
    int matrix = step % A_MATRICES, first = step / A_MATRICES * SLICES;
    weights.load(words, tile + matrix * (OperandA::BYTES / A_MATRICES), first);
    weights.load(factors[matrix], tile + OperandA::BYTES + matrix * FACTORS_EACH, first);
  };
  u32 previous = 0;
#pragma unroll
  for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
    for (int i = 0; i < PRODUCTS * BN / 2; ++i) sums[block][i] = 0;  // undefined, wgmmas would wait for each other
  Pipeline pipe = all;
  int first = first_slice(slice_group(), all.stage), count = begin_slices(pipe, all, first, k_blocks);
  if (SLICED == 1 || count > 0) {
    mbarrier_wait(pipe.full_barrier(), pipe.phase);
    load(shared.a(pipe.stage), 0);
    if constexpr (Changes::EVER) changes.block(shared.b(pipe.stage), barrier);
    weights.get(fragments, words, factors[0]);
  } else {
    begun();
  }
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    u32 tile = shared.a(pipe.stage), empty = pipe.empty_barrier();
    OperandB::Descriptor b(shared.b(pipe.stage));
    pipe.advance_by<SLICED>();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step % SHARING < A_MATRICES) of_sums[step % A_MATRICES] = factors[step % A_MATRICES];
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
        for (int block = 0; block < M_BLOCKS; ++block)
          wgmma(reinterpret_cast<ProductSums&>(parts[block][step % A_MATRICES * (B_MATRICES * BN / 2)]),
                fragments[block][slice], b.at(OperandB::slice_offset(step / A_MATRICES * SLICES + slice)),
                !BY_SUMS || step % SHARING >= A_MATRICES || slice > 0);
      wgmma_commit_group();
      if (step + 1 < STEPS) {
        load(tile, step + 1);
      } else if (k + 1 < count) {
        mbarrier_wait(pipe.full_barrier(), pipe.phase);
        load(shared.a(pipe.stage), 0);
        if constexpr (Changes::EVER) changes.block(shared.b(pipe.stage), barrier);
      }
      wgmma_wait_group<1>();  // the registers of the step before are free
      if (step == 0 && k > 0) release(previous, thread);
      // After the last one of nothing new: a branch would move the registers.
      weights.get(fragments, words, factors[(step + 1) % STEPS % A_MATRICES]);
      if (BY_SUMS && step % SHARING == SHARING - 1) {
        wgmma_wait_group<0>();
        add_scaled<COLUMNS>(sums, parts, of_sums);
      }
    }
    previous = empty;
    if (k == min(2, count - 1)) begun();
  }
  issued();
  wgmma_wait_group<0>();
#pragma unroll
  for (int block = 0; block < M_BLOCKS; ++block) wgmma_done(sums[block]);
  if (SLICED == 1 || count > 0) release(previous, thread);
  if constexpr (SLICED == 1) all = pipe;
  bool whole = add_slices(sums, shared, all, first);
  if (!A_K_MAJOR && whole) put_in_order(sums);
}
