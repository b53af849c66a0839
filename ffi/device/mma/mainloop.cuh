// The pipeline of STAGES blocks of k in shared memory: all threads load, all warps multiply. A stage is a tile of a and
// one of each b. Warps lie WARPS_M x WARPS_N x WARPS_K over the tile and its slices of k; those along k add up what
// they have when the tile is done.

constexpr int STAGE_BYTES = TileA::BYTES + PRODUCTS * TileB::BYTES;
constexpr int SLICES = BK / SLICE / WARPS_K;  // of a block, that one warp multiplies
static_assert(SLICES % 2 == 0 && LOAD_PARTS < SLICES);

struct Loads {
  TileA a;
  TileB b[PRODUCTS];
  int blocks;  // that are left to load

  // Starts to load a part of the next block: the PART-th of PARTS.
  template <int PART = 0, int PARTS = 1>
  DEVICE void load(u32 stage) {
    if (blocks > 0) {
      a.template load<PART, PARTS>(stage);
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p) b[p].template load<PART, PARTS>(stage + TileA::BYTES + p * TileB::BYTES);
      if constexpr (PART == PARTS - 1) {
        a.advance();
#pragma unroll
        for (int p = 0; p < PRODUCTS; ++p) b[p].advance();
        --blocks;
      }
    }
    if constexpr (PART == PARTS - 1) cp_async_commit_group();
  }

  DEVICE void deposit(u32 stage) const {
    a.deposit(stage);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p) b[p].deposit(stage + TileA::BYTES + p * TileB::BYTES);
  }
};

struct Pipeline {
  u32 base;         // of the stages
  u32 read, write;  // the stages that are read and written next

  DEVICE explicit Pipeline(u32 base) : base(base), read(base), write(base) {}

  DEVICE void advance(u32& stage) const {
    stage += STAGE_BYTES;
    if (stage == base + STAGES * STAGE_BYTES) stage = base;
  }

  // Loads the first blocks of a tile; the stages are free.
  DEVICE void begin(Loads& loads) {
    write = read;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
      loads.load(write);
      loads.deposit(write);
      advance(write);
    }
  }

  DEVICE static void wait() {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();
  }

  // Adds a tile's products to the accumulators. When it returns, all warps have read every stage.
  template <typename Multiplier>
  DEVICE void run(Accumulators& d, Loads& loads, const Multiplier& multiplier, const Warp& warp, int k_blocks) {
    Fragments x[2];
    wait();
    multiplier.load(x[0], read, read + TileA::BYTES, warp.slice * SLICES);
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
      bool last = block + 1 == k_blocks;
      if constexpr (SLICES_AT_ONCE < SLICES) {
        loads.load(write);
        u32 tile_a = read, tiles_b = read + TileA::BYTES;
#pragma unroll 1
        for (int s = 0; s < SLICES - SLICES_AT_ONCE; s += SLICES_AT_ONCE) {
#pragma unroll
          for (int t = 0; t < SLICES_AT_ONCE; ++t) {
            multiplier.load(x[(t + 1) % 2], tile_a, tiles_b, warp.slice * SLICES + t + 1);
            multiplier.multiply(d, x[t % 2]);
          }
          multiplier.skip(tile_a, tiles_b);
        }
        slices<SLICES - SLICES_AT_ONCE, 0>(x, d, loads, multiplier, warp, last);
      } else {
        slices<0, LOAD_PARTS>(x, d, loads, multiplier, warp, last);
      }
    }
    multiplier.finish(d);
  }

  // The slices of a block from S on. Beside the first LOADED_IN a part of a later block is loaded; beside each, the
  // fragments of the next.
  template <int S, int LOADED_IN>
  DEVICE void slices(Fragments (&x)[2], Accumulators& d, Loads& loads, const Multiplier& multiplier, const Warp& warp,
                     bool last) {
    if constexpr (S < LOADED_IN) loads.load<S, LOADED_IN>(write);
    if constexpr (S == SLICES - 1) {
      loads.deposit(write);
      advance(write);
      advance(read);
      wait();
    }
    if (S < SLICES - 1 || !last)
      multiplier.load(x[(S + 1) % 2], read, read + TileA::BYTES, warp.slice * SLICES + (S + 1) % SLICES);
    multiplier.multiply(d, x[S % 2]);
    if constexpr (S + 1 < SLICES) slices<S + 1, LOADED_IN>(x, d, loads, multiplier, warp, last);
  }
};
