// Multiplies what the pipeline (tiles.cuh) holds by wgmma, both operands in shared memory.

static_assert(A_MATRICES == 1 || B_MATRICES == 1);

using ProductSums = Acc[B_MATRICES * BN / 2];  // of a block of 64 rows, by one A

// The same of what drain_each.cuh multiplies of A.
struct StageOfA {
  u32 offset;
  OperandA::Descriptor a{0};

  DEVICE StageOfA(int row, int) : offset(OperandA::row_offset(row)) {}

  template <int BLOCK>
  DEVICE void begin(u32 tile) {
    a = OperandA::Descriptor(tile + offset);
  }

  template <int BLOCK>
  DEVICE u64 at(int slice) const {
    return a.at(OperandA::slice_offset(slice) + OperandA::row_offset(BLOCK * 64));
  }

  DEVICE static void finish(Accumulators&) {}
};

// One warpgroup: sums [M_BLOCKS][64 x PRODUCTS * BN] of the tile's rows from `row` on, over `count` of its k blocks,
// from `first` on; of none, which a phase without taps has, sums are undefined. `begun` is called early, beside the
// first of them, `issued` when all of them are multiplying.
template <typename Begun, typename Issued>
DEVICE void multiply(Accumulators& sums, Changes& changes, Pipeline& pipe, SharedTiles shared, int row,
                     const Work& work, int first, int count, int thread, int barrier, Begun begun, Issued issued) {
  u32 previous = 0, offset = OperandA::row_offset(row);
  for (int k = 0; k < count; ++k) {
    mbarrier_wait(pipe.full_barrier(), pipe.phase);
    if constexpr (RAGGED_K)
      clear_block(shared, pipe.stage, row, work, PAIRS > 1 ? (first + k) % work.k_blocks : first + k, thread, barrier);
    if constexpr (COPIERS > 0) fence_proxy_async();
    if constexpr (Changes::EVER) changes.block(shared.b(pipe.stage), barrier);
    OperandA::Descriptor a(shared.a(pipe.stage) + offset);
    OperandB::Descriptor b(shared.b(pipe.stage));
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < BK * A_BITS / 256; ++slice) {
#pragma unroll
      for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
        for (int matrix = 0; matrix < A_MATRICES; ++matrix)
          wgmma(reinterpret_cast<ProductSums&>(sums[block][matrix * (B_MATRICES * BN / 2)]),
                a.at(OperandA::slice_offset(slice) + OperandA::row_offset(matrix * BM + block * 64)),
                b.at(OperandB::slice_offset(slice)), (k | slice) != 0);
    }
    wgmma_commit_group();
    if (k > 0) {  // the group before this one is done, so its stage is free
      wgmma_wait_group<1>();
      release(previous, thread);
    }
    previous = pipe.empty_barrier();
    pipe.advance();
    if (k == min(2, count - 1)) begun();
  }
  issued();
  wgmma_wait_group<0>();
#pragma unroll
  for (int block = 0; block < M_BLOCKS; ++block) wgmma_done(sums[block]);
  if (!PHASED || count > 0) release(previous, thread);
}
