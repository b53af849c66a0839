// Weights of a convolution (cutjax/kernels/operand.py: Taps), whose contraction is walked as windows are
// (load_im2col.cuh): TMA loads boxes of one tap, the third dimension of their map.

struct Taps {
  template <int COUNT>
  struct Source {
    Maps<COUNT> maps;
    int channels;            // of a tap, of all groups where they lie along k: there is nothing from there on
    int first, steps[AXES];  // the place of the first tap, and from one to the next along each axis

    DEVICE const TensorMap* map(int term, int product) const { return maps.map(term, product); }
    DEVICE void prefetch() const { maps.prefetch(); }
  };

  template <typename Operand>
  struct Loader {
    static constexpr int COPIERS = 0;
    static constexpr u32 TMA_BYTES = Operand::BYTES;
    static_assert(!Operand::K_MAJOR || Operand::CHUNK == WINDOW_CHUNK);

    template <int COUNT>
    DEVICE void issue(const Source<COUNT>& source, int term, int product, u32 tile, u32 barrier, int row,
                      const Im2col::Elements& walk, int, u32 share) const {
      constexpr int EACH = Operand::ROWS_EACH, SPAN = Operand::SPAN, SHARE = Operand::SHARE;
      const TensorMap* map = source.map(term, product);
      Im2col::Piece piece = walk.piece;
      for (int panel = 0; panel < BK / WINDOW_CHUNK; ++panel) {
        int k = piece.past(walk.taps) ? source.channels : piece.piece * WINDOW_CHUNK,
            tap = source.first + walk.taps.first;
#pragma unroll
        for (int i = 0; i < AXES; ++i) tap += piece.tap[i] * source.steps[i];
        if constexpr (Operand::K_MAJOR) {
          int first = share * (EACH / SHARE), group = walk.group;
          tma_box<Operand>(tile + (panel * Operand::ROWS + product * EACH + first) * SPAN, map, barrier,
                           k + group * walk.windows.group_channels, row + first - group * walk.windows.group_columns,
                           tap);
        } else {
          // As in load_plain.cuh, of a piece instead of a k block.
          int first = Operand::first_chunk(share), depth = Operand::BY_CHUNK ? 0 : share * (WINDOW_CHUNK / SHARE);
          for (int chunk = first; chunk < first + Operand::CHUNKS_LOADED; ++chunk)
            tma_box<Operand>(
                tile + ((product * Operand::CHUNKS_EACH + chunk) * BK + panel * WINDOW_CHUNK + depth) * SPAN, map,
                barrier, row + chunk * Operand::CHUNK, k + depth, tap);
        }
        piece.next(walk.windows, walk.taps);
      }
    }
  };
};
