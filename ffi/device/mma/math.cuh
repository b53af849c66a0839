// How operands are multiplied: as elements are; float32 as sums of terms (terms.cuh); float64 (double.cuh); one by one
// (fma.cuh).
enum class Math {
  bf16,
  f16,
  f16_f16,
  tf32,
  s8,
  u8,
  s8_u8,
  u8_s8,
  e4m3,
  e5m2,
  e4m3_e5m2,
  e5m2_e4m3,
  tf32x3,
  bf16x1,
  bf16x3,
  bf16x6,
  bf16x9,
  dmma,
  fma
};
