// Rows of the array in an order that is data (load_plain.cuh): a row of the matrix has an index, and one that has none
// of the array's is zero. Lines are rows: the operand lies along k.

struct Gathered {
  static constexpr bool APART = false;
  static constexpr bool CHANGES = false;

  template <int COUNT>
  struct Source {
    const char* bases[COUNT];
    int pitch;
    i64 apart;
    const int* index;
    int count;       // of indices
    int rows, each;  // of the array, and how many indices in sequence are of one of them

    template <int SIZE>
    DEVICE const char* matrix(int product, int number) const {
      return bases[product] + number * apart * SIZE;
    }
  };

  template <int COUNT, int PLACES, bool K_MAJOR, int SIZE>
  struct Lines {
    using Along = int;

    const char* first[COUNT];
    i64 moved;  // from there to this thread's first place
    u32 found;  // which lines there are
    static_assert(COUNT <= 32 && K_MAJOR);

    template <int PRODUCTS, typename LineOf, typename ByteOf>
    DEVICE void begin(const Source<PRODUCTS>& source, const char* matrix, int line, int lines, int byte, LineOf line_of,
                      ByteOf byte_of) {
      moved = byte, found = 0;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        int place = line + line_of(i), index = place < lines ? ld_global(source.index + place) : -1;
        bool there = index >= 0 && index / source.each < source.rows;
        first[i] = matrix + (there ? index / source.each : 0) * static_cast<i64>(source.pitch) * SIZE;
        found |= static_cast<u32>(there) << i;
      }
    }

    DEVICE void advance() { moved += BK * SIZE; }
    DEVICE Along along(int, int byte) const { return byte; }
    DEVICE void skip(Along& along, int bytes) const { along += bytes; }
    DEVICE Spot at(int i, int, Along along) const { return {first[i] + moved + along, (found >> i & 1) != 0}; }
  };
};
