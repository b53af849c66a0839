// A kernel of its own: matrices quantized to float8, each element read once. A block of threads has a tile of TILE x
// TILE elements, a thread EDGE x EDGE of them, in registers. It writes values as they lie (OWN), their transpose
// (TURNED), or both, and their scales: of whole tiles where they are SQUARE, else of each line of TILE elements along
// what is contiguous in the values written.
//
// A magnitude is compared as its bits, an unsigned integer, of 16 bits two at once; a NaN's are greater than
// infinity's. Scales and quotients are what XLA makes on a GPU, to the bit: 1 / LARGEST is rounded before it
// multiplies, and div.full is a product with an approximate reciprocal wherever the divisor is no subnormal number.

constexpr int TILE = 128, EDGE = 8, THREADS = 256, WARPS = THREADS / 32, LINES = TILE / EDGE;
constexpr bool HALVES = SIZE<OF> == 2;
constexpr int WORDS_OF_EDGE = HALVES ? EDGE / 2 : EDGE;
constexpr float INVERSE = 1.0f / (TO == Dtype::e4m3 ? 448.0f : 57344.0f);

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

DEVICE float float_of(u32 bits) {
  if constexpr (OF == Dtype::f16) {
    return f16_to_f32(bits);
  } else {
    return __uint_as_float(HALVES ? bits << 16 : bits);
  }
}

// The scale of a block whose greatest magnitude has these bits: of zeros 1, NaN where one is not finite.
DEVICE float scale_of(u32 bits) {
  float most = float_of(bits), scale = most * INVERSE;
  if (!is_finite(most)) return __uint_as_float(0x7fffffff);
  return scale == 0.0f ? 1.0f : fmaxf(scale, 0x1p-126f);
}

// ---- a thread's elements ----

struct Elements {
  u32 words[EDGE][WORDS_OF_EDGE];

  DEVICE void load(const char* p, i64 pitch) {
#pragma unroll
    for (int i = 0; i < EDGE; ++i)
#pragma unroll
      for (int j = 0; j < WORDS_OF_EDGE; j += 4) {
        Bytes16 v = ld_global_v4(reinterpret_cast<const u32*>(p + i * pitch) + j);
        words[i][j] = v.x, words[i][j + 1] = v.y, words[i][j + 2] = v.z, words[i][j + 3] = v.w;
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

// Four floats as float8, the first lowest.
DEVICE u32 narrow(float a, float b, float c, float d) {
  auto two = [](float low, float high) -> u32 {
    return TO == Dtype::e4m3 ? cvt_satfinite_e4m3x2(low, high) : cvt_satfinite_e5m2x2(low, high);
  };
  return two(a, b) | two(c, d) << 16;
}

// Where the transposed tile has the 8 bytes of a column whose rows begin at 8 * line. Neighbouring threads write
// columns EDGE apart, and read 16 bytes along one: neither meets in a bank.
DEVICE u32 slot(int column, int line) {
  int edge = column / EDGE;
  return column * TILE + (line ^ (edge % 8 * 2 + edge / 8)) * 8;
}

constexpr int RESIDENT = !HALVES ? 2 : OWN && TURNED ? 3 : 4;  // blocks on an SM: more would spill

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) KERNEL(PARAMETERS) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  u32* most_of_columns = reinterpret_cast<u32*>(shared_memory);   // [WARPS][LINES][WORDS_OF_EDGE]
  u32* most_of_rows = most_of_columns + TILE * WORDS_OF_EDGE;     // [TILE]; of warps where scales are of squares
  float* by_row = reinterpret_cast<float*>(most_of_rows + TILE);  // [TILE] reciprocals of scales
  float* by_column = by_row + TILE;                               // [TILE]
  u32 turned = shared_address(by_column + TILE);                  // [TILE][TILE] bytes

  int across = columns / TILE, tiles = rows / TILE * across;
  int matrix = blockIdx.x / tiles, tile = blockIdx.x % tiles, row = tile / across * TILE, column = tile % across * TILE;
  int edge = threadIdx.x % LINES, line = threadIdx.x / LINES, warp = threadIdx.x / 32;
  i64 first = static_cast<i64>(matrix) * rows * columns;
  i64 first_scale = first / TILE / (SQUARE ? TILE : 1);

  Elements elements;
  i64 place = first + static_cast<i64>(row + line * EDGE) * columns + column + edge * EDGE;
  elements.load(x + place * SIZE<OF>, static_cast<i64>(columns) * SIZE<OF>);

  // The greatest of each row and column that this thread has a part of.
  u32 of_rows[EDGE], of_columns[WORDS_OF_EDGE] = {};
#pragma unroll
  for (int i = 0; i < EDGE; ++i) {
    of_rows[i] = 0;
#pragma unroll
    for (int j = 0; j < WORDS_OF_EDGE; ++j) {
      u32 word = magnitude(elements.words[i][j]);
      of_rows[i] = greater(of_rows[i], word);
      of_columns[j] = greater(of_columns[j], word);
    }
  }
  float by_square = 0.0f;
  if constexpr (SQUARE) {
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < WORDS_OF_EDGE; ++j) most = greater(most, of_columns[j]);
    most = __reduce_max_sync(~0u, greatest_of(most));
    u32 most_of_warps = shared_address(most_of_rows);
    if (threadIdx.x % 32 == 0) st_shared_u32(most_of_warps + 4 * warp, most);
    __syncthreads();
    most = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) most = max(most, ld_shared_u32(most_of_warps + 4 * i));
    float scale = scale_of(most);
    by_square = rcp_approx(scale);
    if (threadIdx.x == 0) {
      int down = rows / TILE, i = row / TILE, j = column / TILE;
      if constexpr (OWN) scales[first_scale + i * across + j] = scale;
      if constexpr (TURNED) turned_scales[first_scale + j * down + i] = scale;
    }
  } else {
    if constexpr (OWN) {
      constexpr int COUNT = HALVES ? EDGE / 2 : EDGE;  // two rows in a word
      u32 most[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        most[i] = of_rows[i];
        if constexpr (HALVES) most[i] = greatest_of(of_rows[2 * i]) | greatest_of(of_rows[2 * i + 1]) << 16;
#pragma unroll
        for (int other = 1; other < LINES; other *= 2) most[i] = greater(most[i], __shfl_xor_sync(~0u, most[i], other));
      }
#pragma unroll
      for (int i = 0; i < EDGE; ++i)
        if (edge == i) most_of_rows[line * EDGE + i] = HALVES ? most[i / 2] >> 16 * (i % 2) & 0xffff : most[i];
    }
    if constexpr (TURNED) {
#pragma unroll
      for (int j = 0; j < WORDS_OF_EDGE; ++j) {
        u32 most = greater(of_columns[j], __shfl_xor_sync(~0u, of_columns[j], LINES));
        if (threadIdx.x % 32 < LINES) most_of_columns[(warp * LINES + edge) * WORDS_OF_EDGE + j] = most;
      }
    }
    __syncthreads();
    int i = threadIdx.x % TILE;
    if (OWN && threadIdx.x < TILE) {
      float scale = scale_of(most_of_rows[i]);
      by_row[i] = rcp_approx(scale);
      scales[first_scale + static_cast<i64>(row + i) * across + column / TILE] = scale;
    }
    if (TURNED && threadIdx.x >= TILE) {
      u32 most = 0;
#pragma unroll
      for (int j = 0; j < WARPS; ++j)
        most = greater(most, most_of_columns[j * LINES * WORDS_OF_EDGE + (HALVES ? i / 2 : i)]);
      float scale = scale_of(HALVES ? most >> 16 * (i % 2) & 0xffff : most);
      by_column[i] = rcp_approx(scale);
      turned_scales[first_scale + static_cast<i64>(column + i) * (rows / TILE) + row / TILE] = scale;
    }
    __syncthreads();
  }

  if constexpr (OWN) {
#pragma unroll
    for (int i = 0; i < EDGE; ++i) {
      float by = SQUARE ? by_square : by_row[line * EDGE + i];
      u32 words[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        words[j] = narrow(elements.at(i, 4 * j) * by, elements.at(i, 4 * j + 1) * by, elements.at(i, 4 * j + 2) * by,
                          elements.at(i, 4 * j + 3) * by);
      st_global<8>(values + place + static_cast<i64>(i) * columns, {words[0], words[1]});
    }
  }
  if constexpr (TURNED) {
#pragma unroll
    for (int j = 0; j < EDGE; ++j) {
      float by = SQUARE ? by_square : by_column[edge * EDGE + j];
      u32 words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        words[i] = narrow(elements.at(4 * i, j) * by, elements.at(4 * i + 1, j) * by, elements.at(4 * i + 2, j) * by,
                          elements.at(4 * i + 3, j) * by);
      st_shared_v2(turned + slot(edge * EDGE + j, line), words[0], words[1]);
    }
    __syncthreads();
    constexpr int PIECES = TILE / 16, AT_ONCE = THREADS / PIECES;  // of 16 bytes in a column; columns
    int piece = threadIdx.x % PIECES;
#pragma unroll
    for (int i = 0; i < TILE; i += AT_ONCE) {
      int of = i + threadIdx.x / PIECES;
      Bytes16 v = ld_shared_v4(turned + (slot(of, 2 * piece) & ~15u));
      bool swapped = i >= TILE / 2;  // the eights of columns in the tile's other half lie the other way round
      st_global_v4(turned_values + first + static_cast<i64>(column + of) * rows + row + piece * 16,
                   swapped ? Bytes16{v.z, v.w, v.x, v.y} : v);
    }
  }
}
