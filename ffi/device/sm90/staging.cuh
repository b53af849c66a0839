// A staging tile that TMA stores and loads.
template <Dtype D>
struct TmaStaging : Staging<D> {
  using Staging<D>::ROW, Staging<D>::SPAN, Staging<D>::COLUMNS;

  static DEVICE void store(const TensorMap* map, u32 tile, int x, int y, int z) {
#pragma unroll
    for (int i = 0; i < ROW / SPAN; ++i) tma_store<D_FIRST>(map, tile + i * STAGING_ROWS * SPAN, x + i * COLUMNS, y, z);
  }

  static DEVICE void load(const TensorMap* map, u32 tile, u32 barrier, int x, int y, int z) {
#pragma unroll
    for (int i = 0; i < ROW / SPAN; ++i) tma_load(tile + i * STAGING_ROWS * SPAN, map, barrier, x + i * COLUMNS, y, z);
  }
};
