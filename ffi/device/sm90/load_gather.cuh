// Rows of the array in an order that is data (load_plain.cuh), which TMA cannot gather: all threads of the producer
// copy 16 bytes at a time by cp.async. A row of the matrix has an index, and one that has none of the array's is zero.
//
// These are writes of threads, not of TMA: consumers fence before wgmma reads them (mainloop.cuh), and units of 16
// bytes are permuted here as TMA's swizzle of 128 bytes does.

// Copies `bytes`, up to 16, and zeroes the rest of 16.
DEVICE void cp_async(u32 destination, const char* p, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(p), "r"(bytes)
               : "memory");
}

struct Gathered {
  template <int COUNT>
  struct Source {
    const char* base;
    i64 pitch;      // bytes between neighbouring rows
    int row_bytes;  // of k: what is past them is zero
    const int* index;
    int rows;  // of the array

    DEVICE void prefetch() const {}
  };

  template <int COUNT>
  DEVICE static void limit(const Source<COUNT>&, Work&) {}

  template <typename Operand>
  struct Loader {
    static constexpr int COPIERS = 128;
    static constexpr u32 TMA_BYTES = 0;
    static constexpr int UNITS = Operand::SPAN / 16;  // threads beside each other along a row
    static constexpr int STEP = COPIERS / UNITS;      // rows that all threads copy of at once
    static constexpr int COUNT_ROWS = Operand::ROWS / STEP;
    static_assert(Operand::K_MAJOR && Operand::SHARE == 1 && TERMS == 1);

    int row[COUNT_ROWS];  // of the array, that this thread copies of; -1 of none

    // The tile's rows of the matrix begin at `first` and end before `end`.
    template <int COUNT>
    DEVICE void begin(const Source<COUNT>& source, int first, int end, u32) {
#pragma unroll
      for (int i = 0; i < COUNT_ROWS; ++i) {
        int place = first + threadIdx.x / UNITS + i * STEP;
        row[i] = place < end ? ld_global(source.index + place) : -1;
        if (static_cast<u32>(row[i]) >= static_cast<u32>(source.rows)) row[i] = -1;
      }
    }

    template <int COUNT>
    DEVICE void issue(const Source<COUNT>&, int, int, u32, u32, int, const Depth&, int, u32) const {}

    template <int COUNT>
    DEVICE void copy(const Source<COUNT>& source, u32 tile, u32 barrier, int k) const {
      int line = threadIdx.x / UNITS, unit = threadIdx.x % UNITS;
      u32 to = tile + swizzle<Operand::SPAN>(line * Operand::SPAN + unit * 16);
      static_assert(STEP % 8 == 0, "rows of a thread are permuted alike");
#pragma unroll
      for (int panel = 0; panel < BK / Operand::CHUNK; ++panel) {
        int byte = (k + panel * Operand::CHUNK) * Operand::ELEMENT + unit * 16;
        int valid = max(0, min(16, source.row_bytes - byte));
#pragma unroll
        for (int i = 0; i < COUNT_ROWS; ++i)
          cp_async(to + (panel * Operand::ROWS + i * STEP) * Operand::SPAN,
                   source.base + max(row[i], 0) * source.pitch + (valid > 0 ? byte : 0), row[i] < 0 ? 0 : valid);
      }
      cp_async_mbarrier_arrive_noinc(barrier);
    }

    // Once, before the threads leave.
    DEVICE static void end() { cp_async_wait_all(); }
  };
};
