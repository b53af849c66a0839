// Rows as a warp has them: 16 columns at a time as accumulators, and the same as an operand of the next product.
//
// A warp has M_TILES times 16 rows. With g = lane / 4 and q = lane % 4, of the i-th 16 rows and the h-th 8 columns a
// thread holds the elements of rows g, g, g + 8, g + 8 at columns 2 q, 2 q + 1, 2 q, 2 q + 1: what mma.sync adds up.
// Of 16-bit operands those are, in pairs, what it takes of 16 columns of k. TF32 takes 8 columns of k, each thread one
// of the first 4 and one of the last: which these are is the matrix's to say too, so that they are 2 q and 2 q + 1.

constexpr bool TF32 = MATH == Math::tf32;
constexpr int PARTS = MATH == Math::bf16x3 ? 2 : MATH == Math::bf16x6 || MATH == Math::bf16x9 ? 3 : 1;
constexpr int PAIRS = MATH == Math::bf16x9 ? 9 : MATH == Math::bf16x6 ? 6 : MATH == Math::bf16x3 ? 3 : 1;
constexpr int FRAGMENT_WORDS = TF32 ? 8 : 4 * PARTS;  // of a fragment: of 16 rows, or 16 columns, and 16 of k
constexpr int ELEMENT_BYTES = TF32 ? 4 : 2;           // of an operand in shared memory
constexpr int STASH_VECTORS = M_TILES * (SIZE<OPERAND> == 2 ? 1 : 2);  // of 16 bytes, that a thread stashes of a chunk

struct Chunk {
  float x[M_TILES][2][4];
};
struct Fragment {
  u32 w[M_TILES][FRAGMENT_WORDS];
};
struct Columns {  // of a matrix: 16 of k, 16 columns
  u32 w[FRAGMENT_WORDS];
};

#define EACH_ELEMENT                                                                                \
  _Pragma("unroll") for (int i = 0; i < M_TILES; ++i) _Pragma("unroll") for (int h = 0; h < 2; ++h) \
      _Pragma("unroll") for (int e = 0; e < 4; ++e)

DEVICE int lane() { return threadIdx.x % 32; }

// The parts of two numbers: each the nearest bf16 to what the parts before leave.
DEVICE void split_pair(float x, float y, u32 (&parts)[PARTS]) {
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    parts[p] = MATH == Math::f16 ? cvt_f16x2(x, y) : cvt_bf16x2(x, y);
    if constexpr (PARTS > 1) {
      x -= __uint_as_float(parts[p] << 16);
      y -= __uint_as_float(parts[p] & 0xffff0000);
    }
  }
}

DEVICE Fragment packed(const Chunk& c) {
  Fragment f;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float (&x)[4] = c.x[i][h];
      if constexpr (TF32) {
        f.w[i][4 * h] = cvt_rna_tf32(x[0]), f.w[i][4 * h + 1] = cvt_rna_tf32(x[2]);
        f.w[i][4 * h + 2] = cvt_rna_tf32(x[1]), f.w[i][4 * h + 3] = cvt_rna_tf32(x[3]);
      } else {
        u32 upper[PARTS], lower[PARTS];
        split_pair(x[0], x[1], upper);
        split_pair(x[2], x[3], lower);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) f.w[i][4 * p + 2 * h] = upper[p], f.w[i][4 * p + 2 * h + 1] = lower[p];
      }
    }
  return f;
}

// d += a b, of 16 rows, 8 columns and 16 of k. Of parts the smallest products come first, and are added up by
// themselves: tensor cores round sums towards zero.
DEVICE void multiply_add(float (&d)[4], const u32 (&a)[FRAGMENT_WORDS], const u32 (&b)[FRAGMENT_WORDS], int h) {
  if constexpr (TF32) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const u32 rows[4] = {a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]};
      const u32 columns[2] = {b[4 * k + 2 * h], b[4 * k + 2 * h + 1]};
      mma<Math::tf32>(d, rows, columns);
    }
  } else {
    constexpr int OF_A[] = {2, 2, 1, 2, 1, 0, 1, 0, 0}, OF_B[] = {2, 1, 2, 0, 1, 2, 0, 1, 0};
    float sum[4] = {};
    if constexpr (PARTS == 1)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = d[e];
#pragma unroll
    for (int pair = 9 - PAIRS; pair < 9; ++pair) {
      const int p = 4 * OF_A[pair], r = 4 * OF_B[pair] + 2 * h;
      const u32 rows[4] = {a[p], a[p + 1], a[p + 2], a[p + 3]};
      const u32 columns[2] = {b[r], b[r + 1]};
      mma<MATH == Math::f16 ? Math::f16 : Math::bf16>(sum, rows, columns);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) d[e] = PARTS == 1 ? sum[e] : d[e] + sum[e];
  }
}

DEVICE void multiply_add(Chunk& d, const Fragment& a, const Columns& b) {
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) multiply_add(d.x[i][h], a.w[i], b.w, h);
}

// ---- matrices and vectors in shared memory: rows of COLUMNS elements and 16 bytes, so that 8 rows meet in no bank
// ----

template <int COLUMNS, int ROWS>
struct Matrix {
  static constexpr int PITCH = COLUMNS * ELEMENT_BYTES + 16;
  static constexpr int PLANE = ROWS * PITCH;  // of a part
  static constexpr int BYTES = PARTS * PLANE;

  // Copies a matrix, of which columns and rows past the end are zeros; what is copied by 16 bytes may be on its way.
  static DEVICE void load(u32 to, const char* from, int rows, int columns) {
    if (SIZE<OPERAND> == 2 && PARTS == 1 && columns % 8 == 0) {
      for (int at = threadIdx.x; at < ROWS * COLUMNS / 8; at += THREADS) {
        int row = at / (COLUMNS / 8), column = at % (COLUMNS / 8) * 8;
        bool there = row < rows && column < columns;
        cp_async<16>(to + row * PITCH + column * 2, from + (there ? row * columns + column : 0) * 2, there);
      }
      return;
    }
    for (int at = threadIdx.x; at < ROWS * COLUMNS / 2; at += THREADS) {
      int row = at / (COLUMNS / 2), column = at % (COLUMNS / 2) * 2;
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Pair<OPERAND> one{};
        if (row < rows && column + i < columns) one.load_one(from + (row * columns + column + i) * SIZE<OPERAND>);
        x[i] = one[0];
      }
      u32 place = to + row * PITCH + column * ELEMENT_BYTES;
      if constexpr (TF32) {
        st_shared_v2(place, cvt_rna_tf32(x[0]), cvt_rna_tf32(x[1]));
      } else {
        u32 parts[PARTS];
        split_pair(x[0], x[1], parts);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) st_shared_u32(place + p * PLANE, parts[p]);
      }
    }
  }

  // The 16 of k from 16 k on and the columns from 16 n on of the matrix, or of its transpose.
  template <bool TRANSPOSED>
  static DEVICE Columns columns(u32 matrix, int k, int n) {
    Columns b;
    int l = lane();
    if constexpr (TF32) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // 8 of k, 8 columns
        int of_k = 16 * k + j / 2 * 8 + l % 4 * 2, column = 16 * n + j % 2 * 8 + l / 4;
        if constexpr (TRANSPOSED) {
          ld_shared_v2(matrix + column * PITCH + of_k * 4, b.w[2 * j], b.w[2 * j + 1]);
        } else {
          u32 place = matrix + of_k * PITCH + column * 4;
          b.w[2 * j] = ld_shared_u32(place), b.w[2 * j + 1] = ld_shared_u32(place + PITCH);
        }
      }
    } else {
      u32 place = TRANSPOSED ? (16 * n + l / 16 * 8 + l % 8) * PITCH + (16 * k + l / 8 % 2 * 8) * 2
                             : (16 * k + l % 16) * PITCH + (16 * n + l / 16 * 8) * 2;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        u32(&w)[FRAGMENT_WORDS] = b.w;
        if constexpr (TRANSPOSED) {
          ldmatrix_x4(matrix + place + p * PLANE, w[4 * p], w[4 * p + 1], w[4 * p + 2], w[4 * p + 3]);
        } else {
          ldmatrix_x4_trans(matrix + place + p * PLANE, w[4 * p], w[4 * p + 1], w[4 * p + 2], w[4 * p + 3]);
        }
      }
    }
    return b;
  }
};

template <Dtype D>
DEVICE float load_element(const char* from, int size) {
  Pair<D> one{};
  if (threadIdx.x < size) one.load_one(from + threadIdx.x * SIZE<D>);
  return one[0];
}

template <Dtype D>
DEVICE void load_vector(float* to, const char* from, int size, int places) {
  for (int at = threadIdx.x; at < places; at += THREADS) {
    Pair<D> one{};
    if (at < size) one.load_one(from + at * SIZE<D>);
    to[at] = one[0];
  }
}

DEVICE Chunk vector_rows(const float* vector, int j) {
  Chunk c;
  EACH_ELEMENT c.x[i][h][e] = vector[16 * j + 8 * h + lane() % 4 * 2 + e % 2];
  return c;
}

DEVICE void add_vector(Chunk& c, const float* vector, int j) {
  EACH_ELEMENT c.x[i][h][e] += vector[16 * j + 8 * h + lane() % 4 * 2 + e % 2];
}

// ---- rows in memory ----

// The 16 columns from 16 j on of this thread's rows, the first of which is `row`, as they are in memory; zeros past the
// end. Nothing waits for them here.
template <Dtype D, int WIDTH>
struct Rows {
  static constexpr int LOADS = WIDTH % 2 == 0 ? 1 : 2;  // of two columns
  Pair<D> x[M_TILES][2][2][LOADS];

  DEVICE void load(const char* from, int row, int rows, int j) {
    const char* const own = from + (static_cast<i64>(row) * WIDTH + lane() % 4 * 2) * SIZE<D>;  // others by constants
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < LOADS; ++e) {
            int at = row + 16 * i + 8 * half, column = 16 * j + 8 * h + lane() % 4 * 2 + e;
            const char* p = own + ((16 * i + 8 * half) * WIDTH + 16 * j + 8 * h + e) * SIZE<D>;
            Pair<D>& to = x[i][h][half][e];
            to = {};
            if (at < rows && column < WIDTH) {
              if constexpr (LOADS == 1)
                to.load(p);
              else
                to.load_one(p);
            }
          }
  }

  DEVICE Chunk chunk() const {
    Chunk c;
    EACH_ELEMENT c.x[i][h][e] = LOADS == 1 ? x[i][h][e / 2][0][e % 2] : x[i][h][e / 2][e % 2 % LOADS][0];
    return c;
  }
};

template <Dtype D, int WIDTH>
DEVICE Chunk load_rows(const char* from, int row, int rows, int j) {
  Rows<D, WIDTH> found;
  found.load(from, row, rows, j);
  return found.chunk();
}

template <Dtype D, int WIDTH>
DEVICE void store_rows(char* to, const Chunk& c, int row, int rows, int j) {
  char* const own = to + (static_cast<i64>(row) * WIDTH + lane() % 4 * 2) * SIZE<D>;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int at = row + 16 * i + 8 * half, column = 16 * j + 8 * h + lane() % 4 * 2;
        char* p = own + ((16 * i + 8 * half) * WIDTH + 16 * j + 8 * h) * SIZE<D>;
        bool one = at < rows && column < WIDTH, both = one && column + 1 < WIDTH;
        float x = c.x[i][h][2 * half], y = c.x[i][h][2 * half + 1];
        if constexpr (D == Dtype::f32) {
          if (WIDTH % 2 == 0 && both) {
            st_global_v2(reinterpret_cast<float*>(p), x, y);
          } else {
            if (one) *reinterpret_cast<float*>(p) = x;
            if (both) *reinterpret_cast<float*>(p + 4) = y;
          }
        } else {
          u32 words = pack<D>(x, y);
          if (WIDTH % 2 == 0 && both) {
            *reinterpret_cast<u32*>(p) = words;
          } else {
            if (one) *reinterpret_cast<u16*>(p) = static_cast<u16>(words);
            if (both) *reinterpret_cast<u16*>(p + 2) = static_cast<u16>(words >> 16);
          }
        }
      }
}

// Zeros in columns past a width, which a function may have made anything.
template <int WIDTH>
DEVICE void clear_columns(Chunk& c, int j) {
  if constexpr (WIDTH % 16 != 0) {
    EACH_ELEMENT if (16 * j + 8 * h + lane() % 4 * 2 + e % 2 >= WIDTH) c.x[i][h][e] = 0.0f;
  }
}

DEVICE void clear_rows(Chunk& c, int row, int rows) {
  EACH_ELEMENT if (row + 16 * i + e / 2 * 8 >= rows) c.x[i][h][e] = 0.0f;
}

// The same of what is packed.
DEVICE void clear_rows(Fragment& f, int row, int rows) {
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int w = 0; w < FRAGMENT_WORDS; ++w)
      if (row + 16 * i + w % 2 * 8 >= rows) f.w[i][w] = 0;
}

// ---- the stash: each thread's own, in the dtype of the operands ----

// Of 16 bits these are the words of a fragment.
DEVICE void stash(char* place, const Chunk& c) {
#pragma unroll
  for (int v = 0; v < STASH_VECTORS; ++v) {
    uint4 words;
    if constexpr (SIZE<OPERAND> == 2) {
      const float (&x)[2][4] = c.x[v];
      words = {pack<OPERAND>(x[0][0], x[0][1]), pack<OPERAND>(x[0][2], x[0][3]), pack<OPERAND>(x[1][0], x[1][1]),
               pack<OPERAND>(x[1][2], x[1][3])};
    } else {
      const float (&x)[4] = c.x[v / 2][v % 2];
      words = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
    }
    *reinterpret_cast<uint4*>(place + v * (16 * THREADS)) = words;
  }
}

DEVICE Chunk unstash(const char* place) {
  Chunk c;
#pragma unroll
  for (int v = 0; v < STASH_VECTORS; ++v) {
    const uint4 found = *reinterpret_cast<const uint4*>(place + v * (16 * THREADS));
    const u32 words[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (SIZE<OPERAND> == 2) {
        Pair<OPERAND> pair;
        pair.bits[0] = words[w];
        c.x[v][w / 2][w % 2 * 2] = pair[0], c.x[v][w / 2][w % 2 * 2 + 1] = pair[1];
      } else {
        c.x[v / 2][v % 2][w] = __uint_as_float(words[w]);
      }
    }
  }
  return c;
}
