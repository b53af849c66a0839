// Products by fused multiply-adds of one element each, of any dtype of 4, 8 or 16 bytes: Acc is the elements' type too.
//
//   [BK][ROWS + VECTOR]   a line is one k
//
// Rows lie in a line so that those which a thread multiplies are neighbours, VECTOR at a time: a thread has rows l / 4
// + 8 i of a and columns 2 (l % 4) + e + 8 j of b, as the accumulators lie. The elements after each line put those of
// other lines in other banks.

constexpr int VECTOR = 16 / ELEMENT;  // elements that a thread loads from shared memory at once
constexpr int ROWS_VECTOR = VECTOR < BM / 8 ? VECTOR : BM / 8;  // of a

DEVICE void from_words(float& x, const u32* words) { x = __uint_as_float(words[0]); }
DEVICE void from_words(int& x, const u32* words) { x = static_cast<int>(words[0]); }
DEVICE void from_words(u32& x, const u32* words) { x = words[0]; }
DEVICE void from_words(i64& x, const u32* words) { x = static_cast<i64>(static_cast<u64>(words[1]) << 32 | words[0]); }
DEVICE void from_words(u64& x, const u32* words) { x = static_cast<u64>(words[1]) << 32 | words[0]; }
DEVICE void from_words(double& x, const u32* words) { x = __hiloint2double(words[1], words[0]); }
template <typename R>
DEVICE void from_words(Complex<R>& x, const u32* words) {
  from_words(x.real, words);
  from_words(x.imag, words + sizeof(R) / 4);
}

// d += a b. Integers wrap.
DEVICE void multiply_add(float& d, float a, float b) { d = __fmaf_rn(a, b, d); }
DEVICE void multiply_add(double& d, double a, double b) { d = __fma_rn(a, b, d); }
DEVICE void multiply_add(u32& d, u32 a, u32 b) { d += a * b; }
DEVICE void multiply_add(u64& d, u64 a, u64 b) { d += a * b; }
DEVICE void multiply_add(int& d, int a, int b) {
  d = static_cast<int>(static_cast<u32>(d) + static_cast<u32>(a) * static_cast<u32>(b));
}
DEVICE void multiply_add(i64& d, i64 a, i64 b) {
  d = static_cast<i64>(static_cast<u64>(d) + static_cast<u64>(a) * static_cast<u64>(b));
}
template <typename R>
DEVICE void multiply_add(Complex<R>& d, const Complex<R>& a, const Complex<R>& b) {
  multiply_add(d.real, a.real, b.real);
  multiply_add(d.imag, a.real, b.imag);
  multiply_add(d.real, -a.imag, b.imag);
  multiply_add(d.imag, a.imag, b.real);
}

// Where in a line row r of a, or column r of b, lies, and what lies at p: both permute the bits of a number, so that
// they are sums of what they are of its parts.
template <bool OF_A>
DEVICE constexpr int position(int r) {
  constexpr int V = ROWS_VECTOR;
  if (OF_A) return r % 8 * V + r / 8 % V + r / (8 * V) * (8 * V);
  return VECTOR == 4 ? r % 2 + r / 8 % 2 * 2 + r / 2 % 4 * 4 + r / 16 * 16 : r;
}

template <bool OF_A>
DEVICE constexpr int row_at(int p) {
  constexpr int V = ROWS_VECTOR;
  if (OF_A) return p / V % 8 + p % V * 8 + p / (8 * V) * (8 * V);
  return VECTOR == 4 ? p % 2 + p / 2 % 2 * 8 + p / 4 % 4 * 2 + p / 16 * 16 : p;
}

// One operand, whose elements threads load one by one: neighbours in memory lie apart in a line, or in different lines.
// 8 threads beside each other load a row's neighbours along k, or all do a line's.
template <int ROWS, bool K_MAJOR, bool OF_A>
struct ElementTile {
  static constexpr int PITCH = (ROWS + VECTOR) * ELEMENT;
  static constexpr int BYTES = BK * PITCH;
  static constexpr int ACROSS = K_MAJOR ? 8 : 1;
  static constexpr int STEP = THREADS / ACROSS;  // rows that all threads load at once
  static constexpr int LOADS = (BK * ROWS + THREADS - 1) / THREADS;
  static_assert((ROWS & (ROWS - 1)) == 0 && BK % ACROSS == 0, "what a load adds to a place is known to the compiler");

  const char* next;  // this thread's first element of the block of k that is loaded next
  i64 pitch;         // bytes between lines in memory
  int rows, depth;   // that are left, from this thread's first element on
  u32 offset;        // of that element in a tile
  u32 held[HAS_CP_ASYNC ? 1 : LOADS][ELEMENT / 4];

  static DEVICE int own() { return threadIdx.x / ACROSS; }
  static DEVICE int own_k() { return threadIdx.x % ACROSS + own() / ROWS * ACROSS; }
  static DEVICE int own_row() { return K_MAJOR ? row_at<OF_A>(own() % ROWS) : own() % ROWS; }

  // What the i-th of this thread's loads adds to k and to the row.
  static DEVICE constexpr int k_of(int i) { return i * STEP / ROWS * ACROSS; }
  static DEVICE constexpr int row_of(int i) { return K_MAJOR ? row_at<OF_A>(i * STEP % ROWS) : i * STEP % ROWS; }

  DEVICE void begin(const char* matrix, i64 pitch_bytes, int row, int rows_end, int k, int k_end) {
    pitch = pitch_bytes;
    int r = row + own_row(), first = k + own_k();
    next = matrix + (K_MAJOR ? r : first) * pitch + (K_MAJOR ? first : r) * ELEMENT;
    rows = rows_end - r;
    depth = k_end - first;
    offset = own_k() * PITCH + (K_MAJOR ? own() % ROWS : position<OF_A>(r - row)) * ELEMENT;
  }

  static DEVICE bool mine(int i) { return BK * ROWS % THREADS == 0 || threadIdx.x + i * THREADS < BK * ROWS; }

  DEVICE u32 place(u32 tile, int i) const {
    return tile + offset + k_of(i) * PITCH + position<OF_A>(row_of(i)) * ELEMENT;
  }

  template <int PART, int PARTS>
  DEVICE void load(u32 tile) {
#pragma unroll
    for (int i = LOADS * PART / PARTS; i < LOADS * (PART + 1) / PARTS; ++i) {
      if (!mine(i)) break;
      const char* p = next + (K_MAJOR ? row_of(i) : k_of(i)) * pitch + (K_MAJOR ? k_of(i) : row_of(i)) * ELEMENT;
      bool there = rows > row_of(i) && depth > k_of(i);
      if constexpr (HAS_CP_ASYNC) {
        cp_async<ELEMENT>(place(tile, i), p, there);
      } else {
#pragma unroll
        for (int word = 0; word < ELEMENT / 4; ++word) held[i][word] = ld_global_u32_if(there, p + 4 * word);
      }
    }
  }

  DEVICE void advance() {
    next += K_MAJOR ? BK * ELEMENT : BK * pitch;
    depth -= BK;
  }

  DEVICE void deposit(u32 tile) const {
    if constexpr (!HAS_CP_ASYNC) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
        if (mine(i))
#pragma unroll
          for (int word = 0; word < ELEMENT / 4; ++word) st_shared_u32(place(tile, i) + 4 * word, held[i][word]);
    }
  }
};

using TileA = ElementTile<BM, A_K_MAJOR, true>;
using TileB = ElementTile<BN, B_K_MAJOR, false>;

// N neighbours in shared memory, of 4, 8 or 16 bytes together.
template <int N>
DEVICE void load_elements(Acc* to, u32 address) {
  u32 words[4];
  if constexpr (N * ELEMENT == 16) {
    Bytes16 v = ld_shared_v4(address);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (N * ELEMENT == 8) {
    ld_shared_v2(address, words[0], words[1]);
  } else {
    words[0] = ld_shared_u32(address);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) from_words(to[i], words + i * (ELEMENT / 4));
}

struct Fragments {
  Acc a[2 * M_FRAGMENTS], b[PRODUCTS][2 * N_FRAGMENTS];
};

struct Multiplier {
  u32 offset_a, offset_b;  // of this lane's first row and column in a line

  DEVICE Multiplier(int row, int column)
      : offset_a(position<true>(row + threadIdx.x % 32 / 4) * ELEMENT),
        offset_b(position<false>(column + threadIdx.x % 4 * 2) * ELEMENT) {}

  DEVICE void load(Fragments& to, u32 tile_a, u32 tiles_b, int k) const {
    constexpr int ROWS = VECTOR < 2 * M_FRAGMENTS ? VECTOR : 2 * M_FRAGMENTS;  // at once
    tile_a += offset_a + k * TileA::PITCH;
    tiles_b += offset_b + k * TileB::PITCH;
#pragma unroll
    for (int i = 0; i < 2 * M_FRAGMENTS; i += ROWS)
      load_elements<ROWS>(to.a + i, tile_a + position<true>(8 * i) * ELEMENT);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
      for (int j = 0; j < 2 * N_FRAGMENTS; j += VECTOR)
        load_elements<VECTOR>(to.b[p] + j, tiles_b + p * TileB::BYTES + position<false>(j / 2 * 8 + j % 2) * ELEMENT);
  }

  // Every other column goes up, so that each product shares an element with the one before.
  DEVICE void multiply(Accumulators& d, const Fragments& x) const {
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
      for (int j = 0; j < 2 * N_FRAGMENTS; ++j)
#pragma unroll
        for (int step = 0; step < 2 * M_FRAGMENTS; ++step) {
          int i = j % 2 ? 2 * M_FRAGMENTS - 1 - step : step;
          multiply_add(d[p][i / 2][j / 2][i % 2 * 2 + j % 2], x.a[i], x.b[p][j]);
        }
  }

  static DEVICE void finish(Accumulators&) {}
};
