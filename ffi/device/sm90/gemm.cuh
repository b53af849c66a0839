// The GEMM of sm_90a, dense, batched and grouped: d0[z], d1[z], ... = epilogue(a[z] @ b0[z], a[z] @ b1[z], ...;
// operands), accumulating in f32 or, of integers, in 32 bits, persistent, warp-specialised. Plain products are the case
// of one b, one d, and the identity.
//
// One producer warpgroup (producer.cuh: one thread of it issues TMA) and CONSUMERS warpgroups that multiply.
//   cooperative: all consumers share each tile, BM / CONSUMERS rows each.
//   sliced:      the same of two pairs of consumers, or three or four, each of which takes other k blocks (sliced.cuh).
//   ping-pong:   two consumers take whole tiles in turn, so that one's epilogue runs beside the other's mainloop.
// A cluster of CLUSTER_M x CLUSTER_N CTAs computes neighbouring tiles and multicasts the operand tile they share.
// A cluster takes work items in turns, or as it comes to them: turns.cuh, counter.cuh.
// STREAM_K: tiles of what would be an unfilled last wave are computed in parts (stream_scheduler.cuh).
// CLUSTER_K CTAs that share a tile, and splits, divide the contraction (cluster_sum.cuh): such a CTA has one tile.
// RAGGED_M, RAGGED_N, RAGGED_K: the rows, the columns or the contraction are divided in groups (group_scheduler.cuh).
// A tile takes as long whatever part of it is its group's: blocks are at the same k at the same time, and find in L2
// what others have read. One that left out rows that are not would be ahead of the others for all that is left to do.
//
// PARAMETERS and what is made of them: cutjax/kernels/sm90/arguments.py.
//
// Preconditions (checked in cutjax/kernels/sm90/kernel.py): k >= 1; rows of a and b start 16-byte aligned; grid.x a
// multiple of the cluster; a is K-major where rows are divided, b where columns are, and a and b are alike where the
// contraction is.

constexpr int THREADS = 128 * (1 + CONSUMERS);
constexpr int CTAS = CLUSTER * CLUSTER_K;  // of a cluster; CLUSTER is those that load for each other
constexpr int SLOT_COPIERS = Promotion::COPIERS;
constexpr bool EVEN_DEPTH = !GROUPED && !STREAM_K && !PHASED;  // all work items have as many k blocks

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  const SourceA source_a = SOURCE_A;
  const SourceB source_b = SOURCE_B;
  const TensorMap* const map_d[OUTPUTS] = MAPS_D;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedTiles shared{pinned(shared_address(shared_memory))};
  u32 staging = shared.base + STAGES * STAGE_BYTES;
  u32 barriers = shared.slot(STAGES, Promotion::BYTES), operand_barriers = barriers + STAGES * 16;
  u32 items_base = operand_barriers + (EXTRAS_BYTES > 0 ? STAGERS * STORE_BUFFERS * 8 : 0);
  Pipeline pipe{barriers, barriers + STAGES * 8, 0, 0};

  int warpgroup = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
  u32 rank = CTAS > 1 ? cluster_ctarank() : 0;
  u32 rank_m = CLUSTER_M > 1 ? rank : 0, rank_n = CLUSTER_N > 1 ? rank : 0, rank_k = CLUSTER_K > 1 ? rank : 0;
  if (threadIdx.x == 0) {
    source_a.prefetch();
    source_b.prefetch();
    for (const TensorMap* map : map_d)
      if (map != nullptr) prefetch_tensormap(map);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(pipe.full + stage * 8, FULL_ARRIVALS + Promotion::ARRIVALS);
      mbarrier_init(pipe.empty + stage * 8, CONSUMERS_PER_TILE * CLUSTER * RELEASING_WARPS);
    }
    if constexpr (EXTRAS_BYTES > 0)
      for (int buffer = 0; buffer < STAGERS * STORE_BUFFERS; ++buffer) mbarrier_init(operand_barriers + buffer * 8, 1);
    Items::init(items_base);
    fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) barrier_cluster_relaxed();  // the fence of the mbarriers' initial state is above

  // With this one consumers spill less than with one of their own, but for that of parts of tiles, which is larger, and
  // beside mma.sync.
  Scheduler early(m, n, k, raster, batch, SPLITS, batch1, batch2 SCHEDULER_ARGUMENTS);
  int step = gridDim.x / CTAS, k_blocks = PAIRS * part_blocks((k + BK - 1) / BK, SPLITS);
  int matrices = batch * (RAGGED_K ? batch2 : 1);  // of a split's results
  auto work_of = [&](Scheduler& scheduler, int index) {
    Work work = scheduler.work(index, rank_m, rank_n);
    ViewA::limit(source_a, work);
    return part(work, rank_k, SPLITS, matrices);
  };

  if (warpgroup == 0) {
    if constexpr (CONSUMERS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
    auto each_tile = [&](auto fill_tile) {
      Scheduler scheduler(m, n, k, raster, batch, SPLITS, batch1, batch2 SCHEDULER_ARGUMENTS);
      Producing items(items_base, rank, step ITEMS_ARGUMENTS);
      for (int index = items.first(); scheduler.has(index); index = items.after(index)) {
        Work work = work_of(scheduler, index);
        BatchIndex i(work.batch, batch1, batch2);
        fill_tile(work, i(a_step0, a_step1, a_step2), i(b_step0, b_step1, b_step2));
      }
      items.end();
    };
    if (thread < PRODUCERS) {
      each_tile([&](const Work& work, int matrix_a, int matrix_b) {
        fill(pipe, shared, source_a, source_b, work, m, matrix_a, matrix_b, rank_m, rank_n);
      });
      LoaderA::end();
      if constexpr (CLUSTER > 1) wait_for_readers(pipe);
    } else if (thread < PRODUCERS + SLOT_COPIERS) {
      Promotion promotion{PROMOTION_ARGUMENTS};
      each_tile([&](const Work& work, int matrix_a, int matrix_b) {
        fill_slots(pipe, shared, promotion, work, m, n, matrix_a, matrix_b);
      });
      cp_async_wait_all();
    }
    if constexpr (CLUSTER_K > 1) share_nothing();
  } else {
    if constexpr (CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
    int consumer = warpgroup - 1;
    Scheduler late(m, n, k, raster, batch, SPLITS, batch1, batch2 SCHEDULER_ARGUMENTS);
    Scheduler scheduler = STREAM_K || BY_WARPS ? late : early;
    Epilogue epilogue{staging + consumer * STORE_BUFFERS * D_BUFFER_BYTES,
                      operand_barriers + consumer * STORE_BUFFERS * 8, EPILOGUE_BARRIER + consumer, thread};
    Extras extras(m, n EXTRAS_ARGUMENTS);
    Partials partials(m, n PARTIALS_ARGUMENTS);
    Rows rows_d{m, n ROWS_ARGUMENTS};
    Promotion promotion{PROMOTION_ARGUMENTS};
    Changes changes{Told{CHANGES_ARGUMENTS}};
    Accumulators accumulators;
    int first_row = PING_PONG ? 0 : consumer % STORERS * ROWS_PER_CONSUMER;
    Items items(items_base, rank, step ITEMS_ARGUMENTS);
    int turn = 0;
    if (SLICED > 1 && stores_tile(consumer / STORERS, SLICED - 1)) sums_are_read(0);
    if constexpr (PING_PONG) {
      // A parity wait cannot tell a stage two wraps away from now, so the mainloops take turns explicitly.
      if (consumer == 1) bar_arrive(TURN_BARRIER, 256);
      if constexpr (EVEN_DEPTH) {  // the other's tiles are as deep as ours: no need to look at them
        if (consumer == 1) pipe.advance(k_blocks);
        items.alternate(consumer);
      }
    }
    for (int index = items.first(); scheduler.has(index); index = items.after(index)) {
      Work work = work_of(scheduler, index);
      if constexpr (PING_PONG && !EVEN_DEPTH) {
        turn ^= 1;
        if (turn == consumer) {
          pipe.advance(PAIRS * work.k_blocks);
          continue;
        }
      }
      BatchIndex i(work.batch, batch1, batch2);
      int rows = work.rows - first_row;  // this warpgroup's, which may be none
      bool none = (RAGGED_M || RAGGED_N) && (work.k_blocks == 0 || (RAGGED_M ? work.rows : work.columns) <= 0);
      if (!none) changes.begin(work, first_row, thread);
      if constexpr (PING_PONG) bar_sync(TURN_BARRIER + consumer, 256);
      bool last = stores_tile(consumer / STORERS, pipe.tiles);  // takes the sums of all slices
      bool stores = (CLUSTER_K == 1 || rank < OWNERS) && last;
      int column = work.n + (CLUSTER_K > 1 ? rank * EPILOGUE_COLUMNS : 0);
      auto begin = [&] { epilogue.begin(extras, work.m + first_row, column, work.rows - first_row, i); };
      auto begun = [&] {
        if (stores && (!STREAM_K || work.parts == 1)) begin();
      };
      auto issued = [&] {
        if constexpr (PING_PONG) bar_arrive(TURN_BARRIER + (consumer ^ 1), 256);
      };
      if constexpr (RAGGED_N) rows_d.end = min(n, work.n + work.columns);
      if (none) {
        skip(pipe, work, thread, epilogue.barrier);
        issued();
        if (work.k_blocks == 0 && rows > 0 && stores) {  // of no group: zero, whatever the epilogue
          int first = work.m + first_row, count = min(rows, ROWS_PER_CONSUMER);
          rows_d.clear(work.n, first, work.result, count, thread);
          partials.begin_tile(work.result, first + count);
          partials.clear(first, work.n, thread);
        }
        continue;
      }
      if (FEW_COLUMNS < BN && work.columns <= FEW_COLUMNS) {
        drain<FEW_COLUMNS>(accumulators, promotion, changes, pipe, shared, first_row, work, thread, epilogue.barrier,
                           begun, issued);
      } else {
        drain(accumulators, promotion, changes, pipe, shared, first_row, work, thread, epilogue.barrier, begun, issued);
      }
      if constexpr (PING_PONG && EVEN_DEPTH) pipe.advance(k_blocks);
      if (SLICED > 1 && !last) {
        if constexpr (CLUSTER_K == 1) continue;
        share_nothing();
        break;
      }
      if (STREAM_K && work.parts > 1) {
        if (!join(accumulators, scheduler, work, rank, first_row, thread, epilogue.barrier)) continue;
        begin();
      }
      Acc sums[M_BLOCKS][PRODUCTS * EPILOGUE_COLUMNS / 2];
      const auto& values = share(accumulators, sums, shared.base, rank, TURN_BARRIER);
      if (!stores) break;
      extras.begin_tile(i, work.result);
      partials.begin_tile(work.result, RAGGED_M ? work.m + work.rows : m);
      epilogue.store(values, extras, partials, map_d, rows_d, work.m + first_row, column, rows, work.columns, RESULT, i,
                     work.k_blocks == 0);
      if constexpr (CLUSTER_K > 1) break;  // the only one
    }
    epilogue.wait_for_stores();
  }
  if constexpr (CLUSTER_K > 1) wait_cluster();
}
