// Products of a few rows, BM of them, without tensor cores and without stages: all that counts is to read b once, at
// the speed of memory. All threads stream b through registers, 16 bytes at a time, and multiply it by what they need of
// a, which comes from L1. What they have is added up over lanes, then in shared memory over warps, in order.
//
//   b mn-major   a thread has UNIT_ELEMENTS columns, and every LINES-th run of DEPTH lines of k
//   b k-major    a warp has 8 columns, each lane units of k of all of them; warps that share columns take turns along k

constexpr int A_ELEMENTS = 16 / ELEMENT, UNIT_ELEMENTS = 16 / ELEMENT_B;  // of 16 bytes of a, and of b
constexpr int AT_ONCE = 8;                                                // loads that a thread waits for
constexpr int DEPTH = B_K_MAJOR || UNIT_ELEMENTS > AT_ONCE ? UNIT_ELEMENTS : ELEMENT < 8 ? AT_ONCE : AT_ONCE / 2;
constexpr int THREAD_COLUMNS = B_K_MAJOR ? AT_ONCE : UNIT_ELEMENTS;
constexpr int ACROSS = B_K_MAJOR ? 1 : BN / UNIT_ELEMENTS;                  // lanes that have other columns
constexpr int COLUMN_WARPS = B_K_MAJOR ? BN / AT_ONCE : 1;                  // warps that have
constexpr int WARPS_EACH = THREADS / 32 / COLUMN_WARPS;                     // warps of the same columns
constexpr int STAGE_BYTES = WARPS_EACH * PRODUCTS * BM * BN * sizeof(Acc);  // what they have, as they are added up
static_assert(ACROSS <= 32 && 32 % ACROSS == 0 && WARPS_EACH >= 1);

// The i-th element of a unit of 16 bytes of a, and of b.
DEVICE Acc element(const u32 (&word)[4], int i) {
  Pair<OPERAND> pair{};
  if constexpr (ELEMENT >= 4) {
#pragma unroll
    for (int j = 0; j < ELEMENT / 4; ++j) pair.bits[j] = word[i * (ELEMENT / 4) + j];
    return static_cast<Acc>(pair[0]);
  } else {
    pair.bits[0] = word[i * ELEMENT / 4] >> (ELEMENT == 1 ? i % 4 / 2 * 16 : 0);
    return static_cast<Acc>(pair[i % 2]);
  }
}

DEVICE Acc element_b(const u32 (&word)[4], int i) {
#if NARROW_B
  return decode_f32(word[i / 4], i % 4);
#else
  return element(word, i);
#endif
}

// Where a tile's part of an operand lies, whose elements have SIZE bytes.
template <int SIZE, typename View>
struct Matrix {
  typename View::Change change;
  const char* first;
  i64 pitch;
  int row, rows, k, k_end;

  template <typename Source>
  DEVICE void begin(const Source& source, const char* matrix, int its_row, int its_rows, int its_k, int its_end) {
    change.begin(source);
    first = matrix, pitch = static_cast<i64>(source.pitch) * SIZE;
    row = its_row, rows = its_rows, k = its_k, k_end = its_end;
  }
};

using MatrixA = Matrix<ELEMENT, ViewA>;
using Loads = Operands<MatrixA, Matrix<ELEMENT_B, ViewB>>;

// DEPTH neighbours along k of each row of a.
struct Left {
  u32 word[BM][A_K_MAJOR ? DEPTH / A_ELEMENTS : 1][4];
  Acc value[BM][A_K_MAJOR ? 1 : DEPTH];

  DEVICE void load(const MatrixA& a, int k, int k_end) {
#pragma unroll
    for (int r = 0; r < BM; ++r) {
      bool there = a.row + r < a.rows;
      if constexpr (A_K_MAJOR) {
#pragma unroll
        for (int i = 0; i < DEPTH / A_ELEMENTS; ++i) {
          int at = k + i * A_ELEMENTS;
          const char* p = a.first + (a.row + r) * a.pitch + static_cast<i64>(at) * ELEMENT;
          Held<A_UNIT> held;
          int valid = there ? (k_end - at) * ELEMENT : 0;
          held.load(p, valid);
          held.get(word[r][i], Held<A_UNIT>::skew_of(p), valid);
          a.change(word[r][i], a.row + r, at, valid);
        }
      } else {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
          Pair<OPERAND> pair{};
          if (there && k + i < k_end) pair.load_one(a.first + (k + i) * a.pitch + (a.row + r) * ELEMENT);
          value[r][i] = static_cast<Acc>(pair[0]);
        }
      }
    }
  }

  DEVICE Acc operator()(int r, int i) const {
    if constexpr (A_K_MAJOR) {
      return element(word[r][i / A_ELEMENTS], i % A_ELEMENTS);
    } else {
      return value[r][i];
    }
  }
};

struct Multiplier {
  DEVICE Multiplier(int, int) {}
};

struct Pipeline {
  u32 base;

  DEVICE explicit Pipeline(u32 base) : base(base) {}
  DEVICE void begin(const Loads&) const {}

  // Loads AT_ONCE units of a matrix b, or as many as there are, of so many valid bytes each.
  template <int COUNT, typename Address, typename Valid>
  static DEVICE void load(u32 (&x)[COUNT][4], Address address, Valid valid) {
    Held<B_UNIT> held[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) held[i].load(address(i), valid(i));
// Columns past the matrix are not stored, whatever they are.
#pragma unroll
    for (int i = 0; i < COUNT; ++i) held[i].get(x[i], Held<B_UNIT>::skew_of(address(i)), B_K_MAJOR ? valid(i) : 16);
  }

  DEVICE void run(Accumulators& d, const Loads& loads, const Multiplier&, const Promotion&, const Warp& warp,
                  int k_blocks) const {
    const auto& a = loads.a;
    int lane = threadIdx.x % 32, its_warp = threadIdx.x / 32, k_end = min(a.k_end, a.k + k_blocks * BK);
    int warp_along = its_warp / COLUMN_WARPS,
        column = its_warp % COLUMN_WARPS * AT_ONCE + lane % ACROSS * THREAD_COLUMNS;
    Acc sums[PRODUCTS * BM * THREAD_COLUMNS];
#pragma unroll
    for (Acc& sum : sums) sum = Acc{};
    auto add = [&](int p, int r, int c, Acc x, Acc y) {
      Acc& sum = sums[(p * BM + r) * THREAD_COLUMNS + c];
      sum = sum + x * y;
    };
    int turn = B_K_MAJOR ? warp_along * 32 + lane : threadIdx.x / ACROSS;
    constexpr int TURNS = B_K_MAJOR ? WARPS_EACH * 32 : THREADS / ACROSS;
#pragma unroll 1
    for (int k = a.k + turn * DEPTH; k < k_end; k += TURNS * DEPTH) {
      Left left;
      left.load(a, k, k_end);
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p) {
        const auto& b = loads.b[p];
        int first = b.row + column, columns = b.rows - first;
        if constexpr (B_K_MAJOR) {
          u32 x[AT_ONCE][4];
          const char* start = b.first + first * b.pitch + static_cast<i64>(k) * ELEMENT_B;
          load(
              x, [&](int i) { return start + i * b.pitch; },
              [&](int i) { return i < columns ? (k_end - k) * ELEMENT_B : 0; });
#pragma unroll
          for (int i = 0; i < UNIT_ELEMENTS; ++i)
#pragma unroll
            for (int j = 0; j < AT_ONCE * BM; ++j) add(p, j % BM, j / BM, left(j % BM, i), element_b(x[j / BM], i));
        } else {
          constexpr int COUNT = DEPTH < AT_ONCE ? DEPTH : AT_ONCE;
#pragma unroll
          for (int run = 0; run < DEPTH; run += COUNT) {
            u32 x[COUNT][4];
            const char* start = b.first + (k + run) * b.pitch + static_cast<i64>(first) * ELEMENT_B;
            load(
                x, [&](int i) { return start + i * b.pitch; },
                [&](int i) { return k + run + i < k_end ? columns * ELEMENT_B : 0; });
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
              for (int j = 0; j < UNIT_ELEMENTS * BM; ++j)
                add(p, j % BM, j / BM, left(j % BM, run + i), element_b(x[i], j / BM));
          }
        }
      }
    }
    Acc* warps = static_cast<Acc*>(__cvta_shared_to_generic(base));  // [WARPS_EACH][PRODUCTS * BM][BN]
    __syncthreads();                                                 // those of the last tile have been read
#pragma unroll
    for (int i = 0; i < PRODUCTS * BM * THREAD_COLUMNS; ++i) {
#pragma unroll
      for (int other = ACROSS; other < 32; other *= 2) sums[i] = sums[i] + __shfl_xor_sync(~0u, sums[i], other);
      if (lane < ACROSS)
        warps[(warp_along * PRODUCTS * BM + i / THREAD_COLUMNS) * BN + column + i % THREAD_COLUMNS] = sums[i];
    }
    __syncthreads();
    if (warp.slice > 0) return;
    int row = lane / 4;
#pragma unroll
    for (int i = 0; i < PRODUCTS * N_FRAGMENTS * 2; ++i) {
      int p = i / 2 / N_FRAGMENTS, j = i / 2 % N_FRAGMENTS, at = warp.column + j * 8 + lane % 4 * 2 + i % 2;
      Acc sum{};
      if (row < BM) {
#pragma unroll 1
        for (int other = 0; other < WARPS_EACH; ++other)
          sum = sum + warps[(other * PRODUCTS * BM + p * BM + row) * BN + at];
      }
      d[p][0][j][i % 2] = sum;
    }
  }
};
