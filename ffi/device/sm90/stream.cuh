// Tiles that several clusters compute in parts: each writes what it has to memory and takes a ticket; the last to come
// adds all parts up, in their order, so that the sum is the same whoever that is. Nobody waits for anybody.

// Takes a ticket; orders this block's writes before it, and what others wrote before theirs after it.
DEVICE int take_ticket(int* ticket) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
  return before;
}

// Threads of a named barrier meet; true in all of them where it is in any.
DEVICE bool bar_any(int barrier, int threads, bool x) {
  u32 any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(static_cast<u32>(x)), "r"(barrier), "r"(threads)
               : "memory");
  return uniform(any) != 0;
}

// One warpgroup, `row` of whose tile is its first: true if its accumulators are now the sum of all parts of the tile.
template <typename Stream>
DEVICE bool join(Acc (&accumulators)[M_BLOCKS][PRODUCTS * BN / 2], const Stream& scheduler, const Work& work, u32 rank,
                 int row, int thread, int barrier) {
  if constexpr (STREAM_K) {
    constexpr int QUADS = PRODUCTS * BN / 8;  // of a block of 64 rows
    int consumer = row / (M_BLOCKS * 64);     // which of the tile's warpgroups
    auto quads = [&](int cluster) {
      i64 slot = scheduler.slot(cluster, work.tile) * CLUSTER + rank;
      return scheduler.scratch + ((slot * CONSUMERS_PER_TILE + consumer) * (M_BLOCKS * QUADS) * 128 + thread) * 4;
    };
    Acc* own = quads(scheduler.cluster());
#pragma unroll
    for (int i = 0; i < M_BLOCKS * QUADS; ++i) {
      const Acc* x = &accumulators[i / QUADS][i % QUADS * 4];
      st_global_v4(own + i * 512, x[0], x[1], x[2], x[3]);
    }
    bar_sync(barrier, 128);
    bool last = false;
    if (thread == 0) {
      int* ticket = scheduler.tickets + (work.tile * CLUSTER + rank) * CONSUMERS_PER_TILE + consumer;
      last = take_ticket(ticket) == work.parts - 1;
    }
    if (!bar_any(barrier, 128, last)) return false;
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
      for (int i = 0; i < QUADS * 4; ++i) accumulators[block][i] = 0;
#pragma unroll 1
    for (int part = 0; part < work.parts; ++part) {
      const Acc* other = quads(work.first + part);
#pragma unroll
      for (int i = 0; i < M_BLOCKS * QUADS; ++i) {
        auto x = ld_global_v4(other + i * 512);
        Acc* sum = &accumulators[i / QUADS][i % QUADS * 4];
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      }
    }
  }
  return true;
}
