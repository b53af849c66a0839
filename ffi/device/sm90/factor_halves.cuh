// Factors of decoded elements (multiply_registers.cuh) in the dtype that is multiplied.

DEVICE void load_factors(u32 at, u32 (&x)[2]) {
  u32 both = ld_shared_u32(at);
  x[0] = __byte_perm(both, 0, 0x1010), x[1] = __byte_perm(both, 0, 0x3232);
}

DEVICE u32 scaled(u32 x, u32 factor) { return halves_product(x, factor); }

DEVICE float factor_of(u32 x) { return BF16 ? __uint_as_float(x << 16) : f16_to_f32(x & 0xffff); }
