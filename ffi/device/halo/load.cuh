// What threads load by TMA: the weights once, and boxes of pixels, one thread for each warpgroup that multiplies.

// All taps of the columns from `column` on: [piece][tap of the other axes][TAPS, the last first], each [BN][CHUNK], or,
// along columns, [BN / N_CHUNK][CHUNK][N_CHUNK].
DEVICE void load_weights(const Weights& weights, const Images& images, u32 to, u32 barrier, int column, int group) {
  int taps = images.taps[0] * images.taps[1] * images.taps[2] * TAPS;
  mbarrier_arrive_expect_tx(barrier, images.pieces * taps * BLOCK_BYTES);
  for (int piece = 0; piece < images.pieces; ++piece)
    for (int t2 = 0; t2 < images.taps[2]; ++t2)
      for (int t1 = 0; t1 < images.taps[1]; ++t1)
        for (int t0 = 0; t0 < images.taps[0]; ++t0)
#pragma unroll 1
          for (int t = TAPS - 1; t >= 0; --t, to += BLOCK_BYTES) {
            int place = weights.first + t0 * weights.step[0] + t1 * weights.step[1] + t2 * weights.step[2] +
                        t * weights.stacked;
            if constexpr (B_K_MAJOR) {
              int c = GROUPED ? group * images.group_channels : 0, row = GROUPED ? group * images.group_columns : 0;
              tma_load(to, weights.map, barrier, c + piece * CHUNK, column - row, place);
            } else {
              for (int i = 0; i < BN / N_CHUNK; ++i)
                tma_load(to + i * CHUNK * N_SPAN, weights.map, barrier, column + i * N_CHUNK, piece * CHUNK, place);
            }
          }
}

// The boxes of a run, of a group's channels.
DEVICE void load_boxes(const Images& images, const Run& run, int group, Pipeline& pipe) {
  int at[AXES + 1], c = GROUPED ? group * images.group_channels : 0;
#pragma unroll
  for (int i = 0; i < AXES; ++i) at[i] = images.in_box(i, run.at[i]) - images.low[i];
  at[AXES] = run.at[AXES];
  for (int step = 0; step < run.steps; ++step, at[MARCH] += images.in_box(MARCH, images.step))
    for (int piece = 0; piece < images.pieces; ++piece) {
      mbarrier_wait(pipe.empty_barrier(), pipe.phase ^ 1);
      mbarrier_arrive_expect_tx(pipe.full_barrier(), images.box_bytes);
      tma_load_box(pipe.boxes + pipe.stage * images.stage_bytes, images.map, pipe.full_barrier(), c + piece * CHUNK,
                   at);
      pipe.advance();
    }
}
