// float64, and complex numbers as four real products, in float64 or TF32, on the tensor cores. What lane l holds of a
// slice of k, with g = l / 4 and q = l % 4:
//   a[2 t], a[2 t + 1]       rows g, g + 8 at k 4 t + q
//   b[t]                     column g at k 4 t + q

using TileA = Operand<BM, ELEMENT, A_K_MAJOR, A_UNIT, Read::words, ViewA>;
using TileB = Operand<BN, ELEMENT, B_K_MAJOR, B_UNIT, Read::words, ViewB>;

// What an instruction takes: a float64, or the bits of a TF32.
template <Math>
struct ComponentOf {
  using Type = double;
};
template <>
struct ComponentOf<Math::tf32> {
  using Type = u32;
};
using Component = ComponentOf<MATH>::Type;
constexpr int COMPONENTS = ELEMENT / sizeof(Component);  // of an element: they lie apart in registers

struct Fragments {
  Component a[COMPONENTS][M_FRAGMENTS][SLICE / 2], b[COMPONENTS][PRODUCTS][N_FRAGMENTS][SLICE / 4];
};

DEVICE double negative(double x) { return -x; }
DEVICE u32 negative(u32 tf32) { return tf32 ^ 0x80000000; }
DEVICE void round_component(double&) {}
DEVICE void round_component(u32& x) {
  if constexpr (!TMA) x = cvt_rna_tf32(__uint_as_float(x));  // TMA rounds too
}

DEVICE void multiply_components(double (&d)[4], const double (&a)[SLICE / 2], const double (&b)[SLICE / 4]) {
  dmma(d[0], d[1], d[2], d[3], a, b);
}
DEVICE void multiply_components(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma<MATH>(d, a, b); }

template <typename R>
DEVICE void multiply_one(R (&d)[4], const Fragments& x, int, int p, int i, int j) {
  multiply_components(d, x.a[0][i], x.b[0][p][j]);
}

// Of the real parts of a (z = 0), or of the imaginary ones.
template <typename R>
DEVICE void multiply_one(Complex<R> (&d)[4], const Fragments& x, int z, int p, int i, int j) {
  Component b[SLICE / 4];
#pragma unroll
  for (int t = 0; t < SLICE / 4; ++t) b[t] = z ? negative(x.b[1][p][j][t]) : x.b[0][p][j][t];
  R real[4], imag[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) real[e] = d[e].real, imag[e] = d[e].imag;
  multiply_components(real, x.a[z][i], b);
  multiply_components(imag, x.a[z][i], x.b[1 - z][p][j]);
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] = {real[e], imag[e]};
}

struct Multiplier {
  Words<TileA, A_K_MAJOR> lane_a;
  Words<TileB, B_K_MAJOR> lane_b;

  DEVICE Multiplier(int row, int column) : lane_a(row), lane_b(column) {}

  template <typename To>
  static DEVICE void load(u32 address, To to) {
    if constexpr (COMPONENTS == 2) {
      ld_shared_v2(address, to(0), to(1));
    } else {
      to(0) = ld_shared_f64(address);
    }
  }

  DEVICE void load(Fragments& to, u32 tile_a, u32 tiles_b, int slice) const {
#pragma unroll
    for (int t = 0; t < SLICE / 4; ++t) {
      int depth = slice * (SLICE / 4) + t;
#pragma unroll
      for (int i = 0; i < 2 * M_FRAGMENTS; ++i)
        load(lane_a.at(tile_a, i, depth), [&](int z) -> Component& { return to.a[z][i / 2][2 * t + i % 2]; });
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; ++j)
          load(lane_b.at(tiles_b + p * TileB::BYTES, j, depth), [&](int z) -> Component& { return to.b[z][p][j][t]; });
    }
  }

  // Products with the real part of a, then those with the imaginary one: instructions that follow each other have
  // different accumulators.
  DEVICE void multiply(Accumulators& d, Fragments& x) const {
#pragma unroll
    for (int i = 0; i < COMPONENTS * M_FRAGMENTS * (SLICE / 2); ++i) round_component((&x.a[0][0][0])[i]);
#pragma unroll
    for (int i = 0; i < COMPONENTS * PRODUCTS * N_FRAGMENTS * (SLICE / 4); ++i) round_component((&x.b[0][0][0][0])[i]);
#pragma unroll
    for (int z = 0; z < COMPONENTS; ++z)
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

  static DEVICE void arrange(Accumulators&) {}
};
