// Host stand-ins for wgmma and what goes with it, in place of the generated one: descriptors are read as the hardware
// does, which swizzles by addresses. Each thread has its own sums at once; all of a warpgroup wait where it waits for
// wgmma.

static Barrier of_warpgroup[8];

template <int>
void setmaxnreg_inc() {}
template <int>
void setmaxnreg_dec() {}
static void prefetch_tensormap(const TensorMap*) {}
static void wgmma_fence() {}
static void wgmma_commit_group() {}
template <int PENDING>
void wgmma_wait_group() {
  of_warpgroup[threadIdx.x / 128].wait(128);
}
template <typename T, int COUNT>
void wgmma_done(T (&)[COUNT]) {}

template <int SPAN, u32 LEADING_BYTES, u32 STRIDE_BYTES>
struct WgmmaDescriptor {
  static constexpr u64 MODE = SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3, HIGH = MODE << 30 | STRIDE_BYTES >> 4;
  u32 low;

  explicit WgmmaDescriptor(u32 address) : low(address >> 4 | LEADING_BYTES >> 4 << 16) {}
  u64 at(u32 bytes) const { return HIGH << 32 | (low + (bytes >> 4)); }
};

static float wide(u32 at) {
  u32 bits = load_shared<u16>(at);
  return F16 ? f16_to_f32(bits) : __uint_as_float(bits << 16);
}

// Element k of a row, or of a column, of the matrix that a descriptor says.
static float element_of(u64 descriptor, bool k_major, int row, int k) {
  u32 first = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  u32 stride = (descriptor >> 32 & 0x3fff) << 4, mode = descriptor >> 62, span = mode ? 256 >> mode : 16;
  if (mode == 0 && k_major) return wide(first + row / 8 * stride + row % 8 * 16 + k / 8 * leading + k % 8 * 2);
  int chunk = span / 2;
  u32 at = k_major ? first + row / 8 * stride + row % 8 * span + k * 2
                   : first + row / chunk * leading + k / 8 * stride + k % 8 * span + row % chunk * 2;
  at ^= (at >> 7 & (span / 16 - 1)) << 4;
  return wide(at);
}

template <int COUNT>
void wgmma(float (&d)[COUNT], u64 a, u64 b, int accumulate) {
  int warp = threadIdx.x % 128 / 32;
  for (int i = 0; i < COUNT; ++i) {
    int row = warp * 16 + lane() / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float sum = accumulate ? d[i] : 0;
    for (int k = 0; k < 16; ++k) sum += element_of(a, true, row, k) * element_of(b, B_K_MAJOR, column, k);
    d[i] = sum;
  }
}

static void tma_load_box(u32 destination, const TensorMap* map, u32 barrier, int c, const int (&at)[AXES + 1]) {
  long long from[AXES + 2] = {c};
  std::copy(at, at + AXES + 1, from + 1);
  tma_load<AXES + 2>(destination, map, barrier, from);
}
