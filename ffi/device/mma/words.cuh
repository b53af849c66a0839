// Elements of 4, 8 and 16 bytes, read one by one: what lane l holds of 8 rows and 4 of k, row l / 4 at k l % 4.
//
// TMA permutes units as ldmatrix takes them, and two of 4 neighbours of k would lie in the same banks. So the t-th 4 of
// a GROUP of k are others, the same of a and b. By their bits, with q = l % 4:
//
//   of 8 bytes           k3 k2 k1 k0 = q1, q1 ^ t1, q0 ^ t0, q0
//   of 4 and 16 bytes       k2 k1 k0 = q1, q0, q0 ^ t0
//
// Lanes that read at once have all four q, and differ in k3 k0 where 8 bytes lie along k, in k2 k1 otherwise (in k2 k0
// where lines have 64 bytes): in different banks.

#if TMA
constexpr int GROUP = ELEMENT == 8 ? 16 : 8;
constexpr int K_OF_T = ELEMENT == 8 ? 2 : 1;  // what t is multiplied by, to be XORed with k

template <typename Tile, bool K_MAJOR>
struct Words {
  u32 offset;

  DEVICE explicit Words(int row) {
    int q = threadIdx.x % 4, k = q / 2 * (ELEMENT == 8 ? 12 : 4) + q % 2 * 3, r = row + threadIdx.x % 32 / 4;
    int line = K_MAJOR ? r : k, byte = (K_MAJOR ? k : r) * ELEMENT;
    offset = byte / Tile::SPAN * Tile::PANEL + permuted<Tile::SPAN, Read::matrices>(line, byte % Tile::SPAN);
  }

  // Where the element lies that is 8 `rows` and 4 `depth` further on, both known to the compiler.
  DEVICE u32 at(u32 tile, int rows, int depth) const {
    static_assert(!K_MAJOR || Tile::SPAN == GROUP * ELEMENT);
    int k = depth % (GROUP / 4) * K_OF_T, group = depth / (GROUP / 4);
    if constexpr (K_MAJOR) return tile + (offset ^ k * ELEMENT) + group * Tile::PANEL + rows * 8 * Tile::SPAN;
    int byte = rows * 8 * ELEMENT;
    u32 changed = permuted<Tile::SPAN, Read::matrices>(k, byte % Tile::SPAN);
    return tile + (offset ^ changed) + byte / Tile::SPAN * Tile::PANEL + group * GROUP * Tile::SPAN;
  }
};
#else
template <typename Tile, bool K_MAJOR>
struct Words {
  u32 offset;

  DEVICE explicit Words(int row) {
    int lane = threadIdx.x % 32, line = lane % 4, byte = (row + lane / 4) * ELEMENT;
    if constexpr (K_MAJOR) line = row + lane / 4, byte = lane % 4 * ELEMENT;
    offset = byte / Tile::SPAN * Tile::PANEL + permuted<Tile::SPAN, Read::words>(line, byte % Tile::SPAN);
  }

  // Where the element lies that is 8 `rows` and 4 `depth` further on, both known to the compiler.
  DEVICE u32 at(u32 tile, int rows, int depth) const {
    int byte = (K_MAJOR ? depth * 4 : rows * 8) * ELEMENT, line = K_MAJOR ? rows * 8 : depth * 4;
    return tile + (offset ^ byte % Tile::SPAN) + byte / Tile::SPAN * Tile::PANEL + line * Tile::SPAN;
  }
};
#endif
