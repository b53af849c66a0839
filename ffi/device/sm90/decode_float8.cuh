// Decoding (multiply_registers.cuh) of e4m3 and e5m2, the latter being the high bytes of f16.

constexpr u32 MAGIC = 0, LESS = 0;

DEVICE u32 decode(u32 word, int i, u32, u32) {
  u32 halves = NARROW == Narrow::e5m2 ? (i ? word : word << 8) & 0xff00ff00
                                      : cvt_f16x2_e4m3x2(static_cast<u16>(__byte_perm(word, 0, i ? 0x4431 : 0x4420)));
  return BF16 ? cvt_bf16x2(f16_to_f32(halves & 0xffff), f16_to_f32(halves >> 16)) : halves;
}
