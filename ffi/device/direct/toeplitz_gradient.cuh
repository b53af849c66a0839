// The weight gradient of a convolution of each channel by itself on the tensor cores: along a row, what 16 pixels from
// the first of a strip on and its 8 places have in common is a matrix, of whose diagonals each is a tap. It is added up
// over 16 strips at once, which are the contraction, and over all rows, for each row of taps. A warp has two
// neighbouring channels. It goes down the rows of pixels and has the last WINDOW_H rows of the gradient in registers;
// steps are unrolled, so that none of them moves. A block writes one of the parts, which sum.cuh adds up.

using Gradients = Tile<READ_PLACES, SUB_PLACES>;

constexpr int MATRIX_PITCH = 9;  // of a row of 8 places, in shared memory

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  constexpr int STAGE_BYTES = 4 * (Pixels::WORDS + Gradients::WORDS);
  u32 base = shared_address(shared_memory);
  const Chunks of CHUNKS;
  const Images images IMAGES, gradients GRADIENTS;
  const Work work(of, tiles, gradients.height);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, part = lane % 4;
  clear(base, STAGES * STAGE_BYTES);
  __syncthreads();

  // Rows of pixels, of which each comes with the last row of the gradient that it takes part in.
  int first = work.row - images.low_h, end = min(images.height, work.end - images.low_h + WINDOW_H - 1);
  Pixels rows;
  Gradients results;
  rows.begin(x, images, work, of.images, first, end - first);
  results.begin(g, gradients, work, of.images, work.row, end - first);
  int row_of_load = first, left = work.rounds * max(end - first, 0);  // steps
  auto load = [&](u32 stage, bool there) {
    if (there) {
      if (static_cast<u32>(row_of_load) < static_cast<u32>(images.height)) rows.load(stage);
      if (row_of_load + images.low_h < work.end) results.load(stage + 4 * Pixels::WORDS);
      rows.to_next_row(), results.to_next_row();
      if (++row_of_load == end) row_of_load = first, rows.to_next_group(), results.to_next_group();
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
  u32 b[WINDOW_H][2][2] = {};  // of which each step replaces one row
  int row = first;
  u32 from = base, to = base + (STAGES - 1) * STAGE_BYTES;
#pragma unroll 1
  while (left > 0) {
#pragma unroll
    for (int phase = 0; phase < WINDOW_H; ++phase) {
      if (left == 0) break;
      cp_async_wait_group<STAGES - 2>();
      __syncthreads();
      load(to, left >= STAGES);
      bool there = row + images.low_h < work.end;
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = there && part + 4 * i < TAKEN ? ld_shared_u32(from + places[i]) : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        b[phase][j / 2][j % 2] = __byte_perm(words[j % 2 * 2], words[j % 2 * 2 + 1], j / 2 ? 0x7632 : 0x5410);
      if (static_cast<u32>(row) < static_cast<u32>(images.height)) {
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32 low = ld_shared_u32(from + pixels[i / 2 * 2] + 32 * (i % 2));
          u32 high = ld_shared_u32(from + pixels[i / 2 * 2 + 1] + 32 * (i % 2));
          a[0][i] = __byte_perm(low, high, 0x5410), a[1][i] = __byte_perm(low, high, 0x7632);
        }
#pragma unroll
        for (int h = 0; h < WINDOW_H; ++h) {
          if (row + images.low_h - h < work.row) continue;  // which b has of another chunk
#pragma unroll
          for (int c = 0; c < 2; ++c) mma<MATH>(sums[h][c], a[c], b[(phase + WINDOW_H - h) % WINDOW_H][c]);
        }
      }
      to = from, from = from + STAGE_BYTES < base + STAGES * STAGE_BYTES ? from + STAGE_BYTES : base;
      --left;
      if (++row == end) row = first;
    }
  }
  cp_async_wait_group<0>();
  __syncthreads();

  // A lane has of each matrix pixels quad and quad + 8, and places 2 part and 2 part + 1. A tap is a diagonal.
  float* matrix = reinterpret_cast<float*>(shared_memory) + warp * 16 * MATRIX_PITCH;
#pragma unroll
  for (int i = 0; i < 2 * WINDOW_H; ++i) {
    int h = i / 2, c = i % 2, channel = work.channel + 2 * warp + c;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) matrix[(quad + j / 2 * 8) * MATRIX_PITCH + 2 * part + j % 2] = sums[h][c][j];
    __syncwarp();
    if (lane < WINDOW_W && channel < images.channels) {
      float sum = 0;
#pragma unroll
      for (int place = 0; place < 8; ++place) sum += matrix[(place + lane) * MATRIX_PITCH + place];
      i64 row = (static_cast<i64>(work.part) * WINDOW_H + h) * WINDOW_W + lane;
      sum_of_parts[row * images.channels + channel] = sum;
    }
  }
}
