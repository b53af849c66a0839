// Decoding (multiply_registers.cuh) of integers of 4 bits, put in the mantissa of 128 in bf16, of 1024 in f16; those
// with a sign 8 more.

constexpr u32 MAGIC = (BF16 ? 0x43004300 : 0x64006400) | (NARROW == Narrow::s4 ? 0x00080008 : 0);
constexpr u32 LESS = MAGIC | 0x80008000;

DEVICE u32 less_of(u32 zero, u32) { return (zero * 0x00010001 ^ MAGIC) | 0x80008000; }

DEVICE u32 decode(u32 word, int i, u32 magic, u32 less) {
  return halves_sum((word >> 4 * i & 0x000f000f) ^ magic, less);
}
