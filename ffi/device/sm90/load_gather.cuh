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
    int row_bytes;  // what is past them is zero
    const int* index;
    int count;       // of indices
    int rows, each;  // of the array, and how many indices in sequence are of one of them

    DEVICE void prefetch() const {}

    // The row of the array at a place; -1 where there is none.
    DEVICE int row(int place) const {
      int found = place < count ? ld_global(index + place) : -1;
      return found >= 0 && found / each < rows ? found / each : -1;
    }
  };

  template <int COUNT>
  DEVICE static void limit(const Source<COUNT>&, Work&) {}

  // Rows of the matrix lie along k, or, where the contraction is over them, across it.
  template <typename Operand>
  struct Loader {
    static constexpr int COPIERS = 128;
    static constexpr u32 TMA_BYTES = 0;
    static constexpr int UNITS = Operand::SPAN / 16;  // threads beside each other along a row
    static constexpr int STEP = COPIERS / UNITS;      // rows that all threads copy of at once
    static constexpr int LINES = Operand::K_MAJOR ? Operand::ROWS : BK;
    static constexpr int OWN = LINES / STEP;
    static constexpr int PANELS = Operand::K_MAJOR ? BK / Operand::CHUNK : Operand::CHUNKS_EACH;
    static_assert(Operand::SHARE == 1 && TERMS == 1 && LINES % STEP == 0);
    static_assert(STEP % 8 == 0, "rows of a thread are permuted alike");

    int row[OWN];  // of the array, that this thread copies of; -1 of none
    int at;        // the first place of the block that they are of

    // The tile begins at `first`, and its rows, K-major, end before `end`.
    template <int COUNT>
    DEVICE void begin(const Source<COUNT>& source, int first, int end, u32) {
      if constexpr (Operand::K_MAJOR) {
        find(source, first, end);
      } else {
        at = -BK, column = first;
      }
    }

    template <int COUNT>
    DEVICE void issue(const Source<COUNT>&, int, int, u32, u32, int, const Depth&, int, u32) const {}

    template <int COUNT>
    DEVICE void copy(const Source<COUNT>& source, u32 tile, u32 barrier, int k) {
      if (!Operand::K_MAJOR && at != k) find(source, k, source.count);
      int line = threadIdx.x / UNITS, unit = threadIdx.x % UNITS;
      u32 to = tile + swizzle<Operand::SPAN>(line * Operand::SPAN + unit * 16);
      int begin = (Operand::K_MAJOR ? k : column) * Operand::ELEMENT + unit * 16;
#pragma unroll
      for (int panel = 0; panel < PANELS; ++panel) {
        int byte = begin + panel * Operand::SPAN, valid = max(0, min(16, source.row_bytes - byte));
#pragma unroll
        for (int i = 0; i < OWN; ++i)
          cp_async(to + (panel * LINES + i * STEP) * Operand::SPAN,
                   source.base + max(row[i], 0) * source.pitch + (valid > 0 ? byte : 0), row[i] < 0 ? 0 : valid);
      }
      cp_async_mbarrier_arrive_noinc(barrier);
      if (!Operand::K_MAJOR) find(source, k + BK, source.count);  // of the next block, which need not wait for it then
    }

    // Once, before the threads leave.
    DEVICE static void end() { cp_async_wait_all(); }

   private:
    int column;

    // Looks up this thread's rows of those from `first` on.
    template <int COUNT>
    DEVICE void find(const Source<COUNT>& source, int first, int end) {
      at = first;
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        int place = first + threadIdx.x / UNITS + i * STEP;
        row[i] = place < end ? source.row(place) : -1;
      }
    }
  };
};
