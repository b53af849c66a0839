// A convolution of each channel by itself on the tensor cores, for wide windows of images: along a row, the weights of
// a tap's row are a Toeplitz matrix of 16 pixels by 8 places, of which a window of 7 fills 7 / 16. A warp has two
// neighbouring channels and 16 strips of 8 places, all of rows that are as far down their image (SUBS images or chunks
// of one, of STRIPS strips each). It goes down the rows: fragments of one are multiplied by the matrices of all
// WINDOW_H rows of taps, each for the row of the result in which it takes part.
//
// Pixels lie in shared memory as [STAGES][WARPS][SUBS * PIXELS] words of two channels, results as [2][WARPS][places].
// Elements of k are permuted, so that a lane's are four pixels in a row.

struct Sizes {
  int rows, chunks, subs;  // of a chunk; chunks of an image; of all images
  int pieces;              // of a row, of STRIPS strips each
  int grid_h, grid_w, image_h, image_w, low_h, low_w, channels;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  u32 base = shared_address(shared_memory);
  u32* staged = reinterpret_cast<u32*>(shared_memory) + STAGES * STAGE_WORDS;
  const Sizes of SIZES;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, part = lane % 4;
  int block = blockIdx.x, first_channel = block % tiles * WARPS * 2;
  block /= tiles;
  int piece = block % of.pieces, first_sub = block / of.pieces * SUBS, first_place = piece * STRIPS * 8;
  int channel = first_channel + 2 * warp;

  // Of each row of taps, 16 pixels by 8 places: this lane's four pixels, of one place.
  u32 matrix[WINDOW_H][2][2];
#pragma unroll
  for (int h = 0; h < WINDOW_H; ++h)
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 both = 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int tap = 4 * part + 2 * i + e - quad;
          Vector<OPERAND, 1> one;
          int at = tap_first + h * tap_step_h + tap * tap_step_w;
          one.load(w + (static_cast<i64>(at) * of.channels + channel + c) * SIZE<OPERAND>,
                   tap >= 0 && tap < WINDOW_W && channel + c < of.channels);
          both |= one.words[0] << 16 * e;
        }
        matrix[h][c][i] = both;
      }

  // What this thread copies of each row: words of one pair, of every 32nd pixel. Which pixel of all images each is of
  // the first row, and how far down its image that lies.
  int own_pair = threadIdx.x % WARPS, first_pixel[LOADS], first_row[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    int at = threadIdx.x / WARPS + 32 * i, sub = first_sub + at / SUB_PIXELS;
    int column = first_place + at % SUB_PIXELS - of.low_w, row = sub % of.chunks * of.rows - of.low_h;
    bool there = sub < of.subs && static_cast<u32>(column) < static_cast<u32>(of.image_w);
    there = there && at < ROW_PIXELS && first_channel + 2 * own_pair < of.channels;
    first_row[i] = there ? row : -(1 << 30);
    first_pixel[i] = (sub / of.chunks * of.image_h + row) * of.image_w + column;
  }
  const char* own = x + static_cast<i64>(first_channel + 2 * own_pair) * SIZE<OPERAND>;
  int pixel_bytes = of.channels * SIZE<OPERAND>, steps = of.rows + WINDOW_H - 1;
  auto load = [&](int step) {
    if (step < steps) {
      u32 to = base + 4 * (step % STAGES * STAGE_WORDS + own_pair * PITCH + threadIdx.x / WARPS);
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        if (ROW_PIXELS % 32 && threadIdx.x / WARPS + 32 * i >= ROW_PIXELS) break;
        bool there = static_cast<u32>(first_row[i] + step) < static_cast<u32>(of.image_h);
        int pixel = there ? first_pixel[i] + step * of.image_w : 0;
        cp_async<4>(to + 128 * i, own + static_cast<i64>(pixel) * pixel_bytes, there);
      }
    }
    cp_async_commit_group();
  };

  // Where a place of a row of chunks lies in the result; -1 where it does not.
  auto place_of = [&](int place, int row) -> i64 {
    int sub = first_sub + place / (STRIPS * 8), column = first_place + place % (STRIPS * 8);
    int image = sub / of.chunks, line = sub % of.chunks * of.rows + row;
    if (sub >= of.subs || column >= of.grid_w || line >= of.grid_h) return -1;
    return (static_cast<i64>(image) * of.grid_h + line) * of.grid_w + column;
  };

  Extras extras(of.rows, of.channels EXTRAS_ARGUMENTS);
  if (channel < of.channels) extras.begin(channel);
  float sums[WINDOW_H][2][4] = {};
#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) load(step);
#pragma unroll 1
  for (int step = 0; step <= steps; ++step) {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();
    int row = step - WINDOW_H + 1;  // that this step ends
    if (row > 0)
      copy_results(extras, staged + (row - 1) % 2 * STAGED_WORDS, first_channel, of.channels,
                   [&](int place) { return place_of(place, row - 1); });
    if (step == steps) break;
    load(step + STAGES - 1);
    u32 pixels = base + 4 * (step % STAGES * STAGE_WORDS + warp * PITCH + 4 * part);
    u32 a[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int strip = min(quad + 8 * h, SUBS * STRIPS - 1);
      Bytes16 four = ld_shared_v4(pixels + 4 * (strip / STRIPS * SUB_PIXELS + strip % STRIPS * 8));
      a[0][h] = __byte_perm(four.x, four.y, 0x5410), a[0][h + 2] = __byte_perm(four.z, four.w, 0x5410);
      a[1][h] = __byte_perm(four.x, four.y, 0x7632), a[1][h + 2] = __byte_perm(four.z, four.w, 0x7632);
    }
    bool there = of.chunks > 1 || static_cast<u32>(step - of.low_h) < static_cast<u32>(of.image_h);
    // Row `row + i` of the result has its sums in sums[i], and this row of pixels under its tap WINDOW_H - 1 - i.
#pragma unroll
    for (int i = 0; i < WINDOW_H; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][c][j] = i + 1 < WINDOW_H ? sums[i + 1][c][j] : 0.0f;
      }
      if (!there || row + i < 0 || row + i >= of.rows) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) mma<MATH>(sums[i][c], a[c], matrix[WINDOW_H - 1 - i][c]);
    }
    if (row < 0) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int strip = quad + j / 2 * 8, place = strip * 8 + 2 * part + j % 2;
      if (strip >= SUBS * STRIPS || channel >= of.channels) continue;
      Done done{{sums[0][0][j], sums[0][1][j]}};
      i64 pixel = place_of(place, row);
      if (pixel < 0) continue;
      stage_results(extras, done, static_cast<int>(pixel), channel, staged + row % 2 * STAGED_WORDS, warp, place);
    }
  }
}
