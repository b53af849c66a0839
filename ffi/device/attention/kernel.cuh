// Attention of few query rows: of one head of keys and values, a part of its keys to a block. A step of decoding reads
// each key and value once, so all there is to do is to have enough bytes on their way.
//
// Each warp has tiles of TILE keys of its own, every WARPS-th, in a ring of its own in shared memory, so no warp waits
// for another before the end. Keys are the rows of the products, and query rows the columns, of which 8 are enough:
// scores are k q^T, and the mixed values v^T p^T, so both add up for the same two query rows in a lane, and neither the
// largest score nor the sum of powers moves between lanes. Rows of shared memory are 16 bytes longer than the data, so
// that eight of them lie in different banks.
//
// A lane l has, with g = l / 4 and t = l % 4, query rows 2 t and 2 t + 1 of each 8: of scores those of keys g and g +
// 8, of mixed values those of elements g and g + 8.

constexpr int THREADS = 32 * WARPS;
constexpr int KEY_PITCH = 2 * KEY_SIZE + 16, VALUE_PITCH = 2 * VALUE_SIZE + 16;  // bytes
constexpr int STAGE = TILE * (KEY_PITCH + VALUE_PITCH);
constexpr int MIXED_PITCH = VALUE_SIZE + 4;  // floats of a query row: no two lanes meet in a bank

// Of 8 x 8 elements of 16 bits: lane l's two of row l / 4 become those of column l / 4.
DEVICE u32 movmatrix(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The largest of the lanes that have the same query rows, and the sum.
DEVICE float largest(float x) {
#pragma unroll
  for (int lane = 4; lane < 32; lane *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}
DEVICE float total(float x) {
#pragma unroll
  for (int lane = 4; lane < 32; lane *= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// Copies the rows of keys `first` and following, zeros where a part has no more. Where they are a stream that L2 cannot
// hold, their lines leave it first.
template <int SIZE, int PITCH>
DEVICE void fetch(u32 to, const char* from, int key_bytes, int left, int lane) {
  constexpr int CHUNKS = SIZE / 8, ROWS_AT_ONCE = 32 / CHUNKS, MORE = 32 % CHUNKS;  // of 16 bytes
  int row = lane / CHUNKS, chunk = lane % CHUNKS;
  from += row * key_bytes + chunk * 16;
#pragma unroll
  for (int i = 0; i < TILE * CHUNKS / 32; ++i) {
    cp_async<16, STREAMED>(to + row * PITCH + chunk * 16, from, row < left);
    row += ROWS_AT_ONCE, chunk += MORE, from += ROWS_AT_ONCE * key_bytes + MORE * 16;
    if (MORE > 0 && chunk >= CHUNKS) ++row, chunk -= CHUNKS, from += key_bytes - CHUNKS * 16;
  }
}

// The fragments of queries. Where they are many they lie in shared memory, for all warps, as lanes read them.
struct Query {
  u32 words[COLUMNS][QUERIES_SHARED ? 1 : KEY_SIZE / 16][2], address;

  static DEVICE void fragment(u32 (&to)[2], const char* q, int c, int i, int lane) {
    int row = 8 * c + lane / 4;
    const char* p = q + row * 2 * KEY_SIZE + 32 * i + lane % 4 * 4;
    to[0] = ld_global_u32_if(row < ROWS, p), to[1] = ld_global_u32_if(row < ROWS, p + 16);
  }

  DEVICE void load(const char* q, u32 shared) {
    if constexpr (QUERIES_SHARED) {
      address = shared + threadIdx.x % 32 * 8;
      for (int at = threadIdx.x; at < COLUMNS * KEY_SIZE / 16 * 32; at += THREADS) {
        u32 both[2];
        fragment(both, q, at / 32 % COLUMNS, at / 32 / COLUMNS, at % 32);
        st_shared_v2(shared + at * 8, both[0], both[1]);
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < KEY_SIZE / 16; ++i) fragment(words[c][i], q, c, i, threadIdx.x % 32);
      }
    }
  }

  DEVICE void read(u32 (&to)[COLUMNS][2], int i) const {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      if constexpr (QUERIES_SHARED) {
        ld_shared_v2(address + (i * COLUMNS + c) * 256, to[c][0], to[c][1]);
      } else {
        to[c][0] = words[c][i][0], to[c][1] = words[c][i][1];
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(PARAMETERS) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int part = DIVIDED ? blockIdx.x % parts : 0, matrix = DIVIDED ? blockIdx.x / parts : blockIdx.x;
  int batch = matrix / heads, head = matrix % heads;
  int begin = part * keys_of_part, end = min(keys, begin + keys_of_part);
  k += batch * k_batch + head * k_head, v += batch * v_batch + head * v_head;
  const u32 ring = shared_address(shared_memory) + warp * STAGES * STAGE;

  // The warp's tile n begins at the key first(n).
  auto first = [&](int n) { return begin + (n * WARPS + warp) * TILE; };
  int tiles = max(0, (end - first(0) + WARPS * TILE - 1) / (WARPS * TILE));
  auto load = [&](int n, int stage) {
    int key = first(n);
    u32 to = ring + stage * STAGE;
    fetch<KEY_SIZE, KEY_PITCH>(to, k + static_cast<i64>(key) * k_key, k_key, end - key, lane);
    fetch<VALUE_SIZE, VALUE_PITCH>(to + TILE * KEY_PITCH, v + static_cast<i64>(key) * v_key, v_key, end - key, lane);
  };
#pragma unroll 1
  for (int n = 0; n < STAGES; ++n) {  // not unrolled: text that has to come from memory before the first load
    if (n < tiles) load(n, n);
    cp_async_commit_group();
  }

  Query query;
  query.load(q + static_cast<i64>(matrix) * ROWS * 2 * KEY_SIZE,
             shared_address(shared_memory) + WARPS * STAGES * STAGE);
  Extras extras EXTRAS;

  float mixed[COLUMNS][VALUE_SIZE / 16][4] = {};
  float highest[COLUMNS][2], sum[COLUMNS][2] = {};
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) highest[c][0] = highest[c][1] = lowest();

  int stage = 0;
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    int key = first(n) + g;
    extras.load(key);
    cp_async_wait_group<STAGES - 1>();
    __syncwarp();
    u32 tile_k = ring + stage * STAGE, tile_v = tile_k + TILE * KEY_PITCH;

    float scores[BLOCKS][COLUMNS][4] = {};
#pragma unroll
    for (int i = 0; i < KEY_SIZE / 16; ++i) {
      u32 columns[COLUMNS][2];
      query.read(columns, i);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        u32 a[4];
        ldmatrix_x4(tile_k + (16 * b + lane % 16) * KEY_PITCH + 32 * i + lane / 16 * 16, a[0], a[1], a[2], a[3]);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) mma<MATH>(scores[b][c], a, columns[c]);
      }
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int at = key + 16 * b + i / 2 * 8;
          float score = extras.score(scores[b][c][i], b, i / 2, c, i % 2, at);
          scores[b][c][i] = at < end ? score : lowest();
        }
      }
    }

    u32 powers[BLOCKS][COLUMNS][2];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      float shift[2], factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float most = fmaxf(scores[0][c][e], scores[0][c][2 + e]);
#pragma unroll
        for (int b = 1; b < BLOCKS; ++b) most = fmaxf(most, fmaxf(scores[b][c][e], scores[b][c][2 + e]));
        most = fmaxf(highest[c][e], largest(most));
        shift[e] = finite_shift(most);
        factor[e] = power(highest[c][e] - shift[e]);
        highest[c][e] = most;
        sum[c][e] *= factor[e];
      }
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[b][c][i] = power(scores[b][c][i] - shift[i % 2]);
          sum[c][i % 2] += scores[b][c][i];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
          powers[b][c][h] = movmatrix(pack<ELEMENT>(scores[b][c][2 * h], scores[b][c][2 * h + 1]));
      }
#pragma unroll
      for (int i = 0; i < VALUE_SIZE / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mixed[c][i][j] *= factor[j % 2];
      }
    }
#pragma unroll
    for (int i = 0; i < VALUE_SIZE / 16; ++i) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        u32 a[4];
        int row = 16 * b + lane / 16 * 8 + lane % 8;
        ldmatrix_x4_trans(tile_v + row * VALUE_PITCH + 32 * i + lane / 8 % 2 * 16, a[0], a[1], a[2], a[3]);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) mma<MATH>(mixed[c][i], a, powers[b][c]);
      }
    }
    __syncwarp();
    if (n + STAGES < tiles) load(n + STAGES, stage);
    cp_async_commit_group();
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }

  // What warps have, added up in order: no two runs differ.
  cp_async_wait_group<0>();
  __syncthreads();
  float* all = reinterpret_cast<float*>(shared_memory);   // [WARPS][8 COLUMNS][MIXED_PITCH]
  float* ends = all + WARPS * 8 * COLUMNS * MIXED_PITCH;  // [WARPS][8 COLUMNS][2]: the highest score, the sum
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int row = warp * 8 * COLUMNS + 8 * c + 2 * t + e;
      float whole = total(sum[c][e]);
      if (g == 0) ends[2 * row] = highest[c][e], ends[2 * row + 1] = whole;
#pragma unroll
      for (int i = 0; i < VALUE_SIZE / 16; ++i) {
        all[row * MIXED_PITCH + 16 * i + g] = mixed[c][i][e];
        all[row * MIXED_PITCH + 16 * i + 8 + g] = mixed[c][i][2 + e];
      }
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < ROWS * VALUE_SIZE / 2; at += THREADS) {
    int row = at / (VALUE_SIZE / 2), element = at % (VALUE_SIZE / 2) * 2;
    float most = lowest(), whole = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) most = fmaxf(most, ends[2 * (w * 8 * COLUMNS + row)]);
    const float shift = finite_shift(most);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float* from = all + (w * 8 * COLUMNS + row) * MIXED_PITCH + element;
      const float* its = ends + 2 * (w * 8 * COLUMNS + row);
      float factor = power(its[0] - shift);
      whole += factor * its[1], x += factor * from[0], y += factor * from[1];
    }
    i64 place = static_cast<i64>(blockIdx.x) * ROWS + row;
    if constexpr (!DIVIDED) {
      const float inverse = rcp_approx(whole);
      x *= inverse, y *= inverse;
    }
    const float pair[2] = {x, y};
    Vector<RESULT, 2>::store(result + (place * VALUE_SIZE + element) * SIZE<RESULT>, pair);
    if (DIVIDED && element == 0) st_global_v2(sums + 2 * place, most, whole);
  }
}
