// d += a b on the tensor cores, of 16 rows, 8 columns and 32 bytes of k: 16 elements of 16 bits, 8 tf32, 32 of 8 bits.
//
// What lane l holds, in units of 4 bytes of k, with g = l / 4 and q = l % 4:
//   a[0], a[1], a[2], a[3]   rows g, g + 8, g, g + 8 at unit q, q, q + 4, q + 4
//   b[0], b[1]               column g at unit q, q + 4
//   d[0], d[1], d[2], d[3]   rows g, g, g + 8, g + 8 at column 2 q, 2 q + 1, 2 q, 2 q + 1

#define MMA(shape, type, constraint)                                                    \
  asm volatile("mma.sync.aligned." shape ".row.col." type                               \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                        \
               "{%0, %1, %2, %3};"                                                      \
               : constraint(d[0]), constraint(d[1]), constraint(d[2]), constraint(d[3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

#if __CUDA_ARCH__ >= 800
#define MMA_INTEGERS(types) MMA("m16n8k32", "s32." types ".s32", "+r")
#else  // a quarter as large ones
#define MMA_INTEGERS(types)                                                                                      \
  _Pragma("unroll") for (int i = 0; i < 4; ++i) asm volatile(                                                    \
      "mma.sync.aligned.m8n8k16.row.col.s32." types ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};" : "+r"(d[i % 2 * 2]), \
      "+r"(d[i % 2 * 2 + 1]) : "r"(a[i]), "r"(b[i / 2]))
#endif

template <Math MATH, typename T>
DEVICE void mma(T (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (MATH == Math::bf16) {
    MMA("m16n8k16", "f32.bf16.bf16.f32", "+f");
  } else if constexpr (MATH == Math::tf32) {
    MMA("m16n8k8", "f32.tf32.tf32.f32", "+f");
  } else if constexpr (MATH == Math::e4m3) {
    MMA("m16n8k32", "f32.e4m3.e4m3.f32", "+f");
  } else if constexpr (MATH == Math::e5m2) {
    MMA("m16n8k32", "f32.e5m2.e5m2.f32", "+f");
  } else if constexpr (MATH == Math::e4m3_e5m2) {
    MMA("m16n8k32", "f32.e4m3.e5m2.f32", "+f");
  } else if constexpr (MATH == Math::e5m2_e4m3) {
    MMA("m16n8k32", "f32.e5m2.e4m3.f32", "+f");
  } else if constexpr (MATH == Math::f16 && __CUDA_ARCH__ >= 800) {
    MMA("m16n8k16", "f32.f16.f16.f32", "+f");
  } else if constexpr (MATH == Math::f16) {  // sm_75 has half as deep ones
#pragma unroll
    for (int half = 0; half < 2; ++half)
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
  } else if constexpr (MATH == Math::s8) {
    MMA_INTEGERS("s8.s8");
  } else if constexpr (MATH == Math::u8) {
    MMA_INTEGERS("u8.u8");
  } else if constexpr (MATH == Math::s8_u8) {
    MMA_INTEGERS("s8.u8");
  } else if constexpr (MATH == Math::u8_s8) {
    MMA_INTEGERS("u8.s8");
  }
}

#undef MMA_INTEGERS
#undef MMA

// The same of f16, added up in f16: d holds two columns in each word.
DEVICE void mma_f16(u32 (&d)[2], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
                 : "+r"(d[0]), "+r"(d[1])
                 : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

// The same of float64, of 4, 8 or 16 of k: a[2 t], a[2 t + 1] are of rows g, g + 8, and b[t] of column g, at 4 t + q.
template <int OF_A, int OF_B>
DEVICE void dmma(double& d0, double& d1, double& d2, double& d3, const double (&a)[OF_A], const double (&b)[OF_B]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (OF_B == 4) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(d0), "+d"(d1), "+d"(d2), "+d"(d3)
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
          "d"(b[2]), "d"(b[3]));
  } else if constexpr (OF_B == 2) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+d"(d0), "+d"(d1), "+d"(d2), "+d"(d3)
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
  } else {
    asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+d"(d0), "+d"(d1), "+d"(d2), "+d"(d3)
                 : "d"(a[0]), "d"(a[1]), "d"(b[0]));
  }
#else
#pragma unroll
  for (int t = 0; t < OF_B; ++t) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d0), "+d"(d1)
                 : "d"(a[2 * t]), "d"(b[t]));
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d2), "+d"(d3)
                 : "d"(a[2 * t + 1]), "d"(b[t]));
  }
#endif
}
