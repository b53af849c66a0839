// Elements of 8 bits as floats of 16 or 32, exactly. NARROW is their dtype.

constexpr bool NARROW_INTEGERS = NARROW == Dtype::s8 || NARROW == Dtype::u8;

// Two floats of 16 bits of the bytes `first` and `second` of a word; the first is in the low half.
template <bool BF16>
DEVICE u32 decode(u32 word, int first, int second) {
  if constexpr (NARROW_INTEGERS && BF16) {
    // 128 + x for the low 7 bits of x are those in the mantissa, from which 128 or 256 (0) goes, as the 8th bit says.
    int pair = first | 0x40 | second << 8 | 0x4000;
    u32 low = __byte_perm(word & 0x7f7f7f7f, 0x43434343, pair), high = word & 0x80808080;
    u32 less =
        NARROW == Dtype::s8 ? __byte_perm(high, 0x43434343, pair) : __byte_perm(high ^ 0x80808080, 0, pair) * 0x86;
    return fma_bf16x2(less, 0xbf80bf80, low);
  } else if constexpr (NARROW_INTEGERS) {
    // 1024 + x are x in the mantissa: of a signed one 128 more, and 128 less again.
    u32 x = NARROW == Dtype::s8 ? word ^ 0x80808080 : word;
    return add_f16x2(__byte_perm(x, 0x64646464, first | 0x40 | second << 8 | 0x4000),
                     NARROW == Dtype::s8 ? 0xe480e480 : 0xe400e400);
  } else {
    u32 halves = NARROW == Dtype::e5m2
                     ? __byte_perm(word, 0, 4 | first << 4 | 0x400 | second << 12)  // high bytes of f16
                     : cvt_f16x2_e4m3x2(static_cast<u16>(__byte_perm(word, 0, first | second << 4 | 0x4400)));
    return BF16 ? cvt_bf16x2(f16_to_f32(halves & 0xffff), f16_to_f32(halves >> 16)) : halves;
  }
}

// The i-th byte of a word.
DEVICE float decode_f32(u32 word, int i) {
  if constexpr (NARROW_INTEGERS) {  // 2^23 + x are x in the mantissa
    u32 x = NARROW == Dtype::s8 ? word ^ 0x80808080 : word;
    return __uint_as_float(__byte_perm(x, 0x4b000000, i | 0x7440)) - (NARROW == Dtype::s8 ? 8388736.0f : 8388608.0f);
  } else {
    u32 halves = decode<false>(word, i / 2 * 2, i / 2 * 2 + 1);
    return f16_to_f32(i % 2 ? halves >> 16 : halves & 0xffff);
  }
}
