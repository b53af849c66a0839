// float64, and complex128 as four real products, on the tensor cores. What lane l holds of a slice of k, with g = l / 4
// and q = l % 4:
//   a[2 t], a[2 t + 1]       rows g, g + 8 at k 4 t + q
//   b[t]                     column g at k 4 t + q

using TileA = Operand<BM, ELEMENT, A_K_MAJOR, A_UNIT, Read::words>;
using TileB = Operand<BN, ELEMENT, B_K_MAJOR, B_UNIT, Read::words>;

constexpr bool COMPLEX = ELEMENT == 16;

constexpr int NUMBERS = COMPLEX ? 2 : 1;  // of an element: its parts lie apart in registers

struct Fragments {
  double a[NUMBERS][M_FRAGMENTS][SLICE / 2], b[NUMBERS][PRODUCTS][N_FRAGMENTS][SLICE / 4];
};

DEVICE void multiply_one(double (&d)[4], const Fragments& x, int, int p, int i, int j) {
  dmma(d[0], d[1], d[2], d[3], x.a[0][i], x.b[0][p][j]);
}

// Of the real parts of a (z = 0), or of the imaginary ones.
DEVICE void multiply_one(Complex<double> (&d)[4], const Fragments& x, int z, int p, int i, int j) {
  double real[SLICE / 4];
#pragma unroll
  for (int t = 0; t < SLICE / 4; ++t) real[t] = z ? -x.b[NUMBERS - 1][p][j][t] : x.b[0][p][j][t];
  dmma(d[0].real, d[1].real, d[2].real, d[3].real, x.a[z][i], real);
  dmma(d[0].imag, d[1].imag, d[2].imag, d[3].imag, x.a[z][i], x.b[NUMBERS - 1 - z][p][j]);
}

struct Multiplier {
  Words<TileA, A_K_MAJOR> lane_a;
  Words<TileB, B_K_MAJOR> lane_b;

  DEVICE Multiplier(int row, int column) : lane_a(row), lane_b(column) {}

  template <typename Part>
  static DEVICE void load(u32 address, Part part) {
    if constexpr (COMPLEX) {
      ld_shared_v2(address, part(0), part(1));
    } else {
      part(0) = ld_shared_f64(address);
    }
  }

  DEVICE void load(Fragments& to, u32 tile_a, u32 tiles_b, int slice) const {
#pragma unroll
    for (int t = 0; t < SLICE / 4; ++t) {
      int depth = slice * (SLICE / 4) + t;
#pragma unroll
      for (int i = 0; i < 2 * M_FRAGMENTS; ++i)
        load(lane_a.at(tile_a, i, depth), [&](int z) -> double& { return to.a[z][i / 2][2 * t + i % 2]; });
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; ++j)
          load(lane_b.at(tiles_b + p * TileB::BYTES, j, depth), [&](int z) -> double& { return to.b[z][p][j][t]; });
    }
  }

  // Products with the real part of a, then those with the imaginary one: instructions that follow each other have
  // different accumulators.
  DEVICE void multiply(Accumulators& d, const Fragments& x) const {
#pragma unroll
    for (int z = 0; z < NUMBERS; ++z)
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; ++j)
#pragma unroll
          for (int step = 0; step < M_FRAGMENTS; ++step) {
            int i = j % 2 ? M_FRAGMENTS - 1 - step : step;
            multiply_one(d[p][i][j], x, z, p, i, j);
          }
  }
};
