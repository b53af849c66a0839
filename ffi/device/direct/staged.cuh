// The tiles of a convolution by Toeplitz matrices (toeplitz.cuh) in shared memory: pixels, and results on their way
// out.

constexpr int SUB_PIXELS = STRIPS * 8 + 8, ROW_PIXELS = SUBS * SUB_PIXELS, PLACES = SUBS * STRIPS * 8;
// Words from one pair of channels to the next: no two lanes of a copy meet in a bank.
constexpr int PITCH = (ROW_PIXELS + 27) / 32 * 32 + 4;
constexpr int STAGE_WORDS = WARPS * PITCH;
constexpr int LOADS = (ROW_PIXELS * WARPS + THREADS - 1) / THREADS;
constexpr Math MATH = OPERAND == Dtype::bf16 ? Math::bf16 : Math::f16;

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

  // All of a row, where `at` says where a place of it lies, or -1.
  template <typename At>
  static DEVICE void copy(const u32* buffer, char* d, int first_channel, int channels, At at) {
    constexpr int VECTORS = 2 * WARPS / CHANNELS_EACH;
#pragma unroll 1
    for (int i = threadIdx.x; i < PLACES * VECTORS; i += THREADS) {
      int place = i / VECTORS, channel = i % VECTORS * CHANNELS_EACH;
      i64 pixel = at(place);
      if (pixel < 0 || first_channel + channel >= channels) continue;
      u32 words[4] = {};
#pragma unroll
      for (int w = 0; w < BYTES / 4; ++w) {
        int pair = channel / 2 + w / WORDS_EACH;
        words[w] = buffer[(pair * PLACE_PITCH + place) * WORDS_EACH + w % WORDS_EACH];
      }
      st_global<BYTES>(d + (pixel * channels + first_channel + channel) * SIZE<D>,
                       Bytes16{words[0], words[1], words[2], words[3]});
    }
  }
};
