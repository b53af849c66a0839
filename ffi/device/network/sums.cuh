// Sums over the rows of a block: of columns, and of outer products. Each is added up in an order of its own, whatever
// the number of blocks that run at one time.

constexpr int WARPS = THREADS / 32;
constexpr int ROWS = WARPS * M_TILES * 16;  // of a block

// Adds the columns of a chunk to the sums of this warp.
DEVICE void add_columns(float* sums, Chunk c, int row, int rows, int j) {
  clear_rows(c, row, rows);
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) sum += c.x[i][h][p] + c.x[i][h][2 + p];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      if (lane() < 4) sums[16 * j + 8 * h + lane() * 2 + p] += sum;
    }
}

// 16 columns of 16 rows, of the words of a fragment of 16 bits.
DEVICE void unpack(float (&x)[2][4], const u32 (&words)[4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    Pair<MATH == Math::f16 ? Dtype::f16 : Dtype::bf16> pair;
    pair.bits[0] = words[w];
    x[w / 2][w % 2 * 2] = pair[0], x[w / 2][w % 2 * 2 + 1] = pair[1];
  }
}

// 16 columns of this warp's rows in shared memory, of 16 bits: `place` is of this lane's row of them, as ldmatrix takes
// it.
DEVICE Chunk chunk_at(u32 place, int pitch) {
  Chunk c;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) {
    u32 w[4];
    ldmatrix_x4(place + 16 * i * pitch, w[0], w[1], w[2], w[3]);
    unpack(c.x[i], w);
  }
  return c;
}

// A block's rows of COLUMNS as shared memory has them while their outer products are added up.
template <int COLUMNS>
struct Staged {
  static constexpr int PITCH = COLUMNS * ELEMENT_BYTES + (TF32 ? 32 : 16);
  static constexpr int PLANE = ROWS * PITCH;

  // Where this thread has the first two elements of 16 columns, and the place of its row of them among a warp's 16.
  static DEVICE u32 own(u32 plane, int j) {
    return plane + (threadIdx.x / 32 * (16 * M_TILES) + lane() / 4) * PITCH + (16 * j + lane() % 4 * 2) * ELEMENT_BYTES;
  }
  static DEVICE u32 own_row(u32 plane, int j) {
    return plane + (threadIdx.x / 32 * (16 * M_TILES) + lane() % 16) * PITCH + (16 * j + lane() / 16 * 8) * 2;
  }

  static DEVICE void store(u32 to, const Fragment& f, int j) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      const u32(&w)[FRAGMENT_WORDS] = f.w[i];
#if __CUDA_ARCH__ >= 900
      if constexpr (!TF32) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
          stmatrix_x4(own_row(to, j) + 16 * i * PITCH + p * PLANE, w[4 * p], w[4 * p + 1], w[4 * p + 2], w[4 * p + 3]);
        continue;
      }
#endif
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 place = own(to, j) + (16 * i + 8 * half) * PITCH + 8 * h * ELEMENT_BYTES;
          if constexpr (TF32) {
            st_shared_v2(place, w[4 * h + half], w[4 * h + 2 + half]);
          } else {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) st_shared_u32(place + p * PLANE, w[4 * p + 2 * h + half]);
          }
        }
    }
  }

  // Zeros in rows past the end.
  static DEVICE void clear(u32 plane, int row, int rows) {
    __syncwarp();
#pragma unroll 1
    for (int j = 0; j < COLUMNS / 16; ++j)
#pragma unroll
      for (int at = 0; at < M_TILES * 16; at += 8)
        if (row + at >= rows) {
          st_shared_u32(own(plane, j) + at * PITCH, 0);
          st_shared_u32(own(plane, j) + at * PITCH + 8 * ELEMENT_BYTES, 0);
        }
  }

  // What this warp has stored, of 16 bits.
  static DEVICE Chunk load(u32 from, int j) { return chunk_at(own_row(from, j), PITCH); }

  static DEVICE void store_cleared(u32 to, const Chunk& c, int row, int rows, int j) {
    Fragment f = packed(c);
    clear_rows(f, row, rows);
    store(to, f, j);
  }

  // 16 columns of 16 rows, as the rows of an operand whose k are these rows.
  static DEVICE Columns transposed(u32 from, int row, int column) {
    Columns a;
    int l = lane();
    if constexpr (TF32) {
#pragma unroll
      for (int w = 0; w < 8; ++w)
        a.w[w] =
            ld_shared_u32(from + (row + w / 4 * 8 + w / 2 % 2 * 4 + l % 4) * PITCH + (column + w % 2 * 8 + l / 4) * 4);
    } else {
      u32 place = from + (row + l / 16 * 8 + l % 8) * PITCH + (column + l / 8 % 2 * 8) * 2;
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        ldmatrix_x4_trans(place + p * PLANE, a.w[4 * p], a.w[4 * p + 1], a.w[4 * p + 2], a.w[4 * p + 3]);
    }
    return a;
  }

  // The same, as columns of an operand.
  static DEVICE Columns columns(u32 from, int row, int column) {
    Columns b;
    int l = lane();
    if constexpr (TF32) {
#pragma unroll
      for (int w = 0; w < 8; ++w)
        b.w[w] =
            ld_shared_u32(from + (row + w / 4 * 8 + w % 2 * 4 + l % 4) * PITCH + (column + w / 2 % 2 * 8 + l / 4) * 4);
    } else {
      u32 place = from + (row + l % 16) * PITCH + (column + l / 16 * 8) * 2;
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        ldmatrix_x4_trans(place + p * PLANE, b.w[4 * p], b.w[4 * p + 1], b.w[4 * p + 2], b.w[4 * p + 3]);
    }
    return b;
  }
};

// Sums of outer products of rows of A and of B columns: tiles of 16 x 16, one after the other to each warp.
template <int A, int B>
struct Products {
  static constexpr int ACROSS = (B + 15) / 16, TILES = (A + 15) / 16 * ACROSS;

  static DEVICE void add(float (&x)[2][4], int tile, u32 of_a, u32 of_b) {
#pragma unroll 2
    for (int row = 0; row < ROWS; row += 16) {
      const Columns a = Staged<(A + 15) / 16 * 16>::transposed(of_a, row, tile / ACROSS * 16);
      const Columns b = Staged<(B + 15) / 16 * 16>::columns(of_b, row, tile % ACROSS * 16);
#pragma unroll
      for (int h = 0; h < 2; ++h) multiply_add(x[h], a.w, b.w, h);
    }
  }

  // Calls `each(element, place)` for what lies within the matrix.
  template <typename Each>
  static DEVICE void visit(float (&x)[2][4], int tile, const Each& each) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      int m = tile / ACROSS * 16 + lane() / 4 + e % 4 / 2 * 8;
      int n = tile % ACROSS * 16 + e / 4 * 8 + lane() % 4 * 2 + e % 2;
      if (m < A && n < B) each(x[e / 4][e % 4], m * B + n);
    }
  }

  // To sums in memory; `before` says whether there are any.
  static DEVICE void add_in_memory(float* sums, bool before, u32 of_a, u32 of_b) {
#pragma unroll 1
    for (int tile = threadIdx.x / 32; tile < TILES; tile += WARPS) {
      float x[2][4] = {};
      if (before) visit(x, tile, [&](float& sum, int at) { sum = sums[at]; });
      add(x, tile, of_a, of_b);
      visit(x, tile, [&](float sum, int at) { sums[at] = sum; });
    }
  }
};

// The same in registers: tiles one after the other to each warp. Where there are fewer tiles than warps, several have
// one, each of its part of the rows.
template <int A, int B>
struct HeldProducts : Products<A, B> {
  using Base = Products<A, B>;
  using OfA = Staged<(A + 15) / 16 * 16>;
  using OfB = Staged<(B + 15) / 16 * 16>;
  using Base::ACROSS, Base::TILES;
  static constexpr int DOWN = TILES / ACROSS;
  static constexpr int OWN = (TILES + WARPS - 1) / WARPS;
  static constexpr int SPLIT = WARPS % TILES == 0 && ROWS / 16 % (WARPS / TILES) == 0 ? WARPS / TILES : 1;
  static constexpr int STEPS = ROWS / 16 / SPLIT;
  static constexpr bool FULL = SPLIT > 1 || TILES % WARPS == 0;  // each warp has all of its tiles
  static constexpr bool SHARED = FULL && WARPS % ACROSS == 0;    // and those are of the same columns of B
  static constexpr int COLUMNS = SHARED ? 1 : OWN;
  // Warps take rows in turns that differ by their tiles' places, so that all add up columns at the same steps.
  static constexpr bool IN_TURNS = SHARED && STEPS % DOWN == 0;
  static constexpr int UNROLL = DOWN > 4 ? DOWN : 4;
  float x[OWN][2][4];

  static DEVICE int own(int t) { return SPLIT > 1 ? threadIdx.x / 32 % TILES : threadIdx.x / 32 + t * WARPS; }
  static DEVICE int part() { return SPLIT > 1 ? threadIdx.x / 32 / TILES : 0; }
  static DEVICE bool there(int t) { return FULL || own(t) < TILES; }

  DEVICE void clear() {
#pragma unroll
    for (int t = 0; t < OWN; ++t)
#pragma unroll
      for (int e = 0; e < 8; ++e) x[t][e / 4][e % 4] = 0.0f;
  }

  DEVICE void add(u32 of_a, u32 of_b) { add_rows<false>(of_a, of_b, nullptr); }

  // The same, and adds the columns of B to the sums of this warp: each tile's of its share of the rows, by a product
  // with ones.
  DEVICE void add(u32 of_a, u32 of_b, float* sums) { add_rows<true>(of_a, of_b, sums); }

  template <bool SUMS>
  DEVICE void add_rows(u32 of_a, u32 of_b, float* sums) {
    float totals[COLUMNS][2][4] = {};
    u32 ones[FRAGMENT_WORDS];
#pragma unroll
    for (int w = 0; w < FRAGMENT_WORDS; ++w)
      ones[w] = TF32 ? 0x3f800000 : w >= 4 ? 0 : MATH == Math::f16 ? 0x3c003c00 : 0x3f803f80;
    const int turn = own(0) / ACROSS;
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const int place = SUMS && IN_TURNS ? step / DOWN * DOWN + (step + turn) % DOWN : step;
      const int row = 16 * (part() * STEPS + place);
      Columns b;
#pragma unroll
      for (int t = 0; t < OWN; ++t)
        if (there(t)) {
          const int down = own(t) / ACROSS, across = own(t) % ACROSS;
          if (t == 0 || !SHARED) b = OfB::columns(of_b, row, across * 16);
          const Columns a = OfA::transposed(of_a, row, down * 16);
#pragma unroll
          for (int h = 0; h < 2; ++h) multiply_add(x[t][h], a.w, b.w, h);
          const int share = IN_TURNS ? t * (WARPS / ACROSS) % DOWN : down;
          if (SUMS && step % DOWN == share) {
#pragma unroll
            for (int h = 0; h < 2; ++h) multiply_add(totals[SHARED ? 0 : t][h], ones, b.w, h);
          }
        }
    }
    if constexpr (SUMS) {
#pragma unroll
      for (int t = 0; t < COLUMNS; ++t)
        if (lane() < 4 && there(t)) {
          float* to = sums + own(t) % ACROSS * 16 + lane() * 2;
#pragma unroll
          for (int e = 0; e < 4; ++e) to[e / 2 * 8 + e % 2] += totals[t][e / 2][e % 2];
        }
    }
  }

  DEVICE void store(float* to) {
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) {
      if (s > 0) __syncthreads();
      if (part() == s)
#pragma unroll
        for (int t = 0; t < OWN; ++t)
          if (there(t)) Base::visit(x[t], own(t), [&](float sum, int at) { to[at] = s > 0 ? to[at] + sum : sum; });
    }
  }
};
