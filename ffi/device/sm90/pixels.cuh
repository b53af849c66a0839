// Rows of the result that are pixels apart in images (cutjax/kernels/operand.py: Pixels), and operands of the epilogue
// that lie as it does: of each phase a tensor map has those pixels alone, of which TMA stores and loads columns. All
// phases have as many rows.

struct Pixels {
  int grid[AXES];

  // Of a row: the pixel, the innermost axis first, and the image.
  DEVICE void place(int row, int (&at)[AXES + 1]) const {
#pragma unroll
    for (int i = 0; i < AXES; ++i) {
      int next = row / grid[i];
      at[i] = row - next * grid[i];
      row = next;
    }
    at[AXES] = row;
  }
};

DEVICE const TensorMap* of_phase(const TensorMap* const* maps, int phase) {
  const TensorMap* found = maps[0];
#pragma unroll
  for (int i = 1; i < PHASES; ++i)
    if (phase == i) found = maps[i];
  return found;
}

template <Dtype D>
struct PixelStaging : Staging<D> {
  using Staging<D>::ROW, Staging<D>::SPAN, Staging<D>::COLUMNS;

  static DEVICE void store(const TensorMap* const* maps, u32 tile, int x, int y, int phase, const Pixels& pixels) {
    const TensorMap* map = of_phase(maps, phase);
    int at[AXES + 1];
    pixels.place(y, at);
#pragma unroll
    for (int i = 0; i < ROW / SPAN; ++i) tma_store_im2col(map, tile + i * STAGING_ROWS * SPAN, x + i * COLUMNS, at);
  }

  static DEVICE void load(const TensorMap* const* maps, u32 tile, u32 barrier, int x, int y, int phase,
                          const Pixels& pixels) {
    const TensorMap* map = of_phase(maps, phase);
    int at[AXES + 1];
    pixels.place(y, at);
    const u16 offset[AXES] = {};
#pragma unroll
    for (int i = 0; i < ROW / SPAN; ++i)
      tma_load_im2col<1>(tile + i * STAGING_ROWS * SPAN, map, barrier, x + i * COLUMNS, at, offset);
  }
};
