// The plain view of an operand, of which TMA loads boxes: rows of the array in their order.
//
// A view, in a file of its own, says what a kernel is told of an operand, `Source`, and fills its tiles, as `Loader`:
// one thread of the producer issues TMA for it, COPIERS threads copy themselves, or both. How often that arrives on a
// stage's full barrier, and how many bytes it awaits, the producer (producer.cuh) takes from here.

struct Plain {
  // COUNT arrays alike: of each term those of all products.
  template <int COUNT>
  struct Source {
    const TensorMap* maps[COUNT];

    DEVICE const TensorMap* map(int term, int product) const {
      const TensorMap* found = maps[product];
#pragma unroll
      for (int i = 1; i < TERMS; ++i)
        if (term == i) found = maps[i * (COUNT / TERMS) + product];
      return found;
    }

    DEVICE void prefetch() const {
      for (const TensorMap* map : maps) prefetch_tensormap(map);
    }
  };

  template <typename Operand>
  struct Loader {
    static constexpr int COPIERS = 0;                 // threads that copy
    static constexpr u32 TMA_BYTES = Operand::BYTES;  // that land in a stage by TMA

    // All threads of the producer, once a tile.
    template <int COUNT>
    DEVICE void begin(const Source<COUNT>&, int, int) {}

    // One thread: what of a tile is the `product`-th array's, from `row` and `k` on. Of what CTAs of the cluster share,
    // it loads the `share`-th part for all.
    template <int COUNT>
    DEVICE void issue(const Source<COUNT>& source, int term, int product, u32 tile, u32 barrier, int row, int k,
                      int matrix, u32 share) const {
      constexpr int EACH = Operand::ROWS_EACH, CHUNK = Operand::CHUNK, SPAN = Operand::SPAN, SHARE = Operand::SHARE;
      const TensorMap* map = source.map(term, product);
      if constexpr (Operand::K_MAJOR) {
        int first = share * (EACH / SHARE);
        for (int panel = 0; panel < BK / CHUNK; ++panel)
          box<SHARE>(tile + (panel * Operand::ROWS + product * EACH + first) * SPAN, map, barrier, k + panel * CHUNK,
                     row + first, matrix);
      } else {
        // Whole chunks are divided among the CTAs where their number allows it, else the k rows of each chunk.
        constexpr bool BY_CHUNK = Operand::CHUNKS_EACH % SHARE == 0;
        constexpr int CHUNKS = Operand::CHUNKS_EACH / (BY_CHUNK ? SHARE : 1), DEPTH = BK / (BY_CHUNK ? 1 : SHARE);
        int first = BY_CHUNK ? share * CHUNKS : 0, depth = BY_CHUNK ? 0 : share * DEPTH;
        for (int chunk = first; chunk < first + CHUNKS; ++chunk)
          box<SHARE>(tile + ((product * Operand::CHUNKS_EACH + chunk) * BK + depth) * SPAN, map, barrier,
                     row + chunk * CHUNK, k + depth, matrix);
      }
    }

    // The threads that copy.
    template <int COUNT>
    DEVICE void copy(const Source<COUNT>&, u32, u32, int) const {}
    DEVICE static void end() {}
  };

 private:
  template <int SHARE>
  DEVICE static void box(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z) {
    if constexpr (SHARE > 1) {
      tma_load_multicast(destination, map, barrier, x, y, z, (1 << SHARE) - 1);
    } else {
      tma_load(destination, map, barrier, x, y, z);
    }
  }
};
