// Products on the tensor cores, of elements of a as they are and those of b as a decoder (decode_none.cuh) gives them.

// To the nearest, in place: the instruction would cut off bits.
template <typename T>
DEVICE void round_tf32(T& fragments) {
  u32(&x)[sizeof(T) / 4] = reinterpret_cast<u32(&)[sizeof(T) / 4]>(fragments);
#pragma unroll
  for (int i = 0; i < sizeof(T) / 4; ++i) x[i] = cvt_rna_tf32(__uint_as_float(x[i]));
}

constexpr bool FLOAT8 = MATH == Math::e4m3 || MATH == Math::e5m2 || MATH == Math::e4m3_e5m2 || MATH == Math::e5m2_e4m3;

// Sums of products of 8-bit floats have fewer bits than f32 within an instruction and from one to the next: each is
// added to the others apart.
DEVICE void multiply_one(AccFragment& d, const u32 (&a)[4], const u32 (&b)[2]) {
#if F16_ACCUMULATORS
  mma_f16(d, a, b);
#else
  if constexpr (FLOAT8) {
    AccFragment one{};
    mma<MATH>(one, a, b);
    add_to(d, one);
  } else {
    mma<MATH>(d, a, b);
  }
#endif
}

struct Fragments {
  u32 a[M_FRAGMENTS][4];
  Decoder::Fragments b[PRODUCTS];
};

struct Multiplier {
  Lane<TileA, A_K_MAJOR, true> lane_a;
  Decoder decoder;

  DEVICE Multiplier(int row, int column) : lane_a(row), decoder(column) {}

  DEVICE void load(Fragments& to, u32 tile_a, u32 tiles_b, int slice) const {
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; ++i) lane_a.load(to.a[i], tile_a, i, slice);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p) decoder.load(to.b[p], tiles_b + p * TileB::BYTES, slice);
  }

  // Every other column of instructions goes up, so that each shares a fragment with the one before.
  DEVICE void multiply(Accumulators& d, Fragments& x) const {
    if constexpr (MATH == Math::tf32 && !TMA) {  // which rounds too
      round_tf32(x.a);
      round_tf32(x.b);
    }
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
      for (int j = 0; j < N_FRAGMENTS; ++j) {
        u32 b[2];
        decoder.get(b, x.b[p], j);
#pragma unroll
        for (int step = 0; step < M_FRAGMENTS; ++step) {
          int i = j % 2 ? M_FRAGMENTS - 1 - step : step;
          multiply_one(d[p][i][j], x.a[i], b);
        }
      }
  }

  static DEVICE void arrange(Accumulators& d) { Decoder::put_in_order(d); }
};
