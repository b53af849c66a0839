// The PTX instructions that sm_90 adds beside those of common/tma.cuh: clusters, TMA's stores, wgmma. wgmma itself is
// generated for exactly the shape in use: cutjax/kernels/sm90/text.py.

// ---- clusters and registers ----

DEVICE u32 cluster_ctarank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster have come here. What they wrote before is ordered by a fence of its own: one that comes
// with the barrier would wait for all that they have written to global memory.
DEVICE void barrier_cluster_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

template <int REGISTERS>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- mbarriers and TMA ----

// Arrives on the barrier at this address in CTA `rank` of the cluster.
DEVICE void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Writes the box to the same address, and signals the barrier at the same address, in every CTA of `mask`.
template <bool FIRST>
DEVICE void tma_load_multicast(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z, u16 mask) {
  if constexpr (FIRST) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(destination),
        "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask), "l"(evict_first())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask)
        : "memory");
  }
}

template <bool FIRST>
DEVICE void tma_store(const TensorMap* map, u32 source, int x, int y, int z) {
  if constexpr (FIRST) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;" ::"l"(
            reinterpret_cast<u64>(map)),
        "r"(source), "r"(x), "r"(y), "r"(z), "l"(evict_first())
        : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                     reinterpret_cast<u64>(map)),
                 "r"(source), "r"(x), "r"(y), "r"(z)
                 : "memory");
  }
}

// Bytes as they are, without a tensor map: addresses and sizes are multiples of 16.
DEVICE void cp_async_bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

DEVICE void cp_async_bulk_store(void* destination, u32 source, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most PENDING of the newest groups may still be reading shared memory.
template <int PENDING>
DEVICE void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

DEVICE void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A constant in a register, which the compiler would rather move there each time: it is times the depth of a block, 1.
DEVICE u32 in_register(u32 x) {
  u32 y;
  asm volatile("{\n.reg .b32 one;\nmov.u32 one, %%ntid.z;\nmul.lo.u32 %0, one, %1;\n}" : "=r"(y) : "r"(x));
  return y;
}

// ---- cp.async ----

// Copies 4 bytes.
DEVICE void cp_async_word(u32 destination, const void* p) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(p) : "memory");
}

// Copies `bytes`, up to 4, and zeroes the rest of 4.
DEVICE void cp_async_word(u32 destination, const void* p, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(p), "r"(bytes) : "memory");
}

// Arrives when all that this thread has copied so far has landed; the barrier expects it.
DEVICE void cp_async_mbarrier_arrive_noinc(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until all that this thread has copied has landed.
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- wgmma ----

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Accumulators may be read from here on: nothing else keeps the compiler from reading them before the wait for them.
DEVICE void wgmma_done(float& d) { asm volatile("" : "+f"(d)::"memory"); }
DEVICE void wgmma_done(int& d) { asm volatile("" : "+r"(d)::"memory"); }
DEVICE void wgmma_done(u32& d) { asm volatile("" : "+r"(d)::"memory"); }

template <typename T, int COUNT>
DEVICE void wgmma_done(T (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) wgmma_done(d[i]);
}

// Shared memory matrix descriptor (PTX ISA, "Matrix descriptor"): offsets in bytes; SPAN is the swizzle span in bytes.
// Bytes further on in the same block's memory are 1/16 as many in the low half: nothing is carried out of it.
template <int SPAN, u32 LEADING_BYTES, u32 STRIDE_BYTES>
struct WgmmaDescriptor {
  static constexpr u32 MODE = SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3, HIGH = STRIDE_BYTES >> 4 | MODE << 30;
  u32 low;

  // In a cluster, the block's rank is above the bits of an address that a descriptor holds.
  DEVICE explicit WgmmaDescriptor(u32 address) : low((address & 0x3FFFF) >> 4 | LEADING_BYTES >> 4 << 16) {}
  DEVICE u64 at(u32 bytes) const { return static_cast<u64>(HIGH) << 32 | (low + (bytes >> 4)); }
};
