// Two floats of 16 bits in a word, bf16 or f16 as WIDE says. Products and sums are rounded once.

constexpr bool BF16 = WIDE == Dtype::bf16;

DEVICE u32 halves_sum(u32 x, u32 y) { return BF16 ? fma_bf16x2(x, 0x3f803f80, y) : add_f16x2(x, y); }

DEVICE u32 halves_product(u32 x, u32 y) { return BF16 ? fma_bf16x2(x, y, 0x80008000) : mul_f16x2(x, y); }

// Both times a float32.
DEVICE u32 halves_by_f32(u32 x, float by) {
  if constexpr (BF16) return cvt_bf16x2(__uint_as_float(x << 16) * by, __uint_as_float(x & 0xffff0000) * by);
  return cvt_f16x2(f16_to_f32(x & 0xffff) * by, f16_to_f32(x >> 16) * by);
}
