// Fragments for the tensor cores, read by ldmatrix: 16 rows or columns and 32 bytes of k at a time. Elements of 16 bits
// may lie along either axis; others along k.

using TileA = Operand<BM, ELEMENT, A_K_MAJOR, A_UNIT, Read::matrices>;
using TileB = Operand<BN, ELEMENT, B_K_MAJOR, B_UNIT, Read::matrices>;

constexpr int SLICE = 32 / ELEMENT;  // of k, that one instruction takes

// Where in a tile this lane's row of a matrix of ldmatrix lies, and what it gives: WIDE says whether matrices beside
// each other in registers follow each other along k first.
template <typename Tile, bool K_MAJOR, bool ROWS_FIRST>
struct Lane {
  u32 offset;

  DEVICE explicit Lane(int row) {
    int lane = threadIdx.x % 32;
    bool halves = K_MAJOR == ROWS_FIRST;  // lines are numbered by the first 16 lanes
    int line = halves ? lane % 16 : lane % 8 + lane / 16 * 8, byte = (halves ? lane / 16 : lane / 8 % 2) * 16;
    if constexpr (K_MAJOR) {
      line += row;
    } else {
      byte += row * ELEMENT;
    }
    offset = byte / Tile::SPAN * Tile::PANEL + permuted<Tile::SPAN, Read::matrices>(line, byte % Tile::SPAN);
  }

  // The i-th 16 rows, and a slice of k: both are known to the compiler. Within a line they set bits that are zero.
  DEVICE void load(u32 (&x)[4], u32 tile, int i, int slice) const {
    int byte = (K_MAJOR ? slice : i) * 32, line = (K_MAJOR ? i : slice) * 16;
    u32 address = tile + (offset ^ byte % Tile::SPAN) + byte / Tile::SPAN * Tile::PANEL + line * Tile::SPAN;
    if constexpr (K_MAJOR) {
      ldmatrix_x4(address, x[0], x[1], x[2], x[3]);
    } else {
      ldmatrix_x4_trans(address, x[0], x[1], x[2], x[3]);
    }
  }
};

struct Fragments {
  u32 a[M_FRAGMENTS][4], b[PRODUCTS][N_FRAGMENTS / 2][4];
};

struct Multiplier {
  Lane<TileA, A_K_MAJOR, true> lane_a;
  Lane<TileB, B_K_MAJOR, false> lane_b;

  DEVICE Multiplier(int row, int column) : lane_a(row), lane_b(column) {}

  DEVICE void load(Fragments& to, u32 tile_a, u32 tiles_b, int slice) const {
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; ++i) lane_a.load(to.a[i], tile_a, i, slice);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
      for (int j = 0; j < N_FRAGMENTS / 2; ++j) lane_b.load(to.b[p][j], tiles_b + p * TileB::BYTES, j, slice);
  }

  // Every other column of instructions goes up, so that each shares a fragment with the one before.
  DEVICE void multiply(Accumulators& d, const Fragments& x) const {
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
      for (int j = 0; j < N_FRAGMENTS; ++j)
#pragma unroll
        for (int step = 0; step < M_FRAGMENTS; ++step) {
          int i = j % 2 ? M_FRAGMENTS - 1 - step : step;
          const u32 b[2] = {x.b[p][j / 2][j % 2 * 2], x.b[p][j / 2][j % 2 * 2 + 1]};
          mma<MATH>(d[p][i][j], x.a[i], b);
        }
  }
};
