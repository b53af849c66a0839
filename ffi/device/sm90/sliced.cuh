// Consumers that share a tile's k blocks: of SLICED groups of them, each multiplies every so-manieth block. More warps
// than two hide the latencies of decoding. Their sums meet in shared memory, in the order of the first block of each.

// A stage is one group's, as a parity wait cannot tell it two wraps away from now; a group loads from the next one
// before it releases the last.
static_assert(SLICED == 1 || (STAGES % SLICED == 0 && STAGES >= 2 * SLICED));

// Which group this warpgroup belongs to.
DEVICE int slice_group() { return SLICED > 1 ? uniform((threadIdx.x / 128 - 1) / STORERS) : 0; }

// The first block of a group, where the first of all lies in a stage.
DEVICE int first_slice(int group, int stage) { return (group + SLICED - stage % SLICED) % SLICED; }

// Returns how many of the k blocks are a group's, whose `first` one `pipe` is at then, and `all` past all of them.
DEVICE int begin_slices(Pipeline& pipe, Pipeline& all, int first, int k_blocks) {
  if constexpr (SLICED == 1) return k_blocks;
  pipe.advance(first);
  all.advance(k_blocks);
  return max(0, (k_blocks - first + SLICED - 1) / SLICED);
}

// True if a group stores the `tile`-th tile of this block. A vote, which the compiler takes to be uniform.
DEVICE bool stores_tile(int group, int tile) { return ROTATES ? __all_sync(~0u, group == tile % SLICED) : group == 0; }

// Of those who read sums before others write more: where slices store in turn, the next one to store writes none.
constexpr int READ_THREADS = (CONSUMERS - (ROTATES ? STORERS : 0)) * 128;

// One warpgroup, whose tile's sums have been read, or that has none yet.
DEVICE void sums_are_read(int tiles) { bar_arrive(READ_BARRIER + (ROTATES ? tiles % 2 : 0), READ_THREADS); }

// True where sums are those of all groups now: in the group that stores them. This one's first block is `first`.
DEVICE bool add_slices(Accumulators& sums, SharedTiles shared, Pipeline& pipe, int first) {
  if constexpr (SLICED > 1) {
    constexpr int QUADS = PRODUCTS * BN / 8, ALL = CONSUMERS * 128, PITCH = STORERS * 128 * 16;
    u32 own = (threadIdx.x - 128) % (STORERS * 128) * 16;
    int tile = pipe.tiles++, parity = ROTATES ? tile % 2 : 0;
    if (!stores_tile(slice_group(), tile)) {
      // Those of the tile before have been read: the group that did so knows.
      if (!ROTATES || !stores_tile(slice_group(), tile + SLICED - 1)) bar_sync(READ_BARRIER + parity, READ_THREADS);
#pragma unroll
      for (int i = 0; i < M_BLOCKS * QUADS; ++i) {
        const Acc* x = &sums[i / QUADS][i % QUADS * 4];
        st_shared_v4(shared.sums(first) + own + i * PITCH, word_of(x[0]), word_of(x[1]), word_of(x[2]), word_of(x[3]));
      }
      bar_arrive(SUMS_BARRIER + parity, ALL);
      return false;
    }
    bar_sync(SUMS_BARRIER + parity, ALL);
#pragma unroll
    for (int i = 0; i < M_BLOCKS * QUADS; ++i) {
      Acc of[4], *x = &sums[i / QUADS][i % QUADS * 4];
#pragma unroll
      for (int slice = 0; slice < SLICED; ++slice) {
        auto theirs = ld_shared_v4(shared.sums(slice == first ? (first + 1) % SLICED : slice) + own + i * PITCH);
        u32 words[4] = {theirs.x, theirs.y, theirs.z, theirs.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Acc y = slice == first ? x[j] : of_word<Acc>(words[j]);
          of[j] = slice == 0 ? y : of[j] + y;
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = of[j];
    }
    sums_are_read(tile + 1);
  }
  return true;
}
