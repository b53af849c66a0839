// Products by fused multiply-adds of one element each, of any dtype of 4, 8 or 16 bytes: Acc is the elements' type too.
// Complex numbers are four products of their components.
//
// Which rows of a and columns of b a lane has, and where they lie, says the file of the operands (planes.cuh,
// units.cuh).

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

using TileA = ElementTile<BM, A_K_MAJOR, true, ViewA>;
using TileB = ElementTile<BN, B_K_MAJOR, false, ViewB>;

struct Fragments {
  Component a[COMPONENTS][2 * M_FRAGMENTS], b[PRODUCTS][COMPONENTS][2 * N_FRAGMENTS];
};

struct Multiplier {
  u32 offset_a, offset_b;  // of this lane's first row and column in a line

  DEVICE Multiplier(int row, int column) : offset_a(lane_row(row)), offset_b(lane_column(column)) {}

  DEVICE void load(Fragments& to, u32 tile_a, u32 tiles_b, int k) const {
    constexpr int ROWS = VECTOR < 2 * M_FRAGMENTS ? VECTOR : 2 * M_FRAGMENTS;  // at once
    tile_a += offset_a + TileA::line_at(k);
    tiles_b += offset_b + TileB::line_at(k);
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
    tile_a += TileA::line_at(SLICES_AT_ONCE);
    tiles_b += TileB::line_at(SLICES_AT_ONCE);
  }

  // Every other column, or row, goes back, so that each product shares a component with the one before.
  DEVICE void multiply(Accumulators& d, const Fragments& x) const {
    if constexpr (BY_ROWS) {
#pragma unroll
      for (int i = 0; i < 2 * PRODUCTS * M_FRAGMENTS; ++i)
#pragma unroll
        for (int step = 0; step < 2 * N_FRAGMENTS; ++step) {
          int p = i / (2 * M_FRAGMENTS), row = i % (2 * M_FRAGMENTS);
          int j = i % 2 ? 2 * N_FRAGMENTS - 1 - step : step;
          multiply_components<0, 0>(d[p][row / 2][j / 2][row % 2 * 2 + j % 2], x.a[0][row], x.b[p][0][j]);
        }
      return;
    }
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

  static DEVICE void arrange(Accumulators& d) { place_sums(d); }
};
