// One operand's tile, filled by TMA: a box for each panel. Its swizzle is what `permuted` does for matrices; how words
// are read then, see words.cuh. What is past the array is zero.

template <int ROWS, int ELEMENT, bool K_MAJOR, int, Read, typename View>
struct Operand : Panels<ROWS, ELEMENT, K_MAJOR> {
  using Tile = Panels<ROWS, ELEMENT, K_MAJOR>;
  static_assert(Tile::PANEL % (8 * Tile::SPAN) == 0, "the swizzle is of the address");

  // One thread.
  static DEVICE void load(u32 tile, const TensorMap* map, u32 barrier, int row, int k, int matrix) {
    int along = K_MAJOR ? k : row, line = K_MAJOR ? row : k;
#pragma unroll 1
    for (int panel = 0; panel < Tile::LINE / Tile::SPAN; ++panel)
      View::load(tile + panel * Tile::PANEL, map, barrier, along + panel * (Tile::SPAN / ELEMENT), line, matrix);
  }
};
