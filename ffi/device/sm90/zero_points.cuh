// Zero points of decoded elements (multiply_registers.cuh), in their dtype: what decoding subtracts for each.

DEVICE void load_zeros(u32 at, u32 (&less)[2], u32 magic) {
  u32 both = ZERO_BITS == 8 ? ld_shared_u16(at) : ld_shared_u8(at);
  less[0] = less_of(both & (1 << ZERO_BITS) - 1, magic), less[1] = less_of(both >> ZERO_BITS, magic);
}
