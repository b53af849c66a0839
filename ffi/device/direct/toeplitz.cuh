// A convolution of each channel by itself on the tensor cores, for wide windows of images: along a row, the weights of
// a tap's row are a Toeplitz matrix of 16 pixels by 8 places, of which a window of 7 fills 7 / 16. A warp has two
// neighbouring channels and 16 strips of 8 places, all of rows that are as far down their image (SUBS images or chunks
// of one, of STRIPS strips each). It goes down the rows: fragments of one are multiplied by the matrices of all
// WINDOW_H rows of taps, each for the row of the result in which it takes part.
//
// Elements of k are permuted, so that a lane's are four pixels in a row. A pixel that is not finite reaches all 8
// places of the strips that read it, since most of a matrix is zeros.

// A place of row 0: which pixel of the result it is, and how many rows there are from there on.
struct Place {
  int pixel, rows;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  u32 base = shared_address(shared_memory);
  u32* staged = reinterpret_cast<u32*>(shared_memory) + STAGES * Pixels::WORDS;
  Place* places = reinterpret_cast<Place*>(staged + 2 * STAGED_WORDS);
  const Chunks of CHUNKS;
  const Images images IMAGES;
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
          one.load(w + (static_cast<i64>(at) * images.channels + channel + c) * SIZE<OPERAND>,
                   tap >= 0 && tap < WINDOW_W && channel + c < images.channels);
          both |= one.words[0] << 16 * e;
        }
        matrix[h][c][i] = both;
      }

  Pixels rows;
  rows.begin(x, images, of, first_channel, first_sub, first_place);
  int steps = of.rows + WINDOW_H - 1;
  auto load = [&](int step) {
    if (step < steps) rows.load(base + 4 * (step % STAGES * Pixels::WORDS), step);
    cp_async_commit_group();
  };
  for (int i = threadIdx.x; i < PLACES; i += THREADS) {
    int sub = first_sub + i / (STRIPS * 8), column = first_place + i % (STRIPS * 8), image = sub / of.chunks;
    int row = (sub - image * of.chunks) * of.rows;
    bool there = sub < of.subs && column < grid_w;
    places[i] = {(image * grid_h + row) * grid_w + column, there ? grid_h - row : 0};
  }
  auto pixel_of = [&](int place, int row) {
    Place found = places[place];
    return row < found.rows ? found.pixel + row * grid_w : -1;
  };

  Extras extras(of.rows, images.channels EXTRAS_ARGUMENTS);
  if (channel < images.channels) extras.begin(channel);
  float sums[WINDOW_H][2][4] = {};
#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) load(step);
#pragma unroll 1
  for (int step = 0; step <= steps; ++step) {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();
    int row = step - WINDOW_H + 1;  // that this step ends
    if (row > 0)
      copy_results(extras, staged + (row - 1) % 2 * STAGED_WORDS, first_channel, images.channels,
                   [&](int place) { return pixel_of(place, row - 1); });
    if (step == steps) break;
    load(step + STAGES - 1);
    u32 pixels = base + 4 * (step % STAGES * Pixels::WORDS + warp * Pixels::PITCH + 4 * part);
    u32 a[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Bytes16 four = ld_shared_v4(pixels + 4 * Pixels::at(min(quad + 8 * h, TAKEN - 1)));
      a[0][h] = __byte_perm(four.x, four.y, 0x5410), a[0][h + 2] = __byte_perm(four.z, four.w, 0x5410);
      a[1][h] = __byte_perm(four.x, four.y, 0x7632), a[1][h + 2] = __byte_perm(four.z, four.w, 0x7632);
    }
    bool there = of.chunks > 1 || static_cast<u32>(step - images.low_h) < static_cast<u32>(images.height);
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
      if (strip >= TAKEN || channel >= images.channels) continue;
      Done done{{sums[0][0][j], sums[0][1][j]}};
      int pixel = pixel_of(place, row);
      if (pixel < 0) continue;
      stage_results(extras, done, pixel, channel, staged + row % 2 * STAGED_WORDS, warp, place);
    }
  }
}
