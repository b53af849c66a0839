// A convolution along one axis of each channel by itself, of places and taps without steps. A thread has PAIRS
// neighbouring channels and goes down the places of a chunk with the window's pixels in registers: UNROLL rows are
// loaded ahead, and a place takes one more. Arguments and constants are those of forward.cuh.

constexpr int HALO = WINDOW_H - 1, KEPT = HALO > 0 ? HALO : 1;
constexpr i64 PITCH = static_cast<i64>(ACROSS) * SIZE<OPERAND>;

template <bool B>
struct Bool {
  static constexpr bool value = B;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  const Sizes of SIZES;
  int pair = (blockIdx.x % tiles * LANES + threadIdx.x % LANES) * PAIRS;
  int item = blockIdx.x / tiles * (THREADS / LANES) + threadIdx.x / LANES;
  if (pair >= pairs || item >= of.items) return;
  Acc weight[WINDOW_H][PAIRS], before[KEPT][PAIRS];
#pragma unroll
  for (int k = 0; k < WINDOW_H; ++k) {
    Pixel row;
    row.load(w + (static_cast<i64>(tap_first + k * tap_step_h) * ACROSS + pair) * SIZE<OPERAND>);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) weight[k][p] = static_cast<Acc>(row[p]);
  }
  Extras extras(of.items, ACROSS EXTRAS_ARGUMENTS);
  extras.begin(pair);
  Partials none;
  int image = item / of.chunks, t = item % of.chunks * of.rows, end = min(t + of.rows, of.grid_h);
  int next = t + of.first_h, place = image * of.grid_h + t;  // the image's row that is loaded next; of the result
  i64 at = (static_cast<i64>(image) * of.image_h + next) * PITCH + pair * SIZE<OPERAND>;
  auto there = [&](int row) { return static_cast<u32>(row) < static_cast<u32>(of.image_h); };
#pragma unroll
  for (int h = 0; h < HALO; ++h) {
    Pixel row;
    row.load(x + at + h * PITCH, there(next + h));
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) before[h][p] = static_cast<Acc>(row[p]);
  }
  next += HALO, at += HALO * PITCH;
  Pixel ahead[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) ahead[u].load(x + at + u * PITCH, there(next + u));
  next += UNROLL, at += UNROLL * PITCH;

  // The u-th place from t on; where it is no EDGE, its row of UNROLL places later is there.
  auto place_of = [&](auto edge, int u) {
    constexpr bool EDGE = decltype(edge)::value;
    Acc now[PAIRS];
    Done done;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      now[p] = static_cast<Acc>(ahead[u][p]);
      keep(now[p]);
    }
    ahead[u].load(x + at + u * PITCH, !EDGE || there(next));
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      Acc sum{};
#pragma unroll
      for (int k = 0; k < HALO; ++k) sum += weight[k][p] * before[k][p];
      done.acc[p] = sum + weight[HALO][p] * now[p];
#pragma unroll
      for (int k = 0; k + 1 < HALO; ++k) before[k][p] = before[k + 1][p];
      before[KEPT - 1][p] = now[p];
    }
    finish(extras, none, done, place + u, pair);
  };
#pragma unroll 1
  while (t < end) {
    if (t + UNROLL <= end && next >= 0 && next + UNROLL <= of.image_h) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) place_of(Bool<false>{}, u);
      t += UNROLL, next += UNROLL, place += UNROLL, at += UNROLL * PITCH;
    } else {
      place_of(Bool<true>{}, 0);
      Pixel last = ahead[0];
#pragma unroll
      for (int u = 0; u + 1 < UNROLL; ++u) ahead[u] = ahead[u + 1];
      ahead[UNROLL - 1] = last;
      ++t, ++next, ++place, at += PITCH;
    }
  }
}
