// Tiles of groups whose sizes lie in device memory, and are whatever they are: negative ones count as 0, and together
// they hold no more than there is.
//   RAGGED_M: the rows of A and D are divided. What is left of them belongs to no group, and is one more at the end.
//   RAGGED_N: the columns of B and D are, where operands are swapped.
//   RAGGED_K: the contraction is divided; every group has a matrix of D. Where its blocks are K_ALIGNED they begin at
//   multiples of BK, so that the first of a group may begin with what is of the one before.
// Each warp walks the groups by itself, 32 at a time, one a lane: all of its lanes must call.
//
// Blocks take every step-th tile, so where tiles differ in depth, some blocks would get more to do than others. Of 32
// groups of k the deepest come first, and every other time the least deep, so that the last 32 end with those. Groups
// of about the same depth stay in order: where all are shallow, it is the loads that want to be spread.

struct Scheduler {
  static constexpr bool OF_D = RAGGED_M || RAGGED_N;  // what is of no group is zeroed
  int extent;                                         // of what is divided
  int k_all, raster, batch, splits, batch1, groups, leading, step0, step1;
  int tiles_m, tiles_n;
  const int* sizes;  // [.., leading + groups]
  // The window of 32 sizes: which matrix of the batch (of every split), its first entry, and the first tile after it.
  int z = 0, first = -32, tile_end = 0;
  int row = 0, rows = 0, tile;  // this lane's entry: its first row, how many, its first tile

  DEVICE Scheduler(int m, int n, int k, int raster, int batch, int splits, int batch1, int groups, const int* sizes,
                   int leading, int step0, int step1)
      : extent(RAGGED_M   ? m
               : RAGGED_N ? n
                          : k),
        k_all(k),
        raster(raster),
        batch(batch),
        splits(splits),
        batch1(batch1),
        groups(groups),
        leading(leading),
        step0(step0),
        step1(step1),
        sizes(sizes) {
    tiles_m = RAGGED_N ? (m + BM * CLUSTER_M - 1) / (BM * CLUSTER_M) : tiles(m);
    tiles_n = (n + BN * CLUSTER_N - 1) / (BN * CLUSTER_N);
  }

  // Moves to the window that has this item; items must be asked for in order.
  DEVICE bool has(int index) {
    while (index >= tile_end) {
      first += 32;
      if (first >= leading + groups + OF_D) {
        first = row = rows = 0;
        if (++z >= batch * splits) return false;
      }
      load();
    }
    return true;
  }

  DEVICE Work work(int index, int rank_m, int rank_n) const {
    int lane = __ffs(__ballot_sync(~0u, static_cast<u32>(index - tile) < own_tiles())) - 1;
    int start = __shfl_sync(~0u, row, lane), count = __shfl_sync(~0u, rows, lane);
    index -= __shfl_sync(~0u, tile, lane);
    int group = first + lane - leading;
    bool outside = OF_D && (group < 0 || group >= groups);
    Place at = place(index, RAGGED_M ? tiles(count) : tiles_m, RAGGED_N ? tiles(count) : tiles_n, raster);
    int m = (at.m * CLUSTER_M + rank_m) * BM, n = (at.n * CLUSTER_N + rank_n) * BN, matrix = z * groups + group;
    if constexpr (OF_D) {
      int k_blocks = outside ? 0 : (k_all + BK - 1) / BK;
      if constexpr (RAGGED_M)
        return {uniform(start + m), uniform(n), uniform(count - m), 0, k_all, uniform(k_blocks), z, matrix};
      return {uniform(m), uniform(start + n), BM, 0, k_all, uniform(k_blocks), z, matrix, uniform(count - n)};
    } else {
      int head = K_ALIGNED ? start % BK : 0;
      int k_blocks = uniform(max(1, (head + count + BK - 1) / BK));
      return {m, n, BM, start - head, start + count, k_blocks, matrix, matrix, BN, head};
    }
  }

 private:
  // Those of so many rows, or columns.
  DEVICE static int tiles(int rows) {
    constexpr int EACH = RAGGED_N ? BN * CLUSTER_N : BM * CLUSTER_M;
    return (rows + EACH - 1) / EACH;
  }

  // Of this lane's entry, if it has any.
  DEVICE int own_tiles() const {
    return RAGGED_N ? tiles_m * tiles(rows) : (RAGGED_M ? tiles(rows) : tiles_m) * tiles_n;
  }

  DEVICE void load() {
    int lane = threadIdx.x % 32, entry = first + lane, entries = leading + groups;
    int size = 0;
    if (entry < entries) {
      int own = (IN_PARTS ? z % batch : z) * groups;
      size = ld_global(sizes + static_cast<i64>(BatchIndex(own, batch1, groups)(step0, step1, 0)) * entries + entry);
    } else if (OF_D && entry == entries) {
      size = extent;
    }
    u32 all = extent, end = min(max(size, 0), extent);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      u32 before = __shfl_up_sync(~0u, end, d);
      if (lane >= d) end = min(end + before, all);
    }
    int before = __shfl_sync(~0u, row + rows, 31);  // where the window before this one ended
    end = min(end + before, all);
    row = __shfl_up_sync(~0u, end, 1);
    if (lane == 0) row = before;
    rows = end - row;

    int count = own_tiles();
    if constexpr (OF_D) {
      int sum = count;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        int before = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += before;
      }
      tile = tile_end + sum - count;
      tile_end += __shfl_sync(~0u, sum, 31);
    } else {
      constexpr int LAST = 0x7fffffff;
      bool group = entry >= leading && entry < entries, least_first = (entries - 1 - first) / 32 & 1;
      int depth = rows / 128, key = !group ? -LAST - 1 : least_first ? -depth : depth, rank = 0;
#pragma unroll 1
      for (int other = 0; other < 32; ++other) {
        int its = __shfl_sync(~0u, key, other);
        rank += its > key || (its == key && other < lane);
      }
      tile = group ? tile_end + rank * count : LAST;
      tile_end += __popc(__ballot_sync(~0u, group)) * count;
    }
  }
};
