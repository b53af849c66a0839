// Complex float64 as three real products on the tensor cores, as Gauss has them: a.real b.real, a.imag b.imag, and the
// product of the sums of both parts. What lane l holds of a slice of 4 of k, with g = l / 4 and q = l % 4:
//   a[z][i]   part z of rows g, g + 8 at k q, of the i-th 16
//   b[z][j]   part z of column g at k q, of the j-th 8

// Lines begin 32 bytes apart in banks: 8 lanes read 16 bytes of two rows in each of four lines at once.
using TileA = ElementTile<BM, A_K_MAJOR, true, 32>;
using TileB = ElementTile<BN, B_K_MAJOR, true, 32>;
static_assert(SLICE == 4 && VECTOR == 2 && ROWS_VECTOR == 2);

struct Fragments {
  double a[2][M_FRAGMENTS][2], b[PRODUCTS][2][N_FRAGMENTS];
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
    for (int z = 0; z < 2; ++z) {
#pragma unroll
      for (int i = 0; i < M_FRAGMENTS; ++i) load_parts<2>(to.a[z][i], tile_a + (z * BM + 16 * i) * PART);
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
      for (int z = 0; z < 3; ++z)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; ++j)
#pragma unroll
          for (int i = 0; i < M_FRAGMENTS; ++i) {
            double(&sums)[4] = d[p][i][j][z];
            const double b[1] = {z < 2 ? x.b[p][z % 2][j] : x.b[p][0][j] + x.b[p][1][j]};
            const double a[2] = {z < 2 ? x.a[z % 2][i][0] : x.a[0][i][0] + x.a[1][i][0],
                                 z < 2 ? x.a[z % 2][i][1] : x.a[0][i][1] + x.a[1][i][1]};
            dmma(sums[0], sums[1], sums[2], sums[3], a, b);
          }
  }
};
