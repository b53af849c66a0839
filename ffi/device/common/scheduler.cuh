// Which tile next: what every scheduler hands out, and how tiles lie in a matrix. Schedulers number their work items so
// that those in flight at the same time share rows of A and columns of B in L2.

// The batch index of the result has three parts; an array's is their sum weighted by its steps, 0 where it does not
// move. Where there are groups, the last part is the group.
struct BatchIndex {
  int i0, i1, i2;

  DEVICE BatchIndex(int batch, int size1, int size2) : i0(0), i1(0), i2(batch) {
    if (batch < size2) return;  // a division costs as much as a dozen instructions
    i1 = batch / size2;
    i2 = batch - i1 * size2;
    if (i1 < size1) return;
    i0 = i1 / size1;
    i1 -= i0 * size1;
  }

  DEVICE int operator()(int step0, int step1, int step2) const { return i0 * step0 + i1 * step1 + i2 * step2; }
};

// One CTA's tile.
struct Work {
  int m, n;          // its first row and column in the result
  int rows;          // how many rows from there on belong to its group; fewer than BM only where rows have groups
  int k, k_end;      // the part of the contraction that is its group's
  int k_blocks;      // blocks of BK that this takes, where what is past k_end counts as zero; 0 for rows of no group
  int result;        // which matrix of the results
  int batch;         // which of the batch, groups being its last axis: a BatchIndex of it says which matrix of an array
  int columns = BN;  // how many from n on belong to its group; fewer than BN only where columns have groups
  int head = 0;      // elements from k on that are another group's, where k blocks are K_ALIGNED
  // Where tiles are computed in parts: which tile, in how many, and the cluster of the first.
  int tile = 0, parts = 1, first = 0;
};

struct Place {
  int m, n;
};

// The i-th tile of a matrix. raster > 0: bands of that many rows of tiles, walked column by column; < 0: bands of
// columns, row by row.
DEVICE Place place(int i, int tiles_m, int tiles_n, int raster) {
  bool by_rows = raster > 0;
  int across = by_rows ? tiles_m : tiles_n, along = by_rows ? tiles_n : tiles_m, width = by_rows ? raster : -raster;
  int band = i / (width * along);
  int first = band * width;
  int rows = min(width, across - first);
  i -= first * along;
  int step = i / rows;
  int row = first + i - step * rows;
  return by_rows ? Place{row, step} : Place{step, row};
}
