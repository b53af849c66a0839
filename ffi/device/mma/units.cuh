// One operand of elements of 4 bytes that are multiplied one by one, whose rows begin at multiples of 16 bytes: threads
// copy 4 neighbours at once. Its rows lie in shared memory as they do there.
//
// Neighbours across k stay together, so cp.async copies them. Those along k belong to 4 lines: they go through
// registers, from which each is stored on its own, to banks that no other lane of the warp stores to. (16 bytes of
// cp.async that a warp scatters take an SM 32 cycles, where 512 in a row take 7.)

using Component = Acc;
constexpr int COMPONENTS = 1;
constexpr int COMPONENT_BYTES = 4;
constexpr int VECTOR = 4;  // that a thread reads at once

// A line of a stage is one k, of a and then of each b; 16 bytes after each two put other lines in other banks.
constexpr int LINE_BYTES = (BM + PRODUCTS * BN) * 4;

DEVICE void from_word(float& x, u32 word) { x = __uint_as_float(word); }
DEVICE void from_word(int& x, u32 word) { x = static_cast<int>(word); }
DEVICE void from_word(u32& x, u32 word) { x = word; }

// A lane has rows and columns in fours, as they lie.
template <bool OF_A>
DEVICE constexpr int position(int r) {
  return r;
}
DEVICE u32 lane_row(int row) {
  int lane = threadIdx.x;
  return kept(row * 4 + (lane >> 4 & 1) * 16 + (lane >> 2 & 1) * 32 + (lane >> 3 & 1) * 64);
}
DEVICE u32 lane_column(int column) {
  int lane = threadIdx.x;
  return kept(column * 4 + (lane >> 1 & 1) * 16 + (lane & 1) * 32);
}
constexpr bool BY_ROWS = true;

// Of lanes whose numbers differ in `bit`, the one that has it gives its x for the other's y.
DEVICE void exchange(Acc& x, Acc& y, int bit) {
  bool has = threadIdx.x & bit;
  Acc got = __shfl_xor_sync(~0u, has ? x : y, bit);
  (has ? x : y) = got;
}

// Gives lanes the rows and columns that accumulators have: a row of each 8, and two columns.
DEVICE void place_sums(Accumulators& d) {
#pragma unroll
  for (int p = 0; p < PRODUCTS; ++p) {
    auto at = [&](int i, int j) -> Acc& { return d[p][i / 2][j / 2][i % 2 * 2 + j % 2]; };
#pragma unroll
    for (int i = 0; i < 2 * M_FRAGMENTS; ++i)
#pragma unroll
      for (int j = 0; j < 2 * N_FRAGMENTS; j += 4)
        exchange(at(i, j), at(i, j + 2), 1), exchange(at(i, j + 1), at(i, j + 3), 1);
#pragma unroll
    for (int i = 0; i < 2 * M_FRAGMENTS; i += 4)
#pragma unroll
      for (int j = 0; j < 2 * N_FRAGMENTS; ++j) {
        exchange(at(i, j), at(i + 2, j), 8), exchange(at(i + 1, j), at(i + 3, j), 8);
        exchange(at(i, j), at(i + 1, j), 4), exchange(at(i + 2, j), at(i + 3, j), 4);
      }
  }
}

template <int ROWS, bool K_MAJOR, bool OF_A, typename View>
struct ElementTile {
  static constexpr int BYTES = ROWS * 4;  // of a line
  static constexpr int STAGE_BYTES = BK * BYTES + (OF_A ? BK / 2 * 16 : 0);
  static constexpr int LINES = K_MAJOR ? ROWS : BK;         // of memory
  static constexpr int ACROSS = (K_MAJOR ? BK : ROWS) / 4;  // threads beside each other along one
  static constexpr int ALONG = THREADS / ACROSS;            // lines that all threads load from at once
  static constexpr int EACH = K_MAJOR ? 4 : 1;              // loads of a thread before it goes on: of lines 8 apart
  static constexpr int LOADS = (LINES + EACH * ALONG - 1) / (EACH * ALONG) * EACH;
  static_assert(THREADS % ACROSS == 0 && (!K_MAJOR || (ALONG % 8 == 0 && ROWS % 32 == 0)));

  static DEVICE constexpr int line_at(int k) { return k * LINE_BYTES + k / 2 * 16; }

  // Of the block that is loaded next.
  typename View::template Lines<LOADS, 1, K_MAJOR, ELEMENT> memory;
  int rows, depth;  // that are left from this thread's first on
  u32 offset;       // of its first element in a tile
  u32 held[K_MAJOR ? LOADS : 1][4];

  static DEVICE int own_line() {
    int along = threadIdx.x / ACROSS;
    return K_MAJOR ? along / 8 * 32 + along % 8 : along;
  }

  // What the i-th of this thread's loads adds to it.
  static DEVICE constexpr int line_of(int i) { return K_MAJOR ? i / 4 * ALONG * 4 + i % 4 * 8 : i * ALONG; }

  static DEVICE bool mine(int i) { return LINES % (EACH * ALONG) == 0 || own_line() + line_of(i) < LINES; }

  template <typename Source>
  DEVICE void begin(const Source& source, const char* matrix, int row, int rows_end, int k, int k_end) {
    int beside = threadIdx.x % ACROSS * 4, own_row = K_MAJOR ? own_line() : beside,
        own_k = K_MAJOR ? beside : own_line();
    memory.begin(source, matrix, (K_MAJOR ? row : k) + own_line(), K_MAJOR ? rows_end : k_end,
                 ((K_MAJOR ? k : row) + beside) * 4, line_of, [](int) { return 0; });
    rows = rows_end - row - own_row;
    depth = k_end - k - own_k;
    offset = kept(line_at(own_k) + own_row * 4);
  }

  template <int, int>
  DEVICE void load(u32 tile) {
    auto along = memory.along(0, 0);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (!mine(i)) break;
      Spot from = memory.at(i, line_of(i), along);
      bool there = (K_MAJOR ? rows : depth) > line_of(i) && (K_MAJOR ? depth : rows) > 0 && from.there;
      if constexpr (K_MAJOR) {
        ld_global_v4_if(there, from.p, held[i]);
      } else {
        cp_async<16>(tile + offset + line_at(line_of(i)), from.p, there);
      }
    }
  }

  DEVICE void advance() {
    memory.advance();
    depth -= BK;
  }

  DEVICE void deposit(u32 tile) const {
    if constexpr (K_MAJOR) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        if (!mine(i)) break;
#pragma unroll
        for (int k = 0; k < 4; ++k) st_shared_u32(tile + offset + line_at(k) + line_of(i) * 4, held[i][k]);
      }
    }
  }
};

template <int>
DEVICE void load_components(Component* to, u32 address) {
  Bytes16 v = ld_shared_v4(address);
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) from_word(to[i], words[i]);
}
