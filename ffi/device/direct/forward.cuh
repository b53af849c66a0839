// A convolution of each channel by itself, as fast as memory. A thread has a few neighbouring channels and a strip of
// STRIP places of a row. It goes down the rows of the image: one of them, whose pixels it loads once, is added to the
// ROWS_OPEN rows of the result that it takes part in, under a tap each. RESULT_ROWS rows are done after every
// IMAGE_ROWS. UNROLL times as many are loaded ahead.
//
// Row FIRST_OPEN + a of those from RESULT_ROWS q on has, in step q, its sums in sums[a], so that from step to step a
// sum moves by RESULT_ROWS places, as its first addition of a step is made.

constexpr int TAPS = WINDOW_D * WINDOW_H * WINDOW_W;

// The weights of PAIRS products under each tap, of LANES threads that are neighbours along channels.
struct alignas(sizeof(Acc) * (PAIRS % 4 == 0 && sizeof(Acc) == 4 ? 4 : PAIRS % 2 == 0 ? 2 : 1)) Tap {
  Acc weight[PAIRS];
};

// Where the weight of a pair under a tap is in memory.
struct Places {
  int first, step_d, step_h, step_w, columns, inputs;

  DEVICE i64 operator()(int tap, int pair) const {
    int d = tap / (WINDOW_H * WINDOW_W), h = tap / WINDOW_W % WINDOW_H, w = tap % WINDOW_W;
    int at = first + d * step_d + h * step_h + w * step_w;
    if (B_K_MAJOR) return static_cast<i64>(at * MULTIPLIER + pair % MULTIPLIER) * inputs + pair / MULTIPLIER;
    return static_cast<i64>(at * CHANNELS + pair % CHANNELS) * columns + pair / CHANNELS;
  }
};

DEVICE Acc weight_at(const char* w, i64 place) {
  Vector<OPERAND, 1> one;
  one.load(w + place * SIZE<OPERAND>);
  return static_cast<Acc>(one[0]);
}

// Under which tap image row s of a step takes part in the a-th open row; -1 for none.
DEVICE constexpr int tap_of(int s, int a) {
  int at = SPREAD_H * s - STRIDE_H * (FIRST_OPEN + a) + LOW_H;
  return at >= 0 && at % DILATION_H == 0 && at / DILATION_H < WINDOW_H ? at / DILATION_H : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Tap* shared_taps = reinterpret_cast<Tap*>(shared_memory);
  const Sizes of SIZES;
  const Places places TAP_PLACES;
  int lane = threadIdx.x % LANES, first_pair = blockIdx.x % tiles * LANES * PAIRS, pair = first_pair + lane * PAIRS;
  Tap own[IN_REGISTERS ? TAPS : 1];
  if constexpr (IN_REGISTERS) {
#pragma unroll
    for (int i = 0; i < TAPS * PAIRS; ++i)
      own[i / PAIRS].weight[i % PAIRS] = pair < pairs ? weight_at(w, places(i / PAIRS, pair + i % PAIRS)) : Acc{};
  } else {
    for (int i = threadIdx.x; i < TAPS * LANES * PAIRS; i += THREADS) {
      int tap = i / (LANES * PAIRS), at = first_pair + i % (LANES * PAIRS);
      if (at < pairs) reinterpret_cast<Acc*>(shared_memory)[i] = weight_at(w, places(tap, at));
    }
    __syncthreads();
  }
  int part = blockIdx.x / tiles, at_item = threadIdx.x / LANES, index = part * (THREADS / LANES) + at_item;
  Extras extras(of.items, columns EXTRAS_ARGUMENTS);
  Partials partials;
  auto walk = [&] {
    if (pair >= pairs || index >= of.items) return;
    const Item item(index, of);
    if (item.rows <= 0) return;
    extras.begin(first_column(pair));
    x += static_cast<i64>(first_input(pair)) * SIZE<OPERAND>;
    const Inside inside = item.inside(0, of);
    const int left = item.left(0, of), first_place = item.column(0);

    const char* plane = item.plane_of(x, 0, of);
    auto load = [&](Strip(&rows)[IMAGE_ROWS], int q, int d) {
      if (WINDOW_D > 1) plane = item.plane_of(x, d, of);
#pragma unroll
      for (int s = 0; s < IMAGE_ROWS; ++s) item.load(rows[s], plane, IMAGE_ROWS * q + s, left, inside, of);
    };

    Acc sums[ROWS_OPEN][STRIP][PAIRS] = {};
    int end = item.first_row + item.rows;
    // From the first step that has the first row open to the one that ends the last.
    int q = floor_div(item.first_row - FIRST_OPEN - ROWS_OPEN + RESULT_ROWS, RESULT_ROWS), d = 0;
    int last = floor_div(end - 1 - FIRST_OPEN, RESULT_ROWS);
    auto place_of = [&](int row) {
      int in_plane = (item.row_remainder + EVERY_H * row) * of.grid_w + first_place;
      return (item.image * of.grid_d + item.plane) * of.grid_h * of.grid_w + in_plane;
    };
    // Operands of the rows that a step ends are on their way from where the step before it has ended its own.
    Beside beside[RESULT_ROWS][STRIP];
    auto ask = [&](int a, int row) {
      if (row < item.first_row || row >= end) return;
#pragma unroll
      for (int t = 0; t < STRIP; ++t) {
        int column = WHOLE_STRIPS ? EVERY_W * t : min(EVERY_W * t, of.grid_w - 1 - first_place);
        beside[a][t].load(extras, place_of(row) + column, first_column(pair));
      }
    };
    Strip ahead[UNROLL][IMAGE_ROWS];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) load(ahead[i], q + i, 0);
#pragma unroll
    for (int a = 0; a < RESULT_ROWS; ++a) ask(a, RESULT_ROWS * q + FIRST_OPEN + a);
#pragma unroll 1
    while (q <= last) {
      bool of_step_last = d == WINDOW_D - 1;
      int after_q = of_step_last ? q + UNROLL : q, after_d = of_step_last ? 0 : d + 1;
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        int first = RESULT_ROWS * (q + i) + FIRST_OPEN;
        Acc pixel[IMAGE_ROWS][COUNT][INPUTS];
        bool there[IMAGE_ROWS];
#pragma unroll
        for (int j = 0; j < IMAGE_ROWS * COUNT * INPUTS; ++j) {
          int v = j / INPUTS % COUNT, s = j / INPUTS / COUNT;
          there[s] = ahead[i][s].there;
          if (!is_read(v)) continue;
          pixel[s][v][j % INPUTS] = static_cast<Acc>(ahead[i][s].pixel[v][j % INPUTS]);
          keep(pixel[s][v][j % INPUTS]);
        }
        if (after_q + i <= last) load(ahead[i], after_q + i, after_d);
#pragma unroll
        for (int a = 0; a < ROWS_OPEN; ++a) {
          if (first + a >= item.first_row && first + a < end) {
            if (WINDOW_D == 1 || d == 0) {
#pragma unroll
              for (int j = 0; j < STRIP * PAIRS; ++j)
                sums[a][j / PAIRS][j % PAIRS] =
                    a + RESULT_ROWS < ROWS_OPEN ? sums[a + RESULT_ROWS][j / PAIRS][j % PAIRS] : Acc{};
            }
#pragma unroll
            for (int s = 0; s < IMAGE_ROWS; ++s) {
              if (tap_of(s, a) < 0 || !there[s]) continue;
#pragma unroll
              for (int k = 0; k < WINDOW_W; ++k) {
                int at = tap_of(s, a) * WINDOW_W + k;
                const Tap tap = IN_REGISTERS ? own[at] : shared_taps[(d * WINDOW_H * WINDOW_W + at) * LANES + lane];
#pragma unroll
                for (int t = 0; t < STRIP; ++t) {
                  if (pixel_of(t, k) < 0) continue;
#pragma unroll
                  for (int p = 0; p < PAIRS; ++p)
                    sums[a][t][p] += pixel[s][pixel_of(t, k)][input_of(p)] * tap.weight[p];
                }
              }
            }
            if (a < RESULT_ROWS && of_step_last) {
              int place = place_of(first + a);
#pragma unroll
              for (int t = 0; t < STRIP; ++t) {
                if (!WHOLE_STRIPS && first_place + EVERY_W * t >= of.grid_w) continue;
                Done done;
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                  bool one_of_several = p > 0 && column_of(p - 1) == column_of(p);
                  done.acc[column_of(p)] = one_of_several ? done.acc[column_of(p)] + sums[a][t][p] : sums[a][t][p];
                }
                finish(extras, partials, beside[a][t], done, place + EVERY_W * t, first_column(pair));
              }
            }
          }
          if (a < RESULT_ROWS && of_step_last) ask(a, first + RESULT_ROWS + a);
        }
      }
      q = after_q, d = after_d;
    }
  };
  walk();
  partials.store<LANES>(extras, reinterpret_cast<Acc*>(shared_memory), lane, at_item, first_column(first_pair), part);
}
