// Asynchronous copies and matrix loads: what multistage pipelines of sm_80 are made of. Where the architecture has no
// such instruction (sm_75), loads go through registers (tile.cuh).

constexpr bool HAS_CP_ASYNC = __CUDA_ARCH__ >= 800;

// Copies BYTES, or, unless `there`, zeroes them; nothing is read then. Lines of a copy that is FIRST leave L2 before
// others do.
template <int BYTES, bool FIRST = false>
DEVICE void cp_async(u32 destination, const void* p, bool there) {
  int bytes = there ? BYTES : 0;
  if constexpr (BYTES == 16 && FIRST) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(destination), "l"(p),
                 "r"(bytes), "l"(policy)
                 : "memory");
  } else if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(p), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(destination), "l"(p), "r"(bytes), "n"(BYTES)
                 : "memory");
  }
}

DEVICE void cp_async_commit_group() {
  if constexpr (HAS_CP_ASYNC) asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most PENDING of the newest groups may still be on their way.
template <int PENDING>
DEVICE void cp_async_wait_group() {
  if constexpr (HAS_CP_ASYNC) asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE double ld_shared_f64(u32 address) {
  double x;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(address) : "memory");
  return x;
}

DEVICE void ld_shared_v2(u32 address, double& x, double& y) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(x), "=d"(y) : "r"(address) : "memory");
}

// One word, or zero: nothing is read then.
DEVICE u32 ld_global_u32_if(bool there, const char* p) {
  u32 x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n@p ld.global.nc.u32 %0, [%1];\n}"
               : "=&r"(x)
               : "l"(p), "r"(static_cast<u32>(there)));
  return x;
}

// The same of BYTES, up to a word.
template <int BYTES>
DEVICE u32 ld_global_if(bool there, const char* p) {
  if constexpr (BYTES == 4) return ld_global_u32_if(there, p);
  u16 x;
  if constexpr (BYTES == 2) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u16 %0, 0;\n@p ld.global.nc.u16 %0, [%1];\n}"
                 : "=&h"(x)
                 : "l"(p), "r"(static_cast<u32>(there)));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u16 %0, 0;\n@p ld.global.nc.u8 %0, [%1];\n}"
                 : "=&h"(x)
                 : "l"(p), "r"(static_cast<u32>(there)));
  }
  return x;
}

DEVICE void ld_global_v4_if(bool there, const char* p, u32 (&x)[4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
      : "l"(p), "r"(static_cast<u32>(there)));
}

// The nearest TF32. The 13 bits that it does not have may be any.
DEVICE u32 cvt_rna_tf32(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// d += a b. As assembly, since the compiler moves built-in ones, and finds worse registers then.
DEVICE void fma_rn(float& d, float a, float b) { asm("fma.rn.f32 %0, %1, %2, %0;" : "+f"(d) : "f"(a), "f"(b)); }

// The same, kept in a register: the compiler would rather compute it again where it is read.
DEVICE u32 kept(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Has a pair of registers made of both, and changes neither if `zero` is what it says, which the compiler cannot know.
DEVICE void pass_pair(u32& low, u32& high, u32 zero) {
  asm volatile(
      "{\n.reg .b64 pair;\nmov.b64 pair, {%0, %1};\nmad.wide.u32 pair, %2, %2, pair;\nmov.b64 {%0, %1}, pair;\n}"
      : "+r"(low), "+r"(high)
      : "r"(zero));
}
