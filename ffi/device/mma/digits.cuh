// What the views of a convolution count by: places along AXES axes, and what is inside of one or around all.

struct alignas(8) Two {
  int x, y;
};

// A number by its digits, the last the fastest: of a window (image, *place in the grid), of an element of one (*tap,
// channel). The first has no end.
struct Digits {
  u32 digit[AXES + 1];

  // radix(i) is where digit i begins again, for i > 0.
  template <typename Radix>
  DEVICE void set(int number, Radix radix) {
    u32 left = number;
#pragma unroll
    for (int i = AXES; i > 0; --i) {
      u32 above = left / radix(i);
      digit[i] = left - above * radix(i);
      left = above;
    }
    digit[0] = left;
  }

  // Adds a number whose digits are step(i).
  template <typename Step, typename Radix>
  DEVICE void add(Step step, Radix radix) {
    u32 carried = 0;
#pragma unroll
    for (int i = AXES; i > 0; --i) {
      digit[i] += step(i) + carried;
      carried = digit[i] >= radix(i);
      if (carried) digit[i] -= radix(i);
    }
    digit[0] += step(0) + carried;
  }

  // Adds so many of the last digit, which divide where that begins again.
  template <typename Radix>
  DEVICE void skip(int count, Radix radix) {
    add([&](int i) { return i == AXES ? count : 0; }, radix);
  }
};
