// STAGES blocks of k in shared memory, which all threads load and all warps read. A stage is a tile of a and one of
// each b.

constexpr int STAGE_BYTES = TileA::STAGE_BYTES + PRODUCTS * TileB::STAGE_BYTES;

struct Loads : Operands<TileA, TileB> {
  // Starts to load a part of the next block: the TURN-th of TURNS.
  template <int TURN = 0, int TURNS = 1>
  DEVICE void load(u32 stage) {
    if (blocks > 0) {
      a.template load<TURN, TURNS>(stage);
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p) b[p].template load<TURN, TURNS>(stage + TileA::BYTES + p * TileB::BYTES);
      if constexpr (TURN == TURNS - 1) {
        a.advance();
#pragma unroll
        for (int p = 0; p < PRODUCTS; ++p) b[p].advance();
        --blocks;
      }
    }
    if constexpr (TURN == TURNS - 1) cp_async_commit_group();
  }

  DEVICE void deposit(u32 stage) const {
    a.deposit(stage);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p) b[p].deposit(stage + TileA::BYTES + p * TileB::BYTES);
  }
};

struct Feed {
  u32 base;         // of the stages
  u32 read, write;  // the stages that are read and written next

  DEVICE explicit Feed(u32 base) : base(base), read(base), write(base) {}

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

  // For the stage that is read next, if the tile has any more.
  DEVICE void wait(Loads& loads, bool more = true) const {
    cp_async_wait_group<STAGES - 2>();
    if (more) loads.arrived(read);
    __syncthreads();
  }

  // Starts to load a later block.
  DEVICE void load(Loads& loads) { loads.load(write); }

  // Beside slice S of a block: of the first TURNS, each loads a part of a later block.
  template <int S, int TURNS>
  DEVICE void beside(Loads& loads) {
    if constexpr (S < TURNS) loads.load<S, TURNS>(write);
  }

  // Goes on to the next block, when this one's last fragments are read.
  DEVICE void next(Loads& loads, bool last) {
    loads.deposit(write);
    advance(write);
    advance(read);
    wait(loads, !last);
  }
};
