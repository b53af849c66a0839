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

  // The descriptor of 16 of k, all columns of the matrix or of its transpose; shared memory ends below 256 KB. Parts
  // are added up in 64 bits: halves that are put together are moved for each instruction.
  template <bool TRANSPOSED>
  static DEVICE u64 descriptor(u32 shared, u32 place, int k) {
    const u32 further = TRANSPOSED ? k / 4 * CHUNK + k % 4 * 32 : k * 2048;
    return (u64(1 << 30 | 1024 >> 4) << 32) + (shared >> 4) + ((CHUNK >> 4 << 16) + (place + further) / 16);
  }
};

// Vectors as operands of 16 rows, of which the first is the vector: 8 rows of each, and 8 of zeros that all share, from
// ZEROS on.
DEVICE void store_bias(unsigned char* to, float x) {  // an element by each thread
  to += threadIdx.x / 64 * 1024 + threadIdx.x % 64 * 2;
  *reinterpret_cast<u16*>(to) = static_cast<u16>(pack<OPERAND>(x, 0.0f));
}

template <int ZEROS, int END>
DEVICE void clear_biases(u32 biases) {
#pragma unroll 1
  for (int at = threadIdx.x * 16; at < END; at += THREADS * 16)
    if (at >= ZEROS || at % 1024 >= 128) st_shared_v2(biases + at, 0u, 0u), st_shared_v2(biases + at + 8, 0u, 0u);
}

// All rows of an operand that takes the first row of that.
DEVICE Fragment ones_of_biases() {
  Fragment f;
  const u32 one = lane() % 4 ? 0 : MATH == Math::f16 ? 0x3c00 : 0x3f80;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int w = 0; w < 4; ++w)
      f.w[i][w] = __shfl_sync(~0u, w < 2 ? one : 0, lane());  // or each stage makes them again
  return f;
}

DEVICE u64 bias_descriptor(u32 shared16, u32 place, u32 zeros) {
  return (u64(1 << 30 | zeros - place >> 4) << 32) + shared16 + ((1024 >> 4 << 16) + place / 16);
}

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

// ---- sums of outer products of a block of one warpgroup, both factors in shared memory ----

// Ones, as columns of k: any distance between the parts of the operand will do.
DEVICE u64 ones_descriptor(u32 ones) { return u64(128 >> 4) << 32 | u64(128 >> 4) << 16 | ones >> 4; }

// A block's rows of COLUMNS, as Staged, in chunks of columns that are swizzled, so that rows may be k.
template <int COLUMNS>
struct Plane {
  static constexpr int SPAN = COLUMNS % 64 == 0 ? 128 : COLUMNS % 32 == 0 ? 64 : 32;  // bytes of a row of a chunk
  static constexpr int CHUNK = ROWS * SPAN, CHUNKS = 2 * COLUMNS / SPAN;

  static DEVICE u32 own_row(u32 plane, int j) {
    int row = threadIdx.x / 32 * (16 * M_TILES) + lane() % 16, vector = 2 * j + lane() / 16;  // of 16 bytes
    int swizzled = vector % (SPAN / 16) ^ row * SPAN / 128 % (SPAN / 16);
    return plane + vector / (SPAN / 16) * CHUNK + row * SPAN + swizzled * 16;
  }

  static DEVICE void store(u32 to, const Fragment& f, int j) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
      stmatrix_x4(own_row(to, j) + 16 * i * SPAN, f.w[i][0], f.w[i][1], f.w[i][2], f.w[i][3]);
  }

  static DEVICE void clear(u32 plane, int row, int rows) {
    __syncwarp();
    for (int j = 0; j < COLUMNS / 16; ++j)
      for (int i = 0; i < M_TILES; ++i)
        if (row - lane() / 4 + lane() % 16 + 16 * i >= rows) {
          u32 place = own_row(plane, j) + 16 * i * SPAN;
          st_shared_v2(place, 0u, 0u);
          st_shared_v2(place + 8, 0u, 0u);
        }
  }

  static DEVICE Chunk load(u32 from, int j) { return chunk_at(own_row(from, j), SPAN); }

  // The descriptor of 16 rows, as k; the next chunk is so many bytes further on.
  static DEVICE u64 descriptor(u32 plane, int step, u32 next) {
    constexpr u64 HIGH = u64(SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3) << 62 | u64(8 * SPAN >> 4) << 32;
    return HIGH | next >> 4 << 16 | (plane + step * 16 * SPAN) >> 4;
  }
};

// Sums of outer products of rows of A and of B columns; with SUMS, those of B's columns come as products with ones.
template <int A, int B, bool SUMS>
struct WarpgroupProducts {
  static constexpr int WIDE_A = (A + 15) / 16 * 16, WIDE_B = (B + 15) / 16 * 16;
  static constexpr bool FLIPPED = WIDE_B % 64 == 0;  // B's columns are the rows of wgmma
  static constexpr int M = FLIPPED ? WIDE_B : WIDE_A, N = FLIPPED ? WIDE_A : WIDE_B, COUNT = N / 2 + 4 * SUMS;
  static constexpr int BLOCKS = M / 64;
  static constexpr bool TOGETHER = SUMS && Plane<N>::CHUNKS == 1;
  static_assert(M % 64 == 0 && (!SUMS || FLIPPED));
  float x[BLOCKS][COUNT];

  DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) x[m][i] = 0.0f;
  }

  // Begins to add; planes are read until wgmmas are waited for.
  DEVICE void add(u32 of_a, u32 of_b, u32 ones) {
    const u32 of_m = FLIPPED ? of_b : of_a, of_n = FLIPPED ? of_a : of_b;
    const u32 next = TOGETHER ? ones - of_n : Plane<N>::CHUNK;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < ROWS / 16; ++step)
#pragma unroll
      for (int m = 0; m < BLOCKS; ++m) {
        const u64 a = Plane<M>::descriptor(of_m + m * Plane<M>::CHUNK, step, 0);
        const u64 b = Plane<N>::descriptor(of_n, step, next);
        if constexpr (!SUMS || TOGETHER) {
          wgmma_outer(x[m], a, b, 1);
        } else {
          wgmma_outer(reinterpret_cast<float (&)[N / 2]>(x[m]), a, b, 1);
          wgmma_ones(reinterpret_cast<float (&)[4]>(x[m][N / 2]), a, ones_descriptor(ones), 1);
        }
      }
    wgmma_commit_group();
  }

  DEVICE void store(float* to, float* sums) {
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) wgmma_done(x[m]);
#pragma unroll
    for (int i = 0; i < BLOCKS * COUNT; ++i) {
      int e = i % COUNT, m = i / COUNT * 64 + threadIdx.x / 32 * 16 + lane() / 4 + e / 2 % 2 * 8;
      int n = e / 4 * 8 + lane() % 4 * 2 + e % 2;
      int a = FLIPPED ? n : m, b = FLIPPED ? m : n;
      float* place = a < A && b < B ? to + a * B + b : SUMS && n == N && m < B ? sums + m : nullptr;
      if (place) *place = x[i / COUNT][e];
    }
  }
};
