// A token's row of logits, which LANES lanes read together: each a piece of VECTOR elements of every LANES pieces.
// AHEAD pieces are loaded before one is looked at.

constexpr int PIECES = (EXPERTS + LANES * VECTOR - 1) / (LANES * VECTOR);  // of a lane
constexpr bool HALVES = LOGITS == Dtype::bf16 || LOGITS == Dtype::f16;

struct Piece {
  static constexpr int BYTES = VECTOR * SIZE<LOGITS>;
  u32 words[BYTES < 4 ? 1 : BYTES / 4];

  DEVICE void load(const char* p) {
    if constexpr (BYTES == 16) {
      Bytes16 v = ld_global_v4(p);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (BYTES == 8) {
      uint2 v = *reinterpret_cast<const uint2*>(p);
      words[0] = v.x, words[1] = v.y;
    } else if constexpr (BYTES == 4) {
      words[0] = *reinterpret_cast<const u32*>(p);
    } else {
      words[0] = *reinterpret_cast<const u16*>(p);
    }
  }

  // The bits of an element, of 16 bits in the high half.
  DEVICE u32 operator[](int i) const {
    if constexpr (HALVES) {
      return i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16;
    } else {
      return words[i];
    }
  }
};

// Calls f(expert, bits) of each element that the lane reads, in order.
template <typename F>
DEVICE void each(const char* row, F f) {
  int lane = threadIdx.x % LANES;
#pragma unroll 1
  for (int base = 0; base < PIECES; base += AHEAD) {
    Piece pieces[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      int expert = ((base + i) * LANES + lane) * VECTOR;
      if (expert < EXPERTS) pieces[i].load(row + expert * SIZE<LOGITS>);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      int expert = ((base + i) * LANES + lane) * VECTOR;
      if (expert < EXPERTS) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) f(expert + j, pieces[i][j]);
      }
    }
  }
}

DEVICE float value_of(u32 bits) {
  if constexpr (LOGITS == Dtype::f16) {
    return f16_to_f32(bits >> 16);
  } else {
    return __uint_as_float(bits);
  }
}

DEVICE float logit(const char* row, int expert) {
  if constexpr (HALVES) {
    return value_of(static_cast<u32>(reinterpret_cast<const u16*>(row)[expert]) << 16);
  } else {
    return value_of(reinterpret_cast<const u32*>(row)[expert]);
  }
}

// ---- of all lanes of a token ----

template <typename T, typename F>
DEVICE T of_lanes(T x, F f) {
#pragma unroll
  for (int other = LANES / 2; other; other /= 2) x = f(x, __shfl_xor_sync(~0u, x, other));
  return x;
}

DEVICE float largest(float x) {
  return of_lanes(x, [](float a, float b) { return fmaxf(a, b); });
}

DEVICE float sum(float x) {
  return of_lanes(x, [](float a, float b) { return a + b; });
}
