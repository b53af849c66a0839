// The kernel that copies rows by index: out[r] = x[permutation[r] / k], zeros where that is past the end.
//
// A token's row is read once and stored for each of its k pairs: `inverse` has the row of each pair. Some warps move
// tokens, each by itself: one lane loads a piece of a row by a bulk copy into the next of the warp's stages; lane j
// stores it, by another, for pair j. Nothing goes through registers, and no warp waits for another. A pair stores where
// the permutation says that the row is its own, so the result follows from the permutation alone. The other warps look
// for rows that no pair stores, and write those.

struct Arrays {
  const char* x;
  const int* permutation;
  const int* inverse;
  char* out;
  u32 tokens, rows, k, row_bytes, piece_bytes, pieces;
  // To the next of the batch, in bytes and in elements; 0 where all have the same.
  long long x_step, permutation_step, inverse_step;

  DEVICE const char* row(u32 batch, u32 token) const {
    return x + batch * x_step + token * static_cast<u64>(row_bytes);
  }
  DEVICE char* result(u32 batch, u32 row) const { return out + (static_cast<u64>(batch) * rows + row) * row_bytes; }
  DEVICE int pair_of(u32 batch, u32 row) const { return ld_global(permutation + batch * permutation_step + row); }
  DEVICE int row_of(u32 batch, u32 pair) const { return ld_global(inverse + batch * inverse_step + pair); }
};

// A piece of a token's row, and what lane j knows of pair j: its row, and which pair that row is said to be of.
struct Piece {
  u32 batch, token, offset, bytes;
  int row, owner;

  DEVICE Piece() {}
  DEVICE Piece(const Arrays& of, u32 number) {
    u32 place = number / of.pieces;
    batch = place / of.tokens, token = place % of.tokens;
    offset = number % of.pieces * of.piece_bytes;
    bytes = min(of.piece_bytes, of.row_bytes - offset);
  }
};

// Moves every step-th piece from `first` on. Loads are LAG pieces ahead of stores, which have the other stages' time.
DEVICE void move_tokens(const Arrays& of, u32 first, u32 step, u32 count, u32 stages, u32 barriers) {
  constexpr int LAG = STAGES / 2;
  u32 lane = threadIdx.x % 32;
  if (lane == 0) {
    for (int s = 0; s < STAGES; ++s) mbarrier_init(barriers + 8 * s, 1);
    fence_mbarrier_init();
  }
  __syncwarp();
  u32 mine = first < count ? (count - first + step - 1) / step : 0;
  Piece piece[STAGES];
  for (u32 base = 0; base < mine + LAG; base += STAGES) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      u32 i = base + s;
      if (i < mine) {
        // All but the newest groups of stores have read their stages, this one among these: for all lanes.
        cp_async_bulk_wait_group_read<STAGES - 1 - LAG>();
        __syncwarp();
        Piece& next = piece[s];
        next = Piece(of, first + i * step);
        if (lane == 0) {
          mbarrier_arrive_expect_tx(barriers + 8 * s, next.bytes);
          const char* from = of.row(next.batch, next.token) + next.offset;
          cp_async_bulk_load(stages + s * STAGE_BYTES, from, next.bytes, barriers + 8 * s);
        }
        next.row = lane < of.k ? of.row_of(next.batch, next.token * of.k + lane) : -1;
      }
      // A piece later, so that the row is known and nothing waits for it.
      constexpr int ALL = STAGES;
      Piece& known = piece[(s + ALL - 1) % ALL];
      if (i - 1 < mine) known.owner = static_cast<u32>(known.row) < of.rows ? of.pair_of(known.batch, known.row) : -1;
      if (i - LAG < mine) {
        int stage = (s + ALL - LAG) % ALL;
        const Piece& loaded = piece[stage];
        mbarrier_wait(barriers + 8 * stage, (i - LAG) / STAGES % 2);
        if (lane < of.k && loaded.owner == static_cast<int>(loaded.token * of.k + lane))
          cp_async_bulk_store(of.result(loaded.batch, loaded.row) + loaded.offset, stages + stage * STAGE_BYTES,
                              loaded.bytes);
        cp_async_bulk_commit_group();
      }
    }
  }
  cp_async_bulk_wait_group();
}

// Writes the rows that no pair stores: zeros where their pair is past the end, else its token's row.
DEVICE void write_others(const Arrays& of, u32 first, u32 step, u32 count) {
  u32 lane = threadIdx.x % 32;
  for (; first < count; first += step) {
    u32 at = first + lane, batch = at / of.rows, row = at % of.rows;
    int pair = 0;
    bool other = false;
    if (at < count) {
      pair = of.pair_of(batch, row);
      bool there = static_cast<u32>(pair) < of.tokens * of.k;
      other = !there || of.row_of(batch, pair) != static_cast<int>(row);
    }
    for (u32 lanes = __ballot_sync(~0u, other); lanes; lanes &= lanes - 1) {
      int from = __ffs(lanes) - 1;
      u32 its_batch = (first + from) / of.rows, its_pair = __shfl_sync(~0u, pair, from);
      char* to = of.result(0, first + from);
      bool there = its_pair < of.tokens * of.k;
      const char* source = of.row(its_batch, there ? its_pair / of.k : 0);
      for (u32 offset = 16 * lane; offset < of.row_bytes; offset += 512)
        st_global<16>(to + offset, there ? ld_global_v4(source + offset) : Bytes16{});
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL(const char* x, const int* permutation, const int* inverse, char* out, int batch, int tokens, int rows, int k,
           int row_bytes, int piece_bytes, int pieces, long long x_step, long long permutation_step,
           long long inverse_step) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  u32 stages = shared_address(shared_memory), warp = uniform(threadIdx.x / 32);
  Arrays of{x,           permutation,    inverse,          out,         u32(tokens), u32(rows),
            u32(k),      u32(row_bytes), u32(piece_bytes), u32(pieces), x_step,      permutation_step,
            inverse_step};
  if (warp < WARPS) {
    u32 barriers = stages + WARPS * STAGES * STAGE_BYTES + 8 * STAGES * warp;
    move_tokens(of, blockIdx.x * WARPS + warp, gridDim.x * WARPS, u32(batch) * u32(tokens) * u32(pieces),
                stages + warp * STAGES * STAGE_BYTES, barriers);
  } else {
    constexpr u32 OTHERS = THREADS - 32 * WARPS;
    write_others(of, blockIdx.x * OTHERS + 32 * (warp - WARPS), gridDim.x * OTHERS, u32(batch) * u32(rows));
  }
}
