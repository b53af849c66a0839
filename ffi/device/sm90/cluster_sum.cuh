// Parts of the contraction (common/parts.cuh) in one cluster: CLUSTER_K CTAs share a tile, and their accumulators meet
// in distributed shared memory.

constexpr int OWNERS = BN / EPILOGUE_COLUMNS;  // CTAs of the cluster that store some of the tile's columns

DEVICE u32 mapa(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

DEVICE void ld_shared_cluster_v4(u32 address, u32 (&x)[4]) {
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

DEVICE void arrive_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
DEVICE void wait_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// All threads of the cluster take part, twice: before accumulators are read, and before a CTA that they are read from
// leaves. This is the part of those that have none.
DEVICE void share_nothing() {
  arrive_cluster();
  wait_cluster();
  arrive_cluster();
}

// All consumers of the cluster: what the epilogue takes of a tile, which is the sums, in the order of the parts, of the
// columns that this CTA stores, if any. The stages are free: all that was loaded has been multiplied. There, a thread's
// accumulators lie 4 by 4, of 8 columns each, those of all threads beside each other.
DEVICE const auto& share(const Acc (&accumulators)[M_BLOCKS][PRODUCTS * BN / 2],
                         Acc (&sums)[M_BLOCKS][PRODUCTS * EPILOGUE_COLUMNS / 2], u32 stages, u32 rank, int barrier) {
  if constexpr (CLUSTER_K == 1) {
    return accumulators;
  } else {
    constexpr int PITCH = STORERS * 128 * 16, GROUPS = PRODUCTS * BN / 8, OWN = EPILOGUE_COLUMNS / 8;
    static_assert(CLUSTER_K == 1 || M_BLOCKS * GROUPS * PITCH <= STAGES * STAGE_BYTES, "they take their place");
    u32 own = stages + (threadIdx.x - 128) * 16;
    bar_sync(barrier, STORERS * 128);  // others may still multiply what is there
#pragma unroll
    for (int i = 0; i < M_BLOCKS * GROUPS; ++i) {
      u32 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = word_of(accumulators[i / GROUPS][i % GROUPS * 4 + j]);
      st_shared_v4(own + i * PITCH, x[0], x[1], x[2], x[3]);
    }
    arrive_cluster();
    wait_cluster();
    if (rank < OWNERS) {
      u32 first = own + rank * OWN * PITCH;
#pragma unroll
      for (int part = 0; part < CLUSTER_K; ++part) {
        u32 theirs = mapa(first, part);
#pragma unroll
        for (int i = 0; i < M_BLOCKS * PRODUCTS * OWN; ++i) {
          u32 x[4];
          ld_shared_cluster_v4(theirs + (i / OWN * (BN / 8) + i % OWN) * PITCH, x);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            Acc& sum = sums[i / (PRODUCTS * OWN)][i % (PRODUCTS * OWN) * 4 + j];
            sum = part == 0 ? of_word<Acc>(x[j]) : sum + of_word<Acc>(x[j]);
          }
        }
      }
    }
    arrive_cluster();
    return sums;
  }
}
