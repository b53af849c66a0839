// One operand whose elements threads copy one by one, the components of complex numbers apart, so that those which a
// thread multiplies are neighbours in shared memory.
//
//   [BK][COMPONENTS][ROWS], 16 bytes   a line is one k
//
// Rows are permuted in a line: VECTOR of a thread's are loaded at once.

template <typename T>
struct ComponentOf {
  using Type = T;
};
template <typename R>
struct ComponentOf<Complex<R>> {
  using Type = R;
};
using Component = ComponentOf<Acc>::Type;
constexpr int COMPONENTS = sizeof(Acc) / sizeof(Component);
constexpr int COMPONENT_BYTES = sizeof(Component);
constexpr int VECTOR = 16 / COMPONENT_BYTES;                    // components that a thread loads at once
constexpr int ROWS_VECTOR = VECTOR < BM / 8 ? VECTOR : BM / 8;  // of a

DEVICE void from_words(float& x, const u32* words) { x = __uint_as_float(words[0]); }
DEVICE void from_words(int& x, const u32* words) { x = static_cast<int>(words[0]); }
DEVICE void from_words(u32& x, const u32* words) { x = words[0]; }
DEVICE void from_words(i64& x, const u32* words) { x = static_cast<i64>(static_cast<u64>(words[1]) << 32 | words[0]); }
DEVICE void from_words(u64& x, const u32* words) { x = static_cast<u64>(words[1]) << 32 | words[0]; }
DEVICE void from_words(double& x, const u32* words) { x = __hiloint2double(words[1], words[0]); }

// Where in a line row r lies, and what lies at p: both permute the bits of a number, so that they are sums of what they
// are of its parts. A thread has rows 8 apart (OF_A), or two neighbours of each 8.
template <bool OF_A>
DEVICE constexpr int position(int r) {
  constexpr int V = ROWS_VECTOR;
  if (OF_A) return r % 8 * V + r / 8 % V + r / (8 * V) * (8 * V);
  return VECTOR == 4 ? r % 2 + r / 8 % 2 * 2 + r / 2 % 4 * 4 + r / 16 * 16 : r;
}

template <bool OF_A>
DEVICE constexpr int row_at(int p) {
  constexpr int V = ROWS_VECTOR;
  if (OF_A) return p / V % 8 + p % V * 8 + p / (8 * V) * (8 * V);
  return VECTOR == 4 ? p % 2 + p / 2 % 2 * 8 + p / 4 % 4 * 2 + p / 16 * 16 : p;
}

// Where a lane's first row and column lie: it has a row of each 8, and two columns, as accumulators lie.
DEVICE u32 lane_row(int row) { return position<true>(row + threadIdx.x % 32 / 4) * COMPONENT_BYTES; }
DEVICE u32 lane_column(int column) { return position<false>(column + threadIdx.x % 4 * 2) * COMPONENT_BYTES; }
constexpr bool BY_ROWS = false;  // multiplied row by row, not column by column

// The epilogue stores pairs of neighbours, and the compiler would have them in pairs of registers in the whole loop,
// where half of the multiply-adds would read two registers of one bank then: words of different rows are pairs first.
DEVICE void place_sums(Accumulators& d) {
  if constexpr (COMPONENT_BYTES == 4 && SLICES_AT_ONCE * SLICE * WARPS_K < BK) {
    constexpr int COUNT = PRODUCTS * M_FRAGMENTS * N_FRAGMENTS, HALF = sizeof(AccFragment) / 8;
    u32(&words)[COUNT][2 * HALF] = reinterpret_cast<u32(&)[COUNT][2 * HALF]>(d);
    u32 zero = pinned(0);
#pragma unroll
    for (int i = 0; i < COUNT * HALF; ++i) pass_pair(words[i / HALF][i % HALF + HALF], words[i / HALF][i % HALF], zero);
  }
}

// One operand, whose components threads load one by one: neighbours in memory lie apart in a line, or in different
// lines. ACROSS threads beside each other load a row's neighbours along k, or a line's.
template <int ROWS, bool K_MAJOR, bool OF_A, typename View>
struct ElementTile {
  static constexpr int PITCH = COMPONENTS * ROWS * COMPONENT_BYTES + 16;
  static constexpr int BYTES = BK * PITCH, STAGE_BYTES = BYTES;
  static constexpr int WIDE = THREADS / BK > 32 ? THREADS / BK : 32;
  static constexpr int ACROSS = K_MAJOR ? 8 : WIDE < ROWS ? WIDE : ROWS;
  static constexpr int ALONG = THREADS / ACROSS;  // lines of memory that all threads load from at once
  static constexpr int LOADS = (BK * ROWS + THREADS - 1) / THREADS;
  static constexpr int FIRST = K_MAJOR ? ROWS / ALONG > 1 ? ROWS / ALONG : 1 : ROWS / ACROSS;  // loads along the rows
  static_assert((ROWS & (ROWS - 1)) == 0 && BK % 8 == 0, "what a load adds to a place is known to the compiler");

  static constexpr int OWN_LINES = K_MAJOR ? FIRST : (LOADS + FIRST - 1) / FIRST;  // that a thread copies of
  static constexpr int PLACES = (LOADS + OWN_LINES - 1) / OWN_LINES;               // of each

  // Of the block that is loaded next.
  typename View::template Lines<OWN_LINES, PLACES, K_MAJOR, ELEMENT> memory;
  int rows, depth;  // of the whole tile, and of k, that are left
  u32 offset;       // of the first element in a tile
  u32 held[HAS_CP_ASYNC ? 1 : LOADS][ELEMENT / 4];

  static DEVICE constexpr int line_at(int k) { return k * PITCH; }

  static DEVICE int across() { return threadIdx.x % ACROSS; }
  static DEVICE int along() { return threadIdx.x / ACROSS; }
  static DEVICE int own_k() { return K_MAJOR ? across() + along() / ROWS * ACROSS : along(); }
  static DEVICE int own_row() { return K_MAJOR ? row_at<OF_A>(along() % ROWS) : across(); }

  // What the i-th of this thread's loads adds to k and to the row.
  static DEVICE constexpr int k_of(int i) { return K_MAJOR ? i * ALONG / ROWS * ACROSS : i / FIRST * ALONG; }
  static DEVICE constexpr int row_of(int i) { return K_MAJOR ? row_at<OF_A>(i * ALONG % ROWS) : i % FIRST * ACROSS; }

  // The lines and the places of the loads: of K_MAJOR ones lines first.
  static DEVICE constexpr int line(int i) { return K_MAJOR ? i % FIRST : i / FIRST; }
  static DEVICE constexpr int place(int i) { return K_MAJOR ? i / FIRST : i % FIRST; }
  static DEVICE constexpr int line_of(int line) { return K_MAJOR ? row_of(line) : k_of(line * FIRST); }
  static DEVICE constexpr int byte_of(int place) { return (K_MAJOR ? k_of(place * FIRST) : row_of(place)) * ELEMENT; }

  template <typename Source>
  DEVICE void begin(const Source& source, const char* matrix, int row, int rows_end, int k, int k_end) {
    int r = row + own_row(), first = k + own_k();
    memory.begin(source, matrix, K_MAJOR ? r : first, K_MAJOR ? rows_end : k_end, (K_MAJOR ? first : r) * ELEMENT,
                 line_of, byte_of);
    rows = rows_end - row;
    depth = k_end - k;
    offset = own_k() * PITCH + position<OF_A>(own_row()) * COMPONENT_BYTES;
  }

  static DEVICE bool mine(int i) { return BK * ROWS % THREADS == 0 || threadIdx.x + i * THREADS < BK * ROWS; }

  DEVICE u32 place_of(u32 tile, int i) const {
    return tile + offset + k_of(i) * PITCH + position<OF_A>(row_of(i)) * COMPONENT_BYTES;
  }

  // Starts to load a block of k, all of which is there unless it is an `edge`.
  template <bool EDGE>
  DEVICE void load_block(u32 tile) {
    int rows_left = rows - own_row(), depth_left = depth - own_k();
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (!mine(i)) break;
      auto along = memory.along(place(i), byte_of(place(i)));
      auto [p, inside] = memory.at(line(i), line_of(line(i)), along);
      bool there = (!EDGE || (rows_left > row_of(i) && depth_left > k_of(i))) && inside;
      if constexpr (HAS_CP_ASYNC) {
#pragma unroll
        for (int z = 0; z < COMPONENTS; ++z)
          cp_async<COMPONENT_BYTES>(place_of(tile, i) + z * ROWS * COMPONENT_BYTES, p + z * COMPONENT_BYTES, there);
      } else {
#pragma unroll
        for (int word = 0; word < ELEMENT / 4; ++word) held[i][word] = ld_global_u32_if(there, p + 4 * word);
      }
    }
  }

  template <int, int>
  DEVICE void load(u32 tile) {
    if (rows >= ROWS && depth >= BK) {
      load_block<false>(tile);
    } else {
      load_block<true>(tile);
    }
  }

  DEVICE void advance() {
    memory.advance();
    depth -= BK;
  }

  DEVICE void deposit(u32 tile) const {
    if constexpr (!HAS_CP_ASYNC) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
        if (mine(i))
#pragma unroll
          for (int word = 0; word < ELEMENT / 4; ++word)
            st_shared_u32(place_of(tile, i) + (word / (COMPONENT_BYTES / 4) * ROWS * COMPONENT_BYTES +
                                               word % (COMPONENT_BYTES / 4) * 4),
                          held[i][word]);
    }
  }
};

// N neighbours in shared memory, of 4, 8 or 16 bytes together.
template <int N>
DEVICE void load_components(Component* to, u32 address) {
  u32 words[4];
  if constexpr (N * COMPONENT_BYTES == 16) {
    Bytes16 v = ld_shared_v4(address);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (N * COMPONENT_BYTES == 8) {
    ld_shared_v2(address, words[0], words[1]);
  } else {
    words[0] = ld_shared_u32(address);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) from_words(to[i], words + i * (COMPONENT_BYTES / 4));
}
