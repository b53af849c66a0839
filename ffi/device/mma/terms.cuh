// Products of f32 on the tensor cores by terms: each number is a sum of bf16, or tf32, terms, the first the nearest to
// it, the next the nearest to what is left. Pairs of terms are multiplied, the smallest products first.

constexpr bool TF32 = MATH == Math::tf32x3;
constexpr int TERMS = MATH == Math::bf16x1 ? 1 : MATH == Math::bf16x6 || MATH == Math::bf16x9 ? 3 : 2;
constexpr int PAIRS = MATH == Math::bf16x1 ? 1 : MATH == Math::bf16x9 ? 9 : MATH == Math::bf16x6 ? 6 : 3;
constexpr int HALVES = TF32 ? 1 : 2;                  // of a slice, of 8 elements of k, that fragments have apart
constexpr u32 KEPT = TF32 ? 0xffffe000 : 0xffff0000;  // bits of f32 that a term has

// Which terms of a and b the pair is of.
DEVICE constexpr int term_of_a(int pair) {
  constexpr int OF_A[] = {2, 2, 1, 2, 1, 0, 1, 0, 0};
  return OF_A[pair + 9 - PAIRS];
}
DEVICE constexpr int term_of_b(int pair) {
  constexpr int OF_B[] = {2, 1, 2, 0, 1, 2, 0, 1, 0};
  return OF_B[pair + 9 - PAIRS];
}

// The first term of two numbers, as the instruction takes them, and what is left of each.
DEVICE u32 take_term(float& x, float& y, bool cut) {
  float first = x, second = y;
  u32 term;
  if constexpr (TF32) {
    term = (cut ? __float_as_uint(x) : cvt_rna_tf32(x)) & KEPT;
    first = __uint_as_float(term);
  } else {
    term = cut ? __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632) : cvt_bf16x2(x, y);
    first = __uint_as_float(term << 16), second = __uint_as_float(term & KEPT);
  }
  x -= first, y -= second;
  return term;
}

// Fragments of 16 rows (OF_A), or of two times 8 columns, in terms.
template <bool OF_A>
struct Terms {
  u32 terms[TERMS][4];

  // Word `w` of a term is of one number, or of two: 4 of k apart.
  static DEVICE float number(const u32 (&x)[HALVES][4], int w, int which) {
    if constexpr (TF32) return __uint_as_float(x[0][w]);
    if constexpr (OF_A) return __uint_as_float(x[w / 2][w % 2 + 2 * which]);
    return __uint_as_float(x[w % 2][w / 2 * 2 + which]);
  }

  // False where some number is not finite, or is rounded to infinity: `cut` cuts bits off instead.
  DEVICE bool make(const u32 (&x)[HALVES][4], bool cut) {
    float left = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float a = number(x, w, 0), b = number(x, w, 1);
#pragma unroll
      for (int i = 0; i < TERMS; ++i) {
        if (i > 0 && i == TERMS - 1) left += TF32 ? a : a + b;
        terms[i][w] = take_term(a, b, cut);
      }
    }
    return is_finite(left);
  }

  // Clears what is not finite, and the terms after it.
  DEVICE void clear_infinite() {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      constexpr u32 EXPONENT = 0x7f800000;
      bool low = (TF32 ? terms[0][w] : terms[0][w] << 16) << 1 >= EXPONENT << 1;
      bool high = TF32 ? low : (terms[0][w] & KEPT) << 1 >= EXPONENT << 1;
      u32 kept = (low ? 0 : 0xffff) | (high ? 0 : 0xffff0000);
#pragma unroll
      for (int i = 0; i < TERMS; ++i) terms[i][w] &= kept;
    }
  }
};

struct Fragments {
  u32 a[M_FRAGMENTS][HALVES][4], b[PRODUCTS][N_FRAGMENTS / 2][HALVES][4];
};

struct Multiplier {
  Lane<TileA, A_K_MAJOR, true> lane_a;
  Lane<TileB, B_K_MAJOR, false> lane_b;

  DEVICE Multiplier(int row, int column) : lane_a(row), lane_b(column) {}

  DEVICE void load(Fragments& to, u32 tile_a, u32 tiles_b, int slice) const {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
#pragma unroll
      for (int i = 0; i < M_FRAGMENTS; ++i) lane_a.load(to.a[i][h], tile_a, i, slice * HALVES + h);
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS / 2; ++j)
          lane_b.load(to.b[p][j][h], tiles_b + p * TileB::BYTES, j, slice * HALVES + h);
    }
  }

  static DEVICE void multiply_pair(AccFragment (&d)[N_FRAGMENTS], const Terms<true>& a,
                                   const Terms<false> (&b)[N_FRAGMENTS / 2], int pair) {
#pragma unroll
    for (int j = 0; j < N_FRAGMENTS; ++j) {
      const u32(&of_b)[4] = b[j / 2].terms[term_of_b(pair)];
      const u32 columns[2] = {of_b[j % 2 * 2], of_b[j % 2 * 2 + 1]};
      mma<TF32 ? Math::tf32 : Math::bf16>(d[j], a.terms[term_of_a(pair)], columns);
    }
  }

  // The tensor cores add with a few bits more than f32 has and round towards zero, which would be the largest error:
  // they add up a slice's products, and the slices are added to the nearest. What is infinite is multiplied by first
  // terms alone, since others may be zero.
  DEVICE void multiply(Accumulators& d, const Fragments& x) const {
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p) {
      Terms<false> b[N_FRAGMENTS / 2];
      bool finite = true;
#pragma unroll
      for (int j = 0; j < N_FRAGMENTS / 2; ++j) finite &= b[j].make(x.b[p][j], false);
      bool all_b = TERMS == 1 || __all_sync(~0u, finite);
#pragma unroll
      for (int i = 0; i < M_FRAGMENTS; ++i) {
        Terms<true> a;
        bool all = a.make(x.a[i], false);
        if constexpr (TERMS == 1) {
          multiply_pair(d[p][i], a, b, 0);
          continue;
        }
        AccFragment sums[N_FRAGMENTS] = {};
        all = all_b && __all_sync(~0u, all);
        if (!all) {
          a.make(x.a[i], true);
#pragma unroll
          for (int j = 0; j < N_FRAGMENTS / 2; ++j) b[j].make(x.b[p][j], true);
          multiply_pair(sums, a, b, PAIRS - 1);
          a.clear_infinite();
#pragma unroll
          for (int j = 0; j < N_FRAGMENTS / 2; ++j) b[j].clear_infinite();
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS - 1; ++pair) multiply_pair(sums, a, b, pair);
        if (all) multiply_pair(sums, a, b, PAIRS - 1);
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; ++j) add_to(d[p][i][j], sums[j]);
        if (!all) {  // b as it was, for the rows that follow
#pragma unroll
          for (int j = 0; j < N_FRAGMENTS / 2; ++j) b[j].make(x.b[p][j], false);
        }
      }
    }
  }

  static DEVICE void arrange(Accumulators&) {}
};
