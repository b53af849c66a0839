// The second kernel of a routing, of as many blocks as the first: each adds up what all have counted, and those before
// it, and places the pairs of its own tokens.

constexpr int COLUMNS = PITCH / 8;  // of 8 counts, 16 bytes
constexpr int SLICES = COLUMNS < THREADS ? THREADS / COLUMNS : 1;

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(PARAMETERS) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  u32* before = reinterpret_cast<u32*>(shared_memory);  // [PITCH] each
  u32* count = before + PITCH;
  int batch = blockIdx.x / blocks, block = blockIdx.x % blocks;
  for (int i = threadIdx.x; i < 2 * PITCH; i += THREADS) before[i] = 0;
  __syncthreads();
  const u16* counted = counts + static_cast<i64>(batch) * blocks * PITCH;
  for (int i = threadIdx.x; i < COLUMNS * SLICES; i += THREADS) {
    int column = i % COLUMNS * 8;
    u32 earlier[8] = {}, all[8] = {};
#pragma unroll 4
    for (int other = i / COLUMNS; other < blocks; other += SLICES) {
      uint4 v = *reinterpret_cast<const uint4*>(counted + static_cast<i64>(other) * PITCH + column);
      u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        u32 one = j % 2 ? words[j / 2] >> 16 : words[j / 2] & 0xffff;
        all[j] += one;
        if (other < block) earlier[j] += one;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      atomicAdd(before + column + j, earlier[j]);
      atomicAdd(count + column + j, all[j]);
    }
  }
  __syncthreads();
  if (block == 0)
    for (int i = threadIdx.x; i < EXPERTS; i += THREADS) group_sizes[static_cast<i64>(batch) * EXPERTS + i] = count[i];
  i64 first_pair = static_cast<i64>(batch) * tokens * K;
  int begin = min(tokens, block * chunk) * K, end = min(tokens, (block + 1) * chunk) * K;
  place(indices + first_pair, inverse + first_pair, permutation + first_pair, before, count, begin, end);
}
