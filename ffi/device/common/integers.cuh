// What a generated epilogue calls for integers, with XLA's semantics: T is the type, whose values travel in its
// carrier; arithmetic wraps. Carriers: int and u32 any of up to 32 bits, i64 and u64 any.

using i64 = long long;

template <class T>
struct Integer {
  using Carrier = int;
  using Unsigned = u32;
};
template <>
struct Integer<unsigned char> {
  using Carrier = u32;
  using Unsigned = u32;
};
template <>
struct Integer<u16> : Integer<unsigned char> {};
template <>
struct Integer<u32> : Integer<unsigned char> {};
template <>
struct Integer<i64> {
  using Carrier = i64;
  using Unsigned = u64;
};
template <>
struct Integer<u64> {
  using Carrier = u64;
  using Unsigned = u64;
};

template <class T>
using Carrier = typename Integer<T>::Carrier;
template <class T>
using Unsigned = typename Integer<T>::Unsigned;
template <class T>
constexpr int BITS = sizeof(T) * 8;
template <class T>
constexpr bool SIGNED = static_cast<T>(-1) < static_cast<T>(0);
template <class T>
constexpr Unsigned<T> MASK = static_cast<Unsigned<T>>(~0ull >> (64 - BITS<T>));
template <class T>  // of a signed type
constexpr i64 LARGEST = static_cast<i64>(~0ull >> (65 - BITS<T>));

template <class T, class V>
DEVICE Carrier<T> wrap(V x) {
  return static_cast<Carrier<T>>(static_cast<T>(x));
}

template <class T>
DEVICE Carrier<T> integer_add(Carrier<T> a, Carrier<T> b) {
  return wrap<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}

template <class T>
DEVICE Carrier<T> integer_sub(Carrier<T> a, Carrier<T> b) {
  return wrap<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
}

template <class T>
DEVICE Carrier<T> integer_mul(Carrier<T> a, Carrier<T> b) {
  return wrap<T>(static_cast<Unsigned<T>>(a) * static_cast<Unsigned<T>>(b));
}

template <class T>
DEVICE Carrier<T> integer_div(Carrier<T> a, Carrier<T> b) {  // by 0: -1
  if (b == 0) return wrap<T>(-1);
  if (SIGNED<T> && b == static_cast<Carrier<T>>(-1)) return integer_sub<T>(0, a);
  return wrap<T>(a / b);
}

template <class T>
DEVICE Carrier<T> integer_rem(Carrier<T> a, Carrier<T> b) {  // by 0: a
  if (b == 0) return a;
  if (SIGNED<T> && b == static_cast<Carrier<T>>(-1)) return 0;
  return a % b;
}

template <class T>
DEVICE Carrier<T> integer_abs(Carrier<T> x) {
  return SIGNED<T> && x < static_cast<Carrier<T>>(0) ? integer_sub<T>(0, x) : x;
}

template <class T>
DEVICE Carrier<T> integer_sign(Carrier<T> x) {
  return x == 0 ? Carrier<T>{0} : SIGNED<T> && x < static_cast<Carrier<T>>(0) ? wrap<T>(-1) : Carrier<T>{1};
}

template <class T>
DEVICE Carrier<T> integer_power(Carrier<T> x, int power) {
  Carrier<T> y = 1;
  for (; power; power /= 2, x = integer_mul<T>(x, x)) {
    if (power % 2) y = integer_mul<T>(y, x);
  }
  return y;
}

// An amount outside [0, BITS) shifts every bit out.
template <class T>
DEVICE bool shifts_out(Carrier<T> amount) {
  return static_cast<Unsigned<T>>(amount) >= static_cast<Unsigned<T>>(BITS<T>);
}

template <class T>
DEVICE Carrier<T> shift_left(Carrier<T> x, Carrier<T> amount) {
  return shifts_out<T>(amount) ? 0 : wrap<T>(static_cast<Unsigned<T>>(x) << amount);
}

template <class T>
DEVICE Carrier<T> shift_right_logical(Carrier<T> x, Carrier<T> amount) {
  return shifts_out<T>(amount) ? 0 : wrap<T>((static_cast<Unsigned<T>>(x) & MASK<T>) >> amount);
}

template <class T>
DEVICE Carrier<T> shift_right_arithmetic(Carrier<T> x, Carrier<T> amount) {
  i64 wide = static_cast<i64>(static_cast<u64>(x) << (64 - BITS<T>)) >> (64 - BITS<T>);
  return wrap<T>(wide >> (shifts_out<T>(amount) ? BITS<T> - 1 : static_cast<int>(amount)));
}

template <class T>
DEVICE Carrier<T> population_count(Carrier<T> x) {
  return __popcll(static_cast<u64>(static_cast<Unsigned<T>>(x) & MASK<T>));
}

template <class T>
DEVICE Carrier<T> clz(Carrier<T> x) {
  return __clzll(static_cast<i64>(static_cast<u64>(static_cast<Unsigned<T>>(x) & MASK<T>))) - (64 - BITS<T>);
}

// What jax.random makes of a key and an element's index: threefry of (0, index), one word xor the other.
DEVICE u32 threefry2x32(u32 k0, u32 k1, u32 index) {
  constexpr int ROTATIONS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  u32 keys[3] = {k0, k1, k0 ^ k1 ^ 0x1bd11bda}, x = k0, y = index + k1;
#pragma unroll
  for (int group = 0; group < 5; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int rotation = ROTATIONS[group % 2][i];
      x += y;
      y = x ^ (y << rotation | y >> (32 - rotation));
    }
    x += keys[(group + 1) % 3];
    y += keys[(group + 2) % 3] + group + 1;
  }
  return x ^ y;
}

// Truncates and saturates; NaN is 0.
template <class T, class F>
DEVICE Carrier<T> from_float(F x) {
  if (!(x == x)) return 0;
  if constexpr (SIGNED<T>) {
    constexpr F LIMIT = static_cast<F>(1ull << (BITS<T> - 1));
    if (x >= LIMIT) return static_cast<Carrier<T>>(LARGEST<T>);
    if (x < -LIMIT) return static_cast<Carrier<T>>(-LARGEST<T> - 1);
  } else {
    constexpr F LIMIT = 2 * static_cast<F>(1ull << (BITS<T> - 1));
    if (x >= LIMIT) return static_cast<Carrier<T>>(MASK<T>);
    if (x <= 0) return 0;
  }
  return static_cast<Carrier<T>>(x);
}
