// The weight gradient of a convolution of each channel by itself on the tensor cores, for wide windows of images: along
// a row, what 16 pixels from the first of a strip on and its 8 places have in common is a matrix, of whose diagonals
// each is a tap. It is added up over 16 strips at once, which are the contraction, and over all rows, for each row of
// taps. A warp has two neighbouring channels; a block goes through every parts-th group of chunks and writes one of the
// parts, which sum.cuh adds up.

using Gradients = Tile<STRIPS * 8>;

constexpr int MATRIX_PITCH = 9;  // of a row of 8 places, in shared memory

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  u32 base = shared_address(shared_memory);
  const Chunks of CHUNKS;
  const Images images IMAGES, gradients GRADIENTS;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, part = lane % 4;
  int first_channel = blockIdx.x % tiles * WARPS * 2, own_part = blockIdx.x / tiles;
  int steps = of.rows + WINDOW_H - 1;
  float sums[WINDOW_H][2][4] = {};

#pragma unroll 1
  for (int group = own_part; group < groups; group += parts) {
    int first_sub = group / of.pieces * SUBS, first_place = group % of.pieces * STRIPS * 8;
    Pixels rows;
    Gradients results;
    rows.begin(x, images, of, first_channel, first_sub, first_place);
    results.begin(g, gradients, of, first_channel, first_sub, first_place);
    auto load = [&](int step) {
      u32 stage = base + 4 * (step % STAGES * (Pixels::WORDS + Gradients::WORDS));
      if (step < steps) {
        rows.load(stage, step);
        if (step < of.rows) results.load(stage + 4 * Pixels::WORDS, step);
      }
      cp_async_commit_group();
    };
    __syncthreads();  // the last group's stages have been read
#pragma unroll 1
    for (int step = 0; step < STAGES - 1; ++step) load(step);
    u32 b[WINDOW_H][2][2] = {};  // of row `step - h` of the gradient
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      cp_async_wait_group<STAGES - 2>();
      __syncthreads();
      load(step + STAGES - 1);
      u32 stage = base + 4 * (step % STAGES * (Pixels::WORDS + Gradients::WORDS));
      u32 pixels = stage + 4 * (warp * Pixels::PITCH + quad);
      u32 places = stage + 4 * (Pixels::WORDS + warp * Gradients::PITCH + quad);
      // Elements of k are permuted, so that lanes read strips beside each other: those of this one.
      u32 x_words[4][2], g_words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int strip = part + 4 * i;
        bool there = strip < TAKEN;
        u32 from = pixels + 4 * Pixels::at(there ? strip : 0);
        x_words[i][0] = ld_shared_u32(from), x_words[i][1] = ld_shared_u32(from + 32);
        g_words[i] = there && step < of.rows ? ld_shared_u32(places + 4 * Gradients::at(strip)) : 0;
      }
#pragma unroll
      for (int h = WINDOW_H - 1; h > 0; --h)
#pragma unroll
        for (int i = 0; i < 4; ++i) b[h][i / 2][i % 2] = b[h - 1][i / 2][i % 2];
      u32 a[2][4];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        u32 halves = c ? 0x7632 : 0x5410;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[c][i] = __byte_perm(x_words[i / 2 * 2][i % 2], x_words[i / 2 * 2 + 1][i % 2], halves);
#pragma unroll
        for (int i = 0; i < 2; ++i) b[0][c][i] = __byte_perm(g_words[2 * i], g_words[2 * i + 1], halves);
      }
      if (of.chunks == 1 && static_cast<u32>(step - images.low_h) >= static_cast<u32>(images.height)) continue;
#pragma unroll
      for (int h = 0; h < WINDOW_H; ++h) {
        if (step - h < 0 || step - h >= of.rows) continue;
#pragma unroll
        for (int c = 0; c < 2; ++c) mma<MATH>(sums[h][c], a[c], b[h][c]);
      }
    }
  }
  cp_async_wait_group<0>();
  __syncthreads();

  // A lane has of each matrix pixels quad and quad + 8, and places 2 part and 2 part + 1. A tap is a diagonal.
  float* matrix = reinterpret_cast<float*>(shared_memory) + warp * 16 * MATRIX_PITCH;
#pragma unroll
  for (int i = 0; i < 2 * WINDOW_H; ++i) {
    int h = i / 2, c = i % 2, channel = first_channel + 2 * warp + c;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) matrix[(quad + j / 2 * 8) * MATRIX_PITCH + 2 * part + j % 2] = sums[h][c][j];
    __syncwarp();
    if (lane < WINDOW_W && channel < images.channels) {
      float sum = 0;
#pragma unroll
      for (int place = 0; place < 8; ++place) sum += matrix[(place + lane) * MATRIX_PITCH + place];
      i64 row = (static_cast<i64>(own_part) * WINDOW_H + h) * WINDOW_W + lane;
      sum_of_parts[row * images.channels + channel] = sum;
    }
  }
}
