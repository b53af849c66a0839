// STAGES blocks of k in shared memory, which the first warp loads by TMA and all warps read. A stage is a tile of a and
// one of each b. No warp waits for all others: a stage has a full barrier (its bytes have landed) and an empty one (all
// warps have read it), and stages follow each other from tile to tile.

constexpr int STAGE_BYTES = TileA::BYTES + PRODUCTS * TileB::BYTES;
constexpr int WARPS = THREADS / 32;

struct Loads {
  ViewA::Source<1> source_a;
  ViewB::Source<PRODUCTS> source_b;
  int m, n, k;             // of the block that is loaded next
  int matrix_a, matrix_b;  // of each array
  int blocks;              // that are left to load

  DEVICE void begin_a(const ViewA::Source<1>& source, const Work& work, int matrix, int) {
    source_a = source;
    blocks = work.k_blocks;
    m = work.m, k = work.k;
    matrix_a = matrix;
  }

  DEVICE void begin_b(const ViewB::Source<PRODUCTS>& source, const Work& work, int matrix, int) {
    source_b = source;
    n = work.n, matrix_b = matrix;
  }

  // One thread.
  DEVICE void load(u32 stage, u32 barrier) const {
    mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
    TileA::load(stage, source_a.maps[0], barrier, m, k, matrix_a);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
      TileB::load(stage + TileA::BYTES + p * TileB::BYTES, source_b.maps[p], barrier, n, k, matrix_b);
  }
};

struct Feed {
  // Which stage is next, and the parity of how often all of them were.
  struct Position {
    int stage = 0;
    u32 phase = 0;

    DEVICE void advance() {
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
  };

  u32 base, full, empty;  // of the stages, and their first barriers
  u32 read;               // the stage that is read next
  Position reads, writes;
  bool writer;

  DEVICE explicit Feed(u32 base)
      : base(base),
        full(base + STAGES * STAGE_BYTES + WARPS_M * WARPS_N * D_BUFFER_BYTES),
        empty(full + STAGES * 8),
        read(base),
        writer(uniform(threadIdx.x / 32) == 0) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(full + stage * 8, 1);
        mbarrier_init(empty + stage * 8, WARPS);
      }
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  DEVICE void load(Loads& loads) {
    if (!writer || loads.blocks == 0) return;
    mbarrier_wait(empty + writes.stage * 8, writes.phase ^ 1);
    if (elect()) loads.load(base + writes.stage * STAGE_BYTES, full + writes.stage * 8);
    __syncwarp();
    loads.k += BK;
    --loads.blocks;
    writes.advance();
  }

  // Loads the first blocks of a tile.
  DEVICE void begin(Loads& loads) {
    if constexpr (WARPS_K > 1) fence_proxy_async();  // sums were where stages are
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) load(loads);
  }

  DEVICE void wait(const Loads&) const { mbarrier_wait(full + reads.stage * 8, reads.phase); }

  // Beside slice S of a block: in the middle, when the other warps are likely to have read the block before it.
  template <int S, int TURNS>
  DEVICE void beside(Loads& loads) {
    if constexpr (S == TURNS) load(loads);
  }

  // Goes on to the next block, when this one's last fragments are read.
  DEVICE void next(Loads& loads, bool last) {
    __syncwarp();
    if (elect()) mbarrier_arrive(empty + reads.stage * 8);
    reads.advance();
    read = base + reads.stage * STAGE_BYTES;
    if (!last) wait(loads);
  }
};
