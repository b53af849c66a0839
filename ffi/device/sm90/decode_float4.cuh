// Decoding (multiply_registers.cuh) of e2m1: the bits in their places, times what the exponents' biases differ by.

constexpr u32 MAGIC = 0, LESS = 0;

DEVICE u32 decode(u32 word, int i, u32, u32) {
  u32 x = word >> 4 * i, sign = (x & 0x00080008) << 12;
  return halves_product((x & 0x00070007) << (BF16 ? 6 : 9) | sign, BF16 ? 0x7e807e80 : 0x74007400);
}
