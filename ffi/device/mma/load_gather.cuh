// Rows of the array in an order that is data (load_plain.cuh): a row of the matrix has an index, and one that has none
// of the array's is zero. Lines are rows: the operand lies along k.

struct Gathered {
  template <int COUNT>
  struct Source {
    const char* bases[COUNT];
    int pitch;
    i64 apart;
    const int* index;
    int rows;  // of the array

    template <int SIZE>
    DEVICE const char* matrix(int product, int number) const {
      return bases[product] + number * apart * SIZE;
    }
  };

  template <int COUNT>
  struct Lines {
    const char* first[COUNT];
    i64 moved;  // from there to this thread's place
    u32 found;  // which lines there are
    static_assert(COUNT <= 32);

    template <int SIZE, int PRODUCTS, typename LineOf>
    DEVICE void begin(const Source<PRODUCTS>& source, const char* matrix, int line, int lines, LineOf line_of) {
      moved = 0, found = 0;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        int place = line + line_of(i), row = place < lines ? ld_global(source.index + place) : -1;
        bool there = static_cast<u32>(row) < static_cast<u32>(source.rows);
        first[i] = matrix + (there ? row : 0) * static_cast<i64>(source.pitch) * SIZE;
        found |= static_cast<u32>(there) << i;
      }
    }

    DEVICE void advance(i64 bytes) { moved += bytes; }
    DEVICE const char* at(int i, int) const { return first[i] + moved; }
    DEVICE bool there(int i) const { return found >> i & 1; }
  };
};
