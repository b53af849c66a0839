// One PTX instruction (or one fixed group) each, named after it. Nothing here knows what a GEMM is.
// The only other atom, wgmma, is generated for exactly the shape in use: cutjax/runtime/sources.py.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

struct __align__(64) TensorMap {
  u64 opaque[16];
};

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Tells the compiler that a value is the same in all lanes of the warp, all of which call. Where it does not know that
// of what a loop with wgmma depends on, it waits for each wgmma.
DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// The same, computed once: the compiler would rather compute an address again, in registers that are not uniform.
DEVICE u32 pinned(u32 x) {
  x = uniform(x);
  asm volatile("" : "+r"(x));
  return x;
}

// True in one lane of a whole warp. The compiler knows that it is one, which saves the loop around each TMA that would
// serve lanes with operands of their own.
DEVICE bool elect() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}

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

// ---- named barriers (0 is __syncthreads) ----

DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEVICE void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- mbarriers ----

DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives on the barrier at this address in CTA `rank` of the cluster.
DEVICE void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra retry;\n}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- TMA ----

DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(map)) : "memory");
}

DEVICE void tma_load(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(destination),
      "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Writes the box to the same address, and signals the barrier at the same address, in every CTA of `mask`.
DEVICE void tma_load_multicast(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask)
      : "memory");
}

DEVICE void tma_store(const TensorMap* map, u32 source, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                   reinterpret_cast<u64>(map)),
               "r"(source), "r"(x), "r"(y), "r"(z)
               : "memory");
}

DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most PENDING of the newest groups may still be reading shared memory.
template <int PENDING>
DEVICE void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

DEVICE void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's ordinary writes to shared memory before later TMA stores and wgmma that read them.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

// ---- registers to shared memory ----

// Where TMA with a swizzle span of SPAN bytes keeps the byte at `offset` of a tile with rows of SPAN bytes.
template <int SPAN>
DEVICE u32 swizzle(u32 offset) {
  return offset ^ ((offset >> 7) & (SPAN / 16 - 1)) << 4;
}

DEVICE void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

DEVICE void st_shared_v2(u32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

DEVICE void st_shared_v2(u32 address, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

DEVICE void st_shared_u16(u32 address, u16 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

DEVICE void st_global_v2(float* p, float x, float y) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
}

DEVICE void st_shared_v4(u32 address, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// ---- 16 bytes, and a word ----

struct Bytes16 {
  u32 x, y, z, w;
};

// The bits of an accumulator, and the accumulator of some bits.
DEVICE u32 word_of(float x) { return __float_as_uint(x); }
DEVICE u32 word_of(int x) { return x; }
DEVICE u32 word_of(u32 x) { return x; }

template <typename T>
DEVICE T of_word(u32 x) {
  return static_cast<T>(x);
}
template <>
DEVICE float of_word<float>(u32 x) {
  return __uint_as_float(x);
}

// Of what other blocks may have written.
DEVICE float4 ld_global_v4(const float* p) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

template <typename Integer>
DEVICE Bytes16 ld_global_v4(const Integer* p) {
  Bytes16 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

DEVICE Bytes16 ld_shared_v4(u32 address) {
  Bytes16 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

DEVICE void ld_shared_v2(u32 address, u32& x, u32& y) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}

DEVICE u32 ld_shared_u32(u32 address) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

DEVICE u32 ld_shared_u8(u32 address) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

DEVICE u16 ld_shared_u16(u32 address) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}

DEVICE void ldmatrix_x4(u32 address, u32& r0, u32& r1, u32& r2, u32& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

DEVICE void st_global_v4(void* p, Bytes16 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE void st_global_v4(float* p, float x, float y, float z, float w) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

DEVICE void st_global_v4(void* p, u32 x, u32 y, u32 z, u32 w) { st_global_v4(p, Bytes16{x, y, z, w}); }

// The first BYTES of v.
template <int BYTES>
DEVICE void st_global(void* p, Bytes16 v) {
  if constexpr (BYTES == 16) {
    st_global_v4(p, v);
  } else if constexpr (BYTES == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
  } else if constexpr (BYTES == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v.x) : "memory");
  } else if constexpr (BYTES == 2) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(static_cast<u16>(v.x)) : "memory");
  } else {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(v.x) : "memory");
  }
}

// Copies BYTES, of which both addresses are multiples.
template <int BYTES>
DEVICE void copy_to_global(void* p, u32 address) {
  Bytes16 v{};
  if constexpr (BYTES == 16) {
    v = ld_shared_v4(address);
  } else if constexpr (BYTES == 8) {
    ld_shared_v2(address, v.x, v.y);
  } else if constexpr (BYTES == 4) {
    v.x = ld_shared_u32(address);
  } else if constexpr (BYTES == 2) {
    v.x = ld_shared_u16(address);
  } else {
    v.x = ld_shared_u8(address);
  }
  st_global<BYTES>(p, v);
}

DEVICE int ld_global(const int* p) {
  int x;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}

DEVICE u32 cvt_bf16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

DEVICE u32 cvt_f16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
