// Products of whole stages by wgmma: each of its 64 rows is one of 16 of each of a warpgroup's warps, so that sums and
// operands in registers are those of fragments.cuh. The matrix is in shared memory, of any number of rows.

// A matrix in swizzled rows of 64 elements, 128 bytes: an operand as it is (rows are k) and transposed (columns are).
template <int COLUMNS, int ROWS>
struct Swizzled {
  static constexpr int CHUNK = ROWS * 128;  // of 64 columns
  static constexpr int BYTES = COLUMNS / 64 * CHUNK;

  static DEVICE u32 place(u32 matrix, int row, int column) {  // of 8 columns
    return matrix + column / 64 * CHUNK + row * 128 + (column / 8 % 8 ^ row % 8) * 16;
  }

  // As Matrix::load.
  static DEVICE void load(u32 to, const char* from, int rows, int columns) {
    for (int at = threadIdx.x; at < ROWS * COLUMNS / 8; at += THREADS) {
      int row = at / (COLUMNS / 8), column = at % (COLUMNS / 8) * 8;
      if (columns % 8 == 0) {
        bool there = row < rows && column < columns;
        cp_async<16>(place(to, row, column), from + (there ? row * columns + column : 0) * 2, there);
        continue;
      }
      for (int i = 0; i < 8; i += 2) {
        float x[2];
        for (int e = 0; e < 2; ++e) {
          Pair<OPERAND> one{};
          if (row < rows && column + i + e < columns) one.load_one(from + (row * columns + column + i + e) * 2);
          x[e] = one[0];
        }
        st_shared_u32(place(to, row, column) + 2 * i, pack<OPERAND>(x[0], x[1]));
      }
    }
  }

  // What mma.sync takes, as Matrix::columns.
  template <bool TRANSPOSED>
  static DEVICE Columns columns(u32 matrix, int k, int n) {
    Columns b;
    int l = lane();
    u32(&w)[FRAGMENT_WORDS] = b.w;
    if constexpr (TRANSPOSED)
      ldmatrix_x4(place(matrix, 16 * n + l / 16 * 8 + l % 8, 16 * k + l / 8 % 2 * 8), w[0], w[1], w[2], w[3]);
    else
      ldmatrix_x4_trans(place(matrix, 16 * k + l % 16, 16 * n + l / 16 * 8), w[0], w[1], w[2], w[3]);
    return b;
  }

  // The descriptor of 16 of k, all columns of the matrix or of its transpose; shared memory ends below 256 KB.
  template <bool TRANSPOSED>
  static DEVICE u64 descriptor(u32 matrix, int k) {
    constexpr u64 HIGH = u64(1) << 62 | u64(1024 >> 4) << 32 | u64(CHUNK >> 4) << 16;
    return HIGH | (matrix >> 4) + (TRANSPOSED ? k / 4 * CHUNK + k % 4 * 32 : k * 2048) / 16;
  }
};

// Sums of a stage's columns from some 16 on, of wgmma: element 8 j + 4 h + e is a chunk's.
template <int COUNT>
struct Sums {
  float x[M_TILES][COUNT];

  DEVICE Chunk chunk(int j) const {
    Chunk c;
    EACH_ELEMENT c.x[i][h][e] = x[i][8 * j + 4 * h + e];
    return c;
  }
  DEVICE void set(const Chunk& c, int j) { EACH_ELEMENT x[i][8 * j + 4 * h + e] = c.x[i][h][e]; }
};
