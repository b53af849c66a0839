// How places of a grid lie in an image: what the kernels of a convolution share. The last two axes are those of rows
// (h) and of their pixels (w); an axis before them (d) has planes. Steps along an axis are constants:
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
  DEVICE void load(const char* at, int step, Inside inside, bool in_rows) {
    there = in_rows && inside;
#pragma unroll
    for (int v = 0; v < COUNT; ++v, at = next_to(at, step))
      if (is_read(v)) pixel[v].load(at, there && inside >> v & 1);
  }
};

// The work of a thread: a strip of a chunk of rows, those that have a remainder by EVERY_H. Where a row is all that an
// image has, ALONG, a chunk is of strips that follow each other.
struct Item {
  int image, plane;
  int first_row, rows, row_remainder;  // row_remainder + EVERY_H i for so many i from first_row on
  int strip, remainder;                // the strip's places are remainder + EVERY_W (STRIP strip + t)

  DEVICE Item(int item, const Sizes& of) {
    strip = item % of.strips;
    item /= of.strips;
    int chunk = item % of.chunks;
    item /= of.chunks;
    plane = item % of.grid_d;
    image = item / of.grid_d;
    remainder = strip % EVERY_W, strip /= EVERY_W;
    row_remainder = chunk % EVERY_H;
    first_row = chunk / EVERY_H * of.rows;
    int strips = ((of.grid_w + EVERY_W - 1) / EVERY_W + STRIP - 1) / STRIP;
    rows = min(of.rows, (ALONG ? strips : (of.grid_h - row_remainder + EVERY_H - 1) / EVERY_H) - first_row);
  }

  // Of the strip of a row: its first place, and where its pixel v = 0 lies.
  DEVICE int column(int row) const { return remainder + EVERY_W * STRIP * (ALONG ? row : strip); }
  DEVICE int left(int row, const Sizes& of) const {
    return of.first_w + remainder + EVERY_W * (STRIDE_W * STRIP / SPREAD_W) * (ALONG ? row : strip);
  }

  // Which pixels the image has.
  DEVICE Inside inside(int row, const Sizes& of) const {
    int first = left(row, of);
    if (ALONG && first >= 0 && first + EVERY_W * (COUNT - 1) < of.image_w) return ~Inside{};
    Inside bits = 0;
#pragma unroll
    for (int v = 0; v < COUNT; ++v)
      if (static_cast<u32>(first + EVERY_W * v) < static_cast<u32>(of.image_w)) bits |= Inside{1} << v;
    return bits;
  }

  // The image's plane under a tap; null where there is none.
  DEVICE const char* plane_of(const char* x, int tap, const Sizes& of) const {
    int at = STRIDE_D * plane + DILATION_D * tap - of.low_d;
    if (at < 0 || at % SPREAD_D || at / SPREAD_D >= of.image_d) return nullptr;
    i64 rows = static_cast<i64>(image * of.image_d + at / SPREAD_D) * of.image_h;
    return x + rows * of.image_w * (of.channels * SIZE<OPERAND>);
  }

  // The pixels of element u of the rows, in a plane of the image.
  DEVICE void load(Strip& pixels, const char* in_plane, int u, int left, Inside bits, const Sizes& of) const {
    int row = of.first_h + row_remainder + EVERY_H * u, pixel_bytes = of.channels * SIZE<OPERAND>;
    bool there = in_plane && static_cast<u32>(row) < static_cast<u32>(of.image_h);
    i64 place = static_cast<i64>(row) * of.image_w + left;
    pixels.load(in_plane + place * pixel_bytes, EVERY_W * pixel_bytes, bits, there);
  }
};
