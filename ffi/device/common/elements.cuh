// Elements in memory: what a dtype's elements are in registers, in global memory, and in a staging tile.

enum class Dtype { bf16, f16, f32, f64, e4m3, e5m2, s8, u8, s16, u16, s32, u32, s64, u64, boolean, c64, c128 };

DEVICE constexpr int size_of(Dtype d) {
  switch (d) {
    case Dtype::c128:
      return 16;
    case Dtype::f64:
    case Dtype::s64:
    case Dtype::u64:
    case Dtype::c64:
      return 8;
    case Dtype::f32:
    case Dtype::s32:
    case Dtype::u32:
      return 4;
    case Dtype::bf16:
    case Dtype::f16:
    case Dtype::s16:
    case Dtype::u16:
      return 2;
    default:
      return 1;
  }
}

template <Dtype D>
constexpr int SIZE = size_of(D);

template <Dtype D>
constexpr int WORDS = SIZE<D> < 4 ? 1 : SIZE<D> / 4;  // of 32 bits, of one element

// Two elements of a dtype of 16 bits or fewer in the low bits, the first lowest, from the values that carry them
// (cutjax/epilogue/emit.py).
template <Dtype D, typename Carrier>
DEVICE u32 pack(Carrier low, Carrier high) {
  if constexpr (D == Dtype::bf16) {
    return cvt_bf16x2(low, high);
  } else if constexpr (D == Dtype::f16) {
    return cvt_f16x2(low, high);
  } else if constexpr (D == Dtype::e4m3) {
    return pack_e4m3x2(low, high);
  } else if constexpr (D == Dtype::e5m2) {
    return pack_e5m2x2(low, high);
  } else if constexpr (SIZE<D> == 2) {
    return (static_cast<u32>(low) & 0xffff) | static_cast<u32>(high) << 16;
  } else {
    return (static_cast<u32>(low) & 0xff) | (static_cast<u32>(high) & 0xff) << 8;
  }
}

// The words of one element of 32 bits or more.
template <Dtype D, typename Carrier>
DEVICE void unpack(u32 (&words)[WORDS<D>], Carrier x) {
  if constexpr (D == Dtype::f32) {
    words[0] = __float_as_uint(x);
  } else if constexpr (SIZE<D> == 4) {
    words[0] = static_cast<u32>(x);
  } else if constexpr (D == Dtype::c64) {
    words[0] = __float_as_uint(x.real), words[1] = __float_as_uint(x.imag);
  } else if constexpr (D == Dtype::c128) {
    words[0] = __double2loint(x.real), words[1] = __double2hiint(x.real);
    words[2] = __double2loint(x.imag), words[3] = __double2hiint(x.imag);
  } else if constexpr (D == Dtype::f64) {
    words[0] = __double2loint(x), words[1] = __double2hiint(x);
  } else {
    words[0] = static_cast<u32>(x), words[1] = static_cast<u32>(static_cast<u64>(x) >> 32);
  }
}

// Two neighbouring elements, as they lie in memory.
template <Dtype D>
struct Pair {
  u32 bits[SIZE<D> >= 4 ? 2 * WORDS<D> : 1];

  // `p` is aligned to both.
  DEVICE void load(const void* p) {
    if constexpr (SIZE<D> >= 8) {
#pragma unroll
      for (int i = 0; i < SIZE<D> / 8; ++i)
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[4 * i]), "=r"(bits[4 * i + 1]), "=r"(bits[4 * i + 2]), "=r"(bits[4 * i + 3])
                     : "l"(static_cast<const char*>(p) + 16 * i));
    } else if constexpr (SIZE<D> == 4) {
      asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(bits[0]), "=r"(bits[1]) : "l"(p));
    } else if constexpr (SIZE<D> == 2) {
      asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(bits[0]) : "l"(p));
    } else {
      u16 both;
      asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(both) : "l"(p));
      bits[0] = both;
    }
  }

  // From two places.
  DEVICE void load_each(const void* first, const void* second) {
    Pair other;
    load_one(first);
    other.load_one(second);
    if constexpr (SIZE<D> >= 4) {
#pragma unroll
      for (int i = 0; i < WORDS<D>; ++i) bits[WORDS<D> + i] = other.bits[i];
    } else {
      bits[0] |= other.bits[0] << SIZE<D> * 8;
    }
  }

  // One alone, as the first.
  DEVICE void load_one(const void* p) {
    if constexpr (SIZE<D> == 16) {
      asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                   : "l"(p));
    } else if constexpr (SIZE<D> == 8) {
      asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(bits[0]), "=r"(bits[1]) : "l"(p));
    } else if constexpr (SIZE<D> == 4) {
      asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(bits[0]) : "l"(p));
    } else if constexpr (SIZE<D> == 2) {
      u16 one;
      asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(one) : "l"(p));
      bits[0] = one;
    } else {
      asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(bits[0]) : "l"(p));
    }
  }

  // The value of the first or the second in its carrier.
  DEVICE auto operator[](int which) const {
    constexpr int STEP = SIZE<D> >= 4 ? WORDS<D> : 0;
    const u32* words = bits + which * STEP;
    u32 word = STEP ? words[0] : bits[0] >> which * SIZE<D> * 8;
    if constexpr (D == Dtype::f32) {
      return __uint_as_float(word);
    } else if constexpr (D == Dtype::f64) {
      return __hiloint2double(words[1], words[0]);
    } else if constexpr (D == Dtype::c64) {
      return Complex<float>{__uint_as_float(word), __uint_as_float(words[1])};
    } else if constexpr (D == Dtype::c128) {
      return Complex<double>{__hiloint2double(words[1], words[0]), __hiloint2double(words[3], words[2])};
    } else if constexpr (D == Dtype::u64) {
      return static_cast<u64>(words[1]) << 32 | word;
    } else if constexpr (D == Dtype::s64) {
      return static_cast<i64>(static_cast<u64>(words[1]) << 32 | word);
    } else if constexpr (D == Dtype::bf16) {
      return __uint_as_float(word << 16);
    } else if constexpr (D == Dtype::f16) {
      return f16_to_f32(word & 0xffff);
    } else if constexpr (D == Dtype::e4m3) {
      return f16_to_f32(cvt_f16x2_e4m3x2(static_cast<u16>(word & 0xff)) & 0xffff);
    } else if constexpr (D == Dtype::e5m2) {
      return f16_to_f32(word << 8 & 0xff00);
    } else if constexpr (D == Dtype::boolean) {
      return (word & 0xff) != 0;
    } else if constexpr (D == Dtype::s32) {
      return static_cast<int>(word);
    } else if constexpr (D == Dtype::s16) {
      return static_cast<int>(static_cast<short>(word));
    } else if constexpr (D == Dtype::s8) {
      return static_cast<int>(static_cast<signed char>(word));
    } else if constexpr (D == Dtype::u32) {
      return word;
    } else {
      return word & (SIZE<D> == 2 ? 0xffffu : 0xffu);
    }
  }
};
