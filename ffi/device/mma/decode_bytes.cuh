// Decoding (decode_none.cuh) of elements of 8 bits, which become floats of 16 in registers. Of 8 columns and 16 of k a
// lane holds 4 bytes.
//
//   b k-major    lane l has column l / 4 at k 2 q, 2 q + 1, 2 q + 8, 2 q + 9, with q = l % 4
//   b mn-major   ldmatrix transposes pairs of bytes: lane l has columns 2 (l / 4) and 2 (l / 4) + 1 of 16, at k 2 q and
//                2 q + 1 in one word, 8 further on in the next. One instruction multiplies the even columns, the next
//                the odd ones, and the accumulators are put in order when the tile is done.

constexpr bool TO_BF16 = MATH == Math::bf16;
static_assert(B_K_MAJOR || N_FRAGMENTS % 4 == 0, "of b[k, n] a warp reads 32 columns at a time");

template <bool K_MAJOR>
struct Bytes {
  u32 offset;

  DEVICE explicit Bytes(int column)
      : offset(permuted<TileB::SPAN, Read::matrices>(column + threadIdx.x % 32 / 4, threadIdx.x % 4 * 2)) {}

  // Of a slice of k, which is known to the compiler.
  DEVICE void load(u32 (&x)[N_FRAGMENTS], u32 tile, int slice) const {
    int byte = slice * 16;
    u32 at = tile + byte / TileB::SPAN * TileB::PANEL, within = offset ^ byte % TileB::SPAN;
#pragma unroll
    for (int j = 0; j < N_FRAGMENTS; ++j, at += 8 * TileB::SPAN)
      x[j] = ld_shared_u16(at + within) | static_cast<u32>(ld_shared_u16(at + (within ^ 8))) << 16;
  }

  // What the instruction of the j-th 8 columns takes.
  static DEVICE void get(u32 (&to)[2], const u32 (&x)[N_FRAGMENTS], int j) {
    to[0] = decode<TO_BF16>(x[j], 0, 1);
    to[1] = decode<TO_BF16>(x[j], 2, 3);
  }

  static DEVICE void put_in_order(Accumulators&) {}
};

template <>
struct Bytes<false> {
  Lane<TileB, false, false, ELEMENT_B> lane;

  DEVICE explicit Bytes(int column) : lane(column) {}

  DEVICE void load(u32 (&x)[N_FRAGMENTS], u32 tile, int slice) const {
#pragma unroll
    for (int i = 0; i < N_FRAGMENTS / 4; ++i) lane.load(reinterpret_cast<u32(&)[4]>(x[4 * i]), tile, i, slice);
  }

  static DEVICE void get(u32 (&to)[2], const u32 (&x)[N_FRAGMENTS], int j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) to[i] = decode<TO_BF16>(x[j / 2 * 2 + i], j % 2, j % 2 + 2);
  }

  // Lane q of 4 has columns 4 q to 4 q + 3 of 16, the even ones first: 2 q, 2 q + 1 and 8 more are to be its own.
  static DEVICE void put_in_order(Accumulators& d) {
    int lane = threadIdx.x % 32, from = lane / 4 * 4 + lane % 4 / 2;
    bool high = lane % 2;
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
      for (int i = 0; i < M_FRAGMENTS; ++i)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; j += 2)
#pragma unroll
          for (int row = 0; row < 4; row += 2) {
            AccFragment &even = d[p][i][j], &odd = d[p][i][j + 1];
            Acc sums[4] = {even[row], odd[row], even[row + 1], odd[row + 1]}, moved[2][2];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              Acc low = __shfl_sync(~0u, sums[e % 2], from + e / 2 * 2);
              Acc other = __shfl_sync(~0u, sums[e % 2 + 2], from + e / 2 * 2);
              moved[e / 2][e % 2] = high ? other : low;
            }
            even[row] = moved[0][0], even[row + 1] = moved[0][1];
            odd[row] = moved[1][0], odd[row + 1] = moved[1][1];
          }
  }
};

struct Decoder : Bytes<B_K_MAJOR> {
  using Fragments = u32[N_FRAGMENTS];
  using Bytes::Bytes;
};
