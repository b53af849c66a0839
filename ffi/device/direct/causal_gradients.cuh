// The gradients of an activation of a causal convolution of each channel by itself, y[t] = f(sum_k w[k] x[t - HALO + k]
// + bias), in one pass over x and the gradient of y. A thread has PAIRS neighbouring channels and goes down the places
// of a chunk, of which rows of x and of gradients are loaded AHEAD at a time, before those that it computes with.
//
// Place t's gradient before f, g[t], is made of x[t - HALO .. t]; it is added to sums of w's gradient, and takes part
// in rows t - HALO to t of x's, of which open[] has the sums so far: row t - HALO is then done. So a thread reads HALO
// rows before its chunk and makes the gradients of HALO places behind it, which are for its own rows alone.
//
// A block adds up what its threads have of w's gradient in order and writes one of the parts, which sum.cuh adds up.

constexpr int HALO = WINDOW - 1, KEPT = HALO > 0 ? HALO : 1, SUMS = WINDOW + 1, ITEMS = THREADS / LANES;
constexpr int PITCH = COLUMNS * SIZE<OPERAND>, ACROSS = LANES * PAIRS;
using Row = Vector<OPERAND, PAIRS>;

template <bool B>
struct Bool {
  static constexpr bool value = B;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  int lane = threadIdx.x % LANES, at_item = threadIdx.x / LANES, part = blockIdx.x / tiles;
  int first_column = blockIdx.x % tiles * ACROSS, column = first_column + lane * PAIRS;
  int item = part * ITEMS + at_item;
  Acc sums[SUMS][PAIRS] = {};  // of each tap, and of the bias
  if (column < COLUMNS && item < items) {
    Acc weight[WINDOW][PAIRS], offset[PAIRS] = {}, open[KEPT][PAIRS] = {}, before[KEPT][PAIRS];
#pragma unroll
    for (int k = 0; k < WINDOW; ++k) {
      Row row;
      row.load(w + (k * COLUMNS + column) * SIZE<OPERAND>);
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) weight[k][p] = static_cast<Acc>(row[p]);
    }
    if constexpr (HAS_BIAS) {
      Vector<BIAS, PAIRS> row;
      row.load(bias + column * SIZE<BIAS>);
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) offset[p] = static_cast<Acc>(row[p]);
    }
    int first = item % chunks * rows, stop = min(first + rows, length), end = stop + HALO;
    i64 at = (static_cast<i64>(item / chunks) * length + first) * PITCH + column * SIZE<OPERAND>;
#pragma unroll
    for (int h = 0; h < HALO; ++h) {
      Row row;
      row.load(x + at - (HALO - h) * static_cast<i64>(PITCH), first + h >= HALO);
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) before[h][p] = static_cast<Acc>(row[p]);
    }
    Row next_x[AHEAD], next_y[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      bool there = first + u < min(end, length);
      next_x[u].load(x + at + u * static_cast<i64>(PITCH), there);
      next_y[u].load(dy + at + u * static_cast<i64>(PITCH), there);
    }

    // Place t, whose rows are u places behind `at`. Where it is no EDGE all is there, and of this chunk.
    auto place_of = [&](auto edge, int t, int u) {
      constexpr bool EDGE = decltype(edge)::value;
      Acc now[PAIRS], g[PAIRS], done[PAIRS];
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        now[p] = static_cast<Acc>(next_x[u][p]);
        g[p] = static_cast<Acc>(next_y[u][p]);
        keep(now[p]), keep(g[p]);
      }
      bool there = !EDGE || t + AHEAD < min(end, length), exists = !EDGE || t < length, own = !EDGE || t < stop;
      next_x[u].load(x + at + (AHEAD + u) * static_cast<i64>(PITCH), there);
      next_y[u].load(dy + at + (AHEAD + u) * static_cast<i64>(PITCH), there);
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        Acc sum = offset[p];
#pragma unroll
        for (int k = 0; k < HALO; ++k) sum += weight[k][p] * before[k][p];
        g[p] = gradient_of(sum + weight[HALO][p] * now[p], g[p]);
        if (EDGE) g[p] = exists ? g[p] : Acc{};
        done[p] = HALO > 0 ? open[0][p] + weight[0][p] * g[p] : weight[0][p] * g[p];
#pragma unroll
        for (int k = 1; k < WINDOW; ++k)
          open[k - 1][p] = k < HALO ? open[k < HALO ? k : 0][p] + weight[k][p] * g[p] : weight[k][p] * g[p];
        if (EDGE) g[p] = own ? g[p] : Acc{};
#pragma unroll
        for (int k = 0; k < HALO; ++k) sums[k][p] += g[p] * before[k][p];
        sums[HALO][p] += g[p] * now[p];
        sums[WINDOW][p] += g[p];
#pragma unroll
        for (int k = 0; k + 1 < HALO; ++k) before[k][p] = before[k + 1][p];
        before[KEPT - 1][p] = now[p];
      }
      if (!EDGE || t >= first + HALO) Row::store(dx + at + (u - HALO) * static_cast<i64>(PITCH), done);
    };
    int t = first;
#pragma unroll 1
    while (t < end) {
      if (t >= first + HALO && t + AHEAD <= stop && t + 2 * AHEAD <= length) {
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) place_of(Bool<false>{}, t + u, u);
        t += AHEAD, at += AHEAD * static_cast<i64>(PITCH);
      } else {
        place_of(Bool<true>{}, t, 0);
        Row last_x = next_x[0], last_y = next_y[0];
#pragma unroll
        for (int u = 0; u + 1 < AHEAD; ++u) next_x[u] = next_x[u + 1], next_y[u] = next_y[u + 1];
        next_x[AHEAD - 1] = last_x, next_y[AHEAD - 1] = last_y;
        ++t, at += PITCH;
      }
    }
  }

  Acc* shared = reinterpret_cast<Acc*>(shared_memory);  // [SUMS][ITEMS][ACROSS]
#pragma unroll
  for (int k = 0; k < SUMS; ++k)
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) shared[(k * ITEMS + at_item) * ACROSS + lane * PAIRS + p] = sums[k][p];
  __syncthreads();
  for (int j = threadIdx.x; j < SUMS * ACROSS; j += THREADS) {
    int k = j / ACROSS, at = j % ACROSS;
    if (first_column + at >= COLUMNS) continue;
    Acc sum{};
    for (int other = 0; other < ITEMS; ++other) sum += shared[(k * ITEMS + other) * ACROSS + at];
    sum_of_parts[(static_cast<i64>(part) * SUMS + k) * COLUMNS + first_column + at] = sum;
  }
}
