// The operands of a tile that are several arrays each (load_joined.cuh): tiles of one after the other, in blocks of its
// own. What its last block has past its end is zero, as at the end of k.

static_assert(PRODUCTS == 1);

template <typename Tile, int SIZE>
struct JoinedTile {
  Tile tile;
  Joined::Source<1> source;
  int matrix, row, rows;  // where a tile begins, whichever array it is of
  int summand, left;      // the array, and the blocks of it that are left

  DEVICE void begin(const Joined::Source<1>& its_source, int its_matrix, int its_row, int its_rows, int k) {
    source = its_source, matrix = its_matrix, row = its_row, rows = its_rows;
    summand = 0;
    while (summand + 1 < SUMMANDS && k >= blocks() * BK) k -= blocks() * BK, ++summand;
    start(k);
  }

  DEVICE int blocks() const { return (source.depth(summand) + BK - 1) / BK; }

  DEVICE void start(int k) {
    auto of = source.of(summand);
    left = blocks() - k / BK;
    tile.begin(of, of.template matrix<SIZE>(0, matrix), row, rows, k, source.depth(summand));
  }

  template <int TURN, int TURNS>
  DEVICE void load(u32 stage) {
    if (TURN == 0 && left == 0 && summand + 1 < SUMMANDS) {
      ++summand;
      start(0);
    }
    tile.template load<TURN, TURNS>(stage);
  }

  DEVICE void advance() {
    tile.advance();
    --left;
  }

  DEVICE void deposit(u32 stage) const { tile.deposit(stage); }
};

template <typename TileA, typename TileB>
struct Operands {
  JoinedTile<TileA, ELEMENT> a;
  JoinedTile<TileB, ELEMENT_B> b[1];
  int blocks;  // that are left to load

  DEVICE void arrived(u32) {}

  DEVICE void begin_a(const Joined::Source<1>& source, const Work& work, int matrix, int rows) {
    blocks = work.k_blocks;
    a.begin(source, matrix, work.m, rows, work.k);
  }

  DEVICE void begin_b(const Joined::Source<1>& source, const Work& work, int matrix, int columns) {
    b[0].begin(source, matrix, work.n, columns, work.k);
  }
};
