// What a generated epilogue calls: every function with XLA's semantics, each accuracy it is wanted in
// (docs/accuracy.md). Carriers hold the values: float any float of up to 32 bits (exactly), double and Complex what
// they say, and those of integers.cuh.

#ifndef HOST_EMULATION  // tests/native/device_shim.h has these for the host: one instruction each

#define MATH_UNARY(name, instruction)               \
  DEVICE float name(float x) {                      \
    float y;                                        \
    asm(instruction " %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                       \
  }
#define MATH_BINARY(name, instruction)                          \
  DEVICE float name(float a, float b) {                         \
    float y;                                                    \
    asm(instruction " %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); \
    return y;                                                   \
  }

MATH_UNARY(ex2_approx, "ex2.approx.ftz.f32")
MATH_UNARY(rcp_approx, "rcp.approx.ftz.f32")
MATH_UNARY(tanh_approx, "tanh.approx.f32")
MATH_UNARY(sqrt_approx, "sqrt.approx.f32")
MATH_BINARY(div_full, "div.full.f32")
#if __CUDA_ARCH__ >= 800
MATH_BINARY(max_nan, "max.NaN.f32")
MATH_BINARY(min_nan, "min.NaN.f32")
#else
DEVICE float max_nan(float a, float b) { return a != a || b != b ? a + b : fmaxf(a, b); }
DEVICE float min_nan(float a, float b) { return a != a || b != b ? a + b : fminf(a, b); }
#endif

#undef MATH_UNARY
#undef MATH_BINARY

// A quotient by what is the same for many elements, within a unit of the last place: of what is made of b the compiler
// keeps one copy. The powers of 2 keep the reciprocal, and what it multiplies, in range.
DEVICE float div_uniform(float a, float b) {
  float scale = fabsf(b) > 0x1p64f ? 0x1p-64f : fabsf(b) < 0x1p-64f ? 0x1p64f : 1.0f;
  float divisor = b * scale, inverse = rcp_approx(divisor), error = fmaf(-divisor, inverse, 1.0f);
  inverse = error == error ? fmaf(inverse, error, inverse) : inverse;  // of 0 and infinity
  return a * scale * inverse;
}

// The nearest bf16, as a float: the high half of a pair, in one instruction.
DEVICE float round_bf16(float x) { return __uint_as_float(cvt_bf16x2(0.0f, x)); }

DEVICE float f16_to_f32(u32 bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(static_cast<u16>(bits)));
  return y;
}

// Two e4m3 or e5m2 from two floats and back; too large is the largest finite.
#if __CUDA_ARCH__ >= 890
DEVICE u16 cvt_satfinite_e4m3x2(float low, float high) {
  u16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

DEVICE u16 cvt_satfinite_e5m2x2(float low, float high) {
  u16 packed;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

DEVICE u32 cvt_f16x2_e4m3x2(u16 packed) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
  return halves;
}
#else
template <int MANTISSA, int BIAS, u32 LARGEST>
DEVICE u32 float8(float x) {
  u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, y = bits & 0x7fffffff;
  if (y > 0x7f800000) return 0x7f;
  if (y < (128 - BIAS) << 23) {  // subnormal: the sum ends where it does
    constexpr u32 LAST = (151 - BIAS - MANTISSA) << 23;
    return sign | (__float_as_uint(__uint_as_float(y) + __uint_as_float(LAST)) - LAST);
  }
  y += (1 << (22 - MANTISSA)) - 1 + (y >> (23 - MANTISSA) & 1);
  return sign | min((y - ((127 - BIAS) << 23)) >> (23 - MANTISSA), LARGEST);
}

DEVICE u16 cvt_satfinite_e4m3x2(float low, float high) {
  return static_cast<u16>(float8<3, 7, 0x7e>(low) | float8<3, 7, 0x7e>(high) << 8);
}

DEVICE u16 cvt_satfinite_e5m2x2(float low, float high) {
  return static_cast<u16>(float8<2, 15, 0x7b>(low) | float8<2, 15, 0x7b>(high) << 8);
}

DEVICE u32 cvt_f16x2_e4m3x2(u16 packed) {
  u32 bytes = (packed & 0xff) | (packed & 0xff00) << 8, halves = (bytes & 0x7f007f) << 7;
  asm("mul.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(0x5c005c00));  // 2^8: the exponents' biases differ by that
  if ((bytes & 0x7f) == 0x7f) halves |= 0x7fff;
  if ((bytes & 0x7f0000) == 0x7f0000) halves |= 0x7fff0000;
  return halves | (bytes & 0x800080) << 8;
}
#endif

#endif

constexpr float LOG2_E = 1.4426950408889634f;

DEVICE float round_f16(float x) { return f16_to_f32(cvt_f16x2(x, 0.0f)); }

// ---- float8 as XLA converts to it: beyond the largest finite value e4m3 is NaN, e5m2 infinite ----

DEVICE float overflow_e4m3(float x) {
  return fabsf(x) > 464.0f ? __uint_as_float(0x7fffffff) : x;
}  // 464 rounds to 448

DEVICE u16 pack_e4m3x2(float low, float high) { return cvt_satfinite_e4m3x2(overflow_e4m3(low), overflow_e4m3(high)); }

DEVICE u16 pack_e5m2x2(float low, float high) {
  u32 packed = cvt_satfinite_e5m2x2(low, high);  // 61440, halfway to infinity, rounds to it
  if (fabsf(low) >= 61440.0f) packed = (packed & 0xff80) | 0x7c;
  if (fabsf(high) >= 61440.0f) packed = (packed & 0x80ff) | 0x7c00;
  return static_cast<u16>(packed);
}

DEVICE float round_e4m3(float x) { return f16_to_f32(cvt_f16x2_e4m3x2(pack_e4m3x2(x, 0.0f)) & 0xffff); }

DEVICE float round_e5m2(float x) { return f16_to_f32(pack_e5m2x2(x, 0.0f) << 8 & 0xff00); }  // the high byte of an f16

// ---- accurate: for results that a float32 may show ----

// exp(-|x|) cannot overflow, so subnormal results stay; 1 + e is in [1, 2], where one Newton step is a division without
// the 120 instructions and the call that serve every other divisor.
DEVICE float accurate_logistic(float x) {
  float e = expf(-fabsf(x)), d = 1.0f + e, r = rcp_approx(d);
  r = fmaf(r, fmaf(-d, r, 1.0f), r);
  return x < 0.0f ? e * r : r;
}

DEVICE float accurate_sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }
DEVICE float clamp_nan(float low, float x, float high) { return min_nan(max_nan(low, x), high); }
DEVICE bool is_finite(float x) { return fabsf(x) < __uint_as_float(0x7f800000); }

DEVICE double accurate_logistic(double x) {
  double e = exp(-fabs(x)), r = 1.0 / (1.0 + e);
  return x < 0.0 ? e * r : r;
}

DEVICE double accurate_sign(double x) { return x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x; }
DEVICE double max_nan(double a, double b) { return a > b || a != a ? a : b; }
DEVICE double min_nan(double a, double b) { return a < b || a != a ? a : b; }
DEVICE double clamp_nan(double low, double x, double high) { return min_nan(max_nan(low, x), high); }
DEVICE bool is_finite(double x) { return fabs(x) < __longlong_as_double(0x7ff0000000000000); }

// Repeated multiplication, as XLA does it; of 16 bits in f32.
template <int POWER, class F>
DEVICE F integer_pow(F x) {
  if constexpr (POWER == 0) {
    return F(1);
  } else if constexpr (POWER < 0) {
    return F(1) / integer_pow<-POWER>(x);
  } else if constexpr (POWER == 1) {
    return x;
  } else if constexpr (POWER % 2) {
    return integer_pow<POWER - 1>(x) * x;
  } else {
    F half = integer_pow<POWER / 2>(x);
    return half * half;
  }
}

// ---- fine: relative error about 2^-21, for results rounded to 16 bits or fewer; subnormal results may be 0 ----

// Each takes `scale` as well, f(scale * x): scale * LOG2_E is one constant.
DEVICE float fine_exp(float x, float scale) { return ex2_approx(x * (scale * LOG2_E)); }
DEVICE float fine_exp2(float x) { return ex2_approx(x); }
DEVICE float fine_logistic(float x, float scale) { return rcp_approx(1.0f + ex2_approx(x * (scale * -LOG2_E))); }

// logistic(x) and logistic(-x) where an epilogue has both: the compiler makes the exponential and the inverse once.
DEVICE float bounded_exp(float x, float scale) { return min_nan(ex2_approx(x * (scale * -LOG2_E)), 0x1p126f); }
DEVICE float fine_logistic_rising(float x, float scale) { return rcp_approx(1.0f + bounded_exp(x, scale)); }
DEVICE float fine_logistic_falling(float x, float scale) {
  return bounded_exp(x, scale) * fine_logistic_rising(x, scale);
}

// ---- coarse: relative error below 2^-11, a quarter of what rounding to bf16 makes, or 2^-14 for f16 ----

// Without cancellation: tanh(x / 2) = (exp(x) - 1) / (exp(x) + 1).
DEVICE float coarse_expm1(float x) { return tanh_approx(0.5f * x) * (1.0f + ex2_approx(x * LOG2_E)); }

// log1p(x) / x as a polynomial: for 0 <= x <= 1.
DEVICE float coarse_log1p(float x) {
  float p = fmaf(x, 0.04310618283f, -0.1613628755f);
  p = fmaf(x, p, 0.3092246395f);
  p = fmaf(x, p, -0.4977744712f);
  p = fmaf(x, p, 1.0f);
  return p * x;
}

// log2(erfc(|x|)) as a polynomial without constant term; where it is clamped the result is below 2^-126.
DEVICE float coarse_erfc_bf16(float x) {
  float z = min_nan(fabsf(x), 10.0f);
  float p = fmaf(z, 4.538438068e-07f, -2.031554908e-05f);
  p = fmaf(z, p, 3.917404705e-04f);
  p = fmaf(z, p, -4.299263747e-03f);
  p = fmaf(z, p, 3.010277144e-02f);
  p = fmaf(z, p, -1.448290241e-01f);
  p = fmaf(z, p, -9.239560226e-01f);
  p = fmaf(z, p, -1.625999997e+00f);
  float e = ex2_approx(p * z);
  return x < 0.0f ? 2.0f - e : e;
}

DEVICE float coarse_erfc_f16(float x) {
  float z = min_nan(fabsf(x), 10.0f);
  float p = fmaf(z, -4.435994876e-08f, 2.280444466e-06f);
  p = fmaf(z, p, -5.156088956e-05f);
  p = fmaf(z, p, 6.787913351e-04f);
  p = fmaf(z, p, -5.827269213e-03f);
  p = fmaf(z, p, 3.483744011e-02f);
  p = fmaf(z, p, -1.529389837e-01f);
  p = fmaf(z, p, -9.172364723e-01f);
  p = fmaf(z, p, -1.627908975e+00f);
  float e = ex2_approx(p * z);
  return x < 0.0f ? 2.0f - e : e;
}

// ---- complex numbers: of R, as they lie in memory ----

template <class R>
struct Complex {
  R real, imag;
};

template <class R>
DEVICE Complex<R> operator+(Complex<R> a, Complex<R> b) {
  return {a.real + b.real, a.imag + b.imag};
}

template <class R>
DEVICE Complex<R> operator-(Complex<R> a, Complex<R> b) {
  return {a.real - b.real, a.imag - b.imag};
}

template <class R>
DEVICE Complex<R> operator*(Complex<R> a, Complex<R> b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

template <class R>
DEVICE Complex<R> operator-(Complex<R> x) {
  return {-x.real, -x.imag};
}

template <class R>
DEVICE bool operator==(Complex<R> a, Complex<R> b) {
  return a.real == b.real && a.imag == b.imag;
}

template <class R>
DEVICE bool operator!=(Complex<R> a, Complex<R> b) {
  return !(a == b);
}

template <class R>
DEVICE Complex<R> conj(Complex<R> x) {
  return {x.real, -x.imag};
}

DEVICE float modulus(Complex<float> x) { return hypotf(x.real, x.imag); }
DEVICE double modulus(Complex<double> x) { return hypot(x.real, x.imag); }

#ifndef HOST_EMULATION
template <class R>
DEVICE Complex<R> __shfl_xor_sync(u32 lanes, Complex<R> x, int other) {
  return {__shfl_xor_sync(lanes, x.real, other), __shfl_xor_sync(lanes, x.imag, other)};
}
#endif

template <class R, class Q>
DEVICE Complex<R> to_complex(Complex<Q> x) {
  return {static_cast<R>(x.real), static_cast<R>(x.imag)};
}
