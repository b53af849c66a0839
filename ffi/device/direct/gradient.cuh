// The weight gradient: for each tap and pair of channels the sum, over all places, of a pixel of the image and one of
// the result's gradient. A thread has PAIRS of them and WINDOW_ROWS rows of taps of one plane of the window; it goes
// down chunks of strips, and a block's threads add up what they have in order. A block writes one of the parts, which
// sum.cuh adds up.

constexpr int TAPS = WINDOW_ROWS * WINDOW_W, ITEMS = THREADS / LANES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const Sizes of SIZES;
  int lane = threadIdx.x % LANES, at_item = threadIdx.x / LANES, block = blockIdx.x;
  int first_pair = block % tiles * LANES * PAIRS, pair = first_pair + lane * PAIRS;
  block /= tiles;
  int slice = block % SLICES, part = block / SLICES;
  int d = slice / ROW_SLICES, first_tap = slice % ROW_SLICES * WINDOW_ROWS;
  Acc sums[TAPS][PAIRS] = {};
  using Result = Vector<OPERAND, COLUMNS>;
  x += static_cast<i64>(first_input(pair)) * SIZE<OPERAND>;
  g += static_cast<i64>(first_column(pair)) * SIZE<OPERAND>;

  if (pair < pairs) {
#pragma unroll 1
    for (int index = part * ITEMS + at_item; index < of.items; index += parts * ITEMS) {
      const Item item(index, of);
      const Inside inside = item.inside(0, of);
      const char* plane = item.plane_of(x, d, of);
      if (!plane || (!ALONG && !inside)) continue;
      auto load = [&](Strip& strip, int i, int k) {
        int at = STRIDE_H * (ALONG ? 0 : i) + DILATION_H * (first_tap + k) - LOW_H;
        bool there = first_tap + k < WINDOW_H && at >= 0 && at % SPREAD_H == 0;
        Inside bits = ALONG ? item.inside(i, of) : inside;
        item.load(strip, there ? plane : nullptr, at / SPREAD_H, item.left(i, of), bits, of);
      };
      auto load_result = [&](Result(&result)[STRIP], int i) {
        int row = item.row_remainder + EVERY_H * (ALONG ? 0 : i), column = item.column(i);
        i64 place = (static_cast<i64>(item.image * of.grid_d + item.plane) * of.grid_h + row) * of.grid_w + column;
        const char* from = g + place * columns * SIZE<OPERAND>;
#pragma unroll
        for (int t = 0; t < STRIP; ++t, from = next_to(from, EVERY_W * columns * SIZE<OPERAND>))
          result[t].load(from, column + EVERY_W * t < of.grid_w);
      };
      Strip next;
      Result next_result[STRIP];
      int end = item.first_row + item.rows;
      if (item.rows > 0) load(next, item.first_row, 0), load_result(next_result, item.first_row);
#pragma unroll 1
      for (int i = item.first_row; i < end; ++i) {
        Acc result[STRIP][COLUMNS];
#pragma unroll
        for (int j = 0; j < STRIP * COLUMNS; ++j)
          result[j / COLUMNS][j % COLUMNS] = static_cast<Acc>(next_result[j / COLUMNS][j % COLUMNS]);
#pragma unroll
        for (int k = 0; k < WINDOW_ROWS; ++k) {
          Strip now = next;
          if (k + 1 < WINDOW_ROWS) {
            load(next, i, k + 1);
          } else if (i + 1 < end) {
            load(next, i + 1, 0), load_result(next_result, i + 1);
          }
          if (!now.there) continue;
#pragma unroll
          for (int v = 0; v < COUNT; ++v) {
            if (!is_read(v)) continue;
            Acc pixel[INPUTS];
#pragma unroll
            for (int p = 0; p < INPUTS; ++p) pixel[p] = static_cast<Acc>(now.pixel[v][p]);
#pragma unroll
            for (int j = 0; j < WINDOW_W * STRIP; ++j) {
              if (pixel_of(j % STRIP, j / STRIP) != v) continue;
#pragma unroll
              for (int p = 0; p < PAIRS; ++p)
                sums[k * WINDOW_W + j / STRIP][p] += pixel[input_of(p)] * result[j % STRIP][column_of(p)];
            }
          }
        }
      }
    }
  }

  Acc* shared = reinterpret_cast<Acc*>(shared_memory);  // [TAPS_AT_ONCE][ITEMS][LANES * PAIRS]
  constexpr int ACROSS = LANES * PAIRS;
#pragma unroll
  for (int first = 0; first < TAPS; first += TAPS_AT_ONCE) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < TAPS_AT_ONCE * PAIRS; ++j)
      if (first + j / PAIRS < TAPS)
        shared[(j / PAIRS * ITEMS + at_item) * ACROSS + lane * PAIRS + j % PAIRS] = sums[first + j / PAIRS][j % PAIRS];
    __syncthreads();
    for (int j = threadIdx.x; j < TAPS_AT_ONCE * ACROSS; j += THREADS) {
      int tap = first + j / ACROSS, at = first_pair + j % ACROSS;
      int h = first_tap + tap / WINDOW_W;
      if (tap >= TAPS || h >= WINDOW_H || at >= pairs) continue;
      Acc sum{};
      for (int other = 0; other < ITEMS; ++other) sum += shared[(j / ACROSS * ITEMS + other) * ACROSS + j % ACROSS];
      i64 place = (static_cast<i64>(part) * WINDOW_D + d) * WINDOW_H + h;
      sum_of_parts[(place * WINDOW_W + tap % WINDOW_W) * pairs + at] = sum;
    }
  }
}
