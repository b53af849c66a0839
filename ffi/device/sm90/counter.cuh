// The work items of a cluster, as it comes to them. Where kernels beside this one hold some SMs, blocks wait for a
// place there; in turns they would have all of theirs left to do when the others are done.
//
// A counter in memory, zero before the launch, is the next item. The producer of the cluster's first block takes from
// it and tells all warps of the cluster that ask, through a ring of slots in each block's shared memory. What is past
// the last item says that there are no more.

constexpr int SLOTS = 4;
constexpr u32 READERS = CLUSTER * (1 + 4 * CONSUMERS_PER_TILE);  // warps, one of each block's producer

// Writes to the same address of another block, which its barrier counts as bytes that have come. Neither it nor what
// waits for it is a fence: one for the cluster would wait for all that a warp has written to global memory.
DEVICE void st_async(u32 address, u32 barrier, u32 rank, int value) {
  asm volatile(
      "{\n.reg .b32 to, counts;\nmapa.shared::cluster.u32 to, %0, %2;\nmapa.shared::cluster.u32 counts, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %3, [counts];\n}" ::"r"(address),
      "r"(barrier), "r"(rank), "r"(value)
      : "memory");
}

DEVICE void st_shared(u32 address, int value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE int ld_shared(u32 address) {
  int value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

struct Items {
  u32 full, empty, slots, rank;
  int* counter;
  int stride = 1, slot = 0, phase = 0;

  DEVICE static void init(u32 base) {
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) {
      mbarrier_init(base + i * 8, 1);
      mbarrier_init(base + (SLOTS + i) * 8, READERS);
    }
  }

  DEVICE Items(u32 base, u32 rank, int, int* counter)
      : full(base), empty(base + SLOTS * 8), slots(base + SLOTS * 16), rank(rank), counter(counter) {}

  DEVICE void advance(int count) {
    slot += count;
    phase ^= slot / SLOTS & 1;
    slot %= SLOTS;
  }

  DEVICE void alternate(int consumer) {
    stride = 2;
    advance(consumer);
  }

  // All threads of a warp.
  DEVICE int read() {
    mbarrier_wait(full + slot * 8, phase);
    int item = ld_shared(slots + slot * 4);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if constexpr (CLUSTER > 1) {
        mbarrier_arrive_cluster(empty + slot * 8, 0);
      } else {
        mbarrier_arrive(empty + slot * 8);
      }
    }
    advance(stride);
    return item;
  }

  DEVICE int first() { return read(); }
  DEVICE int after(int) { return read(); }
};

// The producer's warp, which takes an item ahead: while a tile is loaded, the counter answers.
struct Producing : Items {
  int next = 0;

  using Items::Items;

  DEVICE bool tells() const { return rank == 0 && threadIdx.x % 32 == 0; }

  DEVICE void take() {
    if (tells()) next = atomicAdd(counter, 1);
  }

  DEVICE int pass() {
    u32 barrier = full + slot * 8, place = slots + slot * 4;
    if (CLUSTER > 1 && threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(barrier, 4);
    if (tells()) {
      mbarrier_wait(empty + slot * 8, phase ^ 1);
      if constexpr (CLUSTER > 1) {
        for (u32 block = 0; block < CLUSTER; ++block) st_async(place, barrier, block, next);
      } else {
        st_shared(place, next);
        mbarrier_arrive(barrier);
      }
    }
    __syncwarp();
    return read();
  }

  DEVICE int first() {
    take();
    return after(0);
  }

  DEVICE int after(int) {
    int item = pass();
    take();
    return item;
  }

  // The first block of a cluster stays until all others have read what it told them.
  DEVICE void end() {
    if (PING_PONG) pass();  // that there are no more, to the other consumer too
    if (tells()) {
#pragma unroll 1
      for (int i = 0; i < SLOTS; ++i) {
        mbarrier_wait(empty + slot * 8, phase ^ 1);
        advance(1);
      }
    }
  }
};
