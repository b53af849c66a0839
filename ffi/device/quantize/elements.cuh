// What kernels that quantize matrices share: a block of threads has a tile of TILE x TILE elements, a thread EDGE x
// EDGE of them, in registers.
//
// A magnitude is compared as its bits, an unsigned integer, of 16 bits two at once; a NaN's are greater than
// infinity's. Scales and quotients are what XLA makes on a GPU, to the bit: 1 / LARGEST is rounded before it
// multiplies, and div.full is a product with an approximate reciprocal wherever the divisor is no subnormal number.

constexpr int TILE = 128, EDGE = 8, THREADS = 256, WARPS = THREADS / 32, LINES = TILE / EDGE;
constexpr bool HALVES = SIZE<OF> == 2;
constexpr int WORDS_OF_EDGE = HALVES ? EDGE / 2 : EDGE;

// Where a thread's elements are: its tile, of a matrix, and its edges of the tile's columns and rows.
struct Place {
  int matrix, row, column, edge, line;

  // Of the tiles of all matrices, one.
  DEVICE Place(int tile, int rows, int columns) {
    int across = columns / TILE, tiles = rows / TILE * across;
    matrix = tile / tiles, tile %= tiles, row = tile / across * TILE, column = tile % across * TILE;
    edge = threadIdx.x % LINES, line = threadIdx.x / LINES;
  }

  // The first element, in memory.
  DEVICE i64 first(int rows, int columns) const {
    return (static_cast<i64>(matrix) * rows + row + line * EDGE) * columns + column + edge * EDGE;
  }
};

struct Elements {
  u32 words[EDGE][WORDS_OF_EDGE];

  DEVICE void load(const char* p, i64 pitch) {
#pragma unroll
    for (int i = 0; i < EDGE; ++i)
#pragma unroll
      for (int j = 0; j < EDGE * SIZE<FROM> / 4; j += 4) {
        Bytes16 v = ld_global_v4(reinterpret_cast<const u32*>(p + i * pitch) + j);
        if constexpr (FROM == OF) {
          words[i][j] = v.x, words[i][j + 1] = v.y, words[i][j + 2] = v.z, words[i][j + 3] = v.w;
        } else {
          words[i][j / 2] = pack<OF>(__uint_as_float(v.x), __uint_as_float(v.y));
          words[i][j / 2 + 1] = pack<OF>(__uint_as_float(v.z), __uint_as_float(v.w));
        }
      }
  }

  DEVICE float at(int i, int j) const {
    if constexpr (!HALVES) {
      return __uint_as_float(words[i][j]);
    } else if constexpr (OF == Dtype::f16) {
      return f16_to_f32(words[i][j / 2] >> 16 * (j % 2) & 0xffff);
    } else {
      return __uint_as_float(j % 2 ? words[i][j / 2] & 0xffff0000 : words[i][j / 2] << 16);
    }
  }
};

// ---- magnitudes ----

DEVICE u32 magnitude(u32 word) { return word & (HALVES ? 0x7fff7fff : 0x7fffffff); }

// The greater of each half, or of the whole.
DEVICE u32 greater(u32 a, u32 b) {
  if constexpr (!HALVES) return max(a, b);
#if __CUDA_ARCH__ >= 900
  u32 found;
  asm("max.u16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  return found;
#else
  return max(a & 0xffff, b & 0xffff) | max(a & 0xffff0000, b & 0xffff0000);
#endif
}

// The greater half, or the whole.
DEVICE u32 greatest_of(u32 word) { return HALVES ? max(word & 0xffff, word >> 16) : word; }

// The greatest magnitudes of a tile's rows and columns.
struct Maxima {
  u32 *of_columns,  // [WARPS][LINES][WORDS_OF_EDGE]
      *of_rows;     // [TILE]; of warps where one is asked for, of all
  u32 rows[EDGE], columns[WORDS_OF_EDGE];

  // Those of each row and column that a thread has a part of.
  DEVICE void find(const Elements& elements) {
#pragma unroll
    for (int j = 0; j < WORDS_OF_EDGE; ++j) columns[j] = 0;
#pragma unroll
    for (int i = 0; i < EDGE; ++i) {
      rows[i] = 0;
#pragma unroll
      for (int j = 0; j < WORDS_OF_EDGE; ++j) {
        u32 word = magnitude(elements.words[i][j]);
        rows[i] = greater(rows[i], word);
        columns[j] = greater(columns[j], word);
      }
    }
  }

  // That of all.
  DEVICE u32 of_tile() const {
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < WORDS_OF_EDGE; ++j) most = greater(most, columns[j]);
    most = __reduce_max_sync(~0u, greatest_of(most));
    u32 of_warps = shared_address(of_rows);
    if (threadIdx.x % 32 == 0) st_shared_u32(of_warps + 4 * (threadIdx.x / 32), most);
    __syncthreads();
    most = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) most = max(most, ld_shared_u32(of_warps + 4 * i));
    return most;
  }

  // Writes those of rows, of a thread's line of edges.
  DEVICE void write_rows(int edge, int line) const {
    constexpr int COUNT = HALVES ? EDGE / 2 : EDGE;  // two rows in a word
    u32 most[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      most[i] = rows[i];
      if constexpr (HALVES) most[i] = greatest_of(rows[2 * i]) | greatest_of(rows[2 * i + 1]) << 16;
#pragma unroll
      for (int other = 1; other < LINES; other *= 2) most[i] = greater(most[i], __shfl_xor_sync(~0u, most[i], other));
    }
#pragma unroll
    for (int i = 0; i < EDGE; ++i)
      if (edge == i) of_rows[line * EDGE + i] = HALVES ? most[i / 2] >> 16 * (i % 2) & 0xffff : most[i];
  }

  // Writes those of columns, of each warp.
  DEVICE void write_columns(int edge) const {
#pragma unroll
    for (int j = 0; j < WORDS_OF_EDGE; ++j) {
      u32 most = greater(columns[j], __shfl_xor_sync(~0u, columns[j], LINES));
      if (threadIdx.x % 32 < LINES) of_columns[(threadIdx.x / 32 * LINES + edge) * WORDS_OF_EDGE + j] = most;
    }
  }

  DEVICE u32 of_row(int i) const { return of_rows[i]; }

  DEVICE u32 of_column(int i) const {
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < WARPS; ++j) most = greater(most, of_columns[j * LINES * WORDS_OF_EDGE + (HALVES ? i / 2 : i)]);
    return HALVES ? most >> 16 * (i % 2) & 0xffff : most;
  }
};
