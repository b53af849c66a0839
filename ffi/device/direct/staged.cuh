// What convolutions by Toeplitz matrices share. A block has 2 * WARPS channels of SUBS images at once, whose rows are
// as far down as each other's, and of them a piece of STRIPS strips of 8 places. Rows of pixels are copied into shared
// memory well ahead, as words of two channels, one plane of them a warp; so are results on their way out.

constexpr int STEP = 2;  // rows of pixels between two barriers
constexpr int SUB_PLACES = STRIPS * 8, SUB_PIXELS = SUB_PLACES + 8, TAKEN = SUBS * STRIPS;
constexpr Math MATH = OPERAND == Dtype::bf16 ? Math::bf16 : Math::f16;

// How the places of a launch are divided: PARTS blocks have the same channels.
struct Chunks {
  int images, rows, chunks, pieces, parts;
};

// The sizes of images, and what lies before their first row and pixel.
struct Images {
  int height, width, channels, low_h, low_w;
};

// What a block goes through: of one chunk of rows, and one piece, every `by`-th group of images from the first on.
struct Work {
  int channel, part, column, row, end, group, by, rounds;

  DEVICE Work(const Chunks& of, int tiles, int height) {
    channel = blockIdx.x % tiles * WARPS * 2, part = blockIdx.x / tiles;
    column = part % of.pieces * SUB_PLACES, row = part / of.pieces % of.chunks * of.rows;
    end = min(row + of.rows, height), group = part / of.pieces / of.chunks;
    by = of.parts / of.pieces / of.chunks;
    int groups = (of.images + SUBS - 1) / SUBS;
    rounds = group < groups ? (groups - group + by - 1) / by : 0;
  }
};

// A row of SUBS images, SUB words of each and up to READ of them pixels: [WARPS][PITCH] words, and how a thread copies
// its part of the next one. Words that are no pixels are zero from the start.
template <int READ, int SUB>
struct Tile {
  static constexpr int PITCH = (SUBS * SUB + 27) / 32 * 32 + 4;
  static constexpr int WORDS = WARPS * PITCH, AT_ONCE = 32 / SUBS, LOADS = (READ + AT_ONCE - 1) / AT_ONCE;
  static constexpr int ALL = PIECES > 1 ? 1 : READ / AT_ONCE;  // loads of every thread that has any
  const char* next;
  i64 row_bytes, step, jump;
  u32 to;
  int loads, image, images, by;

  // From `row` on, `rows` of each group.
  DEVICE void begin(const char* x, const Images& of, const Work& work, int all_images, int row, int rows) {
    int pair = threadIdx.x % WARPS, slot = threadIdx.x / WARPS, sub = slot / AT_ONCE, column = slot % AT_ONCE;
    int from = work.column - of.low_w, first = max(from, 0), count = min(from + SUB, of.width) - first;
    int channel = work.channel + 2 * pair;
    loads = sub < SUBS && channel < of.channels ? (max(count - column, 0) + AT_ONCE - 1) / AT_ONCE : 0;
    to = 4 * (pair * PITCH + sub * SUB + first - from + column);
    i64 pixel_bytes = of.channels * SIZE<OPERAND>;
    image = work.group * SUBS + sub, images = all_images, by = work.by * SUBS;
    row_bytes = of.width * pixel_bytes, step = AT_ONCE * pixel_bytes;
    jump = (static_cast<i64>(by) * of.height - rows) * row_bytes;
    next = x + (static_cast<i64>(image) * of.height + row) * row_bytes + (first + column) * pixel_bytes +
           channel * SIZE<OPERAND>;
  }

  // Of an image that is not there zeros.
  DEVICE void load(u32 stage) const {
    if (loads == 0) return;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (i < ALL || i < loads) cp_async<4>(stage + to + 4 * AT_ONCE * i, next + i * step, image < images);
  }
  DEVICE void to_next_row() { next += row_bytes; }
  DEVICE void to_next_group() { next += jump, image += by; }

  // Where the first pixel of a strip is, in a pair's words.
  static DEVICE int at(int strip) { return strip / STRIPS * SUB + strip % STRIPS * 8; }
};

using Pixels = Tile<READ_PIXELS, SUB_PIXELS>;  // under the windows of all places

// The steps of a loop that is unrolled by WINDOW_H of them, so that what moves by STEP rows at each stays in its
// registers: step(Phase<i>{}) of every i-th, until one returns false.
template <int I>
struct Phase {
  static constexpr int row = I * STEP;
};
template <int I = 0, typename Step>
DEVICE bool in_turn(Step& step) {
  if constexpr (I == WINDOW_H) {
    return true;
  } else {
    return step(Phase<I>{}) && in_turn<I + 1>(step);
  }
}

// One of them, told which.
template <int I = 0, typename Step>
DEVICE bool in_phase(int phase, Step& step) {
  if constexpr (I + 1 < WINDOW_H) {
    if (phase != I) return in_phase<I + 1>(phase, step);
  }
  return step(Phase<I>{});
}

// Shared memory of so many bytes, a multiple of 16, as zeros.
DEVICE void clear(u32 base, int bytes) {
  for (int i = 16 * threadIdx.x; i < bytes; i += 16 * THREADS) st_shared_v4(base + i, 0, 0, 0, 0);
}

// What a thread has of each row of results: CHANNELS neighbours of them, of 8 / CHANNELS places that are neighbours
// too.
template <int CHANNELS>
struct Own {
  static constexpr int PLACES = 8 / CHANNELS, ACROSS = 2 * WARPS / CHANNELS;  // threads of a place
  static constexpr bool EVEN = PIECES == 1 && READ_PLACES % PLACES == 0;      // none has fewer places
  int item, lane, place, channel, channels, places;                           // those that there are, or less
  int pixel;  // the number of its first place, in an image's first row, among those of all images; or there is none

  DEVICE Own(const Work& work, int all_images, int height, int width, int all_channels)
      : item(threadIdx.x / ACROSS), lane(threadIdx.x % ACROSS), place(item * PLACES) {
    int column = work.column + place % SUB_PLACES, image = work.group * SUBS + place / SUB_PLACES;
    places = min(PLACES, width - column);
    channel = work.channel + lane * CHANNELS, channels = all_channels - channel;
    bool there = place < TAKEN * 8 && places > 0 && channels > 0 && image < all_images;
    pixel = (there ? image : all_images) * height * width + column;
  }
};

// An operand that is as large as the results is copied ahead, each thread's own 8 channels of it, of 16 bits.
constexpr int PLANE_BYTES = 16 * THREADS;

DEVICE void copy_ahead(u32 to, const char* p, int channels) {
#pragma unroll
  for (int v = 0; v < 8; v += UNIT)
    if (UNIT == 8 || v < channels) cp_async<2 * UNIT>(to + 2 * v, p + 2 * v, true);
}

// The results of 16 strips of a dtype, two channels each, on their way to memory.
template <Dtype D>
struct Staged {
  static constexpr int EACH = 2 * SIZE<D> / 4;                      // words of two channels
  static constexpr int PITCH = (128 + (WARPS > 8 ? 2 : 4)) * EACH;  // few lanes meet in a bank
  static constexpr int WORDS = WARPS * PITCH;
  static constexpr int BYTES = UNIT * SIZE<D> < 16 ? UNIT * SIZE<D> : 16, CHANNELS_EACH = BYTES / SIZE<D>;

  template <typename Carrier>
  static DEVICE void stage(u32* buffer, int warp, int place, const Carrier (&y)[2]) {
    u32* to = buffer + warp * PITCH + place * EACH;
    if constexpr (SIZE<D> == 2) {
      *to = pack<D>(y[0], y[1]);
    } else {
      u32 low[1], high[1];
      unpack<D>(low, y[0]);
      unpack<D>(high, y[1]);
      to[0] = low[0], to[1] = high[0];
    }
  }

  static DEVICE void copy(const u32* buffer, char* d, const Own<8>& own) {
    const u32* from = buffer + own.lane * 4 * PITCH + own.place * EACH;
#pragma unroll
    for (int v = 0; v < 8; v += CHANNELS_EACH) {
      if (UNIT < 8 && v >= own.channels) break;  // others are there as one
      u32 words[4] = {};
#pragma unroll
      for (int i = 0; i < BYTES / 4; ++i) words[i] = from[(v / 2 + i / EACH) * PITCH + i % EACH];
      st_global<BYTES>(d + v * SIZE<D>, Bytes16{words[0], words[1], words[2], words[3]});
    }
  }
};

// Sums of 16 strips in float32, on their way to the threads that make results of them: places of each channel.
struct Sums {
  struct alignas(8) Two {
    float first, second;
  };
  static constexpr int PITCH = 8 * 16 + 2, WORDS = 2 * WARPS * PITCH;  // few lanes meet in a bank
  static DEVICE int at(int channel, int place) { return channel * PITCH + (place ^ channel / 16 % 2 * 4); }

  // Of two neighbouring places two channels' sums.
  static DEVICE void stage(u32* to, const Acc (&y)[2][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) *reinterpret_cast<Two*>(to + i * PITCH) = {y[0][i], y[1][i]};
  }

  // The same of as many channels as there is room for.
  template <typename Done>
  static DEVICE void take(const u32* from, Done (&to)[2]) {
    constexpr int COUNT = sizeof(to[0].acc) / sizeof(float);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const Two two = *reinterpret_cast<const Two*>(from + i * PITCH);
      to[0].acc[i] = two.first, to[1].acc[i] = two.second;
    }
  }
};
