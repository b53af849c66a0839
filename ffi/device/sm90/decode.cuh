// Weights of 8 or 4 bits as floats of 16, exactly, and times their factors, rounded once. NARROW says what they are in
// memory, WIDE what they are multiplied in, FACTOR what the factors are, where there are some.

// The bits of the number in whose mantissa an integer is put: 128 in bf16, 1024 in f16, and for 4 bits with a sign 8
// more, for 8 in f16 128 more. Decoding takes it in a register, for which the compiler would move a constant each time.
constexpr u32 MAGIC =
    (WIDE == Dtype::bf16 ? 0x43004300 : 0x64006400) | (NARROW == Narrow::s4                         ? 0x00080008
                                                       : NARROW == Narrow::s8 && WIDE == Dtype::f16 ? 0x00800080
                                                                                                    : 0);

// Two elements of a word, of which the first is in the low half then: of 8 bits, bytes i and i + 2; of 4, nibbles i and
// i + 4, the lowest first.
DEVICE u32 decode(u32 word, int i, u32 magic) {
  constexpr bool BF16 = WIDE == Dtype::bf16;
  u32 x = word >> i * A_BITS;
  if constexpr (NARROW == Narrow::s8 || NARROW == Narrow::u8) {
    if constexpr (BF16) {
      // The low 7 bits in the mantissa of 128, and the 8th in the exponent, which makes 256 of 128.
      u32 low = (x & 0x007f007f) | magic, high = (x & 0x00800080) | magic;
      if constexpr (NARROW == Narrow::s8) return fma_bf16x2(high, 0xbf80bf80, low);
      return fma_bf16x2(fma_bf16x2(high, 0x3f803f80, 0xc380c380), 0x3f803f80, low);
    } else {
      return add_f16x2((x & 0x00ff00ff) ^ magic, MAGIC | 0x80008000);
    }
  } else if constexpr (NARROW == Narrow::s4 || NARROW == Narrow::u4) {
    u32 biased = (x & 0x000f000f) ^ magic;
    return BF16 ? fma_bf16x2(biased, 0x3f803f80, MAGIC | 0x80008000) : add_f16x2(biased, MAGIC | 0x80008000);
  } else if constexpr (NARROW ==
                       Narrow::e2m1) {  // the bits in their places, times what the exponents' biases differ by
    u32 sign = (x & 0x00080008) << 12;
    if constexpr (BF16) return fma_bf16x2((x & 0x00070007) << 6 | sign, 0x7e807e80, 0x80008000);
    return mul_f16x2((x & 0x00070007) << 9 | sign, 0x74007400);
  } else {
    u32 halves = NARROW == Narrow::e5m2 ? (i ? word : word << 8) & 0xff00ff00  // high bytes of f16
                                        : cvt_f16x2_e4m3x2(static_cast<u16>(__byte_perm(word, 0, i ? 0x4431 : 0x4420)));
    return BF16 ? cvt_bf16x2(f16_to_f32(halves & 0xffff), f16_to_f32(halves >> 16)) : halves;
  }
}

// Both halves times a factor: f32, or in both halves of a word.
DEVICE u32 scaled(u32 x, u32 factor) {
  if constexpr (FACTOR == Dtype::f32) {
    float by = __uint_as_float(factor);
    if constexpr (WIDE == Dtype::bf16)
      return cvt_bf16x2(__uint_as_float(x << 16) * by, __uint_as_float(x & 0xffff0000) * by);
    return cvt_f16x2(f16_to_f32(x & 0xffff) * by, f16_to_f32(x >> 16) * by);
  } else {
    if constexpr (WIDE == Dtype::bf16) return fma_bf16x2(x, factor, 0x80008000);
    return mul_f16x2(x, factor);
  }
}
