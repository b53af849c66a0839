// The view of an operand along m whose elements have factors, one for each FACTOR_K of k and each row: TMA loads those
// of a stage behind its tile, [FACTOR_ROWS][ROWS].

struct Scaled : Plain {
  template <int COUNT>
  struct Source {
    Maps<COUNT> values;
    const TensorMap* factors;

    DEVICE void prefetch() const {
      values.prefetch();
      prefetch_tensormap(factors);
    }
  };

  template <int COUNT>
  DEVICE static void limit(const Source<COUNT>&, Work&) {}

  template <typename Operand>
  struct Loader : Plain::Loader<Operand> {
    static constexpr u32 TMA_BYTES = Operand::BYTES + FACTOR_ROWS * Operand::ROWS * SIZE<FACTOR>;

    template <int COUNT>
    DEVICE void begin(const Source<COUNT>&, int, int, u32) {}

    template <int COUNT, typename Walk>
    DEVICE void issue(const Source<COUNT>& source, int term, int product, u32 tile, u32 barrier, int row,
                      const Walk& walk, int matrix, u32 share) const {
      Plain::Loader<Operand>::issue(source.values, term, product, tile, barrier, row, walk, matrix, share);
      tma_load(tile + Operand::BYTES, source.factors, barrier, row, walk.k / FACTOR_K, matrix);
    }

    template <int COUNT>
    DEVICE void copy(const Source<COUNT>&, u32, u32, int) const {}
  };
};
