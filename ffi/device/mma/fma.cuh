// Products by fused multiply-adds of one element each, of any dtype of 4, 8 or 16 bytes: Acc is the elements' type too.
// Complex numbers are four products of their components.
//
// A thread has rows l / 4 + 8 i of a and columns 2 (l % 4) + e + 8 j of b, as the accumulators lie.

// d += a b. Integers wrap.
DEVICE void multiply_add(float& d, float a, float b) { fma_rn(d, a, b); }
DEVICE void multiply_add(double& d, double a, double b) { d = __fma_rn(a, b, d); }
DEVICE void multiply_add(u32& d, u32 a, u32 b) { d += a * b; }
DEVICE void multiply_add(u64& d, u64 a, u64 b) { d += a * b; }
DEVICE void multiply_add(int& d, int a, int b) {
  d = static_cast<int>(static_cast<u32>(d) + static_cast<u32>(a) * static_cast<u32>(b));
}
DEVICE void multiply_add(i64& d, i64 a, i64 b) {
  d = static_cast<i64>(static_cast<u64>(d) + static_cast<u64>(a) * static_cast<u64>(b));
}

// The same of component Z_A of a and component Z_B of b.
template <int Z_A, int Z_B, typename T>
DEVICE void multiply_components(T& d, T a, T b) {
  multiply_add(d, a, b);
}
template <int Z_A, int Z_B, typename R>
DEVICE void multiply_components(Complex<R>& d, R a, R b) {
  multiply_add(Z_A == Z_B ? d.real : d.imag, Z_A && Z_B ? -a : a, b);
}

// 16 bytes after each line put other lines in other banks.
using TileA = ElementTile<BM, A_K_MAJOR, true, ViewA>;
using TileB = ElementTile<BN, B_K_MAJOR, false, ViewB>;

struct Fragments {
  Component a[COMPONENTS][2 * M_FRAGMENTS], b[PRODUCTS][COMPONENTS][2 * N_FRAGMENTS];
};

struct Multiplier {
  u32 offset_a, offset_b;  // of this lane's first row and column in a line

  DEVICE Multiplier(int row, int column)
      : offset_a(position<true>(row + threadIdx.x % 32 / 4) * COMPONENT_BYTES),
        offset_b(position<false>(column + threadIdx.x % 4 * 2) * COMPONENT_BYTES) {}

  DEVICE void load(Fragments& to, u32 tile_a, u32 tiles_b, int k) const {
    constexpr int ROWS = VECTOR < 2 * M_FRAGMENTS ? VECTOR : 2 * M_FRAGMENTS;  // at once
    tile_a += offset_a + k * TileA::PITCH;
    tiles_b += offset_b + k * TileB::PITCH;
#pragma unroll
    for (int z = 0; z < COMPONENTS; ++z)
#pragma unroll
      for (int i = 0; i < 2 * M_FRAGMENTS; i += ROWS)
        load_components<ROWS>(to.a[z] + i, tile_a + (z * BM + position<true>(8 * i)) * COMPONENT_BYTES);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
      for (int z = 0; z < COMPONENTS; ++z)
#pragma unroll
        for (int j = 0; j < 2 * N_FRAGMENTS; j += VECTOR)
          load_components<VECTOR>(to.b[p][z] + j, tiles_b + p * TileB::BYTES +
                                                      (z * BN + position<false>(j / 2 * 8 + j % 2)) * COMPONENT_BYTES);
  }

  // Moves both to the slices after those whose code is repeated.
  static DEVICE void skip(u32& tile_a, u32& tiles_b) {
    tile_a += SLICES_AT_ONCE * TileA::PITCH;
    tiles_b += SLICES_AT_ONCE * TileB::PITCH;
  }

  // Every other column goes up, so that each product shares a component with the one before.
  DEVICE void multiply(Accumulators& d, const Fragments& x) const {
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
      for (int j = 0; j < 2 * N_FRAGMENTS; ++j) {
        multiply_column<0, 0>(d[p], x, p, j);
        if constexpr (COMPONENTS == 2) {
          multiply_column<1, 0>(d[p], x, p, j);
          multiply_column<0, 1>(d[p], x, p, j);
          multiply_column<1, 1>(d[p], x, p, j);
        }
      }
  }

  template <int Z_A, int Z_B>
  static DEVICE void multiply_column(AccFragment (&d)[M_FRAGMENTS][N_FRAGMENTS], const Fragments& x, int p, int j) {
#pragma unroll
    for (int step = 0; step < 2 * M_FRAGMENTS; ++step) {
      int i = (COMPONENTS == 1 ? j : Z_A) % 2 ? 2 * M_FRAGMENTS - 1 - step : step;
      multiply_components<Z_A, Z_B>(d[i / 2][j / 2][i % 2 * 2 + j % 2], x.a[Z_A][i], x.b[p][Z_B][j]);
    }
  }

  // After the last slice. The epilogue stores pairs of neighbours, and the compiler would have them in pairs of
  // registers in the whole loop, where half of the multiply-adds would read two registers of one bank then: words of
  // different rows are pairs first.
  DEVICE void arrange(Accumulators& d) const {
    if constexpr (COMPONENT_BYTES == 4 && SLICES_AT_ONCE * SLICE * WARPS_K < BK) {
      constexpr int COUNT = PRODUCTS * M_FRAGMENTS * N_FRAGMENTS, HALF = sizeof(AccFragment) / 8;
      u32(&words)[COUNT][2 * HALF] = reinterpret_cast<u32(&)[COUNT][2 * HALF]>(d);
      u32 zero = pinned(0);
#pragma unroll
      for (int i = 0; i < COUNT * HALF; ++i)
        pass_pair(words[i / HALF][i % HALF + HALF], words[i / HALF][i % HALF], zero);
    }
  }
};
