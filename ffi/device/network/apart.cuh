// Outer products apart: a second kernel (outer.cuh) sums those of two wide factors, which lie in memory meanwhile;
// those of a narrow one are added up here, by each warp of its own rows, or by warpgroups. Planes go to memory from
// threads, or by bulk copies from shared memory.

DEVICE Chunk unpacked(const Fragment& f) {
  Chunk c;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) unpack(c.x[i], f.w[i]);
  return c;
}

// Planes in memory, as wgmma takes them from shared memory with rows as k: of 64 rows, chunk after chunk of 64 columns,
// each in rows of 128 bytes, swizzled. Of 32 columns the 8 that a thread has of a row are one vector: outer.cuh says
// which column is where. `own` is where a thread has its first vector of the first of CHUNKS.

template <int CHUNKS>
DEVICE char* own_rows(char* planes, int row) {
  return planes + row / 64 * i64(CHUNKS * 8192) + row % 64 * 128 + (lane() % 4 ^ lane() / 4) * 16;
}

// Of columns from 32 times `pair` on, in chunks from FIRST on, those of the row 16 i and 8 times half further on.
template <int FIRST>
DEVICE uint4* vector_at(char* own, int i, int half, int pair) {
  u64 first = reinterpret_cast<u64>(own) ^ pair % 2 * 64;
  return reinterpret_cast<uint4*>(first + (FIRST + pair / 2) * 8192 + (16 * i + 8 * half) * 128);
}

// Stores zeros in rows past the end; what is past the last column is nobody's.
template <int FIRST, int SLICES>
DEVICE void store_plane(char* own, const Fragment (&f)[SLICES], int row, int rows) {
#pragma unroll
  for (int pair = 0; pair < (SLICES + 1) / 2; ++pair)
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32(&x)[FRAGMENT_WORDS] = f[2 * pair].w[i];
        const u32(&y)[FRAGMENT_WORDS] = f[2 * pair + 1 < SLICES ? 2 * pair + 1 : 2 * pair].w[i];
        const bool there = row + 16 * i + 8 * half < rows;
        *vector_at<FIRST>(own, i, half, pair) =
            there ? make_uint4(x[half], x[2 + half], y[half], y[2 + half]) : uint4{};
      }
}

// What this thread has stored.
template <int FIRST, int SLICES>
DEVICE void load_plane(char* own, Fragment (&f)[SLICES]) {
#pragma unroll
  for (int j = 0; j < SLICES; j += 2)
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 found = *vector_at<FIRST>(own, i, half, j / 2);
        f[j].w[i][half] = found.x, f[j].w[i][2 + half] = found.y;
        if (j + 1 < SLICES) f[j + 1 < SLICES ? j + 1 : j].w[i][half] = found.z;
        if (j + 1 < SLICES) f[j + 1 < SLICES ? j + 1 : j].w[i][2 + half] = found.w;
      }
}

// 16 columns of that.
template <int FIRST>
DEVICE Chunk plane_chunk(char* own, int j) {
  Fragment f;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 found = *vector_at<FIRST>(own, i, half, j / 2);
      f.w[i][half] = j % 2 ? found.z : found.x, f.w[i][2 + half] = j % 2 ? found.w : found.y;
    }
  return unpacked(f);
}

// Outer products of a warp's own rows, added to sums in shared memory that are this warp's too; with columns, those of
// B are added up as well, by a product with ones.
template <int A, int B>
struct OwnProducts : Products<A, B> {
  using Base = Products<A, B>;

  static DEVICE void add(float* sums, u32 of_a, u32 of_b) { add_rows<false>(sums, of_a, of_b, nullptr); }
  static DEVICE void add(float* sums, u32 of_a, u32 of_b, float* columns) { add_rows<true>(sums, of_a, of_b, columns); }

  template <bool SUMS>
  static DEVICE void add_rows(float* sums, u32 of_a, u32 of_b, float* columns) {
    const u32 one = MATH == Math::f16 ? 0x3c003c00 : 0x3f803f80, ones[FRAGMENT_WORDS] = {one, one, one, one};
#pragma unroll 2
    for (int tile = 0; tile < Base::TILES; ++tile) {
      const int down = tile / Base::ACROSS, across = tile % Base::ACROSS;
      float x[2][4] = {}, totals[2][4] = {};
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        const int row = threadIdx.x / 32 * (16 * M_TILES) + 16 * i;
        const Columns a = Staged<(A + 15) / 16 * 16>::transposed(of_a, row, down * 16);
        const Columns b = Staged<(B + 15) / 16 * 16>::columns(of_b, row, across * 16);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          multiply_add(x[h], a.w, b.w, h);
          if (SUMS && down == 0) multiply_add(totals[h], ones, b.w, h);
        }
      }
      Base::visit(x, tile, [&](float sum, int at) { sums[at] += sum; });
      if (SUMS && down == 0 && lane() < 4)
#pragma unroll
        for (int e = 0; e < 4; ++e) columns[across * 16 + e / 2 * 8 + lane() * 2 + e % 2] += totals[e / 2][e % 2];
    }
  }
};

// ---- the same by copies of a warpgroup's 64 rows from shared memory, columns as they are ----

// Zeros in rows past the end.
template <int SLICES>
DEVICE void clear_rows_of(Fragment (&f)[SLICES], int row, int rows) {
#pragma unroll
  for (int j = 0; j < SLICES; ++j) clear_rows(f[j], row, rows);
}

// Waits until the buffer that was copied before the last one has been read.
DEVICE void begin_staging() {
  if (threadIdx.x % 128 == 0) cp_async_bulk_wait_group_read<1>();
  bar_sync(1 + threadIdx.x / 128, 128);
}

template <int SLICES>
DEVICE void stage_plane(u32 to, const Fragment (&f)[SLICES]) {
  const int row = threadIdx.x / 32 % 4 * 16 + lane() % 16;
#pragma unroll
  for (int j = 0; j < SLICES; ++j)
    stmatrix_x4(to + j / 4 * 8192 + row * 128 + ((2 * j + lane() / 16) % 8 ^ row % 8) * 16, f[j].w[0][0], f[j].w[0][1],
                f[j].w[0][2], f[j].w[0][3]);
}

template <int CHUNKS>
DEVICE void copy_plane(char* to, u32 from) {
  fence_proxy_async();
  bar_sync(1 + threadIdx.x / 128, 128);
  if (threadIdx.x % 128 == 0) {
    cp_async_bulk_store(to, from, CHUNKS * 8192);
    cp_async_bulk_commit_group();
  }
}

// 16 columns of what this warp has staged.
DEVICE Chunk staged_chunk(u32 from, int j) {
  const int row = threadIdx.x / 32 % 4 * 16 + lane() % 16;
  return chunk_at(from + j / 4 * 8192 + row * 128 + ((2 * j + lane() / 16) % 8 ^ row % 8) * 16, 128);
}

// Sums of outer products of a warpgroup's rows of WIDE columns and NARROW ones, of an input; with those a column of
// ones.
template <int WIDE, int NARROW>
struct NarrowProducts {
  static constexpr int BLOCKS = (WIDE + 63) / 64;
  float x[BLOCKS][4], total[2];

  DEVICE void clear() {
#pragma unroll
    for (int e = 0; e < BLOCKS * 4; ++e) x[e / 4][e % 4] = 0.0f;
    total[0] = total[1] = 0.0f;
  }

  // `of_narrow` is where the narrow rows go, as columns of k, 8 by 8.
  DEVICE void add(u32 staging, u32 of_wide, u32 of_narrow, const Chunk& c) {
    const u32 to = staging + of_narrow + threadIdx.x / 32 % 4 * 256 + lane() % 4 * 32 + lane() / 4 * 2;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value = e % 2 && lane() % 4 == 3 ? 1.0f : c.x[0][0][e];
      st_shared_u16(to + e / 2 * 128 + e % 2 * 16, static_cast<u16>(pack<OPERAND>(value, 0.0f)));
      total[e % 2] += c.x[0][0][e];
    }
    fence_proxy_async();
    bar_sync(1 + threadIdx.x / 128, 128);
    if (threadIdx.x % 128 == 0) cp_async_bulk_commit_group();  // of nothing: each buffer has a group
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int m = 0; m < BLOCKS; ++m) {
        const WgmmaDescriptor<128, 8192, 1024> a(staging + of_wide + m * 8192);
        const u64 b = u64(128 >> 4) << 32 | u64(128 >> 4) << 16 | staging + of_narrow + 256 * k >> 4;
        wgmma_ones(x[m], a.at(k * 2048), b, 1);
      }
    wgmma_commit_group();
  }

  // NARROW_FIRST: the narrow factor's columns are the matrix's rows. SUMS_WIDE: sums of columns are of the wide one.
  template <bool NARROW_FIRST, bool SUMS_WIDE>
  DEVICE void store(float* to, float* sums, float* scratch) {
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) wgmma_done(x[m]);
#pragma unroll
    for (int e = 0; e < BLOCKS * 4; ++e) {
      int m = e / 4 * 64 + threadIdx.x / 32 % 4 * 16 + lane() / 4 + e % 4 / 2 * 8, n = lane() % 4 * 2 + e % 2;
      if (m < WIDE && n < NARROW) to[NARROW_FIRST ? n * WIDE + m : m * NARROW + n] = x[e / 4][e % 4];
      if (SUMS_WIDE && sums && m < WIDE && n == 7) sums[m] = x[e / 4][e % 4];
    }
    if constexpr (!SUMS_WIDE) {
      if (!sums) return;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) total[e] += __shfl_xor_sync(~0u, total[e], lanes);
        if (lane() < 4) scratch[threadIdx.x / 32 % 4 * 8 + lane() * 2 + e] = total[e];
      }
      bar_sync(1 + threadIdx.x / 128, 128);
      if (int n = threadIdx.x % 128; n < NARROW)
        sums[n] = scratch[n] + scratch[8 + n] + scratch[16 + n] + scratch[24 + n];
    }
  }
};
