// Promotion (promote_never.cuh) of the sums of each block of k, times UNIT and the scale of their rows of a and of
// their columns of b: arrays in device memory that have one for SCALE_MN rows or columns, and for the block of k.
//
// A stage has a slot for the scales of its block of k: those of the tile's rows, then those of its columns. Warps of
// the producer's copy them while TMA loads the stage, and arrive on its full barrier too. Those that lie along k go
// through registers, which have them for four blocks of k by one load of 16 bytes: copied one by one, each would take a
// line of its own, and 128 x 256 by scales of columns 1.16 times as long. Others have neighbours in memory. Small tiles
// would wait for that load, and decoded weights: 16 rows beside 4 bits took 17.1 us for 14.8.

DEVICE constexpr int gcd(int x, int y) { return y ? gcd(y, x % y) : x; }

struct Promotion {
  static constexpr bool EVER = true, EACH = true, OF_A = A_SCALE_MN > 0, OF_B = B_SCALE_MN > 0;

  // Columns that share a scale wherever the tile begins; where they are few, each has an entry of its own.
  static constexpr int MN = OF_B ? B_SCALE_MN : 1, SHARING = gcd(BN, MN);
  static constexpr bool BY_COLUMN = OF_B && SHARING % 8 != 0;
  static constexpr int B_EACH = BY_COLUMN ? BN : (BN - SHARING + MN - SHARING) / MN + 1;  // entries of a product
  static constexpr int COLUMNS = B_EACH == 1 ? BN : SHARING;                              // of a run that has one scale
  static constexpr int A_ENTRIES = OF_A ? BM : 0, B_ENTRIES = OF_B ? PRODUCTS * B_EACH : 0;
  static constexpr u32 BYTES = (A_ENTRIES + B_ENTRIES + 3) / 4 * 16;  // of a slot
  static constexpr int COPIERS = 96;                                  // threads
  static constexpr bool HOLDS = A_BITS == B_BITS && BM * BN > 128 * 64, HOLDS_A = OF_A && A_SCALE_K_MAJOR && HOLDS,
                        HOLDS_B = OF_B && B_SCALE_K_MAJOR && HOLDS;  // in registers
  static constexpr bool STORES = HOLDS_A || HOLDS_B, COPIES = OF_A > HOLDS_A || OF_B > HOLDS_B;
  static constexpr int ARRIVALS = STORES * (COPIERS / 32) + COPIES * COPIERS;  // on the full barrier of a stage
  static constexpr int RUNS = BY_COLUMN || !OF_B ? 1 : (PART_COLUMNS - 1) / COLUMNS + 2;  // in a part, at most

  struct Scales {
    const char* base;
    int row, matrix;  // elements between rows, and between matrices
  } of[OF_A + OF_B * PRODUCTS];

  // Where a run's entry depends on where the tile begins, all entries are read.
  static constexpr bool MOVES = !BY_COLUMN && B_EACH > 1 && SHARING < MN;

  struct Factors {
    float a[2], b[MOVES ? PRODUCTS * B_EACH : RUNS];
  };

  // Those of a thread's columns of a part, where they have entries of their own.
  struct Columns {
    float of[BY_COLUMN ? PART_COLUMNS / 4 : 1];
  };

  // ---- of a thread that copies ----

  static constexpr int HELD_A = (A_ENTRIES + COPIERS - 1) / COPIERS, HELD_B = (B_EACH + COPIERS - 1) / COPIERS;

  const float *a, *b[PRODUCTS];  // of the tile's matrix
  int last_row, last;            // rows, and columns
  int m, n;                      // the tile's first
  int block, last_block;         // of k
  bool empty;                    // nothing is multiplied, and no scale that is another group's may be NaN
  float held_a[OF_A ? HELD_A : 1][4], held_b[PRODUCTS][HELD_B][4];  // its entries, of four blocks of k

  DEVICE static const float* matrix_of(const Scales& scales, int matrix) {
    return reinterpret_cast<const float*>(scales.base) + static_cast<i64>(matrix) * scales.matrix;
  }

  DEVICE void begin_copies(const Work& work, int rows, int columns, int matrix_a, int matrix_b) {
    m = work.m, n = work.n;
    last_row = rows - 1, last = columns - 1;
    block = work.k / BK;
    last_block = (work.k_end - 1) / BK;
    empty = work.k_blocks == 0 || (RAGGED_K && work.k_end - work.k <= work.head);
    if constexpr (OF_A) a = matrix_of(of[0], matrix_a);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
      if constexpr (OF_B) b[p] = matrix_of(of[OF_A + p], matrix_b);
  }

  // Calls a function with each of the thread's COUNT entries, and its number among them.
  template <int COUNT, typename F>
  DEVICE static void each_entry(F f) {
#pragma unroll
    for (int i = 0; i * COPIERS < COUNT; ++i) {
      int entry = i * COPIERS + threadIdx.x % COPIERS;
      if ((i + 1) * COPIERS <= COUNT || entry < COUNT) f(entry, i);
    }
  }

  DEVICE int row_of(int entry) const { return min(m + entry, last_row) / max(A_SCALE_MN, 1); }
  DEVICE int column_of(int entry) const {
    return BY_COLUMN ? min(n + entry, last) / MN : min(n / MN + entry, last / MN);
  }

  // The four blocks of k from `first` on, of a row of scales.
  DEVICE void load_row(float (&held)[4], const float* row, bool even, int first) const {
    if (even) {
      float4 v = ld_global_v4(row + first);
      held[0] = v.x, held[1] = v.y, held[2] = v.z, held[3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) held[i] = row[min(first + i, last_block)];
    }
  }

  // What goes through registers of the tile's block k and the three after it: the first of four, wherever it begins.
  DEVICE void load(int k) {
    int y = block + k;
    if (empty || (k > 0 && y % 4 != 0)) return;
    int first = min(y, last_block) / 4 * 4;
    auto row = [&](const float* of, int length, int index, float (&held)[4]) {
      bool even = (static_cast<u32>(reinterpret_cast<u64>(of)) | length * 4) % 16 == 0;
      load_row(held, of + static_cast<u32>(index * length), even, first);
    };
    if constexpr (HOLDS_A)
      each_entry<A_ENTRIES>([&](int entry, int i) { row(a, of[0].row, row_of(entry), held_a[i]); });
    if constexpr (HOLDS_B)
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p)
        each_entry<B_EACH>([&](int entry, int i) { row(b[p], of[OF_A + p].row, column_of(entry), held_b[p][i]); });
  }

  // The scale of block `y` of k, to shared memory: one of four that are held, or of those in memory.
  template <bool HELD, bool K_MAJOR>
  DEVICE void copy_entry(u32 to, const float (&held)[4], const float* from, int row, int index, int y) const {
    if constexpr (HELD) {
      float x = y & 2 ? (y & 1 ? held[3] : held[2]) : (y & 1 ? held[1] : held[0]);
      st_shared_f32(to, RAGGED_K && empty ? 0 : x);
    } else {
      const float* x = from + static_cast<i64>(min(y, last_block)) * (K_MAJOR ? 1 : row);
      x += static_cast<u32>(index * (K_MAJOR ? row : 1));
      if constexpr (RAGGED_K) {
        cp_async_word(to, x, empty ? 0 : 4);
      } else {
        cp_async_word(to, x);
      }
    }
  }

  // The scales of the tile's block k, to a slot.
  DEVICE void copy(u32 slot, int k) const {
    int y = block + k;
    if constexpr (OF_A)
      each_entry<A_ENTRIES>([&](int entry, int i) {
        copy_entry<HOLDS_A, A_SCALE_K_MAJOR>(slot + entry * 4, held_a[i], a, of[0].row, row_of(entry), y);
      });
    if constexpr (OF_B)
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p)
        each_entry<B_EACH>([&](int entry, int i) {
          copy_entry<HOLDS_B, B_SCALE_K_MAJOR>(slot + (A_ENTRIES + p * B_EACH + entry) * 4, held_b[p][i], b[p],
                                               of[OF_A + p].row, column_of(entry), y);
        });
  }

  // ---- of a thread that multiplies ----

  u32 place;   // in a slot, of the lane's first row
  int column;  // of the tile's first run, which others of the run are before
  int thread;  // of the warpgroup

  // Rows from `row` on of the tile are this warpgroup's. Of 32 rows of two blocks beside each other (WARP_ROWS) a lane
  // has four neighbours.
  DEVICE void begin(const Work& work, int row, int thread_) {
    thread = thread_;
    place = (row + thread / 32 * WARP_ROWS + thread % 32 / 4 * (WARP_ROWS == 32 ? 4 : 1)) * 4;
    asm volatile("" : "+r"(place));  // or it would be computed again in front of each wgmma
    if constexpr (MOVES) {
      column = work.n % MN;
      asm volatile("" : "+r"(column));
    }
  }

  // Of rows BLOCK and columns PART.
  template <int BLOCK, int PART>
  DEVICE Factors factors(u32 slot) const {
    constexpr int FIRST = BLOCK * (WARP_ROWS == 32 ? 2 : 64), NEXT = WARP_ROWS == 32 ? 1 : 8;  // rows
    Factors found;
#pragma unroll
    for (int h = 0; h < 2; ++h) found.a[h] = UNIT * (OF_A ? ld_shared_f32(slot + place + (FIRST + h * NEXT) * 4) : 1);
    constexpr int BEGIN = PART * PART_COLUMNS, END = BEGIN + PART_COLUMNS;
    if constexpr (MOVES) {
#pragma unroll
      for (int i = BEGIN / BN * B_EACH; i < (END + BN - 1) / BN * B_EACH; ++i)
        found.b[i] = ld_shared_f32(slot + (A_ENTRIES + i) * 4);
    } else if constexpr (OF_B && !BY_COLUMN) {
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        int first = (BEGIN / COLUMNS + run) * COLUMNS, p = first / BN, at = B_EACH == 1 ? 0 : first % BN / MN;
        if (first < END) found.b[run] = ld_shared_f32(slot + (A_ENTRIES + p * B_EACH + at) * 4);
      }
    }
    return found;
  }

  template <int PART>
  DEVICE Columns columns(u32 slot) const {
    Columns found{};
    if constexpr (BY_COLUMN)
#pragma unroll
      for (int j = 0; j < PART_COLUMNS / 8; ++j) {
        u32 x, y;
        ld_shared_v2(slot + (A_ENTRIES + PART * PART_COLUMNS + 8 * j + thread % 4 * 2) * 4, x, y);
        found.of[2 * j] = __uint_as_float(x);
        found.of[2 * j + 1] = __uint_as_float(y);
      }
    return found;
  }

  template <int PART>
  DEVICE void add(Acc (&accumulators)[PRODUCTS * BN / 2], const PartSums& sums, const Factors& factors,
                  const Columns& columns) const {
    constexpr int BEGIN = PART * PART_COLUMNS;
    float by[2][RUNS];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        int first = (BEGIN / COLUMNS + run) * COLUMNS, p = first / BN * B_EACH;
        if (!OF_B || BY_COLUMN || first >= BEGIN + PART_COLUMNS) {
          by[h][run] = factors.a[h];
        } else if constexpr (MOVES) {
          by[h][run] = factors.a[h] * factors.b[p];
#pragma unroll
          for (int i = 1; i < B_EACH; ++i)
            if (first % BN + column >= i * MN) by[h][run] = factors.a[h] * factors.b[p + i];
        } else {
          by[h][run] = factors.a[h] * factors.b[run];
        }
      }
#pragma unroll
    for (int j = 0; j < PART_COLUMNS / 8; ++j) {
      int first = BEGIN + 8 * j, run = BY_COLUMN || !OF_B ? 0 : first / COLUMNS - BEGIN / COLUMNS;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Acc& sum = accumulators[first / 2 + i];
        sum = __fmaf_rn(sums[4 * j + i], by[i / 2][run] * (BY_COLUMN ? columns.of[2 * j + i % 2] : 1), sum);
      }
    }
  }
};
