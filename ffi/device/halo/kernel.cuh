// A convolution on sm_90a (tile.cuh): d = epilogue(windows of images @ weights; operands), f32 sums.
//
// Each block keeps the weights of its columns, all taps of them, in shared memory. CONSUMERS warpgroups have runs of
// their own, each with boxes that a thread of its own loads.
//
// PARAMETERS and what is made of them: cutjax/kernels/halo/arguments.py.

// Sums of the TAPS steps of the result that a step of the image is part of, the first one first.
using Accumulators = Acc[TAPS * BN / 2];
using Finished = Acc[BN / 2];

// One warpgroup: adds what a box is part of.
DEVICE void multiply(Accumulators& sums, const Images& images, u32 box, u32 weights) {
  constexpr u32 MODE = SPAN == 128 ? 1 : SPAN == 64 ? 2 : SPAN == 32 ? 3 : 0;
  u64 high = static_cast<u64>(static_cast<u32>(images.group_bytes) >> 4 | MODE << 30) << 32;
  u32 a2 = (box & 0x3FFFF) >> 4 | 1 << 16;
  WgmmaDescriptor<B_K_MAJOR ? SPAN : N_SPAN, B_K_MAJOR ? 16 : CHUNK * N_SPAN, 8 * (B_K_MAJOR ? SPAN : N_SPAN)> b(
      weights);
  wgmma_fence();
  int t2 = images.taps[2];
#pragma unroll 1
  do {
    u32 a1 = a2;
    int t1 = images.taps[1];
#pragma unroll 1
    do {
      u32 a0 = a1;
      int t0 = images.taps[0];
#pragma unroll 1
      do {
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice)
          wgmma(sums, high | (a0 + slice * 2), b.at(slice * (B_K_MAJOR ? 32 : 16 * N_SPAN)), 1);
        a0 += images.tap_bytes[0] >> 4;
        b.low += TAPS * BLOCK_BYTES >> 4;
      } while (--t0 > 0);
      a1 += images.tap_bytes[1] >> 4;
    } while (--t1 > 0);
    a2 += images.tap_bytes[2] >> 4;
  } while (--t2 > 0);
  wgmma_commit_group();
}

// Warp by warp: 16 rows of D_CHUNK columns are computed, staged in the warp's own buffer and stored pixel by pixel.
DEVICE void store(const Finished& sums, Extras& extras, Partials& partials, Rows& rows_d, u32 buffer, int column, int n,
                  int thread) {
  int lane = thread % 32, lane_column = lane % 4 * 2, y = thread / 32 * 16, row = y + lane / 4;
  rows_d.begin_rows(y);
#pragma unroll
  for (int h = 0; h < 2; ++h) extras.at[h] = rows_d.pixel_of(lane / 4 + 8 * h);
  extras.begin_rows(row);
  partials.begin_block();
#pragma unroll
  for (int chunk = 0; chunk < BN / D_CHUNK; ++chunk) {
    int x = column + chunk * D_CHUNK;
    if (x >= n) continue;
    extras.begin_chunk(row, x + lane_column);
#pragma unroll
    for (int piece = 0; piece < D_CHUNK / PIECE; ++piece) {
      Acc values[1][PIECE / 2];
#pragma unroll
      for (int v = 0; v < PIECE / 2; ++v) values[0][v] = sums[(chunk * D_CHUNK + piece * PIECE) / 2 + v];
      epilogue_piece(extras, partials, values, piece, row, x + lane_column + piece * PIECE, buffer, lane);
    }
    __syncwarp();
    rows_d.store(false, buffer, x, y, 0, STAGING_ROWS, lane);
    __syncwarp();
  }
  partials.end_block(row, column, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(PARAMETERS) {
  const Images images = SOURCE_A;
  const Weights weights = SOURCE_B;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  u32 boxes = pinned(shared_address(shared_memory)), kept = boxes + CONSUMERS * STAGES * images.stage_bytes;
  u32 staging = kept + weight_bytes, barriers = staging + CONSUMERS * 4 * D_BUFFER_BYTES;
  u32 weights_barrier = barriers + CONSUMERS * STAGES * 16;
  // Blocks beside each other have the same runs, each its columns of them: the grid is of equally many for all columns.
  int blocks = gridDim.x / columns, block = blockIdx.x / columns, column = blockIdx.x % columns * BN;
  if (threadIdx.x == 0) {
    prefetch_tensormap(images.map);
    prefetch_tensormap(weights.map);
    for (int barrier = 0; barrier <= CONSUMERS * STAGES * 2; ++barrier) mbarrier_init(barriers + barrier * 8, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  int warpgroup = uniform(threadIdx.x / 128), thread = threadIdx.x % 128, warp = uniform(threadIdx.x / 32);
  int consumer = warpgroup == 0 ? warp : warpgroup - 1, first = block * CONSUMERS + consumer, step = blocks * CONSUMERS;
  u32 of_consumer = barriers + consumer * STAGES * 16;
  Pipeline pipe{boxes + consumer * STAGES * images.stage_bytes, of_consumer, of_consumer + STAGES * 8};
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    int group = images.group_of(column);
    if (warp == 0 && elect()) load_weights(weights, images, kept, weights_barrier, column, group);
    if (warp < CONSUMERS && elect())
      for (int index = first; index < runs; index += step) load_boxes(images, Run(images, index), group, pipe);
    return;
  }
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  u32 buffer = staging + (consumer * 4 + thread / 32) * D_BUFFER_BYTES;
  int m = 1 << 30;  // rows are of a step: those past an edge are left out by pixels
  Extras extras(m, n EXTRAS_ARGUMENTS);
  Partials partials(m, n PARTIALS_ARGUMENTS);
  Rows rows_d{m, n ROWS_ARGUMENTS};
  extras.begin_tile(BatchIndex(0, 1, 1), 0);
  partials.begin_tile(0, m);
  int piece_bytes = images.taps[0] * images.taps[1] * images.taps[2] * TAPS * BLOCK_BYTES;
  Accumulators sums;
  Finished finished;
  bool stores = false;  // whether there is a finished step: it is stored beside the next one's wgmmas
  mbarrier_wait(weights_barrier, 0);
  for (int index = first; index < runs; index += step) {
    Run run(images, index);
#pragma unroll
    for (int i = 0; i < TAPS * BN / 2; ++i) sums[i] = 0;
    int steps = uniform(run.steps);
    for (int at = 0; at < steps; ++at) {
      for (int piece = 0; piece < images.pieces; ++piece) {
        mbarrier_wait(pipe.full_barrier(), pipe.phase);
        multiply(sums, images, pipe.boxes + pipe.stage * images.stage_bytes, kept + piece * piece_bytes);
        if (stores) store(finished, extras, partials, rows_d, buffer, column, n, thread);
        stores = false;
        wgmma_wait_group<0>();
        wgmma_done(sums);
        if (thread == 0) mbarrier_arrive(pipe.empty_barrier());
        pipe.advance();
      }
      // The first one has all its taps; the next ones move up.
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) finished[i] = sums[i];
#pragma unroll
      for (int i = 0; i < TAPS * BN / 2; ++i) sums[i] = i < (TAPS - 1) * BN / 2 ? sums[i + BN / 2] : 0;
      if (stores = at >= TAPS - 1; stores) rows_d.pixels.begin(images, run, at - (TAPS - 1));
    }
  }
  if (stores) store(finished, extras, partials, rows_d, buffer, column, n, thread);
}
