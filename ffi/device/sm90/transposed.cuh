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

DEVICE void ldmatrix_x2_trans(u32 address, u32& r0, u32& r1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(address)
               : "memory");
}

template <Dtype D>
struct Transposed {
  static constexpr int SPAN = SIZE<D> == 1 ? 64 : 128;
  static constexpr int COLUMNS = SPAN / SIZE<D>, SUBTILE_BYTES = D_CHUNK * SPAN;

  // The address of the element of a column and a row of the chunk.
  static DEVICE u32 at(u32 tile, int column, int row) {
    return tile + row / COLUMNS * SUBTILE_BYTES + swizzle<SPAN>(column * SPAN + row % COLUMNS * SIZE<D>);
  }

  // Columns a multiple of 8 apart lie that many rows of the tile apart, swizzled alike. So all that a lane reads and
  // writes is some constant away from, for elements of 16 bits, where its matrix of stmatrix or ldmatrix has a row: the
  // first matrix has columns and rows from 0 on, the second rows from 8 on, the third columns from 8 on, the fourth
  // both; and for others, from its first element: eight rows down and one column right are single bits of the swizzle.
  static DEVICE u32 first(u32 tile, int thread) {
    int warp = thread / 32, lane = thread % 32;
    if constexpr (SIZE<D> == 2)
      return at(tile, (PIECE == 16 ? lane / 16 * 8 : 0) + lane % 8, warp * 16 + lane / 8 % 2 * 8);
    return at(tile, lane % 4 * 2, warp * 16 + lane / 4);
  }

  // Of 32 or 8 bits: h rows of 8 down and e columns right of what is first in the j-th 8 columns.
  static DEVICE u32 next(u32 first, int j, int h, int e) {
    return (first ^ (h * 8 * SIZE<D> + (SPAN == 128 ? e * 16 : 0))) + (j * 8 + e) * SPAN;
  }

  // What Staging::stage takes.
  template <typename Carrier>
  static DEVICE void stage(u32 tile, int thread, int piece, const Carrier (&v)[PIECE / 2]) {
    u32 address = first(tile, thread);
    if constexpr (SIZE<D> == 2) {
      address += piece * PIECE * SPAN;
      if constexpr (PIECE == 16) {
        stmatrix_x4_trans(address, pack<D>(v[0], v[1]), pack<D>(v[2], v[3]), pack<D>(v[4], v[5]), pack<D>(v[6], v[7]));
      } else {
        stmatrix_x2_trans(address, pack<D>(v[0], v[1]), pack<D>(v[2], v[3]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < PIECE / 2; i += 2) {
        u32 left = next(address, piece * (PIECE / 8) + i / 4, i / 2 % 2, 0);
        u32 right = next(address, piece * (PIECE / 8) + i / 4, i / 2 % 2, 1);
        if constexpr (D == Dtype::f32) {
          st_shared_u32(left, __float_as_uint(v[i]));
          st_shared_u32(right, __float_as_uint(v[i + 1]));
        } else if constexpr (SIZE<D> == 4) {
          st_shared_u32(left, static_cast<u32>(v[i]));
          st_shared_u32(right, static_cast<u32>(v[i + 1]));
        } else {
          u32 both = pack<D>(v[i], v[i + 1]);
          st_shared_u8(left, both);
          st_shared_u8(right, both >> 8);
        }
      }
    }
  }

  // What Staging::read gives.
  static DEVICE void read(u32 tile, int thread, int piece, Pair<D> (&x)[PIECE / 8][2]) {
    u32 address = first(tile, thread);
    if constexpr (SIZE<D> == 2) {
      address += piece * PIECE * SPAN;
      if constexpr (PIECE == 16) {
        ldmatrix_x4_trans(address, x[0][0].bits[0], x[0][1].bits[0], x[1][0].bits[0], x[1][1].bits[0]);
      } else {
        ldmatrix_x2_trans(address, x[0][0].bits[0], x[0][1].bits[0]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < PIECE / 4; ++i) {
        u32 left = next(address, piece * (PIECE / 8) + i / 2, i % 2, 0);
        u32 right = next(address, piece * (PIECE / 8) + i / 2, i % 2, 1);
        Pair<D>& pair = x[i / 2][i % 2];
        if constexpr (SIZE<D> == 4) {
          pair.bits[0] = ld_shared_u32(left);
          pair.bits[1] = ld_shared_u32(right);
        } else {
          pair.bits[0] = ld_shared_u8(left) | ld_shared_u8(right) << 8;
        }
      }
    }
  }

  // The transpose of the chunk at column x and row y: to, and from, row x and column y of what the map describes.
  static DEVICE void store(const TensorMap* map, u32 tile, int x, int y, int z) {
#pragma unroll
    for (int i = 0; i < 64 / COLUMNS; ++i) tma_store<D_FIRST>(map, tile + i * SUBTILE_BYTES, y + i * COLUMNS, x, z);
  }

  static DEVICE void load(const TensorMap* map, u32 tile, u32 barrier, int x, int y, int z) {
#pragma unroll
    for (int i = 0; i < 64 / COLUMNS; ++i) tma_load(tile + i * SUBTILE_BYTES, map, barrier, y + i * COLUMNS, x, z);
  }

  // The same without TMA, of the chunk's first rows, which are whole units of UNIT elements, as m is.
  template <int UNIT>
  static DEVICE void store_rows(char* matrix, int m, int n, int, u32 tile, int x, int y, int rows, int thread) {
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
