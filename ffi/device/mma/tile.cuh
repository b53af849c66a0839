// One operand's tile, filled by all threads from lines that begin anywhere.

// 16 bytes on their way through registers, as the words that hold them: where rows begin anywhere the first may begin
// before them, and a fifth end behind. A word is loaded if it has a byte that may be; arrays lie in whole words. There
// is no branch, so that all loads are on their way at once.
template <int UNIT>
struct Held {
  u32 word[UNIT < 4 ? 5 : 4];

  // Of 16 bytes at `p`, `valid` are there.
  DEVICE void load(const char* p, int valid) {
    if constexpr (UNIT == 16) {
      ld_global_v4_if(valid > 0, p, word);
    } else {
      int skew = skew_of(p);
#pragma unroll
      for (int i = 0; i < (UNIT < 4 ? 5 : 4); ++i)
        word[i] = ld_global_u32_if(valid > 0 && 4 * i - skew < valid, p - skew + 4 * i);
    }
  }

  static DEVICE int skew_of(const char* p) { return UNIT < 4 ? reinterpret_cast<u64>(p) & 3 : 0; }

  // What is not there is zero.
  DEVICE void get(u32 (&x)[4], int skew, int valid) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = word[i];
      if constexpr (UNIT < 4) {
        int there = valid - 4 * i;
        u32 mask = there >= 4 ? ~0u : there <= 0 ? 0 : (1u << 8 * there) - 1;
        x[i] = __funnelshift_r(word[i], word[i + 1], skew * 8) & mask;
      }
    }
  }

  DEVICE void store(u32 address, int skew, int valid) const {
    u32 x[4];
    get(x, skew, valid);
    st_shared_v4(address, x[0], x[1], x[2], x[3]);
  }
};

// Lines in memory begin at multiples of UNIT bytes.
template <int ROWS, int ELEMENT, bool K_MAJOR, int UNIT, Read READ, typename View>
struct Operand : Panels<ROWS, ELEMENT, K_MAJOR> {
  using Tile = Panels<ROWS, ELEMENT, K_MAJOR>;
  using Tile::BYTES, Tile::LINES, Tile::PANEL, Tile::SPAN;

  static constexpr int ACROSS = SPAN / 16;       // threads beside each other along a line
  static constexpr int STEP = THREADS / ACROSS;  // lines that all threads load at once
  static constexpr int LOADS = (BYTES / 16 + THREADS - 1) / THREADS;
  static constexpr bool EVEN = BYTES / 16 % THREADS == 0;
  static constexpr bool ASYNC = HAS_CP_ASYNC && UNIT >= 4;
  static constexpr int OWN_LINES = STEP < LINES ? LINES / STEP : 1;  // that a thread copies of
  static_assert(LINES % STEP == 0 || STEP % LINES == 0, "each load is of the same unit of a line");

  typename View::template Lines<OWN_LINES> memory;  // from this thread's first unit of the block that is loaded next on
  int lines, bytes;                                 // that are left from there on
  Held<UNIT> held[ASYNC ? 1 : LOADS];
  int held_lines, held_bytes;  // what was left of both when that was loaded

  // The tile begins at row `row` of `rows` of a matrix, and at `k`.
  template <typename Source>
  DEVICE void begin(const Source& source, const char* matrix, int row, int rows, int k, int k_end) {
    int line = threadIdx.x / ACROSS % LINES, byte = column();
    int first = K_MAJOR ? row : k, of_line = (K_MAJOR ? k : row) * ELEMENT;
    memory.template begin<ELEMENT>(source, matrix, first + line, K_MAJOR ? rows : k_end, line_of);
    memory.advance(of_line);
    memory.advance(byte);
    lines = (K_MAJOR ? rows - row : k_end - k) - line;
    bytes = (K_MAJOR ? k_end - k : rows - row) * ELEMENT - byte;
  }

  // Of a line, in all panels: where this thread's unit of the first load lies.
  static DEVICE int column() { return threadIdx.x / ACROSS / LINES * SPAN + threadIdx.x % ACROSS * 16; }

  // The i-th of this thread's loads is so many lines, and so many bytes of a line, further on.
  static DEVICE constexpr int line_of(int i) { return i * STEP % LINES; }
  static DEVICE constexpr int byte_of(int i) { return i * STEP / LINES * SPAN; }

  DEVICE const char* from(int i) const { return memory.at(i % OWN_LINES, line_of(i)) + byte_of(i); }
  DEVICE bool mine(int i) const { return EVEN || threadIdx.x + i * THREADS < BYTES / 16; }

  static DEVICE u32 place(u32 tile, int i) {
    int line = threadIdx.x / ACROSS % LINES + line_of(i), byte = column() + byte_of(i);
    return tile + byte / SPAN * PANEL + permuted<SPAN, READ>(line, byte % SPAN);
  }

  // Starts to load a part of a block of k into a tile: the TURN-th of TURNS. What is past the matrix, or k_end, is
  // zero.
  template <int TURN, int TURNS>
  DEVICE void load(u32 tile) {
#pragma unroll
    for (int i = LOADS * TURN / TURNS; i < LOADS * (TURN + 1) / TURNS; ++i) {
      if (!mine(i)) break;
      const char* p = from(i);
      int valid = lines > line_of(i) && memory.there(i % OWN_LINES) ? bytes - byte_of(i) : 0;
      if constexpr (ASYNC) {
        u32 to = place(tile, i);
#pragma unroll
        for (int j = 0; j < 16; j += UNIT) cp_async<UNIT>(to + j, p + j, valid > j);
      } else {
        held[i].load(p, valid);
      }
    }
  }

  DEVICE void advance() {
    held_lines = lines, held_bytes = bytes;
    if constexpr (K_MAJOR) {
      memory.advance(BK * ELEMENT);
    } else {
      memory.advance_lines(BK);
    }
    (K_MAJOR ? bytes : lines) -= K_MAJOR ? BK * ELEMENT : BK;
  }

  // Puts into a tile what came through registers, after the advance, which does not change the skew.
  DEVICE void deposit(u32 tile) const {
    static_assert(BK * ELEMENT % 4 == 0 && BK % 4 == 0);
    if constexpr (!ASYNC) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        int valid = held_lines > line_of(i) && memory.there(i % OWN_LINES) ? held_bytes - byte_of(i) : 0;
        if (mine(i)) held[i].store(place(tile, i), Held<UNIT>::skew_of(from(i)), valid);
      }
    }
  }
};
