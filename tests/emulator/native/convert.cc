// cvt, and the floating-point formats of 16 bits and less.

#include <array>
#include <cmath>

#include "machine.h"

namespace {

// A format: bits of its exponent and mantissa, and whether it has infinities (e4m3 has none, and one NaN).
struct Format {
  int exponent, mantissa;
  bool infinities = true;
  int bias() const { return (1 << (exponent - 1)) - 1; }
  u32 most() const { return infinities ? (((1u << exponent) - 1) << mantissa) - 1 : (1u << (exponent + mantissa)) - 2; }
  u32 nan() const { return infinities ? (1u << (exponent + mantissa)) - 1 : most() + 1; }
};
constexpr Format HALF{5, 10}, BFLOAT{8, 7}, E4M3{4, 3, false}, E5M2{5, 2};

double value(const Format& f, u32 bits) {
  u32 magnitude = bits & ((1u << (f.exponent + f.mantissa)) - 1);
  double sign = bits >> (f.exponent + f.mantissa) & 1 ? -1 : 1;
  if (magnitude > f.most()) {
    if (f.infinities && magnitude == f.most() + 1) return sign * std::numeric_limits<double>::infinity();
    return std::numeric_limits<double>::quiet_NaN();
  }
  int exponent = magnitude >> f.mantissa;
  double mantissa = magnitude & ((1u << f.mantissa) - 1);
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - f.bias() - f.mantissa);
  return sign * std::ldexp(mantissa + (1u << f.mantissa), exponent - f.bias() - f.mantissa);
}

// The nearest, of ties the even one; what is too large is an infinity, or, if it saturates, the largest.
u32 nearest(const Format& f, double x, bool saturates) {
  u32 sign = std::signbit(x) ? 1u << (f.exponent + f.mantissa) : 0;
  if (std::isnan(x)) return f.nan();
  x = std::fabs(x);
  u32 beyond = saturates ? f.most() : f.infinities ? f.most() + 1 : f.nan();
  if (std::isinf(x)) return sign | beyond;
  int exponent = x == 0 ? 1 - f.bias() : std::max(std::ilogb(x), 1 - f.bias());
  double units = std::nearbyint(std::ldexp(x, f.mantissa - exponent));
  u32 magnitude = static_cast<u32>(units);
  u32 bits = static_cast<u32>((exponent + f.bias() - 1) << f.mantissa) + magnitude;  // a carry goes to the exponent
  if (exponent == 1 - f.bias() && magnitude < 1u << f.mantissa) bits = magnitude;
  return sign | (bits > f.most() ? beyond : bits);
}

template <int BITS>
std::array<float, 1 << BITS> table_of(const Format& f) {
  std::array<float, 1 << BITS> found;
  for (u32 i = 0; i < 1 << BITS; ++i) found[i] = static_cast<float>(value(f, i));
  return found;
}

template <class I, class F>
I saturated(F x) {  // of an integer's value
  if (std::isnan(x)) return 0;
  if (x <= static_cast<F>(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  if (x >= static_cast<F>(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  return static_cast<I>(x);
}
template <class I>
I clamped(i64 x) {
  i64 most = sizeof(I) == 8 ? std::numeric_limits<i64>::max() : static_cast<i64>(std::numeric_limits<I>::max());
  return static_cast<I>(std::min(std::max(x, static_cast<i64>(std::numeric_limits<I>::min())), most));
}

float to_tf32_nearest(float x) {  // ties away from zero
  return std::isfinite(x) ? std::bit_cast<float>((std::bit_cast<u32>(x) + 0x1000) & ~0x1fffu) : x;
}
float to_tf32_even(float x) {
  u32 bits = std::bit_cast<u32>(x);
  return std::isfinite(x) ? std::bit_cast<float>((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu) : x;
}

template <class D, class A, class F>
Step convert(Warp& w, const Instruction& i, u32 mask, F f) {
  auto* d = w.at<Slot<D>>(i.o[0]);
  auto* a = w.at<Slot<A>>(i.o[1]);
  lanes(mask, [&](int l) { d[l] = encode<D>(f(decode<A>(a[l]))); });
  return NEXT;
}
#define CVT(name, D, A, expression)                                                         \
  table.push_back({"cvt." name, [](Warp& w, const Instruction& i, u32 mask) -> Step {       \
                     return convert<D, A>(w, i, mask, [](A a) -> D { return expression; }); \
                   }})
#define CVT2(name, D, A, expression)                                                                       \
  table.push_back({"cvt." name, [](Warp& w, const Instruction& i, u32 mask) -> Step {                      \
                     auto* d = w.at<Slot<D>>(i.o[0]);                                                      \
                     lanes(mask, [&](int l) {                                                              \
                       A a = decode<A>(w.at<Slot<A>>(i.o[1])[l]), b = decode<A>(w.at<Slot<A>>(i.o[2])[l]); \
                       d[l] = encode<D>(expression);                                                       \
                     });                                                                                   \
                     return NEXT;                                                                          \
                   }})

template <class D, class A>
void integer(Table& table, const char* plain, const char* saturating) {
  table.push_back({plain, [](Warp& w, const Instruction& i, u32 mask) -> Step {
                     return convert<D, A>(w, i, mask, [](A a) -> D { return static_cast<D>(a); });
                   }});
  table.push_back({saturating, [](Warp& w, const Instruction& i, u32 mask) -> Step {
                     return convert<D, A>(w, i, mask, [](A a) -> D { return clamped<D>(static_cast<i64>(a)); });
                   }});
}
// 8-bit integers lie in registers that are wider, extended by their sign.
#define INTEGERS_TO(d, D)                                           \
  integer<D, i8>(table, "cvt." d ".s8", "cvt.sat." d ".s8"),        \
      integer<D, u8>(table, "cvt." d ".u8", "cvt.sat." d ".u8"),    \
      integer<D, i16>(table, "cvt." d ".s16", "cvt.sat." d ".s16"), \
      integer<D, u16>(table, "cvt." d ".u16", "cvt.sat." d ".u16"), \
      integer<D, i32>(table, "cvt." d ".s32", "cvt.sat." d ".s32"), \
      integer<D, u32>(table, "cvt." d ".u32", "cvt.sat." d ".u32"), \
      integer<D, i64>(table, "cvt." d ".s64", "cvt.sat." d ".s64"), \
      integer<D, u64>(table, "cvt." d ".u64", "cvt.sat." d ".u64")
#define INTEGERS_AND_FLOATS(name, I)                                                                            \
  CVT("rn.f32." name, float, I, static_cast<float>(a)), CVT("rn.f64." name, double, I, static_cast<double>(a)), \
      CVT("rz.f32." name, float, I, static_cast<float>(a)),                                                     \
      CVT("rzi." name ".f32", I, float, saturated<I>(std::trunc(a))),                                           \
      CVT("rni." name ".f32", I, float, saturated<I>(std::nearbyint(a))),                                       \
      CVT("rmi." name ".f32", I, float, saturated<I>(std::floor(a))),                                           \
      CVT("rpi." name ".f32", I, float, saturated<I>(std::ceil(a))),                                            \
      CVT("rzi." name ".f64", I, double, saturated<I>(std::trunc(a))),                                          \
      CVT("rni." name ".f64", I, double, saturated<I>(std::nearbyint(a))),                                      \
      CVT("rn.f16." name, u16, I, to_half(static_cast<double>(a))),                                             \
      CVT("rzi." name ".f16", I, u16, saturated<I>(std::trunc(of_half(a)))),                                    \
      CVT("rni." name ".f16", I, u16, saturated<I>(std::nearbyint(of_half(a)))),                                \
      CVT("rn.bf16." name, u16, I, to_bfloat(static_cast<double>(a)))

u16 pair8(const Format& f, double high, double low) {
  return static_cast<u16>(nearest(f, high, true) << 8 | nearest(f, low, true));
}
u32 halves_of(float high, float low) { return static_cast<u32>(to_half(high)) << 16 | to_half(low); }

}  // namespace

float of_half(u16 x) {
  static const auto* const found = new auto(table_of<16>(HALF));
  return (*found)[x];
}
float of_bfloat(u16 x) { return std::bit_cast<float>(static_cast<u32>(x) << 16); }
float of_e4m3(u8 x) {
  static const auto found = table_of<8>(E4M3);
  return found[x];
}
float of_e5m2(u8 x) {
  static const auto found = table_of<8>(E5M2);
  return found[x];
}
u16 to_half(double x) { return static_cast<u16>(nearest(HALF, x, false)); }
u16 to_bfloat(double x) { return static_cast<u16>(nearest(BFLOAT, x, false)); }
float to_tf32(float x) { return std::bit_cast<float>(std::bit_cast<u32>(x) & ~0x1fffu); }

void add_conversions(Table& table) {
  INTEGERS_TO("s8", i8), INTEGERS_TO("u8", u8), INTEGERS_TO("s16", i16), INTEGERS_TO("u16", u16);
  INTEGERS_TO("s32", i32), INTEGERS_TO("u32", u32), INTEGERS_TO("s64", i64), INTEGERS_TO("u64", u64);
  INTEGERS_AND_FLOATS("s8", i8), INTEGERS_AND_FLOATS("u8", u8), INTEGERS_AND_FLOATS("s16", i16);
  INTEGERS_AND_FLOATS("u16", u16), INTEGERS_AND_FLOATS("s32", i32), INTEGERS_AND_FLOATS("u32", u32);
  INTEGERS_AND_FLOATS("s64", i64), INTEGERS_AND_FLOATS("u64", u64);
  CVT("f32.f16", float, u16, of_half(a)), CVT("f32.bf16", float, u16, of_bfloat(a));
  CVT("f64.f32", double, float, a), CVT("rn.f32.f64", float, double, static_cast<float>(a));
  CVT("f64.f16", double, u16, of_half(a)), CVT("rn.f16.f64", u16, double, to_half(a));
  CVT("rn.f16.f32", u16, float, to_half(a)), CVT("rn.bf16.f32", u16, float, to_bfloat(a));
  CVT("rna.tf32.f32", float, float, to_tf32_nearest(a)), CVT("rn.tf32.f32", float, float, to_tf32_even(a));
  CVT("rni.f32.f32", float, float, std::nearbyint(a)), CVT("rzi.f32.f32", float, float, std::trunc(a));
  CVT("rmi.f32.f32", float, float, std::floor(a)), CVT("rpi.f32.f32", float, float, std::ceil(a));
  CVT("rni.f64.f64", double, double, std::nearbyint(a)), CVT("rzi.f64.f64", double, double, std::trunc(a));
  CVT("rmi.f64.f64", double, double, std::floor(a)), CVT("rpi.f64.f64", double, double, std::ceil(a));
  CVT("sat.f32.f32", float, float, std::fmin(1.f, std::fmax(0.f, a)));
  CVT2("rn.f16x2.f32", u32, float, halves_of(a, b));
  CVT2("rn.bf16x2.f32", u32, float, static_cast<u32>(to_bfloat(a)) << 16 | to_bfloat(b));
  CVT2("rn.satfinite.e4m3x2.f32", u16, float, pair8(E4M3, a, b));
  CVT2("rn.satfinite.e5m2x2.f32", u16, float, pair8(E5M2, a, b));
  CVT("rn.satfinite.e4m3x2.f16x2", u16, u32, pair8(E4M3, of_half(a >> 16), of_half(a & 0xffff)));
  CVT("rn.satfinite.e5m2x2.f16x2", u16, u32, pair8(E5M2, of_half(a >> 16), of_half(a & 0xffff)));
  CVT("rn.f16x2.e4m3x2", u32, u16, halves_of(of_e4m3(a >> 8), of_e4m3(a & 255)));
  CVT("rn.f16x2.e5m2x2", u32, u16, halves_of(of_e5m2(a >> 8), of_e5m2(a & 255)));
}
