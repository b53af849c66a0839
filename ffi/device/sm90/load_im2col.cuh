// Windows of images with channels last (cutjax/kernels/operand.py: Im2col), of which TMA loads columns of pixels: it
// begins at a pixel of the bounding box of windows' first elements, takes the next ones of it, row after row and image
// after image, and moves of each the pixel that offsets lead to. What lies outside of the images is zero.
//
// Axes are the image's, the innermost first. Elements of a window count (tap, channel), in pieces of WINDOW_CHUNK
// channels: the last piece of a tap is filled up with zeros, and so is what is past the last tap.

//
// PHASED: images are spread, with zeros between their elements, and the result is computed in phases, matrices of their
// own of as many rows. A phase has the taps that meet elements in all of its windows. Along each axis it is one of
// PHASES_OF, and what of it differs from phase to phase is told in one number.

// The taps of windows: how many, how much further on than the pixel the first one lies, and where its weights are.
struct Tapped {
  int window[AXES], offset[AXES], first;
};

template <bool>
struct Sizes {
  int window[AXES];

  DEVICE Tapped of(int) const {
    Tapped found = {};
#pragma unroll
    for (int i = 0; i < AXES; ++i) found.window[i] = window[i];
    return found;
  }
};

template <>
struct Sizes<true> {
  u64 along[PHASES_OF[0] + (AXES > 1 ? PHASES_OF[1] : 0) + (AXES > 2 ? PHASES_OF[2] : 0)];  // axis by axis

  DEVICE Tapped of(int phase) const {
    Tapped found = {};
    int begin = 0;
#pragma unroll
    for (int i = 0; i < AXES; ++i) {
      int next = phase / PHASES_OF[i], place = phase - next * PHASES_OF[i];
      u64 entry = along[begin];
#pragma unroll
      for (int j = 1; j < PHASES_OF[i]; ++j)
        if (place == j) entry = along[begin + j];
      found.window[i] = entry & 0xffff;
      found.offset[i] = entry >> 16 & 0xffff;
      found.first += static_cast<int>(entry >> 32);
      begin += PHASES_OF[i];
      phase = next;
    }
    bool none = false;  // along one axis, so that there is none at all
#pragma unroll
    for (int i = 0; i < AXES; ++i) none = none || found.window[i] == 0;
#pragma unroll
    for (int i = 0; i < AXES; ++i)
      if (none) found.window[i] = i < AXES - 1;
    return found;
  }
};

struct Im2col {
  template <int COUNT>
  struct Source {
    Maps<COUNT> maps;
    int pieces;    // of a tap
    int channels;  // of a pixel: there is nothing from there on
    int grid[AXES], strides[AXES], low[AXES], dilation[AXES];
    Sizes<PHASED> sizes;
    int group_channels, group_columns;  // of a group: where there are such, a column of the result is of one
    int block[AXES + 1];                // how far BK windows are, in the digits of a Column: of a weight gradient

    DEVICE const TensorMap* map(int term, int product) const { return maps.map(term, product); }
    DEVICE void prefetch() const { maps.prefetch(); }
  };

  using Windows = Source<TERMS>;

  // The group that a tile's columns are of: tiles end where groups do.
  DEVICE static int group_of(const Windows& windows, int column) {
    return IMAGE_GROUPS ? column / windows.group_columns : 0;
  }

  // A tile of a phase is as deep as that has taps.
  DEVICE static void limit(const Windows& windows, Work& work) {
    if constexpr (PHASED) {
      Tapped taps = windows.sizes.of(work.result);
      int count = taps.window[0];
#pragma unroll
      for (int i = 1; i < AXES; ++i) count *= taps.window[i];
      work.k_blocks = uniform((count * windows.pieces * WINDOW_CHUNK + BK - 1) / BK);
    }
  }

  // A place in the grid of windows, and its image.
  struct Column {
    int digit[AXES + 1];

    DEVICE void begin(const Windows& source, int row) {
#pragma unroll
      for (int i = 0; i < AXES; ++i) {
        int next = row / source.grid[i];
        digit[i] = row - next * source.grid[i];
        row = next;
      }
      digit[AXES] = row;
    }

    // BK windows on.
    DEVICE void next(const Windows& source) {
      int carry = 0;
#pragma unroll
      for (int i = 0; i < AXES; ++i) {
        digit[i] += source.block[i] + carry;
        carry = digit[i] >= source.grid[i];
        if (carry) digit[i] -= source.grid[i];
      }
      digit[AXES] += source.block[AXES] + carry;
    }

    // The coordinates of the window's first element.
    DEVICE void pixel(const Windows& source, int (&at)[AXES + 1]) const {
#pragma unroll
      for (int i = 0; i < AXES; ++i) at[i] = digit[i] * source.strides[i] - source.low[i];
      at[AXES] = digit[AXES];
    }
  };

  // A piece of a window.
  struct Piece {
    int piece, tap[AXES];

    DEVICE void begin(const Windows& source, const Tapped& taps, int element) {
      int place = element / (WINDOW_CHUNK * source.pieces);
      piece = element / WINDOW_CHUNK - place * source.pieces;
#pragma unroll
      for (int i = 0; i < AXES - 1; ++i) {
        int next = place / taps.window[i];
        tap[i] = place - next * taps.window[i];
        place = next;
      }
      tap[AXES - 1] = place;
    }

    DEVICE void next(const Windows& source, const Tapped& taps) {
      if (++piece < source.pieces) return;
      piece = 0;
      ++tap[0];
#pragma unroll
      for (int i = 0; i < AXES - 1; ++i)
        if (tap[i] == taps.window[i]) {
          tap[i] = 0;
          ++tap[i + 1];
        }
    }

    DEVICE bool past(const Tapped& taps) const { return tap[AXES - 1] >= taps.window[AXES - 1]; }

    template <int SHARE>
    DEVICE void load(const Windows& source, const Tapped& taps, const TensorMap* map, u32 destination, u32 barrier,
                     int group, const int (&at)[AXES + 1]) const {
      bool none = past(taps);
      int c = group * source.group_channels + piece * WINDOW_CHUNK;
      u16 offset[AXES];
#pragma unroll
      for (int i = 0; i < AXES; ++i) offset[i] = none ? 0 : taps.offset[i] + tap[i] * source.dilation[i];
      tma_load_im2col<SHARE>(destination, map, barrier, none ? source.channels : c, at, offset);
    }
  };

  // Elements of a window, where they are the contraction.
  struct Elements {
    const Windows& windows;
    int group, k;
    Tapped taps;
    Piece piece;

    DEVICE Elements(const Windows& windows, const Work& work)
        : windows(windows), group(group_of(windows, work.n)), taps(windows.sizes.of(work.result)) {}

    DEVICE void begin(int first, u32) {
      k = first;
      piece.begin(windows, taps, first);
    }

    DEVICE void next() {
      k += BK;
      for (int i = 0; i < BK / WINDOW_CHUNK; ++i) piece.next(windows, taps);
    }
  };

  // Windows, where they are: of what CTAs of the cluster share, the first that this one loads.
  struct Columns {
    const Windows& windows;
    int group, k;
    Column column;

    DEVICE Columns(const Windows& windows, const Work& work) : windows(windows), group(group_of(windows, work.n)) {}

    DEVICE void begin(int first, u32 share) {
      k = first;
      column.begin(windows, first + OperandA::first_depth(share));
    }

    DEVICE void next() {
      k += BK;
      column.next(windows);
    }
  };

  template <typename Operand>
  struct Loader {
    static constexpr int COPIERS = 0;
    static constexpr u32 TMA_BYTES = Operand::BYTES;
    static_assert(Operand::CHUNK == WINDOW_CHUNK);

    // What the tile's rows are: windows, as the coordinates of the first's first element, or elements of them.
    int at[AXES + 1];
    Piece piece;

    DEVICE void begin(const Windows& source, int row, int, u32 share) {
      if constexpr (Operand::K_MAJOR) {
        Column column;
        column.begin(source, row + share * (Operand::ROWS / Operand::SHARE));
        column.pixel(source, at);
      } else {
        piece.begin(source, source.sizes.of(0), row + Operand::first_chunk(share) * Operand::CHUNK);
      }
    }

    DEVICE void issue(const Windows& source, int term, int product, u32 tile, u32 barrier, int, const Elements& walk,
                      int, u32 share) const {
      const TensorMap* map = source.map(term, product);
      u32 first = tile + share * (Operand::ROWS / Operand::SHARE) * Operand::SPAN;
      Piece of_k = walk.piece;
      for (int panel = 0; panel < BK / Operand::CHUNK; ++panel) {
        of_k.template load<Operand::SHARE>(source, walk.taps, map, first + panel * Operand::ROWS * Operand::SPAN,
                                           barrier, walk.group, at);
        of_k.next(source, walk.taps);
      }
    }

    DEVICE void issue(const Windows& source, int term, int product, u32 tile, u32 barrier, int, const Columns& walk,
                      int, u32 share) const {
      const TensorMap* map = source.map(term, product);
      int first = Operand::first_chunk(share), of_column[AXES + 1];
      walk.column.pixel(source, of_column);
      Piece of_row = piece;
      Tapped taps = source.sizes.of(0);
      for (int chunk = first; chunk < first + Operand::CHUNKS_LOADED; ++chunk) {
        u32 to = tile + (chunk * BK + Operand::first_depth(share)) * Operand::SPAN;
        of_row.template load<Operand::SHARE>(source, taps, map, to, barrier, walk.group, of_column);
        of_row.next(source, taps);
      }
    }

    DEVICE void copy(const Windows&, u32, u32, int) const {}
    DEVICE static void end() {}
  };
};
