// The plain view of an operand, of which threads copy: lines of the array in their order.
//
// A view, in a file of its own, says what a kernel is told of an operand, `Source`, and where what a thread copies
// lies, `Lines`: on some lines of a tile, on each at some places along it. Tiles are made of lines (tile.cuh,
// planes.cuh); neither the pipeline nor the multiplication knows the view.

// What is copied, and whether the array has it: it is zero otherwise, and not read.
struct Spot {
  const char* p;
  bool there;
};

struct Plain {
  static constexpr bool APART = false;    // whether 16 bytes of a line may be pieces that lie apart in memory
  static constexpr bool CHANGES = false;  // whether what a thread copied is changed before it is read, by a prologue

  // Changes 16 bytes of a line, of which so many are there.
  struct Change {
    template <typename Source>
    DEVICE void begin(const Source&) {}
    DEVICE void operator()(u32 (&)[4], int line, int element, int valid) const {}
  };

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

  // Of up to COUNT lines that a thread copies of, each at PLACES, in elements of SIZE bytes.
  template <int COUNT, int PLACES, bool K_MAJOR, int SIZE>
  struct Lines {
    using Along = int;  // bytes from the first place

    const char* next;  // the first place in this thread's first line
    i64 pitch;         // bytes between neighbouring lines

    // The first line is `line` of the matrix, which has `lines`; the i-th is `line_of(i)` further on. The first place
    // is at `byte` of a line, the i-th `byte_of(i)` further on.
    template <int PRODUCTS, typename LineOf, typename ByteOf>
    DEVICE void begin(const Source<PRODUCTS>& source, const char* matrix, int line, int lines, int byte, LineOf line_of,
                      ByteOf byte_of) {
      pitch = static_cast<i64>(source.pitch) * SIZE;
      next = matrix + line * pitch + byte;
    }

    // Goes on to the next block of k.
    DEVICE void advance() { next += K_MAJOR ? BK * SIZE : BK * pitch; }

    // A place, which is so many bytes from the first; a piece further on from there.
    DEVICE Along along(int, int byte) const { return byte; }
    DEVICE void skip(Along& along, int bytes) const { along += bytes; }

    // A place in the i-th line, which is so many lines below the first.
    DEVICE Spot at(int i, int line, Along along) const { return {next + line * pitch + along, true}; }
  };
};
