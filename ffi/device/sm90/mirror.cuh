// Symmetric results: of blocks of 64 x 64 of the result, those below the diagonal are stored at their place and, their
// transpose, at its mirror image; those on the diagonal once; those above not at all. So every element is written once.
// A staged chunk lies in one such block: it has 64 rows, and D_CHUNK divides 64.

static_assert(64 % D_CHUNK == 0, "a chunk may not cross a block's edge");

// Blocks right of the diagonal at which the chunk's row and column lie.
DEVICE int right_of_diagonal(int row, int column) { return column / 64 - row / 64; }

// As stmatrix_x4, but each matrix is written transposed.
DEVICE void stmatrix_x4_trans(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

DEVICE void st_shared_u32(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// The transpose of a staging tile: [SUBTILES][D_CHUNK][COLUMNS], rows of 128 bytes, swizzled as TMA does it.
template <Dtype D>
struct Mirror {
  static_assert(SIZE<D> == 2 || SIZE<D> == 4, "elements of 16 or 32 bits");
  static constexpr int COLUMNS = 128 / SIZE<D>, SUBTILE_BYTES = D_CHUNK * 128;

  // The address of row `column` of the transpose at what was row `row`.
  static DEVICE u32 at(u32 tile, int column, int row) {
    return tile + row / COLUMNS * SUBTILE_BYTES + swizzle<128>(column * 128 + row % COLUMNS * SIZE<D>);
  }

  // What Staging::stage takes.
  template <typename Carrier>
  static DEVICE void stage(u32 tile, int thread, int piece, const Carrier (&v)[8]) {
    int warp = thread / 32, lane = thread % 32;
    if constexpr (SIZE<D> == 2) {  // lane l addresses column 8 (l / 16) + l % 8, rows 8 (l / 8 % 2) on
      u32 address = at(tile, piece * 16 + lane / 16 * 8 + lane % 8, warp * 16 + lane / 8 % 2 * 8);
      stmatrix_x4_trans(address, pack<D>(v[0], v[1]), pack<D>(v[2], v[3]), pack<D>(v[4], v[5]), pack<D>(v[6], v[7]));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        u32 address = at(tile, piece * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2, warp * 16 + i / 2 % 2 * 8 + lane / 4);
        if constexpr (D == Dtype::f32) {
          st_shared_u32(address, __float_as_uint(v[i]));
        } else {
          st_shared_u32(address, static_cast<u32>(v[i]));
        }
      }
    }
  }

  // The transpose of the chunk at column x and row y of the result to its mirror image.
  static DEVICE void store(const TensorMap* map, u32 tile, int x, int y, int z) {
#pragma unroll
    for (int i = 0; i < 64 / COLUMNS; ++i) tma_store(map, tile + i * SUBTILE_BYTES, y + i * COLUMNS, x, z);
  }
};
