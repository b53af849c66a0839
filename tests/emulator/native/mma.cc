// mma.sync. Operands lie in units of 4 bytes of k (8 of float64): with g = lane / 4 and q = lane % 4, register r of a
// is row g + 8 (r % 2) at unit q + 4 (r / 2), or, of 8 rows, row g at unit q + 4 r; of b column g at unit q + 4 r. Sums
// are of rows g and, in the second half, g + 8, at columns 2 q and 2 q + 1.

#include <cmath>

#include "machine.h"

namespace {

// Kinds of elements: their bits, and the value of one among those of a register.
struct Half {
  static constexpr int BITS = 16;
  using Sum = float;
  static float get(u32 x, int i) { return of_half(static_cast<u16>(x >> 16 * i)); }
};
struct Bfloat {
  static constexpr int BITS = 16;
  using Sum = float;
  static float get(u32 x, int i) { return of_bfloat(static_cast<u16>(x >> 16 * i)); }
};
struct Tf32 {
  static constexpr int BITS = 32;
  using Sum = float;
  static float get(u32 x, int) { return to_tf32(std::bit_cast<float>(x)); }
};
struct E4m3 {
  static constexpr int BITS = 8;
  using Sum = float;
  static float get(u32 x, int i) { return of_e4m3(static_cast<u8>(x >> 8 * i)); }
};
struct E5m2 {
  static constexpr int BITS = 8;
  using Sum = float;
  static float get(u32 x, int i) { return of_e5m2(static_cast<u8>(x >> 8 * i)); }
};
struct Int8 {
  static constexpr int BITS = 8;
  using Sum = i32;
  static i32 get(u32 x, int i) { return static_cast<i8>(x >> 8 * i); }
};
struct Uint8 {
  static constexpr int BITS = 8;
  using Sum = i32;
  static i32 get(u32 x, int i) { return static_cast<u8>(x >> 8 * i); }
};

// d, a, b, c; x[0] rows, x[1] k, x[2] whether sums are float16. Sums of integers wrap around.
template <class A, class B>
Step multiply(Warp& w, const Instruction& i, u32 mask) {
  using Sum = typename A::Sum;
  if (mask != w.live || mask != ALL) return mask == w.live ? fault("threads have exited"), NEXT : PARK;
  int rows = static_cast<int>(i.x[0]), k = static_cast<int>(i.x[1]), each = 32 / A::BITS, units = k / each;
  bool halves = i.x[2];
  int of_a = rows * units / LANES, of_b = 8 * units / LANES, of_d = rows * 8 / LANES / (halves ? 2 : 1);
  const int *d = i.list, *a = d + of_d, *b = a + of_a, *c = b + of_b;
  Sum left[16][32], right[32][8], sums[16][8];
  for (int l = 0; l < LANES; ++l) {
    int g = l / 4, q = l % 4;
    for (int r = 0; r < of_a; ++r)
      for (int e = 0; e < each; ++e)
        left[rows == 16 ? g + 8 * (r % 2) : g][(q + 4 * (rows == 16 ? r / 2 : r)) * each + e] =
            A::get(w.get32(a[r], l), e);
    for (int r = 0; r < of_b; ++r)
      for (int e = 0; e < each; ++e) right[(q + 4 * r) * each + e][g] = B::get(w.get32(b[r], l), e);
    for (int r = 0; r < rows / 4; ++r) {
      u32 x = w.get32(c[halves ? r / 2 : r], l);
      sums[g + 8 * (r / 2)][2 * q + r % 2] =
          halves ? static_cast<Sum>(of_half(static_cast<u16>(x >> 16 * (r % 2)))) : std::bit_cast<Sum>(x);
    }
  }
  for (int m = 0; m < rows; ++m)
    for (int p = 0; p < k; ++p)
      for (int n = 0; n < 8; ++n) {
        if constexpr (std::is_same_v<Sum, i32>)
          sums[m][n] = static_cast<i32>(static_cast<u32>(sums[m][n]) + static_cast<u32>(left[m][p] * right[p][n]));
        else
          sums[m][n] += left[m][p] * right[p][n];
      }
  for (int l = 0; l < LANES; ++l) {
    const Sum* x = sums[l / 4] + l % 4 * 2;
    for (int r = 0; r < rows / 8; ++r, x += 64) {
      if (halves) {
        w.at<u32>(d[r])[l] = to_half(static_cast<double>(x[0])) | static_cast<u32>(to_half(static_cast<double>(x[1])))
                                                                      << 16;
      } else {
        w.at<u32>(d[2 * r])[l] = std::bit_cast<u32>(x[0]);
        w.at<u32>(d[2 * r + 1])[l] = std::bit_cast<u32>(x[1]);
      }
    }
  }
  return NEXT;
}

Step multiply_doubles(Warp& w, const Instruction& i, u32 mask) {
  if (mask != w.live || mask != ALL) return mask == w.live ? fault("threads have exited"), NEXT : PARK;
  int rows = static_cast<int>(i.x[0]), k = static_cast<int>(i.x[1]);
  int of_a = rows * k / LANES, of_b = 8 * k / LANES, of_d = rows * 8 / LANES;
  const int *d = i.list, *a = d + of_d, *b = a + of_a, *c = b + of_b;
  double left[16][16], right[16][8], sums[16][8];
  auto get = [&](int reg, int l) { return std::bit_cast<double>(w.get64(reg, l)); };
  for (int l = 0; l < LANES; ++l) {
    int g = l / 4, q = l % 4;
    for (int r = 0; r < of_a; ++r)
      left[rows == 16 ? g + 8 * (r % 2) : g][q + 4 * (rows == 16 ? r / 2 : r)] = get(a[r], l);
    for (int r = 0; r < of_b; ++r) right[q + 4 * r][g] = get(b[r], l);
    for (int r = 0; r < of_d; ++r) sums[g + 8 * (r / 2)][2 * q + r % 2] = get(c[r], l);
  }
  for (int m = 0; m < rows; ++m)
    for (int p = 0; p < k; ++p)
      for (int n = 0; n < 8; ++n) sums[m][n] = std::fma(left[m][p], right[p][n], sums[m][n]);
  for (int l = 0; l < LANES; ++l)
    for (int r = 0; r < of_d; ++r)
      w.at<u64>(d[r])[l] = std::bit_cast<u64>(sums[l / 4 + 8 * (r / 2)][l % 4 * 2 + r % 2]);
  return NEXT;
}

}  // namespace

void add_mma(Table& table) {
  table.push_back({"mma.f16.f16", multiply<Half, Half>});
  table.push_back({"mma.bf16.bf16", multiply<Bfloat, Bfloat>});
  table.push_back({"mma.tf32.tf32", multiply<Tf32, Tf32>});
  table.push_back({"mma.e4m3.e4m3", multiply<E4m3, E4m3>});
  table.push_back({"mma.e5m2.e5m2", multiply<E5m2, E5m2>});
  table.push_back({"mma.e4m3.e5m2", multiply<E4m3, E5m2>});
  table.push_back({"mma.e5m2.e4m3", multiply<E5m2, E4m3>});
  table.push_back({"mma.s8.s8", multiply<Int8, Int8>});
  table.push_back({"mma.u8.u8", multiply<Uint8, Uint8>});
  table.push_back({"mma.s8.u8", multiply<Int8, Uint8>});
  table.push_back({"mma.u8.s8", multiply<Uint8, Int8>});
  table.push_back({"mma.f64.f64", multiply_doubles});
}
