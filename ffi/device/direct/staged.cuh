// The tiles of convolutions by Toeplitz matrices in shared memory: rows of pixels, words of two channels each, that are
// copied there, and results on their way out.

constexpr int PLACES = SUBS * STRIPS * 8, TAKEN = SUBS * STRIPS;  // places, and strips of them, of a row of all chunks
constexpr Math MATH = OPERAND == Dtype::bf16 ? Math::bf16 : Math::f16;

struct Chunks {
  int rows, chunks, subs;  // of a chunk; chunks of an image; of all images
  int pieces;              // of a row, of STRIPS strips each
};

// The sizes of images, and what lies before the first row and pixel of a block's.
struct Images {
  int height, width, channels, low_h, low_w;
};

// A row of SUBS chunks, SUB_PIXELS of each: [WARPS][PITCH] words, and how a thread copies its part of the next ones.
template <int SUB_PIXELS>
struct Tile {
  static constexpr int PIXELS = SUBS * SUB_PIXELS;
  static constexpr int PITCH = (PIXELS + 27) / 32 * 32 + 4;  // no two lanes of a copy meet in a bank
  static constexpr int WORDS = WARPS * PITCH, LOADS = (PIXELS + 31) / 32;
  const char* own;
  int pixel_bytes, height, width;
  int first_pixel[LOADS], first_row[LOADS];  // of all images; in its image, as far down as it is without

  // Words of one pair of channels, of every 32nd pixel.
  DEVICE void begin(const char* x, const Images& of, const Chunks& chunks, int channel, int sub, int place) {
    int pair = threadIdx.x % WARPS;
    own = x + static_cast<i64>(channel + 2 * pair) * SIZE<OPERAND>;
    pixel_bytes = of.channels * SIZE<OPERAND>, height = of.height, width = of.width;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      int at = threadIdx.x / WARPS + 32 * i, its_sub = sub + at / SUB_PIXELS;
      int column = place + at % SUB_PIXELS - of.low_w, image = its_sub / chunks.chunks;
      int row = (its_sub - image * chunks.chunks) * chunks.rows - of.low_h;
      bool there = its_sub < chunks.subs && static_cast<u32>(column) < static_cast<u32>(width);
      first_row[i] = there && at < PIXELS && channel + 2 * pair < of.channels ? row : -(1 << 30);
      first_pixel[i] = (image * height + row) * width + column;
    }
  }

  // Of the step-th row; pixels that are in no image are zero.
  DEVICE void load(u32 tile, int step) const {
    u32 to = tile + 4 * (threadIdx.x % WARPS * PITCH + threadIdx.x / WARPS);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (PIXELS % 32 && threadIdx.x / WARPS + 32 * i >= PIXELS) break;
      bool there = static_cast<u32>(first_row[i] + step) < static_cast<u32>(height);
      int pixel = there ? first_pixel[i] + step * width : 0;
      cp_async<4>(to + 128 * i, own + static_cast<i64>(pixel) * pixel_bytes, there);
    }
  }

  // Where the first pixel of a strip is, in a pair's words.
  static DEVICE int at(int strip) { return strip / STRIPS * SUB_PIXELS + strip % STRIPS * 8; }
};

using Pixels = Tile<STRIPS * 8 + 8>;  // under the windows of all places

// The results of PLACES of a dtype, two channels each, on their way to memory.
template <Dtype D>
struct Staged {
  static constexpr int WORDS_EACH = 2 * SIZE<D> / 4;
  static constexpr int PLACE_PITCH = (PLACES + 7) / 8 * 8 + (WARPS > 8 ? 2 : 4);
  static constexpr int BUFFER_WORDS = WARPS * PLACE_PITCH * WORDS_EACH;
  static constexpr int BYTES = UNIT * SIZE<D> < 16 ? UNIT * SIZE<D> : 16, CHANNELS_EACH = BYTES / SIZE<D>;

  template <typename Carrier>
  static DEVICE void stage(u32* buffer, int warp, int place, const Carrier (&y)[2]) {
    u32* to = buffer + (warp * PLACE_PITCH + place) * WORDS_EACH;
    if constexpr (SIZE<D> == 2) {
      *to = pack<D>(y[0], y[1]);
    } else {
      u32 low[1], high[1];
      unpack<D>(low, y[0]);
      unpack<D>(high, y[1]);
      to[0] = low[0], to[1] = high[0];
    }
  }

  // All of a row, where `at` says which pixel of all images a place of it is, or -1.
  template <typename At>
  static DEVICE void copy(const u32* buffer, char* d, int first_channel, int channels, At at) {
    constexpr int VECTORS = 2 * WARPS / CHANNELS_EACH;
#pragma unroll 1
    for (int i = threadIdx.x; i < PLACES * VECTORS; i += THREADS) {
      int place = i / VECTORS, channel = i % VECTORS * CHANNELS_EACH;
      int pixel = at(place);
      if (pixel < 0 || first_channel + channel >= channels) continue;
      u32 words[4] = {};
#pragma unroll
      for (int w = 0; w < BYTES / 4; ++w) {
        int pair = channel / 2 + w / WORDS_EACH;
        words[w] = buffer[(pair * PLACE_PITCH + place) * WORDS_EACH + w % WORDS_EACH];
      }
      st_global<BYTES>(d + (static_cast<i64>(pixel) * channels + first_channel + channel) * SIZE<D>,
                       Bytes16{words[0], words[1], words[2], words[3]});
    }
  }
};
