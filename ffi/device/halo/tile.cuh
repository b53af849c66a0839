// Convolutions by halos. A warpgroup goes along the outermost axis of the images, step by step, with 64
// pixels of the other axes beside each other: of each step TMA loads the box of the image's pixels that all of its taps
// in those axes need, once, for CHUNK channels.
//
// A row of the box in shared memory is a pixel, SPAN bytes of channels, swizzled by its address. What a tap multiplies
// is an operand of wgmma as it lies: 8 groups of 8 neighbours along the innermost axis, the groups `group_bytes` from
// each other. Another tap begins at another row.
//
// A step of the image is part of TAPS steps of the result, one for each tap along the axis of steps: their sums are
// columns of one wgmma. A wgmma of 64 x N x 16 reads 2 KB of the image and N * 32 bytes of weights in N / 2 cycles, and
// shared memory gives 128 bytes in each: of N = 32 it takes 24 cycles, of N = 96 no more than its 48.
//
// Images of one axis have steps of 64 pixels, and taps within the box: TAPS is 1. So it is where windows have strides
// along the axis of steps.
//
// PACKED: windows are of few channels. A row of the box is memory as it lies, 64 elements of it, and a window's row of
// CHUNK elements begins every 16 bytes: as 8 x 16 bytes without a swizzle are 128 bytes in a row, that is an operand
// too, whose next 16 bytes along k are those of the next window.
//
// GROUPED: a block's columns are of one group of channels.

constexpr int SPAN = PACKED ? 16 : CHUNK * 2, SLICES = CHUNK / 16;
constexpr int N_SPAN = N_CHUNK * 2;          // of weights that lie along columns
constexpr int BLOCK_BYTES = BN * CHUNK * 2;  // of the weights of a tap, of CHUNK channels
constexpr int THREADS = 128 * (1 + CONSUMERS);
constexpr int MARCH = AXES - 1;  // the axis of steps

struct Images {
  const TensorMap* map;
  int pieces;       // of CHUNK channels
  int stage_bytes;  // that a box takes in shared memory
  int box_bytes;    // that are loaded
  int group_bytes;
  int taps[3], tap_bytes[3];    // along each axis; along that of steps one, where there are TAPS
  int grid[AXES], tiles[AXES];  // of the result: pixels, and tiles of them, along the axis of steps runs of `steps`
  int low[AXES];
  int images;
  int step, apart;                    // pixels from a step to the next, and runs beside each other that this makes
  int steps;                          // of the result in a run, at most
  int group_channels, group_columns;  // where there are groups
  int strides[AXES];                  // of windows that are packed

  // Rows of a box that so many places of the result along an axis are apart.
  DEVICE int in_box(int axis, int places) const {
    if constexpr (PACKED) return axis == 0 ? places / 8 : places * strides[axis];
    return places;
  }

  DEVICE int group_of(int column) const { return GROUPED ? column / group_columns : 0; }
};

struct Weights {
  const TensorMap* map;
  int first;    // the place of the first tap
  int step[3];  // from a tap to the next along each axis
  int stacked;  // the same along that of TAPS
};

// Pixels of a step along an axis, AXES being that of images.
DEVICE constexpr int size_along(int axis) {
  return AXES == 1 && axis == 0 ? 1 : 1 + (axis == 0) * 7 + (axis == GROUP_AXIS) * (axis == 0 ? 56 : 7);
}

// A run of steps: the coordinates of its first pixel, and how many there are.
struct Run {
  int at[AXES + 1], steps;

  DEVICE Run(const Images& images, int index) {
#pragma unroll
    for (int i = 0; i < AXES; ++i) {
      int next = index / images.tiles[i], tile = index - next * images.tiles[i];
      at[i] = tile * (i == MARCH ? images.steps * images.step : size_along(i));
      index = next;
    }
    int image = index / images.apart;
    at[MARCH] += index - image * images.apart;
    at[AXES] = image * size_along(AXES);
    steps = min(images.steps, (images.grid[MARCH] - at[MARCH] + images.step - 1) / images.step);
    steps = steps > 0 ? steps + TAPS - 1 : 0;
  }
};

// The pixels of the result that a step's rows are.
struct Pixels {
  static constexpr int RUNS = 1;  // of a row's columns, in memory

  int grid[AXES], at[AXES + 1], images;

  DEVICE void begin(const Images& of, const Run& run, int step) {
#pragma unroll
    for (int i = 0; i < AXES; ++i) {
      grid[i] = of.grid[i];
      at[i] = run.at[i] + (i == MARCH ? step * of.step : 0);
    }
    at[AXES] = run.at[AXES];
    images = of.images;
  }

  // Of a row, counted among all images'; -1 of one that is past an edge.
  DEVICE int operator()(int row) const {
    int pixel = at[AXES] + (GROUP_AXIS == AXES ? row / 8 : 0);
    bool inside = pixel < images;
#pragma unroll
    for (int i = AXES - 1; i >= 0; --i) {
      int place = at[i];
      if (i == 0) place += GROUP_AXIS == 0 ? row : row % 8;
      if (i > 0 && i == GROUP_AXIS) place += row / 8;
      inside = inside && place < grid[i];
      pixel = pixel * grid[i] + place;
    }
    return inside ? pixel : -1;
  }
};
