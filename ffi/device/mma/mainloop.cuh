// Multiplies a tile block of k by block of k. Warps lie WARPS_M x WARPS_N x WARPS_K over the tile and its slices of k;
// those along k add up what they have when the tile is done. Feed (feed.cuh, tma_feed.cuh) brings the blocks.

constexpr int SLICES = BK / SLICE / WARPS_K;  // of a block, that one warp multiplies
static_assert(SLICES % 2 == 0 && LOAD_TURNS < SLICES);

struct Pipeline : Feed {
  using Feed::Feed;

  // Adds a tile's products to the accumulators. When it returns, all warps have read every stage.
  template <typename Multiplier>
  DEVICE void run(Accumulators& d, Loads& loads, const Multiplier& multiplier, Promotion& promotion, const Warp& warp,
                  int k_blocks) {
    Fragments x[2];
    Accumulators& sums = promotion.sums(d);
    wait(loads);
    multiplier.load(x[0], read, read + TileA::BYTES, warp.slice * SLICES);
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
      bool last = block + 1 == k_blocks;
      if constexpr (SLICES_AT_ONCE < SLICES) {
        load(loads);
        u32 tile_a = read, tiles_b = read + TileA::BYTES;
#pragma unroll 1
        for (int s = 0; s < SLICES - SLICES_AT_ONCE; s += SLICES_AT_ONCE) {
#pragma unroll
          for (int t = 0; t < SLICES_AT_ONCE; ++t) {
            multiplier.load(x[(t + 1) % 2], tile_a, tiles_b, warp.slice * SLICES + t + 1);
            multiplier.multiply(sums, x[t % 2]);
          }
          multiplier.skip(tile_a, tiles_b);
        }
        slices<SLICES - SLICES_AT_ONCE, 0>(x, sums, loads, multiplier, warp, last);
      } else {
        slices<0, LOAD_TURNS>(x, sums, loads, multiplier, warp, last);
      }
      promotion.end_block(d);
    }
    multiplier.arrange(d);
  }

  // The slices of a block from S on. Beside the first LOADED_IN a later block is loaded; beside each, the fragments of
  // the next.
  template <int S, int LOADED_IN>
  DEVICE void slices(Fragments (&x)[2], Accumulators& d, Loads& loads, const Multiplier& multiplier, const Warp& warp,
                     bool last) {
    beside<S, LOADED_IN>(loads);
    if constexpr (S == SLICES - 1) next(loads, last);
    if (S < SLICES - 1 || !last)
      multiplier.load(x[(S + 1) % 2], read, read + TileA::BYTES, warp.slice * SLICES + (S + 1) % SLICES);
    multiplier.multiply(d, x[S % 2]);
    if constexpr (S + 1 < SLICES) slices<S + 1, LOADED_IN>(x, d, loads, multiplier, warp, last);
  }
};
