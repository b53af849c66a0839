// The weight gradient of a convolution of each channel by itself on the tensor cores: along a row, what 16 pixels from
// the first of a strip on and its 8 places have in common is a matrix, of whose diagonals each is a tap. It is added up
// over 16 strips at once, which are the contraction, and over all rows, for each row of taps. A warp has two
// neighbouring channels. It goes down the rows of pixels and has the last WINDOW_H rows of the gradient in registers;
// steps are unrolled, so that none of them moves. A block writes one of the parts, which sum.cuh adds up.

using Gradients = Tile<READ_PLACES, SUB_PLACES>;

constexpr int MATRIX_PITCH = 9, MATRIX_WORDS = 16 * MATRIX_PITCH;  // of 16 rows of 8 places, in shared memory

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  constexpr int ROW_BYTES = 4 * (Pixels::WORDS + Gradients::WORDS), STAGE_BYTES = STEP * ROW_BYTES;
  u32 base = shared_address(shared_memory);
  const Chunks of CHUNKS;
  const Images images IMAGES, gradients GRADIENTS;
  const Work work(of, tiles, gradients.height);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, part = lane % 4;
  clear(base, STAGES * STAGE_BYTES);
  __syncthreads();

  // Rows of pixels, of which each comes with the last row of the gradient that it takes part in.
  int first = work.row - images.low_h, count = min(images.height, work.end - images.low_h + WINDOW_H - 1) - first;
  int steps = (max(count, 0) + STEP - 1) / STEP, end = first + STEP * steps;
  Pixels rows;
  Gradients results;
  rows.begin(x, images, work, of.images, first, end - first);
  results.begin(g, gradients, work, of.images, work.row, end - first);
  int row_of_load = first, left = work.rounds * steps;
  auto load = [&](u32 stage, bool there) {
    if (there) {
#pragma unroll
      for (int r = 0; r < STEP; ++r) {
        u32 of_row = stage + r * ROW_BYTES;
        if (static_cast<u32>(row_of_load + r) < static_cast<u32>(images.height)) rows.load(of_row);
        if (row_of_load + r + images.low_h < work.end) results.load(of_row + 4 * Pixels::WORDS);
        rows.to_next_row(), results.to_next_row();
      }
      if ((row_of_load += STEP) == end) row_of_load = first, rows.to_next_group(), results.to_next_group();
    }
    cp_async_commit_group();
  };
#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) load(base + step * STAGE_BYTES, step < left);

  // Elements of k are permuted, so that lanes read strips beside each other: those of this one.
  u32 pixels[4], places[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int strip = part + 4 * i < TAKEN ? part + 4 * i : 0;
    pixels[i] = 4 * (warp * Pixels::PITCH + quad + Pixels::at(strip));
    places[i] = 4 * (Pixels::WORDS + warp * Gradients::PITCH + quad + Gradients::at(strip));
  }
  float sums[WINDOW_H][2][4] = {};
  u32 b[WINDOW_H][2][2];  // of which each step replaces one row
  int row = first;
  u32 from = base, to = base + (STAGES - 1) * STAGE_BYTES;
  auto step = [&](auto phase) {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();
    load(to, left >= STAGES);
#pragma unroll
    for (int r = 0; r < STEP; ++r) {
      u32 of_row = from + r * ROW_BYTES, words[4];
      bool there = row + r + images.low_h < work.end;
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = there && part + 4 * i < TAKEN ? ld_shared_u32(of_row + places[i]) : 0;
      u32(&last)[2][2] = b[(phase.row + r) % WINDOW_H];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        last[j / 2][j % 2] = __byte_perm(words[j % 2 * 2], words[j % 2 * 2 + 1], j / 2 ? 0x7632 : 0x5410);
      if (static_cast<u32>(row + r) >= static_cast<u32>(images.height)) continue;
      u32 a[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 low = ld_shared_u32(of_row + pixels[i / 2 * 2] + 32 * (i % 2));
        u32 high = ld_shared_u32(of_row + pixels[i / 2 * 2 + 1] + 32 * (i % 2));
        a[0][i] = __byte_perm(low, high, 0x5410), a[1][i] = __byte_perm(low, high, 0x7632);
      }
#pragma unroll
      for (int h = 0; h < WINDOW_H; ++h)
#pragma unroll
        for (int c = 0; c < 2; ++c) mma<MATH>(sums[h][c], a[c], b[(phase.row + r + WINDOW_H - h) % WINDOW_H][c]);
    }
    to = from, from = from + STAGE_BYTES < base + STAGES * STAGE_BYTES ? from + STAGE_BYTES : base;
    --left, row += STEP;
    return row != end;
  };
#pragma unroll 1
  for (; left > 0; row = first) {
#pragma unroll
    for (int j = 0; j < 4 * WINDOW_H; ++j) b[j / 4][j / 2 % 2][j % 2] = 0;
#pragma unroll 1
    while (in_turn(step)) {
    }
  }
  cp_async_wait_group<0>();
  __syncthreads();

  // A lane has of each matrix pixels quad and quad + 8, and places 2 part and 2 part + 1. A tap is a diagonal. Half of
  // a warp adds up those of a channel.
  float* matrix = reinterpret_cast<float*>(shared_memory) + warp * 2 * MATRIX_WORDS;
  int tap = lane % 16, channel = work.channel + 2 * warp + lane / 16;
  const float* diagonal = matrix + lane / 16 * MATRIX_WORDS + tap * MATRIX_PITCH;
  i64 first_tap = static_cast<i64>(work.part) * WINDOW_H * WINDOW_W + tap;
  float* sum_of_taps = sum_of_parts + first_tap * images.channels + channel;
#pragma unroll
  for (int h = 0; h < WINDOW_H; ++h, sum_of_taps += WINDOW_W * images.channels) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j)
      matrix[j / 4 * MATRIX_WORDS + (quad + j / 2 % 2 * 8) * MATRIX_PITCH + 2 * part + j % 2] = sums[h][j / 4][j % 4];
    __syncwarp();
    if (tap >= WINDOW_W || channel >= images.channels) continue;
    float sum = 0;
#pragma unroll
    for (int place = 0; place < 8; ++place) sum += diagonal[place * (MATRIX_PITCH + 1)];
    *sum_of_taps = sum;
  }
}
