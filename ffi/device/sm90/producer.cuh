// The producer fills the pipeline: PRODUCERS threads of its warpgroup, one warp, of which one thread issues TMA, or,
// where a view is copied by threads, all of them, and one issues TMA for the other operand.
//
// Operands that are sums of TERMS matrices are multiplied in PAIRS of those, one after the other, each over the whole
// contraction: those of the smallest products first.

using LoaderA = ViewA::Loader<OperandA>;
using LoaderB = ViewB::Loader<OperandB>;
constexpr int COPIERS = LoaderA::COPIERS;
static_assert(LoaderB::COPIERS == 0, "b is loaded by TMA");
constexpr int PRODUCERS = COPIERS > 0 ? COPIERS : 32;
constexpr u32 TMA_BYTES = LoaderA::TMA_BYTES + LoaderB::TMA_BYTES;
constexpr int FULL_ARRIVALS = COPIERS + (TMA_BYTES > 0);  // on the full barrier of a stage

using SourceA = ViewA::Source<TERMS * A_MATRICES>;
using SourceB = ViewB::Source<TERMS * B_MATRICES>;

// Which term of a, and of b, the pairs are of.
DEVICE int term_of_a(int pair) { return PAIRS_OF_A >> 2 * pair & 3; }
DEVICE int term_of_b(int pair) { return PAIRS_OF_B >> 2 * pair & 3; }

// Loads all k blocks of a tile. What else of a tile than its group's rows is loaded ends in rows not stored.
//
// Tiles have as many k blocks as stages are a multiple of where an operand STAYS: a stage gets always the same of them,
// and is not filled with what it has, where tiles follow each other along the other axis.
DEVICE void fill(Pipeline& pipe, SharedTiles shared, const SourceA& source_a, const SourceB& source_b, const Work& work,
                 int m, int matrix_a, int matrix_b, u32 rank_m, u32 rank_n) {
  LoaderA a;
  LoaderB b;
  Walk walk(source_a, work);
  if (A_STAYS && work.m != pipe.m) pipe.m = work.m, pipe.filled_a = 0;
  if (B_STAYS && work.n != pipe.n) pipe.n = work.n, pipe.filled_b = 0;
  a.begin(source_a, work.m, RAGGED_M ? min(m, work.m + work.rows) : m, rank_n);
#pragma unroll 1
  for (int pair = 0; pair < PAIRS; ++pair) {
    int term_a = term_of_a(pair), term_b = term_of_b(pair);
    walk.begin(work.k, rank_n);
#pragma unroll 1  // unrolled, it needs more registers than a producer has
    for (int i = 0; i < work.k_blocks; ++i) {
      mbarrier_wait(pipe.empty_barrier(), pipe.phase ^ 1);
      const bool has_a = A_STAYS && pipe.filled_a >= STAGES, has_b = B_STAYS && pipe.filled_b >= STAGES;
      if ((PRODUCERS == 32 || uniform(threadIdx.x / 32) == 0) && elect()) {
        u32 there = (has_a ? LoaderA::TMA_BYTES : 0) + (has_b ? LoaderB::TMA_BYTES : 0);
        mbarrier_arrive_expect_tx(pipe.full_barrier(), TMA_BYTES - there);
#pragma unroll
        for (int p = 0; p < A_MATRICES && !has_a; ++p)
          a.issue(source_a, term_a, p, shared.a(pipe.stage), pipe.full_barrier(), work.m, walk, matrix_a, rank_n);
#pragma unroll
        for (int p = 0; p < B_MATRICES && !has_b; ++p)
          b.issue(source_b, term_b, p, shared.b(pipe.stage), pipe.full_barrier(), work.n, walk, matrix_b, rank_m);
      }
      pipe.filled_a += A_STAYS, pipe.filled_b += B_STAYS;
      __syncwarp();
      a.copy(source_a, shared.a(pipe.stage), pipe.full_barrier(), walk.k);
      walk.next();
      pipe.advance();
    }
  }
}

// Warps beside: what a promotion has of each stage, copied by threads; the arguments say of which tile.
template <typename Promotes, typename... Arguments>
DEVICE void fill_slots(Pipeline& pipe, SharedTiles shared, Promotes& promotion, const Work& work,
                       Arguments... arguments) {
  if constexpr (Promotes::BYTES > 0) {
    promotion.begin_copies(work, arguments...);
#pragma unroll 1
    for (int i = 0; i < work.k_blocks; ++i) {
      promotion.load(i);  // on its way while the stage is read
      mbarrier_wait(pipe.empty_barrier(), pipe.phase ^ 1);
      promotion.copy(shared.slot(pipe.stage, Promotes::BYTES), i);
      if constexpr (Promotes::COPIES) cp_async_mbarrier_arrive_noinc(pipe.full_barrier());
      if constexpr (Promotes::STORES) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(pipe.full_barrier());
      }
      pipe.advance();
    }
  }
}

// Waits until no CTA of the cluster will signal a stage of this one any more, so that it may leave. All that they load
// into it has landed by then, since they have read it.
DEVICE void wait_for_readers(Pipeline& pipe) {
  for (int stage = 0; stage < STAGES; ++stage) {
    mbarrier_wait(pipe.empty_barrier(), pipe.phase ^ 1);
    pipe.advance();
  }
}
