// Weights of 8 bits as floats of 16, exactly. NARROW is their dtype in memory, WIDE the one they are multiplied in.

// The bytes `odd` and `odd` + 2 of a word, the first in the low half.
DEVICE u32 decode(u32 word, int odd) {
  constexpr bool BF16 = WIDE == Dtype::bf16;
  if constexpr (NARROW == Dtype::s8 || NARROW == Dtype::u8) {
    u32 x = odd ? word >> 8 : word;
    if constexpr (BF16) {
      // The low 7 bits in the mantissa of 128, and the 8th in the exponent, which makes 256 of 128.
      u32 low = (x & 0x007f007f) | 0x43004300, high = (x & 0x00800080) | 0x43004300;
      if constexpr (NARROW == Dtype::s8) return fma_bf16x2(high, 0xbf80bf80, low);
      return fma_bf16x2(fma_bf16x2(high, 0x3f803f80, 0xc380c380), 0x3f803f80, low);
    } else {
      // 1024 + x are x in the mantissa: of a signed one 128 more, and 128 less again.
      if constexpr (NARROW == Dtype::s8) return add_f16x2((x & 0x00ff00ff) ^ 0x64806480, 0xe480e480);
      return add_f16x2((x & 0x00ff00ff) | 0x64006400, 0xe400e400);
    }
  } else {
    u32 halves = NARROW == Dtype::e5m2
                     ? (odd ? word : word << 8) & 0xff00ff00  // high bytes of f16
                     : cvt_f16x2_e4m3x2(static_cast<u16>(__byte_perm(word, 0, odd ? 0x4431 : 0x4420)));
    return BF16 ? cvt_bf16x2(f16_to_f32(halves & 0xffff), f16_to_f32(halves >> 16)) : halves;
  }
}
