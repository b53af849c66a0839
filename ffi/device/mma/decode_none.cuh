// Decoding: what fragments of b are of its tile, and what of them the instruction takes. Here they are that.
//
// A decoder has fragments of its own, reads them from the tile, and makes words of the multiplied dtype of them just
// before they are multiplied. Where it gives columns in another order, it puts the accumulators in theirs when the tile
// is done.

struct Decoder {
  using Fragments = u32[N_FRAGMENTS / 2][4];
  Lane<TileB, B_K_MAJOR, false> lane;

  DEVICE explicit Decoder(int column) : lane(column) {}

  // Of a slice of k, which is known to the compiler.
  DEVICE void load(Fragments& x, u32 tile, int slice) const {
#pragma unroll
    for (int j = 0; j < N_FRAGMENTS / 2; ++j) lane.load(x[j], tile, j, slice);
  }

  // What the instruction of the j-th 8 columns takes.
  static DEVICE void get(u32 (&to)[2], const Fragments& x, int j) {
    to[0] = x[j / 2][j % 2 * 2], to[1] = x[j / 2][j % 2 * 2 + 1];
  }

  static DEVICE void put_in_order(Accumulators&) {}
};
