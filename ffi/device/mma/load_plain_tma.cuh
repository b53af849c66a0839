// The plain view of an operand, of which TMA loads boxes: lines of the array in their order.

struct Plain {
  // COUNT arrays alike, of matrices of numbers, of which an element has NUMBERS.
  template <int COUNT>
  struct Source {
    const TensorMap* maps[COUNT];
  };

  // One thread: a box that begins at element `x` of line `line`.
  static DEVICE void load(u32 destination, const TensorMap* map, u32 barrier, int x, int line, int matrix) {
    tma_load(destination, map, barrier, x * NUMBERS, line, matrix);
  }
};
