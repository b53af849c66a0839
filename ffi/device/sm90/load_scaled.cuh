// The view of an operand along m whose elements have factors, and zero points, one for each FACTOR_K of k and each row:
// TMA loads those of a stage behind its tile, for each matrix [FACTOR_ROWS][BM] of the one and then of the other.

struct Scaled : Plain {
  static constexpr int ARRAYS = 1 + (ZERO_BITS > 0);

  template <int COUNT>
  struct Source {
    Maps<COUNT> values;
    const TensorMap* factors[COUNT][ARRAYS];

    DEVICE void prefetch() const {
      values.prefetch();
      for (auto& of : factors)
        for (const TensorMap* map : of) prefetch_tensormap(map);
    }
  };

  template <int COUNT>
  DEVICE static void limit(const Source<COUNT>&, Work&) {}

  template <typename Operand>
  struct Loader : Plain::Loader<Operand> {
    static constexpr u32 TMA_BYTES = Operand::BYTES + FACTOR_ROWS * Operand::ROWS * (FACTOR_BITS + ZERO_BITS) / 8;

    template <int COUNT>
    DEVICE void begin(const Source<COUNT>&, int, int, u32) {}

    template <int COUNT, typename Walk>
    DEVICE void issue(const Source<COUNT>& source, int term, int product, u32 tile, u32 barrier, int row,
                      const Walk& walk, int matrix, u32 share) const {
      Plain::Loader<Operand>::issue(source.values, term, product, tile, barrier, row, walk, matrix, share);
      u32 to = tile + Operand::BYTES + product * FACTORS_EACH;
      tma_load(to, source.factors[product][0], barrier, row, walk.k / FACTOR_K, matrix);
      if constexpr (ZERO_BITS > 0)
        tma_load(to + ZERO_PLACE, source.factors[product][ARRAYS - 1], barrier, row / (ZERO_BITS == 4 ? 2 : 1),
                 walk.k / FACTOR_K, matrix);
    }

    template <int COUNT>
    DEVICE void copy(const Source<COUNT>&, u32, u32, int) const {}
  };
};
