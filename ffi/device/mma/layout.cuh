// One operand: its tile in shared memory, and how that is filled from an array whose rows begin anywhere.
//
//   k-major   [PANELS][ROWS][SPAN]   a line is a row of the tile, SPAN bytes of k; panels follow each other along k
//   mn-major  [PANELS][BK][SPAN]     a line is one k, SPAN bytes of the tile's rows; panels follow each other along
//   them
//
// Units of 16 bytes of a line are permuted by the line's number, so that what a warp reads at once lies in different
// banks. READ is how fragments are read: 8 lines at a time (ldmatrix), or 4 lines of 32 bytes (words).

enum class Read { matrices, words };

// What lies `byte` bytes into line `line`, in lines of SPAN bytes.
template <int SPAN, Read READ>
DEVICE u32 permuted(int line, int byte) {
  u32 offset = line * SPAN + byte;
  if constexpr (READ == Read::matrices) {
    return swizzle<SPAN>(offset);
  } else {
    static_assert(SPAN >= 64);
    return offset ^ (line & 2) << 4 ^ (SPAN == 128 ? (line & 1) << 6 : 0);
  }
}

// ELEMENT bytes an element.
template <int ROWS, int ELEMENT, bool K_MAJOR>
struct Panels {
  static constexpr int LINES = K_MAJOR ? ROWS : BK;
  static constexpr int LINE = (K_MAJOR ? BK : ROWS) * ELEMENT;  // bytes, of all panels
  static constexpr int SPAN = LINE % 128 == 0 ? 128 : LINE % 64 == 0 ? 64 : 32;
  static constexpr int PANEL = LINES * SPAN;
  static constexpr int BYTES = LINES * LINE, STAGE_BYTES = BYTES;
};
