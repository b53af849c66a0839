// The kernel: persistent blocks, each of which takes every gridDim.x-th tile and begins to load the next one before it
// stores the last.
//
// PARAMETERS and what is made of them: cutjax/kernels/mma/arguments.py. RAGGED_M, RAGGED_K: the rows, or the
// contraction, are divided in groups (group_scheduler.cuh). COLUMN_GROUPS: the columns are, in groups of COLUMNS, which
// are its batch. A launch may have the parts of several splits of k.
//
// Preconditions (checked in cutjax/kernels/mma/kernel.py): k >= 1; rows of a, b and the results begin at multiples of
// what A_UNIT, B_UNIT and the generated stores say.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(TMA ? 1024 : 128) unsigned char shared_memory[];
  u32 stages = shared_address(shared_memory);
  Warp warp;
  u32 buffer = stages + STAGES * STAGE_BYTES + threadIdx.x / 32 % (WARPS_M * WARPS_N) * D_BUFFER_BYTES;
  Pipeline pipe(stages);
  Multiplier multiplier(warp.row, warp.column);
  Promotion promotion{PROMOTION_ARGUMENTS};
  Scheduler scheduler(m, COLUMNS, k, raster, batch, SPLITS, batch1, batch2 SCHEDULER_ARGUMENTS);
  Extras extras(m, n EXTRAS_ARGUMENTS);
  Partials partials(m, n PARTIALS_ARGUMENTS);
  Rows rows_d{m, n ROWS_ARGUMENTS};
  int matrices = batch * (RAGGED_K ? batch2 : 1);  // of a split's results
  Loads loads;

  auto work_at = [&](int index) {
    Work work = part(scheduler.work(index, 0, 0), 0, SPLITS, matrices);
    if (COLUMN_GROUPS) work.n += work.batch * COLUMNS, work.result /= batch;
    return work;
  };
  auto end_of = [&](const Work& work) { return COLUMN_GROUPS ? (work.batch + 1) * COLUMNS : n; };
  auto begin = [&](const Work& work) {
    BatchIndex i(work.batch, batch1, batch2);
    int rows = RAGGED_M ? min(m, work.m + work.rows) : m;
    loads.begin_a(SOURCE_A, work, i(a_step0, a_step1, a_step2), rows);
    loads.begin_b(SOURCE_B, work, i(b_step0, b_step1, b_step2), end_of(work));
    pipe.begin(loads);
  };

  int index = blockIdx.x;
  if (!scheduler.has(index)) return;
  Work work = work_at(index);
  begin(work);
  while (true) {
    Accumulators d;
    clear(d);
    if (!RAGGED_M || work.k_blocks > 0) {
      promotion.begin(work, warp);
      pipe.run(d, loads, multiplier, promotion, warp, work.k_blocks);
    }
    add_slices(d, stages, warp);
    index += gridDim.x;
    bool more = scheduler.has(index);
    Work next = work;
    if (more) {
      next = work_at(index);
      begin(next);
    }
    if (WARPS_K == 1 || warp.slice == 0) {
      BatchIndex i(work.batch, batch1, batch2);
      if (RAGGED_M && work.k_blocks == 0) {  // of no group: zero, whatever the epilogue
        int rows = min(min(work.rows, BM) - warp.row, WM);
        rows_d.clear(work.n + warp.column, work.m + warp.row, work.result, rows, threadIdx.x % 32);
        partials.begin_tile(work.result, work.m + warp.row + rows);
        partials.clear(work.m + warp.row, work.n + warp.column, threadIdx.x % 32);
      } else {
        extras.begin_tile(i, work.result);
        partials.begin_tile(work.result, RAGGED_M ? work.m + work.rows : m);
        rows_d.n = end_of(work);
        store(d, extras, partials, rows_d, buffer, warp, work, rows_d.n, RESULT);
      }
    }
    if (!more) return;
    work = next;
  }
}
