// The transpose of a staging tile, of one result or operand: [SUBTILES][D_CHUNK][COLUMNS], rows of SPAN bytes, swizzled
// as TMA does it. Its 64 columns are the rows of a block of accumulators, its rows their columns. As in Staging, each
// warp reads and writes the part of its own 16 rows of accumulators alone.

DEVICE void stmatrix_x4_trans(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

DEVICE void stmatrix_x2_trans(u32 address, u32 r0, u32 r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r0), "r"(r1)
               : "memory");
}

DEVICE void ldmatrix_x4_trans(u32 address, u32& r0, u32& r1, u32& r2, u32& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

DEVICE void ldmatrix_x2_trans(u32 address, u32& r0, u32& r1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(address)
               : "memory");
}

DEVICE void st_shared_u32(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

DEVICE void st_shared_u8(u32 address, u32 x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

template <Dtype D>
struct Transposed {
  static constexpr int SPAN = SIZE<D> == 1 ? 64 : 128;
  static constexpr int COLUMNS = SPAN / SIZE<D>, SUBTILE_BYTES = D_CHUNK * SPAN;

  // The address of the element of a column and a row of the chunk.
  static DEVICE u32 at(u32 tile, int column, int row) {
    return tile + row / COLUMNS * SUBTILE_BYTES + swizzle<SPAN>(column * SPAN + row % COLUMNS * SIZE<D>);
  }

  // Where this lane's matrix of stmatrix or ldmatrix has a row: the first has columns and rows from 0 on, the second
  // rows from 8 on, the third columns from 8 on, the fourth both.
  static DEVICE u32 matrix_at(u32 tile, int thread, int piece) {
    int lane = thread % 32, column = PIECE == 16 ? lane / 16 * 8 : 0;
    return at(tile, piece * PIECE + column + lane % 8, thread / 32 * 16 + lane / 8 % 2 * 8);
  }

  // What Staging::stage takes.
  template <typename Carrier>
  static DEVICE void stage(u32 tile, int thread, int piece, const Carrier (&v)[PIECE / 2]) {
    int row = thread / 32 * 16 + thread % 32 / 4, column = piece * PIECE + thread % 4 * 2;
    if constexpr (SIZE<D> == 2) {
      u32 address = matrix_at(tile, thread, piece);
      if constexpr (PIECE == 16) {
        stmatrix_x4_trans(address, pack<D>(v[0], v[1]), pack<D>(v[2], v[3]), pack<D>(v[4], v[5]), pack<D>(v[6], v[7]));
      } else {
        stmatrix_x2_trans(address, pack<D>(v[0], v[1]), pack<D>(v[2], v[3]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < PIECE / 2; i += 2) {
        u32 first = at(tile, column + i / 4 * 8, row + i / 2 % 2 * 8);
        u32 second = at(tile, column + i / 4 * 8 + 1, row + i / 2 % 2 * 8);
        if constexpr (D == Dtype::f32) {
          st_shared_u32(first, __float_as_uint(v[i]));
          st_shared_u32(second, __float_as_uint(v[i + 1]));
        } else if constexpr (SIZE<D> == 4) {
          st_shared_u32(first, static_cast<u32>(v[i]));
          st_shared_u32(second, static_cast<u32>(v[i + 1]));
        } else {
          u32 both = pack<D>(v[i], v[i + 1]);
          st_shared_u8(first, both);
          st_shared_u8(second, both >> 8);
        }
      }
    }
  }

  // What Staging::read gives.
  static DEVICE void read(u32 tile, int thread, int piece, Pair<D> (&x)[PIECE / 8][2]) {
    int row = thread / 32 * 16 + thread % 32 / 4, column = piece * PIECE + thread % 4 * 2;
    if constexpr (SIZE<D> == 2) {
      u32 address = matrix_at(tile, thread, piece);
      if constexpr (PIECE == 16) {
        ldmatrix_x4_trans(address, x[0][0].bits[0], x[0][1].bits[0], x[1][0].bits[0], x[1][1].bits[0]);
      } else {
        ldmatrix_x2_trans(address, x[0][0].bits[0], x[0][1].bits[0]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < PIECE / 4; ++i) {
        u32 first = at(tile, column + i / 2 * 8, row + i % 2 * 8);
        u32 second = at(tile, column + i / 2 * 8 + 1, row + i % 2 * 8);
        Pair<D>& pair = x[i / 2][i % 2];
        if constexpr (SIZE<D> == 4) {
          pair.bits[0] = ld_shared_u32(first);
          pair.bits[1] = ld_shared_u32(second);
        } else {
          pair.bits[0] = ld_shared_u8(first) | ld_shared_u8(second) << 8;
        }
      }
    }
  }

  // The transpose of the chunk at column x and row y: to, and from, row x and column y of what the map describes.
  static DEVICE void store(const TensorMap* map, u32 tile, int x, int y, int z) {
#pragma unroll
    for (int i = 0; i < 64 / COLUMNS; ++i) tma_store(map, tile + i * SUBTILE_BYTES, y + i * COLUMNS, x, z);
  }

  static DEVICE void load(const TensorMap* map, u32 tile, u32 barrier, int x, int y, int z) {
#pragma unroll
    for (int i = 0; i < 64 / COLUMNS; ++i) tma_load(tile + i * SUBTILE_BYTES, map, barrier, y + i * COLUMNS, x, z);
  }

  // The same without TMA, of the chunk's first rows, which are whole units of UNIT elements, as m is.
  template <int UNIT>
  static DEVICE void store_rows(char* matrix, int m, int n, u32 tile, int x, int y, int rows, int thread) {
    constexpr int UNITS = 64 / UNIT;
#pragma unroll 1
    for (int i = thread; i < D_CHUNK * UNITS; i += 128) {
      int column = i / UNITS, row = i % UNITS * UNIT;
      if (x + column < n && row < rows)
        copy_to_global<UNIT * SIZE<D>>(matrix + ((x + column) * static_cast<i64>(m) + y + row) * SIZE<D>,
                                       at(tile, column, row));
    }
  }
};
