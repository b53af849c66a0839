// Host stand-ins for what ffi/device/common/math.cuh takes from atoms.cuh, from PTX and from CUDA, so that g++ compiles
// a generated epilogue. An approximate instruction errs by all that PTX allows it.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define HOST_EMULATION
#define DEVICE inline

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

inline float __uint_as_float(u32 x) { return std::bit_cast<float>(x); }
inline u32 __float_as_uint(float x) { return std::bit_cast<u32>(x); }
inline int __popcll(u64 x) { return std::popcount(x); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<u64>(x)); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline int __double2loint(double x) { return int(u32(std::bit_cast<u64>(x))); }
inline int __double2hiint(double x) { return int(std::bit_cast<u64>(x) >> 32); }
inline double __hiloint2double(int high, int low) { return std::bit_cast<double>(u64(u32(high)) << 32 | u32(low)); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }

inline double erfinv(double y) {  // Newton, from Winitzki's approximation
  if (!(std::fabs(y) < 1)) return std::fabs(y) == 1 ? y * INFINITY : NAN;
  if (std::fabs(y) < 1e-4) return std::sqrt(M_PI) / 2 * (y + M_PI / 12 * y * y * y);
  double a = std::fabs(y), l = std::log1p(-a * a), t = 2 / (M_PI * 0.147) + l / 2;
  double x = std::sqrt(std::sqrt(t * t - l / 0.147) - t);
  for (int i = 0; i < 4; ++i) x += (std::erfc(x) - (1 - a)) * std::sqrt(M_PI) / 2 * std::exp(x * x);
  return std::copysign(x, y);
}
inline float erfinvf(float y) { return static_cast<float>(erfinv(y)); }

inline float flushed(double x) {
  float y = static_cast<float>(x);
  return std::fabs(y) < std::numeric_limits<float>::min() ? std::copysign(0.0f, y) : y;
}

inline float erring(double x, double relative) { return static_cast<float>(x * (1 + relative)); }
inline float ex2_approx(float x) { return flushed(erring(std::exp2(static_cast<double>(flushed(x))), 0x1p-22)); }
inline float rcp_approx(float x) { return flushed(erring(1 / static_cast<double>(flushed(x)), 0x1p-23)); }
inline float tanh_approx(float x) { return erring(std::tanh(static_cast<double>(x)), 0x1p-11); }
inline float sqrt_approx(float x) { return erring(std::sqrt(static_cast<double>(x)), 0x1p-23); }
inline float div_full(float a, float b) { return erring(static_cast<double>(a) / b, 0x1p-22); }

inline float max_nan(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  return a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
inline float min_nan(float a, float b) { return -max_nan(-a, -b); }

// To the nearest float with so many bits of mantissa and a least exponent, ties to even.
inline float rounded(float x, int mantissa, int least) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent = std::max(std::ilogb(x), least);
  double unit = std::ldexp(1.0, exponent - mantissa);
  return static_cast<float>(std::copysign(std::nearbyint(x / unit) * unit, static_cast<double>(x)));
}

inline u32 bf16_bits(float x) {
  if (std::isnan(x)) return 0x7fff;
  u32 bits = __float_as_uint(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 cvt_bf16x2(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline float round_bf16(float x) { return __uint_as_float(bf16_bits(x) << 16); }

inline u32 f16_bits(float x) {
  if (std::isnan(x)) return 0x7fff;
  u32 sign = __float_as_uint(x) >> 16 & 0x8000;
  float y = std::fabs(rounded(x, 10, -14));
  if (y >= 65536) return sign | 0x7c00;
  if (y < 0x1p-14f) return sign | static_cast<u32>(y * 0x1p24f);
  return sign | ((__float_as_uint(y) >> 13) - (112 << 10));
}
inline u32 cvt_f16x2(float low, float high) { return f16_bits(low) | f16_bits(high) << 16; }
inline float f16_to_f32(u32 bits) {
  u32 exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float y = exponent == 31 ? (mantissa ? NAN : INFINITY)
            : exponent     ? std::ldexp(1024.0f + mantissa, static_cast<int>(exponent) - 25)
                           : std::ldexp(static_cast<float>(mantissa), -24);
  return bits & 0x8000 ? -y : y;
}

inline u32 e4m3_bits(float x) {
  if (std::isnan(x)) return 0x7f;
  u32 sign = std::signbit(x) ? 0x80 : 0;
  float y = std::fmin(std::fabs(rounded(x, 3, -6)), 448.0f);
  if (y < 0x1p-6f) return sign | static_cast<u32>(y * 0x1p9f);
  return sign | ((__float_as_uint(y) >> 20) - (120 << 3));
}
inline u32 e5m2_bits(float x) {
  if (std::isnan(x)) return 0x7f;
  u32 sign = std::signbit(x) ? 0x80 : 0;
  float y = std::fmin(std::fabs(rounded(x, 2, -14)), 57344.0f);
  if (y < 0x1p-14f) return sign | static_cast<u32>(y * 0x1p16f);
  return sign | ((__float_as_uint(y) >> 21) - (112 << 2));
}
inline u16 cvt_satfinite_e4m3x2(float low, float high) { return e4m3_bits(low) | e4m3_bits(high) << 8; }
inline u16 cvt_satfinite_e5m2x2(float low, float high) { return e5m2_bits(low) | e5m2_bits(high) << 8; }

inline u32 e4m3_to_f16(u32 bits) {
  if ((bits & 0x7f) == 0x7f) return 0x7fff;
  u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
  float y = exponent ? std::ldexp(8.0f + mantissa, static_cast<int>(exponent) - 10) : std::ldexp(float(mantissa), -9);
  return f16_bits(bits & 0x80 ? -y : y);
}
inline u32 cvt_f16x2_e4m3x2(u16 packed) { return e4m3_to_f16(packed & 0xff) | e4m3_to_f16(packed >> 8) << 16; }
