// A kernel of its own: sums over rows of what an expression makes of the elements of matrices. A block has some rows of
// one matrix, LANES threads along its columns, each with COUNT neighbours, and LINES rows at a time, of which a thread
// loads UNROLL before it computes. A thread's sums are added up through shared memory, in order, and are the block's
// share: no two runs differ.

constexpr int THREADS = LANES * LINES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);  // [SUMS][LINES][LANES * COUNT]
  int lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
  int tile = blockIdx.x % tiles, part = blockIdx.x / tiles, matrix = part / chunks, chunk = part % chunks;
  int first = tile * LANES * COUNT, column = first + lane * COUNT;
  int end = min(rows, (chunk + 1) * rows_of_chunk);

  float sums[SUMS][COUNT] = {};
  if (column < columns) {
    const Given given GIVEN;
    Shared same;
    same.load(given, matrix, column);
#pragma unroll 1
    for (int row = chunk * rows_of_chunk + line; row < end; row += LINES * UNROLL) {
      Own own[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        own[u].load(given, static_cast<i64>(matrix) * rows + row + u * LINES, row + u * LINES, column,
                    row + u * LINES < end);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * LINES >= end) break;
#pragma unroll
        for (int v = 0; v < COUNT; ++v) add(sums, same, own[u], v);
      }
    }
  }
#pragma unroll
  for (int s = 0; s < SUMS; ++s)
#pragma unroll
    for (int v = 0; v < COUNT; ++v) shared[(s * LINES + line) * LANES * COUNT + lane * COUNT + v] = sums[s][v];
  __syncthreads();
  for (int j = threadIdx.x; j < SUMS * LANES * COUNT; j += THREADS) {
    int s = j / (LANES * COUNT), at = j % (LANES * COUNT);
    if (first + at >= columns) continue;
    const float* from = shared + s * LINES * LANES * COUNT + at;
    float sum = from[0];
#pragma unroll 8
    for (int other = 1; other < LINES; ++other) sum += from[other * LANES * COUNT];
    store_sum(s, static_cast<i64>(part) * columns + first + at, sum RESULTS);
  }
}
