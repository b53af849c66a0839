// Multiplies what the pipeline (tiles.cuh) holds by mma.sync, where elements of A are decoded (weights.cuh) beside few
// columns. A warp has the rows and the accumulators that it has in a warpgroup, and waits for no other: wgmma takes as
// long for 16 columns as for more, and its warps wait for each other before and after each step.

static_assert(B_K_MAJOR && B_BITS == 16 && SLICES == 2 && RELEASING_WARPS == 4);

constexpr int COLUMN_BLOCKS = B_MATRICES * BN / 8;

using Columns = u32[COLUMN_BLOCKS][2 * SLICES];  // what ldmatrix reads of B in a step

// d += a b, of 16 rows, 8 columns and 16 of k.
DEVICE void mma(Acc* d, const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// One warpgroup: what multiply in multiply.cuh computes, of the k blocks of its group (sliced.cuh). Those that share
// factors are added up in sums of their own where factors multiply these.
template <typename Begun, typename Issued>
DEVICE void multiply(Accumulators& sums, Changes&, Pipeline& all, SharedTiles shared, int row, const Work&, int,
                     int k_blocks, int thread, int, Begun begun, Issued issued) {
  static_assert(!Changes::EVER);
  Weights<A_K_MAJOR> weights(row, thread);
  Words words[2];
  Columns columns[2];
  Factors factors[A_MATRICES];
  Accumulators own;
  Accumulators& parts = BY_SUMS ? own : sums;
  u32 column = swizzle<128>(thread % 8 * 128 + thread % 32 / 8 * 16);  // of ldmatrix, in the first 8 columns
  auto load = [&](int stage, int step, int to) {
    int matrix = step % A_MATRICES, first = step / A_MATRICES * SLICES, byte = first * 32;
    weights.load(words[to], shared.a(stage) + matrix * (OperandA::BYTES / A_MATRICES), first);
    if (matrix > 0) return;
    u32 b = shared.b(stage) + byte / 128 * (OperandB::ROWS * 128);
#pragma unroll
    for (int block = 0; block < COLUMN_BLOCKS; ++block) {
      u32(&x)[4] = columns[step / A_MATRICES % 2][block];
      ldmatrix_x4(b + block * 1024 + (column ^ byte % 128), x[0], x[1], x[2], x[3]);
    }
  };
#pragma unroll
  for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
    for (int i = 0; i < PRODUCTS * BN / 2; ++i) sums[block][i] = 0;
  Pipeline pipe = all;
  int first = first_slice(slice_group(), all.stage), count = begin_slices(pipe, all, first, k_blocks);
  if (count > 0) {
    mbarrier_wait(pipe.full_barrier(), pipe.phase);
    load(pipe.stage, 0, 0);
  } else {
    begun();
  }
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    int stage = pipe.stage;
    pipe.advance_by<SLICED>();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      int matrix = step % A_MATRICES;
      weights.load(factors[matrix], shared.a(stage) + OperandA::BYTES + matrix * FACTORS_EACH,
                   step / A_MATRICES * SLICES);
      if (step + 1 < STEPS) {
        load(stage, step + 1, (step + 1) % 2);
      } else if (k + 1 < count) {
        mbarrier_wait(pipe.full_barrier(), pipe.phase);
        load(pipe.stage, 0, 0);
      }
      Fragments fragments;
      weights.get(fragments, words[step % 2], factors[matrix]);
#pragma unroll
      for (int block = 0; block < M_BLOCKS; ++block)
        if (BY_SUMS && step % SHARING < A_MATRICES)
#pragma unroll
          for (int i = 0; i < B_MATRICES * BN / 2; ++i) parts[block][matrix * (B_MATRICES * BN / 2) + i] = 0;
#pragma unroll
      for (int i = 0; i < COLUMN_BLOCKS; ++i) {
        const u32(&b)[2 * SLICES] = columns[step / A_MATRICES % 2][i];
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
          for (int block = 0; block < M_BLOCKS; ++block)
            mma(&parts[block][matrix * (B_MATRICES * BN / 2) + 4 * i], fragments[block][slice], b[2 * slice],
                b[2 * slice + 1]);
      }
      if constexpr (BY_SUMS)
        if (step % SHARING == SHARING - 1) add_scaled(sums, parts, factors);
    }
    release(pipe.empty_barrier(stage), thread);
    if (k == min(2, count - 1)) begun();
  }
  issued();
  if constexpr (SLICED == 1) all = pipe;
  bool whole = add_slices(sums, shared, all, first);
  if (!A_K_MAJOR && whole) put_in_order(sums);
}
