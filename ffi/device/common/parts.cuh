// Parts of the contraction: equal ranges of a tile's k blocks. A launch may have the parts of several splits, each with
// results of its own: those of split 0, then those of split 1, and so on.

// Of k blocks, those of each part. Past the contraction's end TMA brings zeros, so that no part is without any.
DEVICE int part_blocks(int blocks, int splits) {
  int parts = CLUSTER_K * splits;
  return (blocks + parts - 1) / parts;
}

// What of a work item is this CTA's, whose rank along k is given; a split has `matrices` results.
DEVICE Work part(Work work, u32 rank, int splits, int matrices) {
  if constexpr (CLUSTER_K == 1 && !IN_PARTS) return work;
  int split = work.result / matrices, before = part_blocks(work.k_blocks, splits);
  work.batch -= split * matrices;
  int first = (split * CLUSTER_K + rank) * before;
  if constexpr (RAGGED_K) {  // past a group's end is the next one: a part of none has one block, all of it cleared
    int left = work.k_blocks - first;
    if (left <= 0) work.k_end = work.k;
    if (left <= 0 || first > 0) work.head = 0;
    if (left > 0) work.k += first * BK;
    work.k_blocks = uniform(max(1, min(before, left)));
  } else {
    work.k = first * BK;
    work.k_blocks = before;
  }
  return work;
}
