// How places of a grid lie in an image: what the kernels of a convolution share. The last two axes are those of rows (h)
// and of their pixels (w); an axis before them (d) has planes. Steps along an axis are constants:
//
//   SPREAD u = STRIDE i + DILATION k - LOW    the u-th element of the image that place i reads under tap k
//
// of places and elements that have one remainder by EVERY, where a window is dilated alone, and of all others.

struct Sizes {
  int items, strips, chunks, rows;  // threads that there is work for; theirs along w; along h, of so many rows each
  int grid_d, grid_h, grid_w, image_d, image_h, image_w;
  int low_d, first_h, first_w;  // what lies before plane 0; in which row, and pixel, of the image u = 0 is
  int channels;                 // of a pixel
};

DEVICE constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// A strip of STRIP places reads COUNT pixels, of which its place t has under tap k the v-th, or -1 where it has none.
constexpr int COUNT = (STRIDE_W * (STRIP - 1) + DILATION_W * (WINDOW_W - 1) - LOW_W) / SPREAD_W + 1;

DEVICE constexpr int pixel_of(int t, int k) {
  int at = STRIDE_W * t + DILATION_W * k - LOW_W;
  return at >= 0 && at % SPREAD_W == 0 ? at / SPREAD_W : -1;
}

DEVICE constexpr bool is_read(int v) {
  for (int t = 0; t < STRIP; ++t)
    for (int k = 0; k < WINDOW_W; ++k)
      if (pixel_of(t, k) == v) return true;
  return false;
}

template <bool WIDE>
struct Bits {
  using Type = u32;
};
template <>
struct Bits<true> {
  using Type = u64;
};
using Inside = Bits<(COUNT > 32)>::Type;  // which pixels of a strip the image has

// Of PAIRS products of a tap, the i-th is of input i / (PAIRS / INPUTS) of a thread, for its column i / (PAIRS /
// COLUMNS).
constexpr int INPUTS = PAIRS % MULTIPLIER == 0 ? PAIRS / MULTIPLIER : 1, COLUMNS = PAIRS / CHANNELS;
DEVICE constexpr int input_of(int i) { return i / (PAIRS / INPUTS); }
DEVICE constexpr int column_of(int i) { return i / (PAIRS / COLUMNS); }

// The first input, and column, of a thread whose first pair is this.
DEVICE int first_input(int pair) { return pair / MULTIPLIER; }
DEVICE int first_column(int pair) { return pair / CHANNELS; }

using Pixel = Vector<OPERAND, INPUTS>;

// COUNT pixels of a row of an image.
struct Strip {
  Pixel pixel[COUNT];
  bool there;

  // The v-th is `step` bytes behind the one before it, and zero unless the image has it.
  DEVICE void load(const char* first, int step, Inside inside, bool in_rows) {
    there = in_rows && inside;
#pragma unroll
    for (int v = 0; v < COUNT; ++v)
      if (is_read(v)) pixel[v].load(first + v * static_cast<i64>(step), there && inside >> v & 1);
  }
};

// The work of a thread: a strip of a chunk of rows, those that have a remainder by EVERY_H.
struct Item {
  int image, plane;
  int first_row, rows, row_remainder;  // row_remainder + EVERY_H i for so many i from first_row on
  int column, left;                    // of the first place, and of the pixel v = 0

  DEVICE Item(int item, const Sizes& of) {
    int strip = item % of.strips;
    item /= of.strips;
    int chunk = item % of.chunks;
    item /= of.chunks;
    plane = item % of.grid_d;
    image = item / of.grid_d;
    int remainder = strip % EVERY_W, before = strip / EVERY_W * STRIP;
    column = remainder + EVERY_W * before;
    left = of.first_w + remainder + EVERY_W * (before * STRIDE_W / SPREAD_W);
    row_remainder = chunk % EVERY_H;
    first_row = chunk / EVERY_H * of.rows;
    rows = min(of.rows, (of.grid_h - row_remainder + EVERY_H - 1) / EVERY_H - first_row);
  }

  DEVICE Inside inside(const Sizes& of) const {
    Inside bits = 0;
#pragma unroll
    for (int v = 0; v < COUNT; ++v)
      if (static_cast<u32>(left + EVERY_W * v) < static_cast<u32>(of.image_w)) bits |= Inside{1} << v;
    return bits;
  }

  // The plane of the image under a tap; -1 where there is none.
  DEVICE int plane_at(int tap, const Sizes& of) const {
    int at = STRIDE_D * plane + DILATION_D * tap - of.low_d;
    return at >= 0 && at % SPREAD_D == 0 && at / SPREAD_D < of.image_d ? at / SPREAD_D : -1;
  }

  // The pixels of element u of the rows, in a plane of the image.
  DEVICE void load(Strip& strip, const char* x, int in_plane, int u, Inside bits, const Sizes& of) const {
    int row = of.first_h + row_remainder + EVERY_H * u;
    bool there = in_plane >= 0 && static_cast<u32>(row) < static_cast<u32>(of.image_h);
    int pixel_bytes = of.channels * SIZE<OPERAND>;
    i64 pixels = (static_cast<i64>(image * of.image_d + max(in_plane, 0)) * of.image_h + row) * of.image_w + left;
    strip.load(x + pixels * pixel_bytes, EVERY_W * pixel_bytes, bits, there);
  }
};
