// A staging tile of one result or operand: [SUBTILES][STAGING_ROWS][COLUMNS], rows of SPAN bytes, swizzled as TMA does
// it. STAGING_THREADS fill and empty it, each warp 16 rows.
constexpr bool HAS_STMATRIX = __CUDA_ARCH__ >= 900;

template <Dtype D>
struct Staging {
  static constexpr int ROW = D_CHUNK * SIZE<D>;
  static constexpr int SPAN = ROW < 128 ? ROW : 128;
  static constexpr int COLUMNS = SPAN / SIZE<D>;

  // The address of a byte of a row, given as a part known to the compiler and a part within 32 bytes of it.
  static DEVICE u32 at(u32 tile, int row, int byte, int more) {
    return tile + byte / SPAN * (STAGING_ROWS * SPAN) + swizzle<SPAN>(row * SPAN + byte % SPAN + more);
  }

  // PIECE columns from PIECE * piece on: value 4 j + 2 h + e is of column 8 j + 2 (lane % 4) + e and of the warp's row
  // lane / 4 + 8 h.
  template <typename Carrier>
  static DEVICE void stage(u32 tile, int thread, int piece, const Carrier (&v)[PIECE / 2]) {
    int warp = thread / 32, lane = thread % 32;
    if constexpr (SIZE<D> == 2 && HAS_STMATRIX && PIECE == 16) {
      // stmatrix: lane l addresses row l % 16, columns 8 (l / 16) on
      u32 address = at(tile, warp * 16 + lane % 16, piece * 32, lane / 16 * 16);
      stmatrix_x4(address, pack<D>(v[0], v[1]), pack<D>(v[2], v[3]), pack<D>(v[4], v[5]), pack<D>(v[6], v[7]));
    } else {
#pragma unroll
      for (int i = 0; i < PIECE / 2; i += 2) {
        int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, byte = (piece * PIECE + i / 4 * 8) * SIZE<D>;
        if constexpr (SIZE<D> >= 4) {
          u32 x[WORDS<D>], y[WORDS<D>];
          unpack<D>(x, v[i]);
          unpack<D>(y, v[i + 1]);
          if constexpr (SIZE<D> == 4 && TAKE_TURNS) {
            u32 first = at(tile, row, byte, lane % 4 * 8) + right_first(lane) * 4;
            st_shared_u32(first, right_first(lane) ? y[0] : x[0]);
            st_shared_u32(first ^ 4, right_first(lane) ? x[0] : y[0]);
          } else if constexpr (SIZE<D> == 4) {
            st_shared_v2(at(tile, row, byte, lane % 4 * 8), x[0], y[0]);
          } else if constexpr (SIZE<D> == 8) {
            st_shared_v4(pair(tile, row, byte, lane), x[0], x[1], y[0], y[1]);
          } else {
            st_shared_v4(pair(tile, row, byte, lane), x[0], x[1], x[2], x[3]);
            st_shared_v4(pair(tile, row, byte + 16, lane), y[0], y[1], y[2], y[3]);
          }
        } else {
          u32 address = at(tile, row, byte, lane % 4 * 2 * SIZE<D>), both = pack<D>(v[i], v[i + 1]);
          if constexpr (SIZE<D> == 2) {
            st_shared_u32(address, both);
          } else {
            st_shared_u16(address, static_cast<u16>(both));
          }
        }
      }
    }
  }

  // Of pairs of elements of 4 bytes, eight rows of which go at once, every other row's lie in the same banks as the
  // row's before (of rows of less than 128 bytes, every other two's or four's): in those the right ones go first.
  static DEVICE bool right_first(int lane) { return lane / 4 / (128 / SPAN) % 2; }

  // The address of 16 bytes of a lane's two elements of 8 or 16 bytes, of those of four lanes beside each other.
  static DEVICE u32 pair(u32 tile, int row, int byte, int lane) {
    int of_row = byte + lane % 4 * 2 * SIZE<D>;
    return tile + of_row / SPAN * (STAGING_ROWS * SPAN) + swizzle<SPAN>(row * SPAN + of_row % SPAN);
  }

  // The same of an operand, to x[j][h], e being a part of the pair.
  static DEVICE void read(u32 tile, int thread, int piece, Pair<D> (&x)[PIECE / 8][2]) {
    static_assert(SIZE<D> <= 4);
    int warp = thread / 32, lane = thread % 32;
    if constexpr (SIZE<D> == 2) {
      u32 address = at(tile, warp * 16 + lane % 16, piece * 32, lane / 16 * 16);
      ldmatrix_x4(address, x[0][0].bits[0], x[0][1].bits[0], x[1][0].bits[0], x[1][1].bits[0]);
    } else {
#pragma unroll
      for (int i = 0; i < PIECE / 4; ++i) {
        int row = warp * 16 + lane / 4 + i % 2 * 8;
        u32 address = at(tile, row, (piece * PIECE + i / 2 * 8) * SIZE<D>, lane % 4 * 2 * SIZE<D>);
        if constexpr (SIZE<D> == 4 && TAKE_TURNS) {
          u32 first = ld_shared_u32(address + right_first(lane) * 4);
          u32 second = ld_shared_u32((address + right_first(lane) * 4) ^ 4);
          x[i / 2][i % 2].bits[0] = right_first(lane) ? second : first;
          x[i / 2][i % 2].bits[1] = right_first(lane) ? first : second;
        } else if constexpr (SIZE<D> == 4) {
          ld_shared_v2(address, x[i / 2][i % 2].bits[0], x[i / 2][i % 2].bits[1]);
        } else {
          x[i / 2][i % 2].bits[0] = ld_shared_u16(address);
        }
      }
    }
  }

  // The first rows alone, to row y and column x of a matrix of n columns, which are whole units of UNIT elements. Rows
  // are `pitch` elements apart.
  template <int UNIT>
  static DEVICE void store_rows(char* matrix, int, int n, int pitch, u32 tile, int x, int y, int rows, int thread) {
    constexpr int UNITS = D_CHUNK / UNIT;
#pragma unroll 1
    for (int i = thread; i < rows * UNITS; i += STAGING_THREADS) {
      int row = i / UNITS, column = i % UNITS * UNIT, byte = column * SIZE<D>;
      if (x + column < n)
        copy_to_global<UNIT * SIZE<D>>(matrix + ((y + row) * static_cast<i64>(pitch) + x + column) * SIZE<D>,
                                       at(tile, row, byte, 0));
    }
  }

  // The 16 rows that a warp has staged, each to a row of the matrix that a lane of the same number tells, if any. Of
  // the `pitch` columns of a row, equal runs may lie so many runs apart.
  template <int UNIT, int RUNS>
  static DEVICE void store_rows_at(char* matrix, int n, int pitch, int apart, u32 tile, int x, int place, int thread) {
    constexpr int UNITS = D_CHUNK / UNIT;
    const int length = pitch / RUNS;
#pragma unroll
    for (int first = 0; first < 16 * UNITS; first += 32) {
      int i = first + thread % 32, row = i / UNITS, column = i % UNITS * UNIT;
      int run = RUNS > 1 ? (x + column) / length : 0, to = __shfl_sync(~0u, place, row % 16);
      i64 begin = (to + run * (apart - 1)) * static_cast<i64>(length);
      if (row < 16 && to >= 0 && x + column < n)
        copy_to_global<UNIT * SIZE<D>>(matrix + (begin + x + column) * SIZE<D>,
                                       at(tile, thread / 32 * 16 + row, column * SIZE<D>, 0));
    }
  }

  // The transpose of the first rows, gathered, to row x and column y of a matrix of n columns.
  template <int UNIT>
  static DEVICE void store_columns(char* matrix, int, int n, int pitch, u32 tile, int x, int y, int rows, int thread) {
    constexpr int UNITS = STAGING_ROWS / UNIT, EACH = SIZE<D> < 4 ? 4 / SIZE<D> : 1;  // elements of a word, if any
#pragma unroll 1
    for (int i = thread; i < D_CHUNK * UNITS; i += STAGING_THREADS) {
      int column = i / UNITS, row = i % UNITS * UNIT;
      if (x + column >= n || row >= rows) continue;
      char* to = matrix + ((x + column) * static_cast<i64>(pitch) + y + row) * SIZE<D>;
      auto of = [&](int r) { return at(tile, row + r, column * SIZE<D>, 0); };
      if constexpr (SIZE<D> > 4) {
#pragma unroll
        for (int r = 0; r < UNIT; ++r) copy_to_global<SIZE<D>>(to + r * SIZE<D>, of(r));
      } else {
        u32 words[4] = {};
#pragma unroll
        for (int r = 0; r < UNIT; ++r) {
          u32 element = SIZE<D> == 4 ? ld_shared_u32(of(r)) : SIZE<D> == 2 ? ld_shared_u16(of(r)) : ld_shared_u8(of(r));
          words[r / EACH] |= element << r % EACH * SIZE<D> * 8;
        }
        st_global<UNIT * SIZE<D>>(to, {words[0], words[1], words[2], words[3]});
      }
    }
  }

  // Zeroes rows of so many columns.
  template <int UNIT>
  static DEVICE void clear_rows(char* matrix, int n, int pitch, int x, int y, int rows, int columns, int thread) {
    const int units = columns / UNIT;
#pragma unroll 1
    for (int i = thread; i < rows * units; i += STAGING_THREADS) {
      int row = i / units, column = i % units * UNIT;
      if (x + column < n)
        st_global<UNIT * SIZE<D>>(matrix + ((y + row) * static_cast<i64>(pitch) + x + column) * SIZE<D>, Bytes16{});
    }
  }
};
