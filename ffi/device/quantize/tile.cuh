// A kernel of its own: matrices quantized to float8, each element read once. A block of threads writes the values of
// its tile as they lie (OWN), their transpose (TURNED), or both, and their scales: of the tile where they are SQUARE,
// else of each line of TILE elements along what is contiguous in the values written. Where they are of WHOLE matrices
// and lines, a pass before has found the greatest magnitudes. What that has read last is then read first, from L2.

constexpr float INVERSE = 1.0f / (TO == Dtype::e4m3 ? 448.0f : 57344.0f);

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

constexpr int RESIDENT = SIZE<FROM> == 4 ? 2 : OWN && TURNED ? 3 : 4;  // blocks on an SM: more would spill

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) KERNEL(PARAMETERS) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  Maxima maxima;
  maxima.of_columns = reinterpret_cast<u32*>(shared_memory);
  maxima.of_rows = maxima.of_columns + TILE * WORDS_OF_EDGE;
  float* by_row = reinterpret_cast<float*>(maxima.of_rows + TILE);  // [TILE] reciprocals of scales
  float* by_column = by_row + TILE;                                 // [TILE]
  u32 turned = shared_address(by_column + TILE);                    // [TILE][TILE] bytes

  Place at(WHOLE ? gridDim.x - 1 - blockIdx.x : blockIdx.x, rows, columns);
  i64 place = at.first(rows, columns), first = static_cast<i64>(at.matrix) * rows * columns;
  i64 first_row = static_cast<i64>(at.matrix) * rows + at.row;  // of all matrices
  i64 first_column = static_cast<i64>(at.matrix) * columns + at.column;
  int across = columns / TILE, down = rows / TILE;

  Elements elements;
  elements.load(x + place * SIZE<FROM>, static_cast<i64>(columns) * SIZE<FROM>);
  if constexpr (!WHOLE) maxima.find(elements);
  float by_square = 0.0f;
  if constexpr (SQUARE) {
    float scale;
    if constexpr (WHOLE) {
      scale = scale_of(most_of_rows[at.matrix]);
    } else {
      scale = scale_of(maxima.of_tile());
    }
    by_square = rcp_approx(scale);
    if (threadIdx.x == 0 && (!WHOLE || at.row + at.column == 0)) {
      i64 matrix = static_cast<i64>(at.matrix) * (WHOLE ? 1 : across * down);
      int i = at.row / TILE, j = at.column / TILE;
      if constexpr (OWN) scales[matrix + i * across + j] = scale;
      if constexpr (TURNED) turned_scales[matrix + j * down + i] = scale;
    }
  } else {
    if constexpr (!WHOLE) {
      if constexpr (OWN) maxima.write_rows(at.edge, at.line);
      if constexpr (TURNED) maxima.write_columns(at.edge);
      __syncthreads();
    }
    int i = threadIdx.x % TILE;
    if (OWN && threadIdx.x < TILE) {
      u32 most;
      if constexpr (WHOLE) {
        most = most_of_rows[first_row + i];
      } else {
        most = maxima.of_row(i);
      }
      float scale = scale_of(most);
      by_row[i] = rcp_approx(scale);
      if constexpr (!WHOLE) {
        scales[(first_row + i) * across + at.column / TILE] = scale;
      } else if (at.column == 0) {
        scales[first_row + i] = scale;
      }
    }
    if (TURNED && threadIdx.x >= TILE) {
      u32 most;
      if constexpr (WHOLE) {
        most = most_of_columns[first_column + i];
      } else {
        most = maxima.of_column(i);
      }
      float scale = scale_of(most);
      by_column[i] = rcp_approx(scale);
      if constexpr (!WHOLE) {
        turned_scales[(first_column + i) * down + at.row / TILE] = scale;
      } else if (at.row == 0) {
        turned_scales[first_column + i] = scale;
      }
    }
    __syncthreads();
  }

  if constexpr (OWN) {
#pragma unroll
    for (int i = 0; i < EDGE; ++i) {
      float by = SQUARE ? by_square : by_row[at.line * EDGE + i];
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
      float by = SQUARE ? by_square : by_column[at.edge * EDGE + j];
      u32 words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        words[i] = narrow(elements.at(4 * i, j) * by, elements.at(4 * i + 1, j) * by, elements.at(4 * i + 2, j) * by,
                          elements.at(4 * i + 3, j) * by);
      st_shared_v2(turned + slot(at.edge * EDGE + j, at.line), words[0], words[1]);
    }
    __syncthreads();
    constexpr int PIECES = TILE / 16, AT_ONCE = THREADS / PIECES;  // of 16 bytes in a column; columns
    int piece = threadIdx.x % PIECES;
#pragma unroll
    for (int i = 0; i < TILE; i += AT_ONCE) {
      int of = i + threadIdx.x / PIECES;
      Bytes16 v = ld_shared_v4(turned + (slot(of, 2 * piece) & ~15u));
      bool swapped = i >= TILE / 2;  // the eights of columns in the tile's other half lie the other way round
      st_global_v4(turned_values + first + static_cast<i64>(at.column + of) * rows + at.row + piece * 16,
                   swapped ? Bytes16{v.z, v.w, v.x, v.y} : v);
    }
  }
}
