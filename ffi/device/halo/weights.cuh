// The gradient of a convolution's weights on sm_90a: over pixels, the sum of windows times the result's gradient there.
//
// Of 64 pixels TMA loads the box of the image that all taps need, and columns of the gradient. A pixel is a row of
// either in shared memory, SPAN bytes of channels or BN columns, and k is pixels: both operands of a wgmma lie along
// their other axis. The columns are its 64 rows. Its N columns are TAPS taps of CHUNK channels, each a pixel after the
// one before. Where there are fewer columns than 64 they are rows COPIES times, of pixels that are TAPS taps apart: a
// copy has other taps. As a box begins where the first copy's pixels do, the last one's begin `lead` pixels before.
//
// A warpgroup has UNITS sums of 64 x N: those of taps along the next axis, and of what TAPS * COPIES leave of the
// innermost one. Taps along a third axis, planes, are of other blocks. A split has some of the pixels; XLA adds up what
// splits write.
//
// PACKED: windows are of few channels, as in tile.cuh, and a unit's columns are a row of a window.
//
// PARAMETERS and what is made of them: cutjax/kernels/halo/weights_kernel.py.

constexpr int SPAN = PACKED ? 16 : CHUNK * 2, COLUMNS = TAPS * CHUNK;
constexpr int THREADS = 128 * (1 + CONSUMERS);
constexpr int MARCH = AXES - 1;             // the axis along which tiles follow each other
constexpr int GROUP_BYTES = 8 * BN * 2;     // of 8 pixels' columns
constexpr u32 MODE_OF[] = {0, 3, 2, 0, 1};  // of a descriptor, by 32 bytes of a swizzle's span

struct Windows {
  const TensorMap* map;
  int box_bytes, stage_bytes;
  int group_bytes, tap_bytes;     // from 8 pixels to the next ones, and from a tap to the next along the innermost axis
  int window;                     // taps along that
  int parts, part_bytes;          // of TAPS * COPIES of them
  int rows, row_bytes;            // taps along the next axis
  int planes, plane_step;         // along the one after it, and how far a tap moves the box
  int tiles[AXES];                // of 64 pixels
  int low[AXES], strides[AXES];   // as those of kernels.operand.Im2col
  int pieces, channels, columns;  // of a pixel of a group of channels, and of a group in the gradient
};

struct Gradient {
  const TensorMap* map;
  int offset, box_bytes;  // in a stage
  int copy_bytes, lead;
};

// Pixels of a tile along an axis, AXES being that of images.
DEVICE constexpr int size_along(int axis) { return (axis == 0 ? 8 : 1) * (axis == GROUP_AXIS ? 8 : 1); }

struct Tile {
  int at[AXES + 1];

  DEVICE Tile(const Windows& windows, int index) {
    int next = index / windows.tiles[MARCH];
    at[MARCH] = (index - next * windows.tiles[MARCH]) * size_along(MARCH);
#pragma unroll
    for (int i = 0; i < MARCH; ++i) {
      index = next, next = index / windows.tiles[i];
      at[i] = (index - next * windows.tiles[i]) * size_along(i);
    }
    at[AXES] = next * size_along(AXES);
  }
};

// A split of the sums for some columns and channels.
struct Item {
  int split, column, piece, plane, first, last;  // the first tile, and the one after the last

  DEVICE Item(const Windows& windows, int index, int columns, int splits, int tiles) {
    int sets = columns * windows.pieces * windows.planes;
    split = index / sets, index -= split * sets;
    plane = index / (columns * windows.pieces), index -= plane * columns * windows.pieces;
    piece = index / columns, column = (index - piece * columns) * BN;
    first = static_cast<int>(static_cast<i64>(split) * tiles / splits);
    last = static_cast<int>(static_cast<i64>(split + 1) * tiles / splits);
  }
};

DEVICE void load(const Windows& windows, const Gradient& gradient, const Item& item, Pipeline& pipe) {
  int group = item.column / windows.columns;
  for (int index = item.first; index < item.last; ++index) {
    Tile tile(windows, index);
    int at[AXES + 1];
#pragma unroll
    for (int i = 0; i < AXES; ++i)
      at[i] = PACKED && i == 0 ? tile.at[i] / 8 : tile.at[i] * windows.strides[i] - windows.low[i];
    at[AXES] = tile.at[AXES];
    at[MARCH] += item.plane * windows.plane_step;
    mbarrier_wait(pipe.empty_barrier(), pipe.phase ^ 1);
    mbarrier_arrive_expect_tx(pipe.full_barrier(), windows.box_bytes + gradient.box_bytes);
    u32 box = pipe.boxes + pipe.stage * windows.stage_bytes;
    int c = PACKED ? 0 : group * windows.channels + item.piece * CHUNK;
    tma_load_box(box, windows.map, pipe.full_barrier(), c, at);
    tile.at[0] -= gradient.lead;
    tma_load_box(box + gradient.offset, gradient.map, pipe.full_barrier(), item.column, tile.at);
    pipe.advance();
  }
}

// A unit's taps: the first along the innermost axis, and the place along the next.
struct Unit {
  int part, row;

  DEVICE Unit(const Windows& windows, int index) { row = index / windows.parts, part = index - row * windows.parts; }

  DEVICE u32 offset(const Windows& windows) const { return part * windows.part_bytes + row * windows.row_bytes; }
};

using Sums = Acc[COLUMNS / 2];

// One warpgroup: adds the products of 64 pixels.
DEVICE void multiply(Sums (&sums)[UNITS], const u32 (&offsets)[UNITS], const Windows& windows, const Gradient& gradient,
                     u32 box) {
  u32 group = static_cast<u32>(windows.group_bytes) >> 4, tap = static_cast<u32>(windows.tap_bytes) >> 4;
  u64 high_a = static_cast<u64>(GROUP_BYTES >> 4 | MODE_OF[BN * 2 / 32] << 30) << 32;
  u64 high_b = static_cast<u64>(PACKED ? 1 : group | MODE_OF[SPAN / 32] << 30) << 32;
  u32 a = (box + gradient.offset & 0x3FFFF) >> 4 | static_cast<u32>(gradient.copy_bytes) >> 4 << 16;
  u32 b = (box & 0x3FFFF) >> 4 | (PACKED ? group : tap) << 16;
  wgmma_fence();
#pragma unroll
  for (int slice = 0; slice < 4; ++slice)
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit)
      wgmma(sums[unit], high_a | (a + slice * (2 * GROUP_BYTES >> 4)), high_b | (b + slice * 2 * group + offsets[unit]),
            1);
  wgmma_commit_group();
}

// Writes a unit's sums to its rows of the gradient of weights, [splits, rows, n].
DEVICE void store(const Sums& sums, const Unit& unit, const Windows& windows, const Item& item, float* d, int rows,
                  int n, int thread) {
  int lane = thread % 32, of_other_axes = item.plane * windows.rows + unit.row;
  int channels = PACKED ? CHUNK : windows.pieces * CHUNK;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = thread / 32 * 16 + lane / 4 + 8 * h, copy = row / BN, column = item.column + row % BN;
    if (copy >= COPIES || column >= n) continue;
    int first = (unit.part * COPIES + COPIES - 1 - copy) * TAPS;
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) {
      int x = i / 2 * 8 + lane % 4 * 2 + i % 2, tap = first + x / CHUNK;
      if (tap >= windows.window) continue;
      i64 place = (of_other_axes * windows.window + tap) * channels + item.piece * CHUNK + x % CHUNK;
      d[(static_cast<i64>(item.split) * rows + place) * n + column] = sums[i / 2 * 4 + 2 * h + i % 2];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(PARAMETERS) {
  const Windows windows = WINDOWS;
  const Gradient gradient = GRADIENT;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  u32 boxes = pinned(shared_address(shared_memory)), barriers = boxes + STAGES * windows.stage_bytes;
  Pipeline pipe{boxes, barriers, barriers + STAGES * 8};
  if (threadIdx.x == 0) {
    prefetch_tensormap(windows.map);
    prefetch_tensormap(gradient.map);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(pipe.full + stage * 8, 1);
      mbarrier_init(pipe.empty + stage * 8, CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  int warpgroup = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
  int items = columns * windows.pieces * windows.planes * splits;
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (uniform(threadIdx.x / 32) == 0 && elect())
      for (int index = blockIdx.x; index < items; index += gridDim.x)
        load(windows, gradient, Item(windows, index, columns, splits, tiles), pipe);
    return;
  }
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  // Units that a warpgroup has too many of are the last one again, which is not stored.
  int units = windows.parts * windows.rows, own = warpgroup - 1;
  u32 offsets[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; ++i) offsets[i] = Unit(windows, min(own + i * CONSUMERS, units - 1)).offset(windows) >> 4;
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    Item item(windows, index, columns, splits, tiles);
    Sums sums[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS / 2; ++j) sums[i][j] = 0;
    int count = uniform(item.last - item.first);
    u32 before = 0;  // the barrier of the boxes that are being multiplied
    for (int at = 0; at < count; ++at) {
      mbarrier_wait(pipe.full_barrier(), pipe.phase);
      multiply(sums, offsets, windows, gradient, pipe.boxes + pipe.stage * windows.stage_bytes);
      wgmma_wait_group<1>();
      if (at > 0 && thread == 0) mbarrier_arrive(before);
      before = pipe.empty_barrier();
      pipe.advance();
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < UNITS; ++i) wgmma_done(sums[i]);
    if (count > 0 && thread == 0) mbarrier_arrive(before);
#pragma unroll
    for (int i = 0; i < UNITS; ++i)
      if (own + i * CONSUMERS < units)
        store(sums[i], Unit(windows, own + i * CONSUMERS), windows, item, d, rows, n, thread);
  }
}
