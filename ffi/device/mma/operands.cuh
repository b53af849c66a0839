// The operands of a tile, as threads load them: a tile of a, and one of each b, from where their views say.

template <typename TileA, typename TileB>
struct Operands {
  TileA a;
  TileB b[PRODUCTS];
  int blocks;  // that are left to load

  // What this thread brought of the stage that is read next is there.
  DEVICE void arrived(u32 stage) {
    if constexpr (ViewA::CHANGES) a.change(stage);
  }

  // A tile of one matrix of the array, which ends before row `rows`; then the same of b, before column `columns`.
  DEVICE void begin_a(const ViewA::Source<1>& source_a, const Work& work, int matrix, int rows) {
    blocks = work.k_blocks;
    a.begin(source_a, source_a.template matrix<ELEMENT>(0, matrix), work.m, rows, work.k, work.k_end);
  }

  DEVICE void begin_b(const ViewB::Source<PRODUCTS>& source_b, const Work& work, int matrix, int columns) {
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p)
      b[p].begin(source_b, source_b.template matrix<ELEMENT_B>(p, matrix), work.n, columns, work.k, work.k_end);
  }
};
