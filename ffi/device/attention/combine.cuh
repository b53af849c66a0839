// Adds up the parts of attention, in order: a thread has two elements of a query row.

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(PARAMETERS) {
  int at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= pairs) return;
  int row = at / (VALUE_SIZE / 2), element = at % (VALUE_SIZE / 2) * 2, matrix = row / ROWS;
  i64 first = static_cast<i64>(matrix) * parts * ROWS + row % ROWS;
  float most = lowest(), whole = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll 16
  for (int part = 0; part < parts; ++part) most = fmaxf(most, sums[2 * (first + part * ROWS)]);
  const float shift = finite_shift(most);
#pragma unroll 16
  for (int part = 0; part < parts; ++part) {
    i64 place = first + part * ROWS;
    float factor = power(sums[2 * place] - shift);
    const float* from = mixed + place * VALUE_SIZE + element;
    whole += factor * sums[2 * place + 1], x += factor * from[0], y += factor * from[1];
  }
  const float pair[2] = {x / whole, y / whole};
  Vector<RESULT, 2>::store(result + (static_cast<i64>(row) * VALUE_SIZE + element) * SIZE<RESULT>, pair);
}
