// One PTX instruction (or one fixed group) each, named after it, that all architectures have, or of which a kernel uses
// what its own has. Nothing here knows what a GEMM is.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

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

// ---- named barriers (0 is __syncthreads) ----

DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEVICE void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

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

DEVICE void st_shared_u32(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

DEVICE void st_shared_f32(u32 address, float x) { st_shared_u32(address, __float_as_uint(x)); }

DEVICE void st_shared_u8(u32 address, u32 x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

DEVICE void st_shared_u16(u32 address, u16 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

DEVICE void st_global_v2(float* p, float x, float y) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
}

// Of other types.
template <typename T>
DEVICE void st_global_v2(T* p, T x, T y) {
  p[0] = x;
  p[1] = y;
}

DEVICE void st_global_v4(float* p, float x, float y, float z, float w) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
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

DEVICE float ld_shared_f32(u32 address) { return __uint_as_float(ld_shared_u32(address)); }

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

DEVICE void ldmatrix_x4_trans(u32 address, u32& r0, u32& r1, u32& r2, u32& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

DEVICE void st_global_v4(void* p, Bytes16 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
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

// BYTES, of which the address is a multiple.
template <int BYTES>
DEVICE Bytes16 ld_shared(u32 address) {
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
  return v;
}

// Copies BYTES, of which both addresses are multiples.
template <int BYTES>
DEVICE void copy_to_global(void* p, u32 address) {
  st_global<BYTES>(p, ld_shared<BYTES>(address));
}

DEVICE int ld_global(const int* p) {
  int x;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}

// The nearest bf16, or f16, of both.
DEVICE u32 cvt_bf16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#else
  auto rounded = [](float x) {
    u32 bits = __float_as_uint(x);
    return x != x ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
#endif
}

DEVICE u32 cvt_f16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#else
  u16 x, y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(high));
  return x | static_cast<u32>(y) << 16;
#endif
}

// a b + c, a + b, and a b, of each half.
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

DEVICE u32 add_f16x2(u32 a, u32 b) {
  u32 d;
  asm("add.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
