// Tiles of a dense product where what would be an unfilled last wave is divided equally. Each cluster of CTAs first
// takes an equal range of the k blocks of as many tiles as leave whole waves, then whole tiles. A range begins and ends
// anywhere in a tile, so a tile is computed in parts, by clusters that follow each other (sm90/stream.cuh adds them
// up).

struct Scheduler {
  int k_end, raster;
  Acc* scratch;
  int* tickets;
  int tiles_m, tiles_n, tiles, k_blocks;
  int streamed, waves;       // tiles that are computed in parts; waves of whole ones after them
  int each, more;            // k blocks of a range; the first so many ranges have one more
  int first_tile, segments;  // of this cluster's range

  DEVICE Scheduler(int m, int n, int k, int raster, int batch, int, int, int, Acc* scratch, int* tickets)
      : k_end(k), raster(raster), scratch(scratch), tickets(tickets) {
    tiles_m = (m + BM * CLUSTER_M - 1) / (BM * CLUSTER_M);
    tiles_n = (n + BN * CLUSTER_N - 1) / (BN * CLUSTER_N);
    tiles = tiles_m * tiles_n;
    k_blocks = (k + BK - 1) / BK;
    int clusters = gridDim.x / (CLUSTER_M * CLUSTER_N);
    waves = max(0, tiles * batch / clusters - 1);
    streamed = tiles * batch - waves * clusters;
    each = streamed * k_blocks / clusters;
    more = streamed * k_blocks - each * clusters;
    int begin = range(cluster()), end = range(cluster() + 1);
    first_tile = begin / k_blocks;
    segments = end > begin ? (end - 1) / k_blocks - first_tile + 1 : 0;
  }

  DEVICE int cluster() const { return blockIdx.x / (CLUSTER_M * CLUSTER_N); }

  // How many work items of this cluster come before one.
  DEVICE int turn(int index) const { return index / static_cast<int>(gridDim.x / (CLUSTER_M * CLUSTER_N)); }

  // The first k block of a cluster's range, counted from the first tile's.
  DEVICE int range(int c) const { return c * each + min(c, more); }

  // The cluster in whose range a k block lies.
  DEVICE int owner(int block) const {
    int larger = more * (each + 1);
    return block < larger ? block / (each + 1) : more + (block - larger) / max(1, each);
  }

  DEVICE bool has(int index) const { return turn(index) < segments + waves; }

  DEVICE Work work(int index, int rank_m, int rank_n) const {
    int item = turn(index), tile, first = 0, last = k_blocks;
    bool part = item < segments;
    if (part) {
      tile = first_tile + item;
      first = max(0, range(cluster()) - tile * k_blocks);
      last = min(k_blocks, range(cluster() + 1) - tile * k_blocks);
    } else {
      tile = streamed + index - segments * static_cast<int>(gridDim.x / (CLUSTER_M * CLUSTER_N));
    }
    int batch = tile < tiles ? 0 : tile / tiles;
    Place at = place(tile - batch * tiles, tiles_m, tiles_n, raster);
    int m = (at.m * CLUSTER_M + rank_m) * BM, n = (at.n * CLUSTER_N + rank_n) * BN;
    Work work{m, n, BM, first * BK, k_end, last - first, batch, batch};
    if (part) {
      work.tile = tile;
      work.first = owner(tile * k_blocks);
      work.parts = owner((tile + 1) * k_blocks - 1) - work.first + 1;
    }
    return work;
  }

  // Where a cluster keeps its part of a tile: a range has two tiles at most of which it is not the whole.
  DEVICE int slot(int c, int tile) const { return 2 * c + (range(c) / k_blocks != tile); }
};
