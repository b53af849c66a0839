// The change of B's tiles by a prologue: in shared memory, once TMA has brought one, by those who multiply, before they
// do. Warpgroups that share a tile share the work, and wait for each other.
//
// A thread has the same 16 bytes of every STEP-th line of a tile: of a row of B where that lies along k, else of a line
// of k. Told and Beside are generated (cutjax/kernels/sm90/prologue.py): Beside holds the operands of a thread's
// places. Those of the next block are on their way while this one is multiplied.

struct Changes {
  static constexpr bool EVER = true, K_MAJOR = OperandB::K_MAJOR;
  static constexpr int SPAN = OperandB::SPAN, UNITS = SPAN / 16;  // of 16 bytes, of a line of the tile
  static constexpr int TILE_LINES = K_MAJOR ? OperandB::ROWS : BK;
  static constexpr int STEP = 128 * CONSUMERS_PER_TILE / UNITS;
  static constexpr int LINES = (TILE_LINES + STEP - 1) / STEP;                          // of a thread
  static constexpr int PARTS = K_MAJOR ? BK / OperandB::CHUNK : OperandB::CHUNKS_EACH;  // panels, or chunks
  static_assert(B_MATRICES == 1 && PAIRS == 1 && !RAGGED_K && STEP % 8 == 0);

  Told told;
  Beside<LINES, PARTS> beside;
  int first, line, element;  // this thread's first line of a tile, and where that is in the array, with its first unit
  int k_end;
  u32 place;  // of the unit in a tile

  DEVICE explicit Changes(const Told& told) : told(told) {}

  // A tile, of whose warpgroups the one of the rows from `row` on is this thread's.
  DEVICE void begin(const Work& work, int row, int thread) {
    thread += row / ROWS_PER_CONSUMER * 128;
    int unit = thread % UNITS;
    first = thread / UNITS;
    place = swizzle<SPAN>(first * SPAN + unit * 16);
    line = (K_MAJOR ? work.n : work.k) + first;
    element = (K_MAJOR ? work.k : work.n) + unit * 8;
    k_end = work.k_end;
    beside.begin(told, *this);
    beside.fetch(told, *this);
  }

  // Where the l-th line and the first element of the c-th part of the next block are in the array, for operands.
  DEVICE int line_of(int l) const { return min(line + l * STEP, told.rows - 1); }
  DEVICE int element_of(int c) const { return element + c * OperandB::CHUNK; }

  // The next block of k, whose tile has arrived.
  DEVICE void block(u32 tile, int barrier) {
#pragma unroll
    for (int l = 0; l < LINES; ++l) {
      if ((l + 1) * STEP > TILE_LINES && first + l * STEP >= TILE_LINES) continue;
#pragma unroll
      for (int c = 0; c < PARTS; ++c) {
        u32 at = tile + place + (c * TILE_LINES + l * STEP) * SPAN;
        Bytes16 v = ld_shared_v4(at);
        u32 x[4] = {v.x, v.y, v.z, v.w};
        beside.change(x, l, c, line_of(l), element_of(c));
        // Past the end of k are zeros, whatever it makes of them.
        int there = K_MAJOR ? k_end - element_of(c) : line + l * STEP < k_end ? 8 : 0;
        if (there < 8)
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] &= there >= 2 * j + 2 ? ~0u : there <= 2 * j ? 0u : 0xffffu;
        st_shared_v4(at, x[0], x[1], x[2], x[3]);
      }
    }
    (K_MAJOR ? element : line) += BK;
    fence_proxy_async();
    bar_sync(CONSUMERS_PER_TILE > 1 ? TURN_BARRIER : barrier, 128 * CONSUMERS_PER_TILE);
    beside.fetch(told, *this);
  }
};
