// Rows of the result that are pixels of its images, some apart (cutjax/kernels/operand.py: Pixels).

struct Pixels {
  static constexpr int RUNS = 1;  // of a row's columns, in memory

  struct Axis {
    Two sizes;   // of the grid that rows count, and of an image
    Two places;  // of the first pixel, and steps to the next
  };

  Axis axes[AXES];

  DEVICE int apart() const { return 0; }

  // The pixel, of those of all images, that a row is.
  DEVICE int operator()(int row, int) const {
    Digits place;
    place.set(row, [this](int i) -> u32 { return axes[i - 1].sizes.x; });
    int pixel = place.digit[0];
#pragma unroll
    for (int i = 0; i < AXES; ++i)
      pixel = pixel * axes[i].sizes.y + axes[i].places.x + place.digit[i + 1] * axes[i].places.y;
    return pixel;
  }
};
