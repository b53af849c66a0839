// Fragments for the tensor cores, read by ldmatrix: 16 rows or columns and 32 bytes of k at a time. Elements of 16 bits
// may lie along either axis, and so may those of 32, then read one by one; those of 8 bits lie along k.

DEVICE constexpr Read read_of(bool k_major) { return ELEMENT == 4 && !k_major ? Read::words : Read::matrices; }
using TileA = Operand<BM, ELEMENT, A_K_MAJOR, A_UNIT, read_of(A_K_MAJOR), ViewA>;
using TileB = Operand<BN, ELEMENT_B, B_K_MAJOR, B_UNIT, read_of(B_K_MAJOR), ViewB>;

// Where in a tile this lane's row of a matrix of ldmatrix lies, and what it gives: ROWS_FIRST says whether matrices
// beside each other in registers follow each other along rows first, else along k.
template <typename Tile, bool K_MAJOR, bool ROWS_FIRST, int SIZE = ELEMENT>
struct Lane {
  u32 offset;

  DEVICE explicit Lane(int row) {
    int lane = threadIdx.x % 32;
    bool halves = K_MAJOR == ROWS_FIRST;  // lines are numbered by the first 16 lanes
    int line = halves ? lane % 16 : lane % 8 + lane / 16 * 8, byte = (halves ? lane / 16 : lane / 8 % 2) * 16;
    if constexpr (K_MAJOR) {
      line += row;
    } else {
      byte += row * SIZE;
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

// The same of elements of 32 bits that do not lie along k.
template <typename Tile, bool ROWS_FIRST>
struct Lane<Tile, false, ROWS_FIRST, 4> : Words<Tile, false> {
  using Words<Tile, false>::Words;

  DEVICE void load(u32 (&x)[4], u32 tile, int i, int slice) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int high = ROWS_FIRST ? e % 2 : e / 2, deep = ROWS_FIRST ? e / 2 : e % 2;
      x[e] = ld_shared_u32(this->at(tile, 2 * i + high, 2 * slice + deep));
    }
  }
};
