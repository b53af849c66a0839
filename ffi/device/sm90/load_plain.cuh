// The plain view of an operand, of which TMA loads boxes: rows of the array in their order.
//
// A view, in a file of its own, says what a kernel is told of an operand, `Source`, and fills its tiles, as `Loader`:
// one thread of the producer issues TMA for it, COPIERS threads copy themselves, or both. How often that arrives on a
// stage's full barrier, and how many bytes it awaits, the producer (producer.cuh) takes from here.

// A view of a says too how k is walked, block by block, from where the contraction of a tile begins: `Walk`.

// The tensor maps of COUNT arrays alike: of each term those of all products.
template <int COUNT>
struct Maps {
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

// A box of an operand, which SHARE CTAs of the cluster get.
template <typename Operand>
DEVICE void tma_box(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z) {
  if constexpr (Operand::SHARE > 1) {
    tma_load_multicast<Operand::FIRST>(destination, map, barrier, x, y, z, (1 << Operand::SHARE) - 1);
  } else {
    tma_load<Operand::FIRST>(destination, map, barrier, x, y, z);
  }
}

// k as it is.
struct Depth {
  int k;

  template <typename Source>
  DEVICE Depth(const Source&, const Work&) {}
  DEVICE void begin(int first, u32) { k = first; }
  DEVICE void next() { k += BK; }
};

struct Plain {
  template <int COUNT>
  using Source = Maps<COUNT>;

  // Of a view of a: cuts the contraction of a work item to what there is of it.
  template <int COUNT>
  DEVICE static void limit(const Source<COUNT>&, Work&) {}

  template <typename Operand>
  struct Loader {
    static constexpr int COPIERS = 0;                 // threads that copy
    static constexpr u32 TMA_BYTES = Operand::BYTES;  // that land in a stage by TMA

    // All threads of the producer, once a tile.
    template <int COUNT>
    DEVICE void begin(const Source<COUNT>&, int, int, u32) {}

    // One thread: what of a tile is the `product`-th array's, from `row` and where the walk is on. Of what CTAs of the
    // cluster share, it loads the `share`-th part for all.
    template <int COUNT, typename Walk>
    DEVICE void issue(const Source<COUNT>& source, int term, int product, u32 tile, u32 barrier, int row,
                      const Walk& walk, int matrix, u32 share) const {
      constexpr int EACH = Operand::ROWS_EACH, CHUNK = Operand::CHUNK, SPAN = Operand::SPAN, SHARE = Operand::SHARE;
      const TensorMap* map = source.map(term, product);
      if constexpr (Operand::K_MAJOR) {
        int first = share * (EACH / SHARE);
        for (int panel = 0; panel < BK / CHUNK; ++panel)
          tma_box<Operand>(tile + (panel * Operand::ROWS + product * EACH + first) * SPAN, map, barrier,
                           (walk.k + panel * CHUNK) / Operand::PACKED, row + first, matrix);
      } else {
        int first = Operand::first_chunk(share), depth = Operand::first_depth(share);
        for (int chunk = first; chunk < first + Operand::CHUNKS_LOADED; ++chunk)
          tma_box<Operand>(tile + ((product * Operand::CHUNKS_EACH + chunk) * BK + depth) * SPAN, map, barrier,
                           (row + chunk * CHUNK) / Operand::PACKED, walk.k + depth, matrix);
      }
    }

    // The threads that copy.
    template <int COUNT>
    DEVICE void copy(const Source<COUNT>&, u32, u32, int) const {}
    DEVICE static void end() {}
  };
};
