// Accumulators to memory: what the epilogue makes of them is staged in shared memory in the layout TMA wants and stored
// by TMA, which clips the tile to the matrix. Generated for each kernel, by cutjax/kernels/sm90/text.py, are:
//   Extras           what it reads beside the accumulators: loaded once a tile, a row, a chunk (by TMA, of what varies
//                    along rows and columns, into the buffer where the chunk's results will be staged) or a piece
//                    (what varies along columns, from L1)
//   Partials         where results that are reductions go: one value for each 16 rows, for EPILOGUE_COLUMNS columns, or
//                    both; XLA reduces them further, in a fixed order
//   epilogue_piece   computes and stages PIECE columns of every result
//   epilogue_store   stores the staged chunk of every result, by TMA
//   Rows             stores it without, where BY_THREADS: rows in memory are of no whole units of 16 bytes, or PIXELS
//                    of images, each with a place of its own; and its first rows alone, where those below belong to
//                    another group, or its first columns: TMA clips at the matrix
// A warpgroup owns STORE_BUFFERS staging buffers of D_CHUNK columns and overlaps filling one with storing the others.

// Where operands come by TMA, a buffer that has its chunk's operands may be written. Elsewhere:
// A barrier says that a chunk is staged. It also says that the next buffer may be written again where waiting for that
// costs nothing: with buffers to spare, or with another warpgroup's mainloop to hide it. Else a barrier of its own
// does.
constexpr bool ONE_BARRIER = PING_PONG || STORE_BUFFERS > 2;

constexpr int CHUNKS = EPILOGUE_COLUMNS / D_CHUNK;  // of a block of 64 rows

struct Epilogue {
  u32 staging;  // this warpgroup's buffers
  u32 full;     // address of the first one's barrier: its operands have landed
  int barrier;  // this warpgroup's named barrier
  int thread;   // of the warpgroup
  int next = 0;
  u32 phase = 0;

  // Beside the mainloop of the tile: loads operands of as many chunks as there are buffers.
  DEVICE void begin(const Extras& extras, int m, int n, int rows, const BatchIndex& i) const {
    if (EXTRAS_BYTES == 0 || thread != 0) return;
    cp_async_bulk_wait_group_read<0>();
    int blocks = RAGGED_M ? min(M_BLOCKS, (rows + 63) / 64) : M_BLOCKS;
#pragma unroll 1
    for (int chunk = 0; chunk < min(STORE_BUFFERS, blocks * CHUNKS); ++chunk) {
      int buffer = next + chunk;
      fetch(extras, chunk, buffer < STORE_BUFFERS ? buffer : buffer - STORE_BUFFERS, m, n, i);
    }
  }

  // One thread.
  DEVICE void fetch(const Extras& extras, int chunk, int buffer, int m, int n, const BatchIndex& i) const {
    mbarrier_arrive_expect_tx(full + buffer * 8, EXTRAS_BYTES);
    extras.fetch(staging + buffer * D_BUFFER_BYTES, full + buffer * 8, n + chunk % CHUNKS * D_CHUNK,
                 m + chunk / CHUNKS * 64, i);
  }

  // In 64 rows of accumulators, lane l of warp w holds, for each 8 columns j, rows 16 w + l / 4 (+ 8) and columns
  // 8 j + 2 (l % 4) (+ 1): values 4 j + {0, 1} and, 8 rows down, {2, 3}. Where WARP_ROWS are 32, two blocks of a warp
  // are rows beside each other: two warps store each 64 rows, as four would.
  // Of the accumulators, or of zeros. So many rows, and columns, are the tile's group's.
  DEVICE void store(const Acc (&accumulators)[M_BLOCKS][PRODUCTS * EPILOGUE_COLUMNS / 2], Extras& extras,
                    Partials& partials, const TensorMap* const (&map_d)[OUTPUTS], Rows& rows_d, int m, int n, int rows,
                    int columns, int batch, const BatchIndex& i, bool zeros) {
    constexpr bool TWO = WARP_ROWS == 32;
    static_assert(!TWO || (M_BLOCKS == 2 && !RAGGED_M && !PIXELS));
    int lane_row = thread / 32 * 16 + thread % 32 / 4, lane_column = thread % 4 * 2;
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block) {
      if (RAGGED_M && rows <= block * 64) return;
      int row = m + block * 64 + lane_row;
#if PIXELS
      rows_d.begin_rows(m + block * 64 + thread / 32 * 16, batch);
#pragma unroll
      for (int h = 0; h < 2; ++h) extras.at[h] = rows_d.pixel_of(thread % 32 / 4 + 8 * h);
#endif
      if constexpr (!TWO) extras.begin_rows(row);
      partials.begin_block();
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        u32 buffer = staging + next * D_BUFFER_BYTES;
        int before = next == 0 ? STORE_BUFFERS - 1 : next - 1;
        if constexpr (EXTRAS_BYTES > 0) mbarrier_wait(full + next * 8, phase);
        if (++next == STORE_BUFFERS) {
          next = 0;
          phase ^= 1;
        }
        int column = n + chunk * D_CHUNK + lane_column;
        if constexpr (!TWO) extras.begin_chunk(row, column);
        if constexpr (!ONE_BARRIER && EXTRAS_BYTES == 0 && !PIXELS) {
          if (thread == 0) cp_async_bulk_wait_group_read<STORE_BUFFERS - 1>();
          bar_sync(barrier, 128);
        }
#pragma unroll
        for (int half = 0; half < (TWO ? 2 : 1); ++half) {
          int as = TWO ? (thread / 32 % 2 * 2 + half) * 32 + thread % 32 : thread;
          if constexpr (TWO) {
            if (thread / 64 != block) continue;
            row = m + block * 64 + as / 32 * 16 + as % 32 / 4;
            extras.begin_rows(row);
            extras.begin_chunk(row, column);
          }
#pragma unroll
          for (int piece = 0; piece < D_CHUNK / PIECE; ++piece) {
            constexpr int VALUES = PIECE / 2;
            Acc values[PRODUCTS][VALUES];
#pragma unroll
            for (int v = 0; v < PRODUCTS * VALUES; ++v) {
              int place = (v / VALUES * EPILOGUE_COLUMNS + chunk * D_CHUNK + piece * PIECE) / 2 + v % VALUES;
              values[v / VALUES][v % VALUES] = PHASED && zeros ? Acc(0) : accumulators[TWO ? half : block][place];
            }
            epilogue_piece(extras, partials, values, piece, row, column + piece * PIECE, buffer, as);
          }
        }
        if constexpr (PIXELS) {  // a warp stores what it has staged, the chunk before the last one from this buffer
          __syncwarp();
          rows_d.store(false, buffer, n + chunk * D_CHUNK, m + block * 64, batch, rows - block * 64, thread);
          continue;
        }
        fence_proxy_async();
        if (ONE_BARRIER && EXTRAS_BYTES == 0 && thread == 0) cp_async_bulk_wait_group_read<STORE_BUFFERS - 2>();
        bar_sync(barrier, 128);
        bool whole = (!RAGGED_M || rows >= block * 64 + 64) && (!RAGGED_N || columns >= (chunk + 1) * D_CHUNK);
        // A buffer read here is written again only after the next chunk's barrier, or by TMA, after the one below.
        if (BY_THREADS || !whole) {
          rows_d.store(whole, buffer, n + chunk * D_CHUNK, m + block * 64, batch, rows - block * 64, thread);
          if constexpr (EXTRAS_BYTES > 0) bar_sync(barrier, 128);
        }
        if (thread == 0) {
          if (whole) epilogue_store(extras, map_d, buffer, n + chunk * D_CHUNK, m + block * 64, batch);
          cp_async_bulk_commit_group();  // of nothing, where rows are stored: groups are counted as buffers are
          // The chunk before this one has left its buffer, which takes the operands of another.
          int done = block * CHUNKS + chunk, later = done - 1 + STORE_BUFFERS;
          if (EXTRAS_BYTES > 0 && done > 0 && later < M_BLOCKS * CHUNKS && (!RAGGED_M || rows > later / CHUNKS * 64)) {
            cp_async_bulk_wait_group_read<1>();
            fetch(extras, later, before, m, n, i);
          }
        }
      }
      partials.end_block(row, n, thread % 32);
    }
  }

  DEVICE void wait_for_stores() const {
    if (thread == 0) cp_async_bulk_wait_group();
  }
};
