// Rows of the result that are pixels apart in images (cutjax/kernels/operand.py: Pixels). All phases count as many
// rows: of one that has fewer places along an axis, some are past an image.

struct Pixels {
  static constexpr int RUNS = PIXEL_RUNS;  // of a row's columns, in memory

  int grid[AXES];    // that rows count, the innermost axis first
  u64 image[AXES];   // the size, and, 32 bits up, the steps from one pixel to the next
  u64 firsts[AXES];  // pixels, of each phase along an axis, in 4 bits each

  // How many pixels on the next run of a row is.
  DEVICE int apart() const { return static_cast<int>(image[0]); }

  // The pixel, of those of all images, that a row is; -1 where it is none.
  DEVICE int operator()(int row, int phase) const {
    int pixel = 0, apart = 1;
    bool inside = true;
#pragma unroll
    for (int i = 0; i < AXES; ++i) {
      int rows = row / grid[i], phases = phase / PHASES_OF[i], size = image[i], step = image[i] >> 32;
      int first = firsts[i] >> (phase - phases * PHASES_OF[i]) * 4 & 15, at = first + (row - rows * grid[i]) * step;
      inside = inside && at < size;
      pixel += at * apart;
      apart *= size;
      row = rows;
      phase = phases;
    }
    return inside ? pixel + row * apart : -1;
  }
};
