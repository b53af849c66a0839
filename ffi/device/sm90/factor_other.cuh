// Factors of decoded elements (multiply_registers.cuh) in the other dtype of 16 bits than the one that is multiplied.

DEVICE void load_factors(u32 at, u32 (&x)[2]) {
  u32 both = ld_shared_u32(at);
  x[0] = BF16 ? __float_as_uint(f16_to_f32(both & 0xffff)) : both << 16;
  x[1] = BF16 ? __float_as_uint(f16_to_f32(both >> 16)) : both & 0xffff0000;
}

DEVICE u32 scaled(u32 x, u32 factor) { return halves_by_f32(x, __uint_as_float(factor)); }

DEVICE float factor_of(u32 x) { return __uint_as_float(x); }
