// Instructions that compute each thread's registers of its own: a table of names and expressions.

#include <cmath>

#include "machine.h"

namespace {

template <class D, class A, class F>
inline Step map1(Warp& w, const Instruction& i, u32 mask, F f) {
  auto* d = w.at<Slot<D>>(i.o[0]);
  auto* a = w.at<Slot<A>>(i.o[1]);
  lanes(mask, [&](int l) { d[l] = encode<D>(f(decode<A>(a[l]))); });
  return NEXT;
}
template <class D, class A, class B, class F>
inline Step map2(Warp& w, const Instruction& i, u32 mask, F f) {
  auto* d = w.at<Slot<D>>(i.o[0]);
  auto* a = w.at<Slot<A>>(i.o[1]);
  auto* b = w.at<Slot<B>>(i.o[2]);
  lanes(mask, [&](int l) { d[l] = encode<D>(f(decode<A>(a[l]), decode<B>(b[l]))); });
  return NEXT;
}
template <class D, class A, class B, class C, class F>
inline Step map3(Warp& w, const Instruction& i, u32 mask, F f) {
  auto* d = w.at<Slot<D>>(i.o[0]);
  auto* a = w.at<Slot<A>>(i.o[1]);
  auto* b = w.at<Slot<B>>(i.o[2]);
  auto* c = w.at<Slot<C>>(i.o[3]);
  lanes(mask, [&](int l) { d[l] = encode<D>(f(decode<A>(a[l]), decode<B>(b[l]), decode<C>(c[l]))); });
  return NEXT;
}

#define RUN [](Warp& w, const Instruction& i, u32 mask)->Step
#define OP1(name, D, A, expression)                                                                \
  table.push_back({name, RUN { return map1<D, A>(w, i, mask, [](A a) -> D { return expression; }); \
  }                                                                                                \
  })
#define OP2(name, D, A, B, expression)                                                                     \
  table.push_back({name, RUN { return map2<D, A, B>(w, i, mask, [](A a, B b) -> D { return expression; }); \
  }                                                                                                        \
  })
#define OP3(name, D, A, B, C, expression)                                                                          \
  table.push_back({name, RUN { return map3<D, A, B, C>(w, i, mask, [](A a, B b, C c) -> D { return expression; }); \
  }                                                                                                                \
  })

// Of each type: its PTX name and T. What overflows wraps around.
#define BITS(name, expression, of)                                                                        \
  of(name ".pred", bool, expression), of(name ".b16", u16, expression), of(name ".b32", u32, expression), \
      of(name ".b64", u64, expression)
#define UNSIGNED(name, expression, of) \
  of(name ".u16", u16, expression), of(name ".u32", u32, expression), of(name ".u64", u64, expression)
#define SIGNED(name, expression, of) \
  of(name ".s16", i16, expression), of(name ".s32", i32, expression), of(name ".s64", i64, expression)
#define UNARY(name, T, expression) OP1(name, T, T, expression)
#define BINARY(name, T, expression) OP2(name, T, T, T, expression)
#define TERNARY(name, T, expression) OP3(name, T, T, T, T, expression)
#define COMPARED(name, T, expression) OP2(name, bool, T, T, expression)
#define SHIFTED(name, T, expression) OP2(name, T, T, u32, expression)

template <class T>
using Wide = std::conditional_t<sizeof(T) == 2, u32, u64>;  // arithmetic that may wrap, without a sign
#define W(x) static_cast<Wide<decltype(x)>>(x)

template <class T>
T high(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    if constexpr (std::is_signed_v<T>)
      return static_cast<T>((static_cast<__int128>(a) * b) >> 64);
    else
      return static_cast<T>((static_cast<unsigned __int128>(a) * b) >> 64);
  } else {
    return static_cast<T>((static_cast<i64>(a) * static_cast<i64>(b)) >> (8 * sizeof(T)));
  }
}
template <>
u32 high(u32 a, u32 b) {
  return static_cast<u64>(a) * b >> 32;
}

template <class T>
T divided(T a, T b) {
  if (b == 0) fault("an integer is divided by 0");
  return b == static_cast<T>(-1) && std::is_signed_v<T> ? static_cast<T>(0 - W(a)) : static_cast<T>(a / b);
}
template <class T>
T remainder_of(T a, T b) {
  return static_cast<T>(W(a) - W(divided(a, b)) * W(b));
}

template <class T>
T smaller(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <class T>
T larger(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
template <class T>
T nan_if(T a, T b, T x) {
  return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN() : x;
}

u32 permuted(u32 a, u32 b, u32 selector) {
  u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) {
    u32 s = selector >> 4 * i & 15;
    u32 byte = bytes >> 8 * (s & 7) & 255;
    d |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return d;
}

template <class F>
u32 halves(u32 a, u32 b, u32 c, float (*of)(u16), u16 (*to)(double), F f) {
  u32 low = to(f(of(a & 0xffff), of(b & 0xffff), of(c & 0xffff)));
  return low | static_cast<u32>(to(f(of(a >> 16), of(b >> 16), of(c >> 16)))) << 16;
}

// d, what is inserted, into what, where, how many bits.
template <class T>
Step insert(Warp& w, const Instruction& i, u32 mask) {
  constexpr u32 BITS = 8 * sizeof(T);
  lanes(mask, [&](int l) {
    T a = w.at<T>(i.list[1])[l], b = w.at<T>(i.list[2])[l];
    u32 at = w.get32(i.list[3], l) & 255, bits = w.get32(i.list[4], l) & 255;
    T field = bits >= BITS ? ~T{} : (T{1} << bits) - 1;
    w.at<T>(i.list[0])[l] = at >= BITS ? b : (b & ~(field << at)) | (a & field) << at;
  });
  return NEXT;
}

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }
double exact(float x) { return x; }
float toward_zero(double x) {
  float y = static_cast<float>(x);
  return std::fabs(y) > std::fabs(x) ? std::nextafter(y, 0.f) : y;
}

#define COMPARE_INTEGERS(T, type)                                                                                  \
  COMPARED("setp.eq." type, T, a == b), COMPARED("setp.ne." type, T, a != b), COMPARED("setp.lt." type, T, a < b), \
      COMPARED("setp.le." type, T, a <= b), COMPARED("setp.gt." type, T, a > b), COMPARED("setp.ge." type, T, a >= b)
#define UNORDERED (std::isnan(a) || std::isnan(b))
#define COMPARE_FLOATS(T, type)                                                                                       \
  COMPARED("setp.eq." type, T, a == b), COMPARED("setp.ne." type, T, a != b && !UNORDERED),                           \
      COMPARED("setp.lt." type, T, a < b), COMPARED("setp.le." type, T, a <= b), COMPARED("setp.gt." type, T, a > b), \
      COMPARED("setp.ge." type, T, a >= b), COMPARED("setp.equ." type, T, a == b || UNORDERED),                       \
      COMPARED("setp.neu." type, T, a != b), COMPARED("setp.ltu." type, T, !(a >= b)),                                \
      COMPARED("setp.leu." type, T, !(a > b)), COMPARED("setp.gtu." type, T, !(a <= b)),                              \
      COMPARED("setp.geu." type, T, !(a < b)), COMPARED("setp.nan." type, T, UNORDERED),                              \
      COMPARED("setp.num." type, T, !UNORDERED)

template <class A, class B>
u32 dot_of_bytes(u32 a, u32 b, u32 c) {
  for (int j = 0; j < 4; ++j) c += static_cast<A>(a >> 8 * j) * static_cast<B>(b >> 8 * j);
  return c;
}

void add_integers(Table& table) {
  SIGNED("add", W(a) + W(b), BINARY), UNSIGNED("add", W(a) + W(b), BINARY);
  SIGNED("sub", W(a) - W(b), BINARY), UNSIGNED("sub", W(a) - W(b), BINARY);
  SIGNED("mul.lo", W(a) * W(b), BINARY), UNSIGNED("mul.lo", W(a) * W(b), BINARY);
  SIGNED("mul.hi", high(a, b), BINARY), UNSIGNED("mul.hi", high(a, b), BINARY);
  SIGNED("mad.lo", W(a) * W(b) + W(c), TERNARY), UNSIGNED("mad.lo", W(a) * W(b) + W(c), TERNARY);
  SIGNED("mad.hi", W(high(a, b)) + W(c), TERNARY), UNSIGNED("mad.hi", W(high(a, b)) + W(c), TERNARY);
  SIGNED("div", divided(a, b), BINARY), UNSIGNED("div", divided(a, b), BINARY);
  SIGNED("rem", remainder_of(a, b), BINARY), UNSIGNED("rem", remainder_of(a, b), BINARY);
  SIGNED("min", a < b ? a : b, BINARY), UNSIGNED("min", a < b ? a : b, BINARY);
  SIGNED("max", a > b ? a : b, BINARY), UNSIGNED("max", a > b ? a : b, BINARY);
  SIGNED("neg", 0 - W(a), UNARY), SIGNED("abs", a < 0 ? 0 - W(a) : W(a), UNARY);
  SIGNED("shr", b >= 8 * sizeof a ? (a < 0 ? -1 : 0) : a >> b, SHIFTED);
  UNSIGNED("shr", b >= 8 * sizeof a ? 0 : a >> b, SHIFTED);
  OP2("shr.b32", u32, u32, u32, b >= 32 ? 0 : a >> b), OP2("shr.b64", u64, u64, u32, b >= 64 ? 0 : a >> b);
  OP2("shl.b16", u16, u16, u32, b >= 16 ? 0 : a << b), OP2("shl.b32", u32, u32, u32, b >= 32 ? 0 : a << b);
  OP2("shl.b64", u64, u64, u32, b >= 64 ? 0 : a << b), OP2("shr.b16", u16, u16, u32, b >= 16 ? 0 : a >> b);
  BITS("and", a & b, BINARY), BITS("or", a | b, BINARY), BITS("xor", a ^ b, BINARY);
  OP1("not.pred", bool, bool, !a), OP1("not.b16", u16, u16, ~a), OP1("not.b32", u32, u32, ~a);
  OP1("not.b64", u64, u64, ~a), OP1("cnot.b32", u32, u32, a == 0);
  OP2("mul.wide.s16", i32, i16, i16, a * b), OP2("mul.wide.u16", u32, u16, u16, static_cast<u32>(a) * b);
  OP2("mul.wide.s32", i64, i32, i32, static_cast<i64>(a) * b);
  OP2("mul.wide.u32", u64, u32, u32, static_cast<u64>(a) * b);
  OP3("mad.wide.s32", u64, i32, i32, u64, static_cast<i64>(a) * b + c);
  OP3("mad.wide.u32", u64, u32, u32, u64, static_cast<u64>(a) * b + c);
  OP3("mad.wide.u16", u32, u16, u16, u32, static_cast<u32>(a) * b + c);
  OP3("mad.wide.s16", u32, i16, i16, u32, static_cast<u32>(a * b) + c);
  OP2("mul24.lo.s32", i32, i32, i32, static_cast<u32>((a << 8 >> 8) * (b << 8 >> 8)));
  COMPARE_INTEGERS(i16, "s16"), COMPARE_INTEGERS(i32, "s32"), COMPARE_INTEGERS(i64, "s64");
  COMPARE_INTEGERS(u16, "u16"), COMPARE_INTEGERS(u32, "u32"), COMPARE_INTEGERS(u64, "u64");
  COMPARE_INTEGERS(u16, "b16"), COMPARE_INTEGERS(u32, "b32"), COMPARE_INTEGERS(u64, "b64");
  OP3("selp.b16", u16, u16, u16, bool, c ? a : b), OP3("selp.b32", u32, u32, u32, bool, c ? a : b);
  OP3("selp.b64", u64, u64, u64, bool, c ? a : b);
  OP1("mov.b32", u32, u32, a), OP1("mov.b64", u64, u64, a), OP1("mov.pred", bool, bool, a);
  OP1("popc.b32", u32, u32, std::popcount(a)), OP1("popc.b64", u32, u64, std::popcount(a));
  OP1("clz.b32", u32, u32, std::countl_zero(a)), OP1("clz.b64", u32, u64, std::countl_zero(a));
  OP1("brev.b32", u32, u32, ([&] {
        u32 d = 0;
        for (int i = 0; i < 32; ++i) d |= (a >> i & 1) << (31 - i);
        return d;
      }()));
  OP1("bfind.u32", u32, u32, a ? 31 - std::countl_zero(a) : ALL);
  OP1("bfind.shiftamt.u32", u32, u32, a ? std::countl_zero(a) : ALL);
  OP3("bfe.u32", u32, u32, u32, u32, ((b &= 255) > 31 ? 0 : a >> b) & ((c &= 255) > 31 ? ALL : (1u << c) - 1));
  OP3("bfe.s32", i32, i32, u32, u32,
      ((c &= 255) == 0 ? 0 : static_cast<i32>(static_cast<i64>(a) << (64 - std::min(64u, c + (b & 255))) >> (64 - c))));
  OP3("prmt.b32", u32, u32, u32, u32, permuted(a, b, c));
  OP3("shf.l.wrap.b32", u32, u32, u32, u32, ((static_cast<u64>(b) << 32 | a) << (c & 31)) >> 32);
  OP3("shf.r.wrap.b32", u32, u32, u32, u32, (static_cast<u64>(b) << 32 | a) >> (c & 31));
  OP3("shf.l.clamp.b32", u32, u32, u32, u32, c > 31 ? a : ((static_cast<u64>(b) << 32 | a) << c) >> 32);
  OP3("shf.r.clamp.b32", u32, u32, u32, u32, c > 31 ? b : (static_cast<u64>(b) << 32 | a) >> c);
  table.push_back({"bfi.b32", insert<u32>}), table.push_back({"bfi.b64", insert<u64>});
  table.push_back({"lop3.b32", RUN {
                     u32 lut = w.get32(i.list[4], 0);
                     lanes(mask, [&](int l) {
    u32 a = w.get32(i.list[1], l), b = w.get32(i.list[2], l), c = w.get32(i.list[3], l), d = 0;
    for (int j = 0; j < 8; ++j)
      if (lut >> j & 1) d |= (j & 4 ? a : ~a) & (j & 2 ? b : ~b) & (j & 1 ? c : ~c);
    w.at<u32>(i.list[0])[l] = d;
                     });
                     return NEXT;
}
}  // namespace
);
OP3("dp4a.s32.s32", u32, u32, u32, u32, (dot_of_bytes<i8, i8>(a, b, c)));
OP3("dp4a.s32.u32", u32, u32, u32, u32, (dot_of_bytes<i8, u8>(a, b, c)));
OP3("dp4a.u32.s32", u32, u32, u32, u32, (dot_of_bytes<u8, i8>(a, b, c)));
OP3("dp4a.u32.u32", u32, u32, u32, u32, (dot_of_bytes<u8, u8>(a, b, c)));
}

void add_floats(Table& table) {
#define FLOATS(T, type)                                                                                               \
  BINARY("add." type, T, a + b), BINARY("sub." type, T, a - b), BINARY("mul." type, T, a* b),                         \
      BINARY("add.rn." type, T, a + b), BINARY("sub.rn." type, T, a - b), BINARY("mul.rn." type, T, a* b),            \
      TERNARY("fma.rn." type, T, std::fma(a, b, c)), BINARY("div.rn." type, T, a / b), UNARY("neg." type, T, -a),     \
      UNARY("abs." type, T, std::fabs(a)), BINARY("min." type, T, smaller(a, b)),                                     \
      BINARY("max." type, T, larger(a, b)), UNARY("sqrt.rn." type, T, std::sqrt(a)), UNARY("rcp.rn." type, T, 1 / a), \
      TERNARY("mad.rn." type, T, std::fma(a, b, c)), BINARY("copysign." type, T, std::copysign(b, a))
  FLOATS(float, "f32"), FLOATS(double, "f64");
  COMPARE_FLOATS(float, "f32"), COMPARE_FLOATS(double, "f64");
  BINARY("min.NaN.f32", float, nan_if(a, b, smaller(a, b))), BINARY("max.NaN.f32", float, nan_if(a, b, larger(a, b)));
  UNARY("ex2.approx.f32", float, std::exp2(exact(a))), UNARY("lg2.approx.f32", float, std::log2(exact(a)));
  UNARY("rcp.approx.f32", float, 1 / exact(a)), UNARY("rsqrt.approx.f32", float, 1 / std::sqrt(exact(a)));
  UNARY("sqrt.approx.f32", float, std::sqrt(a)), UNARY("tanh.approx.f32", float, std::tanh(exact(a)));
  UNARY("sin.approx.f32", float, std::sin(exact(a))), UNARY("cos.approx.f32", float, std::cos(exact(a)));
  UNARY("ex2.approx.ftz.f32", float, flushed(std::exp2(exact(flushed(a)))));
  UNARY("lg2.approx.ftz.f32", float, std::log2(exact(flushed(a))));
  UNARY("rcp.approx.ftz.f32", float, flushed(1 / exact(flushed(a))));
  UNARY("rsqrt.approx.ftz.f32", float, 1 / std::sqrt(exact(flushed(a))));
  UNARY("rcp.approx.ftz.f64", double, 1 / std::bit_cast<double>(std::bit_cast<u64>(a) >> 32 << 32));
  UNARY("rsqrt.approx.ftz.f64", double, 1 / std::sqrt(std::bit_cast<double>(std::bit_cast<u64>(a) >> 32 << 32)));
  BINARY("div.full.f32", float, exact(a) / b), BINARY("div.approx.f32", float, exact(a) / b);
  TERNARY("fma.rn.sat.f32", float, std::fmin(1.f, std::fmax(0.f, std::fma(a, b, c))));
  BINARY("add.rz.f32", float, toward_zero(exact(a) + exact(b)));  // as the logarithm's argument is reduced
  TERNARY("fma.rm.f32", float, std::floor(std::fma(exact(a), exact(b), exact(c))));  // as exp2's argument is reduced
  BINARY("add.sat.f32", float, std::fmin(1.f, std::fmax(0.f, a + b)));
}

// Of halves: sums and products are doubles, which hold them, rounded once.
void add_halves(Table& table) {
#define PAIR(name, expression)                                                                                         \
  OP2(name ".f16x2", u32, u32, u32,                                                                                    \
      halves(a, b, 0, of_half, to_half, [](double a, double b, double) { return expression; })),                       \
      OP2(name ".bf16x2", u32, u32, u32,                                                                               \
          halves(a, b, 0, of_bfloat, to_bfloat, [](double a, double b, double) { return expression; })),               \
      OP2(name ".f16", u16, u16, u16, to_half([](double a, double b) { return expression; }(of_half(a), of_half(b)))), \
      OP2(name ".bf16", u16, u16, u16,                                                                                 \
          to_bfloat([](double a, double b) { return expression; }(of_bfloat(a), of_bfloat(b))))
  PAIR("add", a + b), PAIR("sub", a - b), PAIR("mul", a * b), PAIR("add.rn", a + b), PAIR("sub.rn", a - b);
  PAIR("mul.rn", a * b), PAIR("min", smaller(a, b)), PAIR("max", larger(a, b));
  OP2("max.u16x2", u32, u32, u32, std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16);
#define FUSED(type, of, to)                                                             \
  OP3("fma.rn." type "x2", u32, u32, u32, u32,                                          \
      halves(a, b, c, of, to, [](double a, double b, double c) { return a * b + c; })), \
      OP3("fma.rn." type, u16, u16, u16, u16, to(static_cast<double>(of(a)) * of(b) + of(c)))
  FUSED("f16", of_half, to_half), FUSED("bf16", of_bfloat, to_bfloat);
  OP1("neg.f16", u16, u16, a ^ 0x8000), OP1("neg.bf16", u16, u16, a ^ 0x8000);
  OP1("neg.f16x2", u32, u32, a ^ 0x80008000), OP1("neg.bf16x2", u32, u32, a ^ 0x80008000);
  OP1("abs.f16x2", u32, u32, a & 0x7fff7fff), OP1("abs.bf16x2", u32, u32, a & 0x7fff7fff);
}

}  // namespace

void add_arithmetic(Table& table) {
  add_integers(table);
  add_floats(table);
  add_halves(table);
}
