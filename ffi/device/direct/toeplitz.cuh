// A convolution of each channel by itself on the tensor cores: along a row, the weights of a tap's row are a Toeplitz
// matrix of 16 pixels by 8 places, of which a window of 7 fills 7 / 16. A warp has two neighbouring channels and 16
// strips of 8 places, all of rows that are as far down their image. It goes down the rows of pixels: fragments of one
// are multiplied by the matrices of all WINDOW_H rows of taps, each for the row of the result in which it takes part.
// Steps are unrolled, so that no sum moves; those before an image's first row of pixels, or behind its last one, only
// end a row of the result.
//
// Elements of k are permuted, so that a lane's are four pixels in a row. A pixel that is not finite reaches all 8
// places of the strips that read it, since most of a matrix is zeros.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  constexpr int ROW_BYTES = 4 * Pixels::WORDS, STAGE_BYTES = STEP * (ROW_BYTES + PLANES * PLANE_BYTES);
  u32 base = shared_address(shared_memory);
  u32* staged = reinterpret_cast<u32*>(shared_memory) + STAGES * STAGE_BYTES / 4;
  const Chunks of CHUNKS;
  const Images images IMAGES;
  const Work work(of, tiles, grid_h);
  if (work.rounds == 0) return;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, part = lane % 4;
  int channel = work.channel + 2 * warp;

  Vector<OPERAND, 2> taps[WINDOW_H][4];  // four in a row, of this lane's place
#pragma unroll
  for (int i = 0; i < 4 * WINDOW_H; ++i) {
    int tap = 4 * part + i % 4 - quad, at = tap_first + i / 4 * tap_step_h + tap * tap_step_w;
    taps[i / 4][i % 4].load(w + (static_cast<i64>(at) * images.channels + channel) * SIZE<OPERAND>,
                            tap >= 0 && tap < WINDOW_W && channel < images.channels);
  }
  clear(base, STAGES * STAGE_BYTES);
  __syncthreads();

  // Rows of pixels, from the first that the image has on; as the last of them is added, a chunk ends.
  int before = work.row - images.low_h, first = min(max(before, 0), before + WINDOW_H - 1);
  int steps = (work.end - images.low_h + WINDOW_H - 1 - first + STEP - 1) / STEP, end = first + STEP * steps;
  Pixels rows;
  rows.begin(x, images, work, of.images, first, end - first);
  int row_of_load = first, left = work.rounds * steps, behind = images.low_h - (WINDOW_H - 1);
  Extras extras(of.images * grid_h * grid_w, images.channels EXTRAS_ARGUMENTS);
  Own<8> asking(work, of.images, grid_h, grid_w, images.channels);
  Own<CHANNELS_EACH> own(work, of.images, grid_h, grid_w, images.channels);
  Partials partials;
  // Where a row's sums are that a thread has of its fragments, and those that it makes results of.
  int made = AS_LARGE ? Sums::at(2 * warp, 8 * quad + 2 * part) : 0;
  int taken = AS_LARGE ? Sums::at(own.lane * CHANNELS_EACH, own.place) : 0;
  int in_plane = 2 * CHANNELS_EACH * (own.place * own.ACROSS + own.lane);
  if (AS_LARGE) keep(made), keep(taken), keep(in_plane);
  // Of the rows of the result that a step ends, from one on, those that there are, with their planes in a stage.
  auto each_ended = [&](int ended, auto& of_thread, u32 stage, auto each) {
#pragma unroll
    for (int r = 0; r < STEP; ++r) {
      int row = ended + r, at = of_thread.pixel + row * grid_w;
      bool there = row >= work.row && row < work.end && of_thread.pixel < extras.m;
      if (there) each(r, at, stage + STEP * ROW_BYTES + r * PLANES * PLANE_BYTES);
    }
    if (ended + STEP >= work.end && of_thread.pixel < extras.m) of_thread.pixel += work.by * SUBS * grid_h * grid_w;
  };
  // With a step's pixels come the planes of the results that leave in it: those that the step before it ends.
  int asked = work.row - STEP;
  auto load = [&](u32 stage, bool there) {
    if (PLANES > 0) {
      each_ended(asked, asking, stage, [&](int, int pixel, u32 planes) {
        extras.ask(planes + 16 * threadIdx.x, pixel, asking.channel, asking.channels);
      });
      asked = there ? row_of_load + behind : work.end;
    }
    if (there) {
#pragma unroll
      for (int r = 0; r < STEP; ++r) {
        if (static_cast<u32>(row_of_load + r) < static_cast<u32>(images.height)) rows.load(stage + r * ROW_BYTES);
        rows.to_next_row();
      }
      if ((row_of_load += STEP) == end) row_of_load = first, rows.to_next_group();
    }
    cp_async_commit_group();
  };
#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) load(base + step * STAGE_BYTES, step < left);

  // Of each row of taps, 16 pixels by 8 places: this lane's four pixels, of one place.
  u32 matrix[WINDOW_H][2][2];
#pragma unroll
  for (int i = 0; i < 4 * WINDOW_H; ++i) {
    const auto& two = taps[i / 4];
    matrix[i / 4][i / 2 % 2][i % 2] =
        __byte_perm(two[i % 2 * 2].words[0], two[i % 2 * 2 + 1].words[0], i / 2 % 2 ? 0x7632 : 0x5410);
  }

  int held = AS_LARGE ? own.channel : channel;  // the first of the channels whose vectors a thread has
  if (!BEGUN_EACH && held < images.channels) extras.begin(held);
  u32 strips[2];  // this lane's, of those in `from`
#pragma unroll
  for (int h = 0; h < 2; ++h)
    strips[h] = 4 * (warp * Pixels::PITCH + 4 * part + Pixels::at(min(quad + 8 * h, TAKEN - 1)));
  float sums[WINDOW_H][2][4];
  int row = first, group = work.group, buffer = 0;
  int ended = work.row - STEP;  // of the rows of the result, the first that the last step ended
  u32 from = base, to = base + (STAGES - 1) * STAGE_BYTES;
  auto copy = [&] {
    each_ended(ended, own, from, [&](int r, int pixel, u32 planes) {
      u32* of_row = staged + (STEP - buffer + r) * STAGED_WORDS;
      copy_results(extras, partials, of_row + taken, own, pixel, planes + in_plane);
    });
  };
  auto begin = [&] {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();
    copy();
    load(to, left >= STAGES);
    ended = row + behind;
  };
  auto step = [&](auto phase) {
    if (!COPIED_ONCE) begin();
#pragma unroll
    for (int r = 0; r < STEP; ++r) {
      float (&newest)[2][4] = sums[(phase.row + r + WINDOW_H - 1) % WINDOW_H];
      u32 a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Bytes16 four = ld_shared_v4(from + r * ROW_BYTES + strips[h]);
        a[0][h] = __byte_perm(four.x, four.y, 0x5410), a[0][h + 2] = __byte_perm(four.z, four.w, 0x5410);
        a[1][h] = __byte_perm(four.x, four.y, 0x7632), a[1][h + 2] = __byte_perm(four.z, four.w, 0x7632);
      }
      // Of the rows that are open, the i-th has this row of pixels under its tap WINDOW_H - 1 - i.
#pragma unroll
      for (int j = 0; j < 8; ++j) newest[j / 4][j % 4] = 0;
      if (static_cast<u32>(row + r) < static_cast<u32>(images.height)) {
#pragma unroll
        for (int i = 0; i < WINDOW_H; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            mma<MATH>(sums[(phase.row + r + i) % WINDOW_H][c], a[c], matrix[WINDOW_H - 1 - i][c]);
      }
      const float (&sum)[2][4] = sums[(phase.row + r) % WINDOW_H];
      if (ended + r >= work.row && ended + r < work.end) {
        u32* of_row = staged + (buffer + r) * STAGED_WORDS;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int strip = quad + 8 * h, column = strip % STRIPS * 8 + 2 * part, image = group * SUBS + strip / STRIPS;
          int pixel = (image * grid_h + ended + r) * grid_w + work.column + column;
          int there = strip < TAKEN && image < of.images ? grid_w - work.column - column : 0;
          if (channel >= images.channels) continue;
          const Acc two[2][2] = {{sum[0][2 * h], sum[1][2 * h]}, {sum[0][2 * h + 1], sum[1][2 * h + 1]}};
          u32* to = of_row + (AS_LARGE ? made + 64 * h : 0);
          stage_results(extras, partials, two, pixel, channel, to, warp, 8 * quad + 64 * h + 2 * part, there);
        }
      }
    }
    buffer = STEP - buffer;
    to = from, from = from + STAGE_BYTES < base + STAGES * STAGE_BYTES ? from + STAGE_BYTES : base;
    --left, row += STEP;
    return row != end;
  };
#pragma unroll 1
  for (; left > 0; row = first, group += work.by) {
#pragma unroll
    for (int j = 0; j < 8 * WINDOW_H; ++j) sums[j / 8][j / 4 % 2][j % 4] = 0;
    if constexpr (COPIED_ONCE) {
      bool more = true;
#pragma unroll 1
      for (int phase = 0; more; phase = phase + 1 < WINDOW_H ? phase + 1 : 0) {
        begin();
        more = in_phase(phase, step);
      }
    } else {
#pragma unroll 1
      while (in_turn(step)) {
      }
    }
  }
  if (PLANES > 0) cp_async_wait_group<0>();
  __syncthreads();
  copy();
  Acc* shared = reinterpret_cast<Acc*>(shared_memory);
  if (AS_LARGE) {
    partials.store<Own<CHANNELS_EACH>::ACROSS>(extras, shared, own.lane, own.item, work.channel, work.part);
  } else {
    partials.store<WARPS>(extras, shared, warp, lane, work.channel, work.part);
  }
}
