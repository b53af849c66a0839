// Accumulators to memory, warp by warp: 16 rows of D_CHUNK columns at a time are computed, staged in the warp's own
// part of shared memory and stored in whole rows. The generated text is that of every family
// (cutjax/kernels/epilogue_text.py); nothing here is loaded or stored by TMA.

constexpr int CHUNKS = WN / D_CHUNK;

// Adds up, in the warps of the first slice, what those along k have, in their order. The stages take it.
DEVICE void add_slices(Accumulators& d, u32 stages, const Warp& warp) {
  if constexpr (WARPS_K > 1 && !SLIM) {
    constexpr int WORDS_EACH = sizeof(Accumulators) / 4, OTHERS = WARPS_M * WARPS_N * 32;
    static_assert(WARPS_K == 1 || SLIM || WORDS_EACH * 4 * OTHERS <= STAGES * STAGE_BYTES,
                  "one slice's accumulators take the stages' place");
    u32 own = stages + threadIdx.x % OTHERS * 4;
    u32(&words)[WORDS_EACH] = reinterpret_cast<u32(&)[WORDS_EACH]>(d);
#pragma unroll 1
    for (int slice = 1; slice < WARPS_K; ++slice) {
      __syncthreads();
      if (warp.slice == slice) {
#pragma unroll
        for (int i = 0; i < WORDS_EACH; ++i) st_shared_u32(own + i * OTHERS * 4, words[i]);
      }
      __syncthreads();
      if (warp.slice == 0) {
        Accumulators other;
        u32(&theirs)[WORDS_EACH] = reinterpret_cast<u32(&)[WORDS_EACH]>(other);
#pragma unroll
        for (int i = 0; i < WORDS_EACH; ++i) theirs[i] = ld_shared_u32(own + i * OTHERS * 4);
        add_to(d, other);
      }
    }
    __syncthreads();
  }
}

// In 16 rows of accumulators, lane l holds, for each 8 columns j, rows l / 4 (+ 8) and columns 8 j + 2 (l % 4) (+ 1).
DEVICE void store(const Accumulators& d, Extras& extras, Partials& partials, Rows& rows_d, u32 buffer, const Warp& warp,
                  const Work& work, int n, int result) {
  int lane = threadIdx.x % 32, lane_column = lane % 4 * 2, column = work.n + warp.column;
#pragma unroll
  for (int i = 0; i < M_FRAGMENTS; ++i) {
    int rows = min(work.rows, BM) - warp.row - i * 16, y = work.m + warp.row + i * 16, row = y + lane / 4;
    if (RAGGED_M && rows <= 0) return;
#if PIXELS
    rows_d.begin_rows(y, 0);
    for (int h = 0; h < 2; ++h) extras.at[h] = rows_d.pixel_of(lane / 4 + 8 * h);
#endif
    extras.begin_rows(row);
    partials.begin_block();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      int x = column + chunk * D_CHUNK;
      if (x < n) {
        extras.begin_chunk(row, x + lane_column);
#pragma unroll
        for (int piece = 0; piece < D_CHUNK / PIECE; ++piece) {
          Acc values[PRODUCTS][PIECE / 2];
#pragma unroll
          for (int v = 0; v < PRODUCTS * PIECE / 2; ++v) {
            int p = v / (PIECE / 2), w = v % (PIECE / 2);
            values[p][w] = value_of(d[p][i][(chunk * D_CHUNK + piece * PIECE) / 8 + w / 4], w % 4);
          }
          epilogue_piece(extras, partials, values, piece, row, x + lane_column + piece * PIECE, buffer, lane);
        }
        __syncwarp();
        rows_d.store(false, buffer, x, y, result, rows, lane);
        __syncwarp();
      }
    }
    partials.end_block(row, column, lane);
  }
}
