// Elements of 4, 8 and 16 bytes, read one by one: what lane l holds of 8 rows and 4 of k, row l / 4 at k l % 4.

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
