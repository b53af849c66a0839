// Promotion (promote_never.cuh) of the sums of each block of k, times the scale of their rows of a and of their columns
// of b: arrays in device memory that have one for SCALE_MN rows or columns, and for the block of k.
//
// A warpgroup copies those of its tile to shared memory, for GROUP blocks of k while it multiplies the GROUP before.

DEVICE constexpr int gcd(int x, int y) { return y ? gcd(y, x % y) : x; }

struct Promotion {
  static constexpr bool EVER = true, EACH = true, OF_A = A_SCALE_MN > 0, OF_B = B_SCALE_MN > 0;

  // Columns that share a scale wherever the tile begins; where they are few, each has an entry of its own.
  static constexpr int MN = OF_B ? B_SCALE_MN : 1, SHARING = gcd(BN, MN);
  static constexpr bool BY_COLUMN = OF_B && SHARING % 8 != 0;
  static constexpr int B_EACH = BY_COLUMN ? BN : (BN - SHARING + MN - SHARING) / MN + 1;  // entries of a product
  static constexpr int COLUMNS = B_EACH == 1 ? BN : SHARING;                              // of a run that has one scale
  static constexpr int A_ENTRIES = OF_A ? ROWS_PER_CONSUMER : 0, B_ENTRIES = OF_B ? PRODUCTS * B_EACH : 0;
  static constexpr u32 SLOT = (A_ENTRIES + B_ENTRIES + 1) / 2 * 8;                        // bytes of one block of k
  static constexpr u32 BYTES = (2 * GROUP * SLOT + 15) / 16 * 16;                         // of a warpgroup
  static constexpr int RUNS = BY_COLUMN || !OF_B ? 1 : (PART_COLUMNS - 1) / COLUMNS + 2;  // in a part, at most

  struct Scales {
    const char* base;
    int row, matrix;  // elements between rows, and between matrices
  } of[OF_A + OF_B * PRODUCTS];

  u32 memory;
  int thread;
  const float *a, *b[PRODUCTS];          // of the tile's matrix
  int first_row, last_row, first, last;  // rows, and columns
  int block, last_block;                 // of k
  bool empty;                            // nothing is multiplied, and no scale that is another group's may be NaN

  struct Factors {
    float a[2], b[RUNS];
  };

  DEVICE static const float* matrix_of(const Scales& scales, int matrix) {
    return reinterpret_cast<const float*>(scales.base) + static_cast<i64>(matrix) * scales.matrix;
  }

  // Rows from `row` on of the tile are this warpgroup's.
  DEVICE void begin(const Work& work, int m, int n, int row, int matrix_a, int matrix_b, u32 at, int thread_) {
    memory = at;
    thread = thread_;
    first_row = work.m + row;
    last_row = m - 1;
    first = work.n;
    last = n - 1;
    block = work.k / BK;
    last_block = (work.k_end - 1) / BK;
    empty = RAGGED_K && work.k_end - work.k <= work.head;
    if constexpr (OF_A) a = matrix_of(of[0], matrix_a);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
      if constexpr (OF_B) b[p] = matrix_of(of[OF_A + p], matrix_b);
    copy(0);
  }

  // The scales of `COUNT` entries, the `of_entry`-th in `mn`, of GROUP blocks of k from `k` on.
  template <bool K_MAJOR, int COUNT, typename Index>
  DEVICE void copy_entries(u32 to, const float* from, int row, int k, Index index) const {
#pragma unroll
    for (int i = 0; i < COUNT * GROUP; i += 128) {
      int x = i + thread;
      if (COUNT * GROUP % 128 != 0 && x >= COUNT * GROUP) break;
      int entry = K_MAJOR ? x / GROUP : x % COUNT, q = K_MAJOR ? x % GROUP : x / COUNT;
      int y = min(block + k + q, last_block), mn = index(entry);
      i64 place = K_MAJOR ? static_cast<i64>(mn) * row + y : static_cast<i64>(y) * row + mn;
      if constexpr (RAGGED_K) {
        cp_async_word(to + q * SLOT + entry * 4, from + place, empty ? 0 : 4);
      } else {
        cp_async_word(to + q * SLOT + entry * 4, from + place);
      }
    }
  }

  DEVICE void copy(int k) const {
    u32 to = memory + k / GROUP % 2 * (GROUP * SLOT);
    if constexpr (OF_A)
      copy_entries<A_SCALE_K_MAJOR, A_ENTRIES>(
          to, a, of[0].row, k, [&](int entry) { return min(first_row + entry, last_row) / A_SCALE_MN; });
    if constexpr (OF_B)
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p)
        copy_entries<B_SCALE_K_MAJOR, B_EACH>(
            to + (A_ENTRIES + p * B_EACH) * 4, b[p], of[OF_A + p].row, k,
            [&](int entry) { return BY_COLUMN ? min(first + entry, last) / MN : min(first / MN + entry, last / MN); });
  }

  // Before the first sums of a GROUP, from block `k` of `count` on, are added.
  DEVICE void begin_group(int k, int count, int barrier) const {
    cp_async_wait_all();
    bar_sync(barrier, 128);  // all have copied theirs, and read those that come next over them
    if (k + GROUP < count) copy(k + GROUP);
  }

  DEVICE u32 slot(int k) const { return memory + k % (2 * GROUP) * SLOT; }

  // A lane's h-th row of a block; of 32 rows of both beside each other (WARP_ROWS) it has four neighbours.
  template <int BLOCK>
  DEVICE int row(int h) const {
    int warp = thread / 32, line = thread % 32 / 4;
    return WARP_ROWS == 32 ? warp * 32 + line * 4 + BLOCK * 2 + h : BLOCK * 64 + warp * 16 + line + 8 * h;
  }

  // Of rows BLOCK and columns PART, in block `k`.
  template <int BLOCK, int PART>
  DEVICE Factors factors(int k) const {
    Factors found;
#pragma unroll
    for (int h = 0; h < 2; ++h) found.a[h] = OF_A ? ld_shared_f32(slot(k) + row<BLOCK>(h) * 4) : 1;
    constexpr int BEGIN = PART * PART_COLUMNS, END = BEGIN + PART_COLUMNS;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      int column = (BEGIN / COLUMNS + run) * COLUMNS;
      found.b[run] = 1;
      if (OF_B && !BY_COLUMN && column < END) {
        int p = column / BN, at = (column % BN + (B_EACH == 1 ? 0 : first % MN)) / (B_EACH == 1 ? BN : MN);
        found.b[run] = ld_shared_f32(slot(k) + (A_ENTRIES + p * B_EACH + at) * 4);
      }
    }
    return found;
  }

  template <int PART>
  DEVICE void add(Acc (&accumulators)[PRODUCTS * BN / 2], const PartSums& sums, const Factors& factors, int k) const {
    constexpr int BEGIN = PART * PART_COLUMNS;
#pragma unroll
    for (int j = 0; j < PART_COLUMNS / 8; ++j) {
      int column = BEGIN + 8 * j, run = BY_COLUMN || !OF_B ? 0 : column / COLUMNS - BEGIN / COLUMNS;
      float of_columns[2] = {factors.b[run], factors.b[run]};
      if constexpr (BY_COLUMN) {
        u32 x, y;
        ld_shared_v2(slot(k) + (A_ENTRIES + column + thread % 4 * 2) * 4, x, y);
        of_columns[0] = __uint_as_float(x);
        of_columns[1] = __uint_as_float(y);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Acc& sum = accumulators[column / 2 + i];
        sum = __fmaf_rn(sums[4 * j + i], factors.a[i / 2] * of_columns[i % 2], sum);
      }
    }
  }
};
