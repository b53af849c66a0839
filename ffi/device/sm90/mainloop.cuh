// Fill and drain the pipeline of STAGES tiles of A and B in shared memory: one thread fills it by TMA, warpgroups drain
// it by wgmma. Each stage has a full barrier (TMA's bytes have landed) and an empty one (its readers are done).
//
// Operand tiles in shared memory, ROWS = BM or PRODUCTS * BN:
//   K-major:  [BK/CHUNK][ROWS][CHUNK]      128-byte swizzle; one TMA box holds CHUNK of k, which are 128 bytes
//   MN-major: [ROWS/CHUNK][BK][CHUNK]      16-bit elements; swizzle span of 2*CHUNK bytes; one TMA box holds CHUNK rows
//             or columns. The last chunk may be wider than the tile: what is loaded too much costs less than a narrower
//             swizzle.
// Several b beside each other in one tile are multiplied as if they were one matrix, so a is read once.
// Operands that are sums of PARTS matrices are multiplied in PAIRS of those, one after the other, each over the whole
// contraction: those of the smallest products first.

constexpr int ROWS_PER_CONSUMER = M_BLOCKS * 64;
constexpr int CONSUMERS_PER_TILE = BM / ROWS_PER_CONSUMER;
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;

struct Pipeline {
  u32 full, empty;  // addresses of the first barriers
  int stage;
  u32 phase;

  DEVICE u32 full_barrier() const { return full + stage * 8; }
  DEVICE u32 empty_barrier() const { return empty + stage * 8; }

  DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }

  DEVICE void advance(int k_blocks) {
    int position = stage + k_blocks;
    phase ^= (position / STAGES) & 1;
    stage = position % STAGES;
  }
};

// One operand: ROWS of its m or n axis per tile, of which each of TILES matrices has an equal part, shared by SHARE
// CTAs of the cluster, each of which loads 1/SHARE of every part. Elements have SIZE bytes.
template <int ROWS, int SIZE, int TILES, bool K_MAJOR, int CHUNK, int SHARE>
struct Operand {
  static constexpr int PART = ROWS / TILES;
  static constexpr int PART_CHUNKS = (PART + CHUNK - 1) / CHUNK;
  static constexpr int SPAN = CHUNK * SIZE;
  static constexpr int BYTES = (K_MAJOR ? ROWS : TILES * PART_CHUNKS * CHUNK) * BK * SIZE;
  static_assert(K_MAJOR ? SPAN == 128 : SIZE == 2);
  static constexpr u16 MASK = (1 << SHARE) - 1;

  DEVICE static void load(u32 tile, const TensorMap* map, u32 barrier, int part, int row, int k, int batch, u32 share) {
    if constexpr (K_MAJOR) {
      int first = share * (PART / SHARE);
      for (int panel = 0; panel < BK / CHUNK; ++panel)
        box(tile + (panel * ROWS + part * PART + first) * SPAN, map, barrier, k + panel * CHUNK, row + first, batch);
    } else {
      // Whole chunks are divided among the CTAs where their number allows it, else the k rows of each chunk.
      constexpr bool BY_CHUNK = PART_CHUNKS % SHARE == 0;
      constexpr int CHUNKS = PART_CHUNKS / (BY_CHUNK ? SHARE : 1), DEPTH = BK / (BY_CHUNK ? 1 : SHARE);
      int first = BY_CHUNK ? share * CHUNKS : 0, depth = BY_CHUNK ? 0 : share * DEPTH;
      for (int chunk = first; chunk < first + CHUNKS; ++chunk)
        box(tile + ((part * PART_CHUNKS + chunk) * BK + depth) * SPAN, map, barrier, row + chunk * CHUNK, k + depth,
            batch);
    }
  }

  // Of a tile's rows from a multiple of 64 on. K-major, both offsets are ignored but that of 8 rows.
  using Descriptor = WgmmaDescriptor<SPAN, K_MAJOR ? 16 : BK * SPAN, 8 * SPAN>;

  // Bytes from a tile's begin to its row `row` (a multiple of 64), and from there to a slice of k, of 32 bytes each.
  DEVICE static u32 row_offset(int row) { return K_MAJOR ? row * SPAN : row / CHUNK * BK * SPAN; }
  DEVICE static u32 slice_offset(int slice) {
    return K_MAJOR ? slice / 4 * ROWS * SPAN + slice % 4 * 32 : slice * 16 * SPAN;
  }

  // Zeroes what an MN-major tile holds of `rows` rows or columns from `row` on, in k from `depth` on.
  DEVICE static void clear(u32 tile, int row, int rows, int depth, int thread) {
    static_assert(!K_MAJOR || !RAGGED_K);
    int span = (BK - depth) * SPAN;
    for (int chunk = row / CHUNK; chunk < (row + rows + CHUNK - 1) / CHUNK; ++chunk)
      for (int i = thread * 16; i < span; i += 128 * 16)
        st_shared_v4(tile + (chunk * BK + depth) * SPAN + i, 0, 0, 0, 0);
  }

 private:
  DEVICE static void box(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z) {
    if constexpr (SHARE > 1) {
      tma_load_multicast(destination, map, barrier, x, y, z, MASK);
    } else {
      tma_load(destination, map, barrier, x, y, z);
    }
  }
};

using OperandA = Operand<BM, A_BYTES, 1, A_K_MAJOR, 128 / A_BYTES, CLUSTER_N>;
using OperandB = Operand<PRODUCTS * BN, B_BYTES, PRODUCTS, B_K_MAJOR, B_CHUNK, CLUSTER_M>;

constexpr int STAGE_BYTES = OperandA::BYTES + OperandB::BYTES;

struct SharedTiles {
  u32 base;  // [STAGES] of A, then [STAGES] of B
  DEVICE u32 a(int stage) const { return base + stage * OperandA::BYTES; }
  DEVICE u32 b(int stage) const { return base + STAGES * OperandA::BYTES + stage * OperandB::BYTES; }
};

// Which part of a, and of b, the pairs are of.
DEVICE int part_of_a(int pair) { return PAIRS_OF_A >> 2 * pair & 3; }
DEVICE int part_of_b(int pair) { return PAIRS_OF_B >> 2 * pair & 3; }

// The map of a part: of several products, those of each part follow each other.
template <int COUNT>
DEVICE const TensorMap* of_part(const TensorMap* const (&maps)[COUNT], int part, int product = 0) {
  const TensorMap* found = maps[product];
#pragma unroll
  for (int i = 1; i < PARTS; ++i)
    if (part == i) found = maps[i * (COUNT / PARTS) + product];
  return found;
}

// One warp: loads all k blocks of a tile. What else of a tile than its group's rows is loaded ends in rows not stored.
DEVICE void fill(Pipeline& pipe, SharedTiles shared, const TensorMap* const (&map_a)[PARTS],
                 const TensorMap* const (&map_b)[PARTS * PRODUCTS], const Work& work, int batch_a, int batch_b,
                 u32 rank_m, u32 rank_n) {
#pragma unroll 1
  for (int pair = 0; pair < PAIRS; ++pair) {
    int part_a = part_of_a(pair), part_b = part_of_b(pair);
#pragma unroll 1  // unrolled, it needs more registers than a producer has
    for (int i = 0; i < work.k_blocks; ++i) {
      int k = work.k + i * BK;
      mbarrier_wait(pipe.empty_barrier(), pipe.phase ^ 1);
      if (elect()) {
        mbarrier_arrive_expect_tx(pipe.full_barrier(), STAGE_BYTES);
        OperandA::load(shared.a(pipe.stage), of_part(map_a, part_a), pipe.full_barrier(), 0, work.m, k, batch_a,
                       rank_n);
#pragma unroll
        for (int p = 0; p < PRODUCTS; ++p)
          OperandB::load(shared.b(pipe.stage), of_part(map_b, part_b, p), pipe.full_barrier(), p, work.n, k, batch_b,
                         rank_m);
      }
      __syncwarp();
      pipe.advance();
    }
  }
}

// The warp that fills: waits until no CTA of the cluster will signal a stage of this one any more, so that it may
// leave. All that they load into it has landed by then, since they have read it.
DEVICE void finish(Pipeline& pipe) {
  for (int stage = 0; stage < STAGES; ++stage) {
    mbarrier_wait(pipe.empty_barrier(), pipe.phase ^ 1);
    pipe.advance();
  }
}

// One warpgroup tells every CTA that writes this stage that it has read it.
DEVICE void release(u32 empty_barrier, int thread) {
  if constexpr (CLUSTER_M * CLUSTER_N == 1) {
    if (thread == 0) mbarrier_arrive(empty_barrier);
  } else {
    if (thread < CLUSTER_M * CLUSTER_N) mbarrier_arrive_cluster(empty_barrier, thread);
  }
}

// One warpgroup: zeroes what of a stage lies past the contraction's end, where another group's begins: 0 * NaN is NaN.
// Another warpgroup may read the same of B at the same time, having written the same zeros itself.
DEVICE void clear(SharedTiles shared, int stage, int row, int depth, int thread, int barrier) {
  OperandA::clear(shared.a(stage), row, M_BLOCKS * 64, depth, thread);
  OperandB::clear(shared.b(stage), 0, PRODUCTS * BN, depth, thread);
  fence_proxy_async();
  bar_sync(barrier, 128);
}

using Accumulators = Acc[M_BLOCKS][PRODUCTS * BN / 2];

// One warpgroup: sums [M_BLOCKS][64 x PRODUCTS * BN] of the tile's rows from `row` on, or of the first BLOCKS of them,
// over `count` of its k blocks, from `first` on, of which there is at least one. `begun` is called early, beside the
// first of them, `issued` when all of them are multiplying.
template <int BLOCKS, typename Begun, typename Issued>
DEVICE void multiply(Accumulators& sums, Pipeline& pipe, SharedTiles shared, int row, const Work& work, int first,
                     int count, int thread, int barrier, Begun begun, Issued issued) {
  u32 previous = 0, offset = OperandA::row_offset(row);
  for (int k = 0; k < count; ++k) {
    mbarrier_wait(pipe.full_barrier(), pipe.phase);
    if constexpr (RAGGED_K) {
      int depth = work.k_end - work.k - (PAIRS > 1 ? (first + k) % work.k_blocks : first + k) * BK;
      if (depth < BK) clear(shared, pipe.stage, row, depth, thread, barrier);
    }
    OperandA::Descriptor a(shared.a(pipe.stage) + offset);
    OperandB::Descriptor b(shared.b(pipe.stage));
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < BK * A_BYTES / 32; ++slice) {
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block)
        wgmma(sums[block], a.at(OperandA::slice_offset(slice) + OperandA::row_offset(block * 64)),
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
  for (int block = 0; block < BLOCKS; ++block) wgmma_done(sums[block]);
  release(previous, thread);
}

// One warpgroup: accumulators, over all k blocks and pairs of parts.
//
// Where sums are promoted, accumulators are sums of sums: of all pairs of parts but the last, and then of every
// PROMOTED_BLOCKS k blocks. Of the former, what is not finite counts as zero: a highest part was not, and says so.
template <int BLOCKS, typename Begun, typename Issued>
DEVICE void drain(Accumulators& accumulators, Pipeline& pipe, SharedTiles shared, int row, const Work& work, int thread,
                  int barrier, Begun begun, Issued issued) {
  static_assert(PROMOTED_BLOCKS > 0 || PAIRS == 1);
  if constexpr (PROMOTED_BLOCKS == 0) {
    multiply<BLOCKS>(accumulators, pipe, shared, row, work, 0, work.k_blocks, thread, barrier, begun, issued);
  } else {
    Accumulators sums = {};  // undefined, few of them would be moved between wgmmas, which then wait for each other
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
      for (int i = 0; i < PRODUCTS * BN / 2; ++i) accumulators[block][i] = 0;
    int k_blocks = PAIRS * work.k_blocks, count = PAIRS > 1 ? k_blocks - work.k_blocks : PROMOTED_BLOCKS;
#pragma unroll 1
    for (int k = 0; k < k_blocks; k += count) {
      if (k > 0 || PAIRS == 1) count = min(PROMOTED_BLOCKS, k_blocks - k);
      auto begun_once = [&] {
        if (k == 0) begun();
      };
      auto issued_once = [&] {
        if (k + count == k_blocks) issued();
      };
      multiply<BLOCKS>(sums, pipe, shared, row, work, k, count, thread, barrier, begun_once, issued_once);
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < PRODUCTS * BN / 2; ++i) {
          Acc x = sums[block][i];
          if (PAIRS > 1 && k == 0) x = (word_of(x) & 0x7f800000) == 0x7f800000 ? 0 : x;
          accumulators[block][i] += x;
        }
      }
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
