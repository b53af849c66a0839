// Which tile next. A work item is the block of tiles one cluster computes together; items are numbered so that those
// in flight at the same time share rows of A and columns of B in L2.

struct Tile {
  int m, n, batch;  // in units of cluster tiles, and of matrices
};

struct TileScheduler {
  int tiles_m, tiles_n, tiles, total;
  int raster;  // > 0: bands of that many rows of tiles, walked column by column; < 0: bands of columns, row by row

  DEVICE TileScheduler(int m, int n, int batch, int raster_) : raster(raster_) {
    tiles_m = (m + BM * CLUSTER_M - 1) / (BM * CLUSTER_M);
    tiles_n = (n + BN * CLUSTER_N - 1) / (BN * CLUSTER_N);
    tiles = tiles_m * tiles_n;
    total = tiles * batch;
  }

  DEVICE Tile at(int index) const {
    int batch = index < tiles ? 0 : index / tiles;  // a division costs as much as a dozen instructions
    int i = index - batch * tiles;
    bool by_rows = raster > 0;
    int across = by_rows ? tiles_m : tiles_n, along = by_rows ? tiles_n : tiles_m, width = by_rows ? raster : -raster;
    int band = i / (width * along);
    int first = band * width;
    int rows = min(width, across - first);
    i -= first * along;
    int step = i / rows;
    int row = first + i - step * rows;
    return by_rows ? Tile{row, step, batch} : Tile{step, row, batch};
  }
};

// The result's batch index has three parts; an operand's is their sum weighted by its steps, 0 where it does not move.
struct BatchIndex {
  int i0, i1, i2;

  DEVICE BatchIndex(int batch, int size1, int size2) : i0(0), i1(0), i2(batch) {
    if (batch < size2) return;
    i1 = batch / size2;
    i2 = batch - i1 * size2;
    if (i1 < size1) return;
    i0 = i1 / size1;
    i1 -= i0 * size1;
  }

  DEVICE int operator()(int step0, int step1, int step2) const { return i0 * step0 + i1 * step1 + i2 * step2; }
};
