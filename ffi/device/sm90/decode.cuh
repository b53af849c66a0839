// Weights of 8 or 4 bits as floats of 16, exactly, and times their factors, rounded once. NARROW says what they are in
// memory, WIDE what they are multiplied in, FACTOR what the factors are, where there are some.

// Two elements of a word, of which the first is in the low half then: of 8 bits, bytes i and i + 2; of 4, nibbles i and
// i + 4, the lowest first.
DEVICE u32 decode(u32 word, int i) {
  constexpr bool BF16 = WIDE == Dtype::bf16;
  u32 x = word >> i * A_BITS;
  if constexpr (NARROW == Narrow::s8 || NARROW == Narrow::u8) {
    if constexpr (BF16) {
      // The low 7 bits in the mantissa of 128, and the 8th in the exponent, which makes 256 of 128.
      u32 low = (x & 0x007f007f) | 0x43004300, high = (x & 0x00800080) | 0x43004300;
      if constexpr (NARROW == Narrow::s8) return fma_bf16x2(high, 0xbf80bf80, low);
      return fma_bf16x2(fma_bf16x2(high, 0x3f803f80, 0xc380c380), 0x3f803f80, low);
    } else {
      // 1024 + x are x in the mantissa: of a signed one 128 more, and 128 less again.
      if constexpr (NARROW == Narrow::s8) return add_f16x2((x & 0x00ff00ff) ^ 0x64806480, 0xe480e480);
      return add_f16x2((x & 0x00ff00ff) | 0x64006400, 0xe400e400);
    }
  } else if constexpr (NARROW == Narrow::s4) {  // in the mantissa of 128 or 1024, of a signed one 8 more
    if constexpr (BF16) return fma_bf16x2((x & 0x000f000f) ^ 0x43084308, 0x3f803f80, 0xc308c308);
    return add_f16x2((x & 0x000f000f) ^ 0x64086408, 0xe408e408);
  } else if constexpr (NARROW == Narrow::u4) {
    if constexpr (BF16) return fma_bf16x2((x & 0x000f000f) | 0x43004300, 0x3f803f80, 0xc300c300);
    return add_f16x2((x & 0x000f000f) | 0x64006400, 0xe400e400);
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
