// A work item is the block of tiles that one cluster computes together; matrices of a batch, and batches
// of splits, follow each other.

struct Scheduler {
  int k_end, raster;
  int tiles_m, tiles_n, tiles, total;

  DEVICE Scheduler(int m, int n, int k, int raster, int batch, int splits, int, int) : k_end(k), raster(raster) {
    tiles_m = (m + BM * CLUSTER_M - 1) / (BM * CLUSTER_M);
    tiles_n = (n + BN * CLUSTER_N - 1) / (BN * CLUSTER_N);
    tiles = tiles_m * tiles_n;
    total = tiles * batch * splits;
  }

  DEVICE bool has(int index) const { return index < total; }

  DEVICE Work work(int index, int rank_m, int rank_n) const {
    int batch = index < tiles ? 0 : index / tiles;
    Place at = place(index - batch * tiles, tiles_m, tiles_n, raster);
    int m = (at.m * CLUSTER_M + rank_m) * BM, n = (at.n * CLUSTER_N + rank_n) * BN;
    return {m, n, BM, 0, k_end, (k_end + BK - 1) / BK, batch, batch};
  }
};
