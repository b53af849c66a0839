// Tiles of symmetric results: a work item is the block of tiles that one cluster computes together, of those with
// anything on or below the diagonal. Matrices of a batch follow each other; in each, bands of |raster| rows of items,
// walked column by column, each column from the first item that reaches down to the diagonal.

struct Scheduler {
  static constexpr int HEIGHT = BM * CLUSTER_M, WIDTH = BN * CLUSTER_N;  // of an item
  int m, k_end, raster;
  int tiles, total;
  // The band of the last item: which matrix's, its first row, its first item and the first one after it. They are kept,
  // since finding a band costs a look at every row before it, and some tiles are short.
  int matrix = -1, top, begin, end;

  DEVICE Scheduler(int m, int, int k, int raster, int batch, int splits, int, int)
      : m(m), k_end(k), raster(raster < 0 ? -raster : raster) {
    tiles = items(0, rows());
    total = tiles * batch * splits;
  }

  DEVICE int rows() const { return (m + HEIGHT - 1) / HEIGHT; }

  // Items of a row of them: the last one ends at or right of the diagonal.
  DEVICE int width(int row) const { return (min(m, (row + 1) * HEIGHT) + WIDTH - 1) / WIDTH; }

  DEVICE int items(int row, int count) const {
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) sum += width(row + i);
    return sum;
  }

  // Rows of the band at `top`.
  DEVICE int band() const { return min(raster, rows() - top); }

  DEVICE bool has(int index) const { return index < total; }

  // Items must be asked for in order.
  DEVICE Work work(int index, int rank_m, int rank_n) {
    int batch = index < tiles ? 0 : index / tiles;
    index -= batch * tiles;
    if (batch != matrix) {
      matrix = batch;
      top = -raster;
      end = 0;
    }
    while (index >= end) {
      top += raster;
      begin = end;
      end += items(top, band());
    }
    index -= begin;
    int height = band(), whole = width(top), column, row;  // columns that all rows of the band have
    if (index < whole * height) {
      column = index / height;
      row = top + index - column * height;
    } else {
      index -= whole * height;
      column = whole;
      while (true) {
        row = column * WIDTH / HEIGHT;  // the first that reaches this column
        int below = top + height - row;
        if (index < below) break;
        index -= below;
        ++column;
      }
      row += index;
    }
    int m = (row * CLUSTER_M + rank_m) * BM, n = (column * CLUSTER_N + rank_n) * BN;
    return {m, n, BM, 0, k_end, (k_end + BK - 1) / BK, batch, batch};
  }
};
