// Decoding (multiply_registers.cuh) of integers of 8 bits. In f16 they are put in the mantissa of 1024, those with a
// sign 128 more. In bf16 the low 7 bits are put in that of 128, and the 8th in the exponent, which makes 256 of 128.

constexpr u32 MAGIC = BF16 ? 0x43004300 : 0x64006400 | (NARROW == Narrow::s8 ? 0x00800080 : 0);
constexpr u32 LESS = BF16 ? 0 : MAGIC | 0x80008000;

// In bf16, of the low bytes of both halves.
DEVICE u32 integers(u32 x, u32 magic) {
  u32 low = (x & 0x007f007f) | magic, high = (x & 0x00800080) | magic;
  if constexpr (NARROW == Narrow::s8) return fma_bf16x2(high, 0xbf80bf80, low);
  return halves_sum(halves_sum(high, 0xc380c380), low);
}

DEVICE u32 less_of(u32 zero, u32 magic) {
  if constexpr (BF16) return integers(zero * 0x00010001, magic) ^ 0x80008000;
  return (zero * 0x00010001 ^ MAGIC) | 0x80008000;
}

DEVICE u32 decode(u32 word, int i, u32 magic, u32 less) {
  u32 x = word >> 8 * i;
  if constexpr (!BF16) return halves_sum((x & 0x00ff00ff) ^ magic, less);
  x = integers(x, magic);
  return ZERO_BITS > 0 ? halves_sum(x, less) : x;
}
