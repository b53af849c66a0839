// Factors of decoded elements (multiply_registers.cuh) that are powers of two, the exponent and 127 in a byte: those of
// bf16 in both halves of a word; f16 has not all of them, which are f32 there.

// The least, 2^-127, is a denormal, and 255 is NaN: both have the mantissa's highest bit.
DEVICE u32 power(u32 exponent) {
  u32 highest = (exponent + 1 & 0xff) <= 1;
  return BF16 ? (exponent << 7 | highest << 6) * 0x00010001 : exponent << 23 | highest << 22;
}

DEVICE void load_factors(u32 at, u32 (&x)[2]) {
  u32 both = ld_shared_u16(at);
  x[0] = power(both & 0xff), x[1] = power(both >> 8);
}

DEVICE u32 scaled(u32 x, u32 factor) {
  return BF16 ? halves_product(x, factor) : halves_by_f32(x, __uint_as_float(factor));
}

DEVICE float factor_of(u32 x) { return __uint_as_float(BF16 ? x << 16 : x); }
