// Operand tiles and their pipeline in shared memory, which a producer (producer.cuh) fills and consumers (mainloop.cuh)
// drain. Each of STAGES has a full barrier (what was asked for has landed) and an empty one (its readers are done).
//
// Operand tiles, ROWS = A_MATRICES * BM or B_MATRICES * BN:
//   K-major:  [BK/CHUNK][ROWS][CHUNK]      swizzled in rows of CHUNK, which are 128 bytes unless a view needs fewer
//   MN-major: [ROWS/CHUNK][BK][CHUNK]      wgmma reads those of 16 bits; swizzle span of CHUNK; a line of CHUNK rows or
//             columns. The last chunk may be wider than the tile: what is loaded too much costs less than a narrower
//             swizzle.
// Several b beside each other in one tile are multiplied as if they were one matrix, so a is read once. Where operands
// are swapped, there are several a.

static_assert(A_MATRICES * B_MATRICES == PRODUCTS);

constexpr int ROWS_PER_CONSUMER = M_BLOCKS * 64;
constexpr int CONSUMERS_PER_TILE = BM / ROWS_PER_CONSUMER;
// Consumers in groups of so many that multiply all rows: each of SLICED groups takes every so-manieth k block.
constexpr int SLICED = PING_PONG ? 1 : CONSUMERS / CONSUMERS_PER_TILE;
constexpr int STORERS = CONSUMERS / SLICED;
// Slices store tiles in turn where a block has many, so that an epilogue runs beside the others' mainloop.
constexpr bool ROTATES = SLICED > 1 && RAGGED_N;
constexpr int STAGERS = ROTATES ? CONSUMERS : STORERS;  // that have staging buffers
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;

// Named barriers: 0 is __syncthreads, then one for each consumer's epilogue, then whose turn the mainloop is
// (ping-pong), that it is over (CLUSTER_K), or that all consumers have cleared their part of a stage (RAGGED_K); then
// that sums of others lie there, and have been read (SLICED), of even and of odd tiles.
constexpr int EPILOGUE_BARRIER = 1;
constexpr int TURN_BARRIER = 1 + CONSUMERS;
constexpr int SUMS_BARRIER = TURN_BARRIER + 2, READ_BARRIER = SUMS_BARRIER + 2;

// Of a warpgroup.
using Accumulators = Acc[M_BLOCKS][PRODUCTS * BN / 2];

// A part of them, whose sums are promoted at once, where those of each block of k are.
constexpr int PART_COLUMNS = PRODUCTS * BN / COLUMN_PARTS;
using PartSums = Acc[PART_COLUMNS / 2];

struct Pipeline {
  u32 full, empty;  // addresses of the first barriers
  int stage;
  u32 phase;
  int filled_a = 0, filled_b = 0;  // how many stages in a row, by the producer, with the rows of a from m on, and of b
  int m = -1, n = -1;
  int tiles = 0;  // that were multiplied, by a consumer that shares their k blocks

  DEVICE u32 full_barrier() const { return full + stage * 8; }
  DEVICE u32 empty_barrier() const { return empty_barrier(stage); }
  DEVICE u32 empty_barrier(int of) const { return empty + of * 8; }

  DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }

  // By fewer than there are stages.
  template <int COUNT>
  DEVICE void advance_by() {
    static_assert(COUNT <= STAGES);
    if ((stage += COUNT) >= STAGES) {
      stage -= STAGES;
      phase ^= 1;
    }
  }

  DEVICE void advance(int k_blocks) {
    int position = stage + k_blocks;
    phase ^= (position / STAGES) & 1;
    stage = position % STAGES;
  }
};

// One operand: HEIGHT of its m or n axis per tile, of which each of MATRICES has an equal number, needed by SHARED CTAs
// of the cluster, each of which may load 1/SHARED of every matrix for all. Elements have BITS. Whether its lines leave
// L2 FIRST, a config says.
template <int HEIGHT, int BITS, int MATRICES, bool ALONG_K, int WIDTH, int SHARED, bool EVICTED>
struct Operand {
  static constexpr bool K_MAJOR = ALONG_K, FIRST = EVICTED;
  static constexpr int ROWS = HEIGHT, CHUNK = WIDTH, ELEMENT = BITS / 8, SHARE = SHARED;
  static constexpr int ROWS_EACH = ROWS / MATRICES;
  static constexpr int CHUNKS_EACH = (ROWS_EACH + CHUNK - 1) / CHUNK;
  static constexpr int SPAN = CHUNK * BITS / 8;
  static constexpr int PACKED = BITS < 8 ? 8 / BITS : 1;  // elements in one of the tensor map's
  static constexpr int BYTES = (K_MAJOR ? ROWS : MATRICES * CHUNKS_EACH * CHUNK) * BK * BITS / 8;
  static_assert(SPAN == 128 || SPAN == 64 || SPAN == 32);

  // MN-major, of what CTAs share: whole chunks are divided among them where their number allows it, else the k rows of
  // each chunk.
  static constexpr bool BY_CHUNK = CHUNKS_EACH % SHARE == 0;
  static constexpr int CHUNKS_LOADED = CHUNKS_EACH / (BY_CHUNK ? SHARE : 1), DEPTH_LOADED = BK / (BY_CHUNK ? 1 : SHARE);
  DEVICE static int first_chunk(u32 share) { return BY_CHUNK ? share * CHUNKS_LOADED : 0; }
  DEVICE static int first_depth(u32 share) { return BY_CHUNK ? 0 : share * DEPTH_LOADED; }

  // Of a tile's rows from a multiple of 64 on. K-major, both offsets are ignored but that of 8 rows.
  using Descriptor = WgmmaDescriptor<SPAN, K_MAJOR ? 16 : BK * SPAN, 8 * SPAN>;

  // Bytes from a tile's begin to its row `row` (a multiple of 64), and from there to a slice of k, of 32 bytes each.
  DEVICE static u32 row_offset(int row) { return K_MAJOR ? row * SPAN : row / CHUNK * BK * SPAN; }
  DEVICE static u32 slice_offset(int slice) {
    constexpr int SLICES = SPAN / 32;  // of a row
    return K_MAJOR ? slice / SLICES * ROWS * SPAN + slice % SLICES * 32 : slice * 16 * SPAN;
  }
};

using OperandA = Operand<A_MATRICES * BM, A_BITS, A_MATRICES, A_K_MAJOR, A_CHUNK, CLUSTER_N, A_FIRST>;
using OperandB = Operand<B_MATRICES * BN, B_BITS, B_MATRICES, B_K_MAJOR, B_CHUNK, CLUSTER_M, B_FIRST>;

// Behind each tile of A lie the factors of its elements, where it has some.
constexpr int A_STAGE_BYTES = OperandA::BYTES + FACTOR_BYTES, STAGE_BYTES = A_STAGE_BYTES + OperandB::BYTES;

constexpr int SUMS_BYTES = BM * PRODUCTS * BN * 4;

struct SharedTiles {
  u32 base;  // [STAGES] of A, then [STAGES] of B
  DEVICE u32 a(int stage) const { return base + stage * A_STAGE_BYTES; }
  DEVICE u32 b(int stage) const { return base + STAGES * A_STAGE_BYTES + stage * OperandB::BYTES; }

  // Behind the staging buffers, which are aligned: where consumers are sliced, the sums of each group that does not
  // store, 16 bytes of each thread beside each other.
  DEVICE u32 sums(int slice) const {
    return base + STAGES * STAGE_BYTES + STAGERS * STORE_BUFFERS * D_BUFFER_BYTES + slice * SUMS_BYTES;
  }

  // What else of so many bytes a stage has.
  DEVICE u32 slot(int stage, u32 bytes) const { return sums(SLICED > 1 ? SLICED : 0) + stage * bytes; }
};

// One warpgroup tells every CTA that writes this stage that it has read it: one thread does, as all of them have waited
// for wgmma, or one of each warp, where threads have read it too.
DEVICE void release(u32 empty_barrier, int thread) {
  int place = RELEASING_WARPS == 1 ? thread : thread % 32;
  if constexpr (CLUSTER_M * CLUSTER_N == 1) {
    if (place == 0) mbarrier_arrive(empty_barrier);
  } else {
    if (place < CLUSTER_M * CLUSTER_N) mbarrier_arrive_cluster(empty_barrier, place);
  }
}

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// Calls a function with the constants 0 to COUNT - 1.
template <int COUNT, int I = 0, typename F>
DEVICE void each(F f) {
  if constexpr (I < COUNT) {
    f(Constant<I>());
    each<COUNT, I + 1>(f);
  }
}
