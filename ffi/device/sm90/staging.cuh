// Elements in memory: what a dtype's elements are in registers, in global memory, and in a staging tile.

enum class Dtype { bf16, f16, f32, e4m3, e5m2, s8, u8, s16, u16, s32, u32, boolean };

template <Dtype D>
constexpr int SIZE = D == Dtype::f32 || D == Dtype::s32 || D == Dtype::u32                       ? 4
                     : D == Dtype::bf16 || D == Dtype::f16 || D == Dtype::s16 || D == Dtype::u16 ? 2
                                                                                                 : 1;
// Two elements of the dtype in the low bits, the first lowest, from the values that carry them
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

// Two neighbouring elements, as they lie in memory.
template <Dtype D>
struct Pair {
  u32 bits[SIZE<D> == 4 ? 2 : 1];

  // `p` is aligned to both.
  DEVICE void load(const void* p) {
    if constexpr (SIZE<D> == 4) {
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
    if constexpr (SIZE<D> == 4) {
      bits[1] = other.bits[0];
    } else {
      bits[0] |= other.bits[0] << SIZE<D> * 8;
    }
  }

  // One alone, as the first.
  DEVICE void load_one(const void* p) {
    if constexpr (SIZE<D> == 4) {
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
    u32 word = SIZE<D> == 4 ? bits[which * (SIZE<D> == 4)] : bits[0] >> which * SIZE<D> * 8;
    if constexpr (D == Dtype::f32) {
      return __uint_as_float(word);
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

// A staging tile of one result or operand: [SUBTILES][64][COLUMNS], rows of SPAN bytes, swizzled as TMA does it.
template <Dtype D>
struct Staging {
  static constexpr int ROW = D_CHUNK * SIZE<D>;
  static constexpr int SPAN = ROW < 128 ? ROW : 128;
  static constexpr int COLUMNS = SPAN / SIZE<D>;

  // The address of a byte of a row, given as a part known to the compiler and a part within 32 bytes of it.
  static DEVICE u32 at(u32 tile, int row, int byte, int more) {
    return tile + byte / SPAN * (64 * SPAN) + swizzle<SPAN>(row * SPAN + byte % SPAN + more);
  }

  // PIECE columns from PIECE * piece on: value 4 j + 2 h + e is of column 8 j + 2 (lane % 4) + e and of the warp's row
  // lane / 4 + 8 h.
  template <typename Carrier>
  static DEVICE void stage(u32 tile, int thread, int piece, const Carrier (&v)[PIECE / 2]) {
    int warp = thread / 32, lane = thread % 32;
    if constexpr (SIZE<D> == 2) {  // stmatrix: lane l addresses row l % 16, columns 8 (l / 16) on
      u32 address = at(tile, warp * 16 + lane % 16, piece * 32, lane / 16 * 16);
      stmatrix_x4(address, pack<D>(v[0], v[1]), pack<D>(v[2], v[3]), pack<D>(v[4], v[5]), pack<D>(v[6], v[7]));
    } else {
#pragma unroll
      for (int i = 0; i < PIECE / 2; i += 2) {
        int row = warp * 16 + lane / 4 + i / 2 % 2 * 8;
        u32 address = at(tile, row, (piece * PIECE + i / 4 * 8) * SIZE<D>, lane % 4 * 2 * SIZE<D>);
        if constexpr (SIZE<D> == 4) {
          if constexpr (D == Dtype::f32) {
            st_shared_v2(address, v[i], v[i + 1]);
          } else {
            st_shared_v2(address, static_cast<u32>(v[i]), static_cast<u32>(v[i + 1]));
          }
        } else {
          st_shared_u16(address, static_cast<u16>(pack<D>(v[i], v[i + 1])));
        }
      }
    }
  }

  // The same of an operand, to x[j][h], e being a part of the pair.
  static DEVICE void read(u32 tile, int thread, int piece, Pair<D> (&x)[PIECE / 8][2]) {
    int warp = thread / 32, lane = thread % 32;
    if constexpr (SIZE<D> == 2) {
      u32 address = at(tile, warp * 16 + lane % 16, piece * 32, lane / 16 * 16);
      ldmatrix_x4(address, x[0][0].bits[0], x[0][1].bits[0], x[1][0].bits[0], x[1][1].bits[0]);
    } else {
#pragma unroll
      for (int i = 0; i < PIECE / 4; ++i) {
        int row = warp * 16 + lane / 4 + i % 2 * 8;
        u32 address = at(tile, row, (piece * PIECE + i / 2 * 8) * SIZE<D>, lane % 4 * 2 * SIZE<D>);
        if constexpr (SIZE<D> == 4) {
          ld_shared_v2(address, x[i / 2][i % 2].bits[0], x[i / 2][i % 2].bits[1]);
        } else {
          x[i / 2][i % 2].bits[0] = ld_shared_u16(address);
        }
      }
    }
  }

  static DEVICE void store(const TensorMap* map, u32 tile, int x, int y, int z) {
#pragma unroll
    for (int i = 0; i < ROW / SPAN; ++i) tma_store(map, tile + i * 64 * SPAN, x + i * COLUMNS, y, z);
  }

  static DEVICE void load(const TensorMap* map, u32 tile, u32 barrier, int x, int y, int z) {
#pragma unroll
    for (int i = 0; i < ROW / SPAN; ++i) tma_load(tile + i * 64 * SPAN, map, barrier, x + i * COLUMNS, y, z);
  }

  // The first rows alone, to row y and column x of a matrix of n columns, which are whole units of UNIT elements.
  template <int UNIT>
  static DEVICE void store_rows(char* matrix, int, int n, u32 tile, int x, int y, int rows, int thread) {
    constexpr int UNITS = D_CHUNK / UNIT;
#pragma unroll 1
    for (int i = thread; i < rows * UNITS; i += 128) {
      int row = i / UNITS, column = i % UNITS * UNIT, byte = column * SIZE<D>;
      if (x + column < n)
        copy_to_global<UNIT * SIZE<D>>(matrix + ((y + row) * static_cast<i64>(n) + x + column) * SIZE<D>,
                                       at(tile, row, byte, 0));
    }
  }

  // Zeroes rows of BN columns.
  template <int UNIT>
  static DEVICE void clear_rows(char* matrix, int n, int x, int y, int rows, int thread) {
    constexpr int UNITS = BN / UNIT;
#pragma unroll 1
    for (int i = thread; i < rows * UNITS; i += 128) {
      int row = i / UNITS, column = i % UNITS * UNIT;
      if (x + column < n)
        st_global<UNIT * SIZE<D>>(matrix + ((y + row) * static_cast<i64>(n) + x + column) * SIZE<D>, Bytes16{});
    }
  }
};
