// One operand's tile, filled by all threads from lines that begin anywhere.

// 16 bytes on their way through registers, as the words that hold them: where rows begin anywhere the first may begin
// before them, and a fifth end behind. A word is loaded if it has a byte that may be; arrays lie in whole words. There
// is no branch, so that all loads are on their way at once.
template <int UNIT, bool APART = false>
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

// The same of pieces of UNIT bytes that lie apart.
template <int UNIT>
struct Held<UNIT, true> {
  static constexpr int WORD = UNIT < 4 ? UNIT : 4;  // bytes that are loaded to a register

  u32 word[16 / WORD];

  // The piece that is `byte` bytes into the 16.
  DEVICE void load(int byte, const char* p, bool there) {
    if constexpr (UNIT == 16) {
      ld_global_v4_if(there, p, word);
    } else {
#pragma unroll
      for (int i = 0; i < UNIT / WORD; ++i) word[byte / WORD + i] = ld_global_if<WORD>(there, p + WORD * i);
    }
  }

  DEVICE void store(u32 address) const {
    u32 x[4] = {};
#pragma unroll
    for (int i = 0; i < 16 / WORD; ++i) x[i * WORD / 4] |= word[i] << i * WORD % 4 * 8;
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

  static constexpr int PLACES = LOADS / OWN_LINES;  // of each
  static constexpr int PIECE = ASYNC || View::APART ? UNIT : 16;

  // Of the block that is loaded next.
  typename View::template Lines<OWN_LINES, PLACES, K_MAJOR, ELEMENT> memory;
  int lines, bytes;  // that are left from this thread's first unit on
  int unchanged;     // those along k that are left of the block that is changed next
  Held<UNIT, View::APART> held[ASYNC ? 1 : LOADS];
  int held_lines, held_bytes;  // what was left of both when that was loaded

  // The tile begins at row `row` of `rows` of a matrix, and at `k`.
  template <typename Source>
  DEVICE void begin(const Source& source, const char* matrix, int row, int rows, int k, int k_end) {
    int line = threadIdx.x / ACROSS % LINES, byte = column();
    int first = K_MAJOR ? row : k, of_line = (K_MAJOR ? k : row) * ELEMENT;
    memory.begin(source, matrix, first + line, K_MAJOR ? rows : k_end, of_line + byte, line_of,
                 [](int i) { return byte_of(i * OWN_LINES); });
    lines = (K_MAJOR ? rows - row : k_end - k) - line;
    bytes = (K_MAJOR ? k_end - k : rows - row) * ELEMENT - byte;
    unchanged = K_MAJOR ? bytes : lines;
  }

  // Of a line, in all panels: where this thread's unit of the first load lies.
  static DEVICE int column() { return threadIdx.x / ACROSS / LINES * SPAN + threadIdx.x % ACROSS * 16; }

  // The i-th of this thread's loads is so many lines, and so many bytes of a line, further on.
  static DEVICE constexpr int line_of(int i) { return i * STEP % LINES; }
  static DEVICE constexpr int byte_of(int i) { return i * STEP / LINES * SPAN; }

  DEVICE bool mine(int i) const { return EVEN || threadIdx.x + i * THREADS < BYTES / 16; }

  static DEVICE u32 place_of(u32 tile, int i) {
    int line = threadIdx.x / ACROSS % LINES + line_of(i), byte = column() + byte_of(i);
    return tile + byte / SPAN * PANEL + permuted<SPAN, READ>(line, byte % SPAN);
  }

  // Starts to load a part of a block of k into a tile: the TURN-th of TURNS. What is past the matrix, or k_end, is
  // zero.
  template <int TURN, int TURNS>
  DEVICE void load(u32 tile) {
    constexpr int FIRST = LOADS * TURN / TURNS, END = LOADS * (TURN + 1) / TURNS;
#pragma unroll
    for (int place = FIRST / OWN_LINES; place * OWN_LINES < END; ++place) {
      auto along = memory.along(place, byte_of(place * OWN_LINES));
#pragma unroll
      for (int j = 0; j < 16; j += PIECE) {
        if (j > 0) memory.skip(along, PIECE);
#pragma unroll
        for (int i = place * OWN_LINES; i < (place + 1) * OWN_LINES; ++i) {
          if (i < FIRST || i >= END || !mine(i)) continue;
          Spot from = memory.at(i % OWN_LINES, line_of(i), along);
          int valid = lines > line_of(i) && from.there ? bytes - byte_of(i) : 0;
          if constexpr (ASYNC) {
            cp_async<UNIT>(place_of(tile, i) + j, from.p, valid > j);
          } else if constexpr (View::APART) {
            held[i].load(j, from.p, valid > j);
          } else {
            held[i].load(from.p, valid);
          }
        }
      }
    }
  }

  DEVICE void advance() {
    held_lines = lines, held_bytes = bytes;
    memory.advance();
    (K_MAJOR ? bytes : lines) -= K_MAJOR ? BK * ELEMENT : BK;
  }

  // Changes what this thread brought into the tile that is read next: nobody else has seen it. What is past k_end stays
  // zero, as it came. One unit at a time: the operands take registers.
  DEVICE void change(u32 tile) {
#pragma unroll 1
    for (int i = 0; i < LOADS; ++i) {
      int valid = K_MAJOR ? unchanged - byte_of(i) : (unchanged - line_of(i)) * 16;
      if (!mine(i) || valid <= 0) continue;
      u32 at = place_of(tile, i);
      Bytes16 v = ld_shared_v4(at);
      u32 x[4] = {v.x, v.y, v.z, v.w};
      memory.change(x, line_of(i), byte_of(i), valid);
      st_shared_v4(at, x[0], x[1], x[2], x[3]);
    }
    memory.changed();
    unchanged -= K_MAJOR ? BK * ELEMENT : BK;
  }

  // Puts into a tile what came through registers, after the advance, which does not change the skew.
  DEVICE void deposit(u32 tile) const {
    static_assert(BK * ELEMENT % 4 == 0 && BK % 4 == 0);
    if constexpr (!ASYNC) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        if (!mine(i)) continue;
        if constexpr (View::APART) {
          held[i].store(place_of(tile, i));
        } else {
          Spot from = memory.at(i % OWN_LINES, line_of(i), memory.along(i / OWN_LINES, byte_of(i)));
          int valid = held_lines > line_of(i) && from.there ? held_bytes - byte_of(i) : 0;
          held[i].store(place_of(tile, i), Held<UNIT>::skew_of(from.p), valid);
        }
      }
    }
  }
};
