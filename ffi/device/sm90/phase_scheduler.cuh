// A work item is the block of tiles that one cluster computes together. Phases of a result (load_im2col.cuh) read the
// same images and store neighbouring pixels, which L2 keeps where they follow each other: clusters compute a tile each
// of the deepest phase, then the same tiles of the next one, and so on, before they go on to other tiles.

struct Scheduler {
  int k_end, raster;
  int tiles_m, tiles_n, tiles, phases, total, clusters;

  DEVICE Scheduler(int m, int n, int k, int raster, int batch, int splits, int, int)
      : k_end(k), raster(raster), phases(batch), clusters(gridDim.x / (CLUSTER_M * CLUSTER_N * CLUSTER_K)) {
    tiles_m = (m + BM * CLUSTER_M - 1) / (BM * CLUSTER_M);
    tiles_n = (n + BN * CLUSTER_N - 1) / (BN * CLUSTER_N);
    tiles = tiles_m * tiles_n;
    total = tiles * phases;
  }

  // Of the last tiles, a turn of the clusters may have some of one phase and some of the next. Turns are in order or
  // the other way round as the Thue-Morse sequence has it, so that a cluster has deep ones and others.
  DEVICE int item(int index) const {
    int turn = index / clusters;
    return __popc(turn) % 2 == 0 ? index : (2 * turn + 1) * clusters - 1 - index;
  }

  DEVICE bool has(int index) const { return item(index) < total; }

  DEVICE Work work(int index, int rank_m, int rank_n) const {
    int i = item(index), first = i / (clusters * phases) * clusters, count = min(clusters, tiles - first);
    i -= first * phases;
    int phase = i / count;
    Place at = place(first + i - phase * count, tiles_m, tiles_n, raster);
    int m = (at.m * CLUSTER_M + rank_m) * BM, n = (at.n * CLUSTER_N + rank_n) * BN;
    return {m, n, BM, 0, k_end, (k_end + BK - 1) / BK, phase, phase};
  }
};
