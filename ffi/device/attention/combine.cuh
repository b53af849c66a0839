// Adds up the parts of attention: a thread has two elements of a query row, of every LINES-th part, and the first line
// of threads those of all lines, in order: no two runs differ.

struct Part {
  float most = lowest(), whole = 0.0f, x = 0.0f, y = 0.0f;

  DEVICE void add(float its_most, float its_whole, float its_x, float its_y) {
    float next = fmaxf(most, its_most), shift = finite_shift(next);
    float own = power(most - shift), other = power(its_most - shift);
    most = next, whole = own * whole + other * its_whole;
    x = own * x + other * its_x, y = own * y + other * its_y;
  }
};

extern "C" __global__ void __launch_bounds__(32 * LINES) KERNEL(PARAMETERS) {
  __shared__ float4 lines[LINES][32];
  int lane = threadIdx.x % 32, line = threadIdx.x / 32, at = blockIdx.x * 32 + lane;
  int row = at / (VALUE_SIZE / 2), element = at % (VALUE_SIZE / 2) * 2, matrix = row / ROWS;
  Part all;
  if (at < pairs) {
#pragma unroll 2
    for (int part = line; part < parts; part += LINES) {
      i64 place = (static_cast<i64>(matrix) * parts + part) * ROWS + row % ROWS;
      const float* from = mixed + place * VALUE_SIZE + element;
      all.add(sums[2 * place], sums[2 * place + 1], from[0], from[1]);
    }
  }
  lines[line][lane] = make_float4(all.most, all.whole, all.x, all.y);
  __syncthreads();
  if (line > 0 || at >= pairs) return;
#pragma unroll
  for (int other = 1; other < LINES; ++other) {
    float4 its = lines[other][lane];
    all.add(its.x, its.y, its.z, its.w);
  }
  const float pair[2] = {all.x / all.whole, all.y / all.whole};
  Vector<RESULT, 2>::store(result + (static_cast<i64>(row) * VALUE_SIZE + element) * SIZE<RESULT>, pair);
}
