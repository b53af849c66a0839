// What a thread loads and stores at once.

using Acc = ACCUMULATOR;

// What is `step` bytes behind. The compiler would rather keep the distance of each from the first, in registers.
DEVICE const char* next_to(const char* p, int step) {
  p += step;
#ifndef HOST_EMULATION
  asm volatile("" : "+l"(p));
#endif
  return p;
}

// A value that is computed here: the compiler would rather do so again in each branch, or step, that reads it.
#ifdef HOST_EMULATION
DEVICE void keep(Acc&) {}
DEVICE void keep(int&) {}
#else
DEVICE void keep(int& x) { asm volatile("" : "+r"(x)); }
DEVICE void keep(float& x) { asm volatile("" : "+f"(x)); }
DEVICE void keep(double& x) { asm volatile("" : "+d"(x)); }
#endif

// COUNT neighbours of a dtype, in units of as many bytes as theirs are a multiple of.
template <Dtype D, int COUNT>
struct Vector {
  static constexpr int BYTES = COUNT * SIZE<D>;
  static constexpr int UNIT = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : BYTES % 2 == 0 ? 2 : 1;
  u32 words[(BYTES + 3) / 4];

  // Zeros unless they are there.
  DEVICE void load(const char* p, bool there = true) {
#pragma unroll
    for (u32& word : words) word = 0;
    if (!there) return;
#pragma unroll
    for (int at = 0; at < BYTES; at += UNIT) {
      if constexpr (UNIT == 16) {
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[at / 4]), "=r"(words[at / 4 + 1]), "=r"(words[at / 4 + 2]), "=r"(words[at / 4 + 3])
                     : "l"(p + at));
      } else if constexpr (UNIT == 8) {
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                     : "=r"(words[at / 4]), "=r"(words[at / 4 + 1])
                     : "l"(p + at));
      } else if constexpr (UNIT == 4) {
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(words[at / 4]) : "l"(p + at));
      } else if constexpr (UNIT == 2) {
        u16 half;
        asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(half) : "l"(p + at));
        words[at / 4] |= static_cast<u32>(half) << at % 4 * 8;
      } else {
        u32 byte;
        asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(byte) : "l"(p + at));
        words[at / 4] |= byte << at % 4 * 8;
      }
    }
  }

  // From shared memory, up to 16 bytes at once.
  DEVICE void load_shared(u32 address) {
    static_assert(BYTES == UNIT);
    const Bytes16 v = ld_shared<BYTES>(address);
    const u32 all[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) words[i] = all[i];
  }

  DEVICE auto operator[](int i) const {
    Pair<D> pair{};
    if constexpr (SIZE<D> >= 4) {
#pragma unroll
      for (int j = 0; j < WORDS<D>; ++j) pair.bits[j] = words[i * WORDS<D> + j];
      return pair[0];
    } else {
      pair.bits[0] = words[i * SIZE<D> / 4] >> (SIZE<D> == 1 ? i % 4 / 2 * 16 : 0);
      return pair[i % 2];
    }
  }

  template <typename Carrier>
  static DEVICE void store(char* p, const Carrier (&y)[COUNT]) {
    u32 packed[(BYTES + 3) / 4 + 3] = {};
    if constexpr (SIZE<D> >= 4) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        u32 own[WORDS<D>];
        unpack<D>(own, y[i]);
#pragma unroll
        for (int j = 0; j < WORDS<D>; ++j) packed[i * WORDS<D> + j] = own[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i += 2)
        packed[i * SIZE<D> / 4] |= pack<D>(y[i], y[i + 1 < COUNT ? i + 1 : i]) << i * SIZE<D> % 4 * 8;
    }
#pragma unroll
    for (int at = 0; at < BYTES; at += UNIT)
      st_global<UNIT>(
          p + at, Bytes16{packed[at / 4] >> at % 4 * 8, packed[at / 4 + 1], packed[at / 4 + 2], packed[at / 4 + 3]});
  }
};
