// The plain view of an operand, of which threads copy: lines of the array in their order.
//
// A view, in a file of its own, says what a kernel is told of an operand, `Source`, and where lines of its matrices
// begin, `Lines`. Tiles are made of lines (tile.cuh, planes.cuh); neither the pipeline nor the multiplication knows the
// view.

struct Plain {
  // COUNT arrays alike: lines are `pitch` elements from each other, matrices `apart`.
  template <int COUNT>
  struct Source {
    const char* bases[COUNT];
    int pitch;
    i64 apart;

    // SIZE is that of an element.
    template <int SIZE>
    DEVICE const char* matrix(int product, int number) const {
      return bases[product] + number * apart * SIZE;
    }
  };

  // Of up to COUNT lines that a thread copies of.
  template <int COUNT>
  struct Lines {
    const char* next;  // this thread's place in its first line
    i64 pitch;         // bytes between neighbouring lines

    // The first line is `line` of the matrix, which has `lines`; the i-th is `line_of(i)` further on.
    template <int SIZE, int PRODUCTS, typename LineOf>
    DEVICE void begin(const Source<PRODUCTS>& source, const char* matrix, int line, int lines, LineOf line_of) {
      pitch = static_cast<i64>(source.pitch) * SIZE;
      next = matrix + line * pitch;
    }

    // Moves the place along all lines by so many bytes, and to later lines.
    DEVICE void advance(i64 bytes) { next += bytes; }
    DEVICE void advance_lines(int lines) { next += lines * pitch; }

    // The place in the i-th line, which is so many lines below the first; whether the array has that line.
    DEVICE const char* at(int i, int line) const { return next + line * pitch; }
    DEVICE bool there(int i) const { return true; }
  };
};
