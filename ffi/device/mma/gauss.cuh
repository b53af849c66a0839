// Complex float64 as three real products on the tensor cores, as Gauss has them: a.real b.real, a.imag b.imag, and the
// product of the sums of both parts. What lane l holds of a slice of 4 of k, with g = l / 4 and q = l % 4:
//   a[z][i]   part z of rows g, g + 8 at k q, of the i-th 16
//   b[z][j]   part z of column g at k q, of the j-th 8

// Lines begin 32 bytes apart in banks: 8 lanes read 16 bytes of two rows in each of four lines at once.
using TileA = ElementTile<BM, A_K_MAJOR, true, 32>;
using TileB = ElementTile<BN, B_K_MAJOR, true, 32>;
static_assert(SLICE == 4 && VECTOR == 2 && ROWS_VECTOR == 2);

struct Fragments {
  double a[PARTS][2 * M_FRAGMENTS], b[PRODUCTS][PARTS][N_FRAGMENTS];
};

struct Multiplier {
  u32 offset_a, offset_b;  // of this lane's first row, and column, at its k

  DEVICE Multiplier(int row, int column)
      : offset_a(position<true>(row + threadIdx.x % 32 / 4) * PART + threadIdx.x % 4 * TileA::PITCH),
        offset_b(position<true>(column + threadIdx.x % 32 / 4) * PART + threadIdx.x % 4 * TileB::PITCH) {}

  DEVICE void load(Fragments& to, u32 tile_a, u32 tiles_b, int slice) const {
    tile_a += offset_a + slice * 4 * TileA::PITCH;
    tiles_b += offset_b + slice * 4 * TileB::PITCH;
#pragma unroll
    for (int z = 0; z < PARTS; ++z) {
#pragma unroll
      for (int i = 0; i < M_FRAGMENTS; ++i) load_parts<2>(to.a[z] + 2 * i, tile_a + (z * BM + 16 * i) * PART);
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; j += 2)
          load_parts<2>(to.b[p][z] + j, tiles_b + p * TileB::BYTES + (z * BN + 8 * j) * PART);
    }
  }

  DEVICE void multiply(Accumulators& d, const Fragments& x) const {
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
      for (int z = 0; z < (PARTS == 1 ? 1 : 3); ++z)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; ++j)
#pragma unroll
          for (int step = 0; step < M_FRAGMENTS; ++step) {
            int i = j % 2 ? M_FRAGMENTS - 1 - step : step;
            double (&sums)[4] = sums_of(d[p][i][j], z);
            const double b[1] = {part(x.b[p], z, j)}, a[2] = {part(x.a, z, 2 * i), part(x.a, z, 2 * i + 1)};
            dmma(sums[0], sums[1], sums[2], sums[3], a, b);
          }
  }

  static DEVICE void finish(Accumulators&) {}

  static DEVICE double (&sums_of(double (&x)[4], int))[4] { return x; }
  static DEVICE double (&sums_of(double (&x)[3][4], int z))[4] { return x[z]; }

  // Of both parts, or their sum (z = 2).
  template <int N>
  static DEVICE double part(const double (&x)[PARTS][N], int z, int i) {
    return z < 2 ? x[z][i] : x[0][i] + x[PARTS - 1][i];
  }
};
