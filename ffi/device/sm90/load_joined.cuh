// Several arrays beside each other along k (load_plain.cuh), which make a product a sum of products: k goes through one
// after the other. Each is cut into blocks of its own, and TMA zeroes what its last one has past its end, so that to
// the rest of the kernel there is one contraction of whole blocks.

struct Joined : Plain {
  // The arrays, and, of a alone, how much of k each of them but the last takes in whole blocks.
  template <int COUNT>
  struct Source {
    Maps<COUNT> arrays[SUMMANDS];
    int depths[SUMMANDS - 1];

    DEVICE Maps<COUNT> of(int summand) const {
      Maps<COUNT> found = arrays[0];
#pragma unroll
      for (int i = 1; i < SUMMANDS; ++i)
        if (summand == i) found = arrays[i];
      return found;
    }

    DEVICE void prefetch() const {
      for (const Maps<COUNT>& maps : arrays) maps.prefetch();
    }
  };

  // Which array, and where in it. What is past the end of the last is zero.
  struct Walk {
    int depths[SUMMANDS - 1], summand, k;

    template <int COUNT>
    DEVICE Walk(const Source<COUNT>& source, const Work&) {
#pragma unroll
      for (int i = 0; i < SUMMANDS - 1; ++i) depths[i] = source.depths[i];
    }

    DEVICE void begin(int first, u32) {
      summand = 0, k = first;
      settle();
    }

    DEVICE void next() {
      k += BK;
      settle();
    }

    DEVICE void settle() {
#pragma unroll
      for (int i = 0; i < SUMMANDS - 1; ++i)
        if (summand == i && k >= depths[i]) k -= depths[i], ++summand;
    }
  };

  template <int COUNT>
  DEVICE static void limit(const Source<COUNT>&, Work&) {}

  template <typename Operand>
  struct Loader : Plain::Loader<Operand> {
    template <int COUNT>
    DEVICE void begin(const Source<COUNT>&, int, int, u32) {}

    template <int COUNT>
    DEVICE void issue(const Source<COUNT>& source, int term, int product, u32 tile, u32 barrier, int row,
                      const Walk& walk, int matrix, u32 share) const {
      Plain::Loader<Operand>::issue(source.of(walk.summand), term, product, tile, barrier, row, walk, matrix, share);
    }

    template <int COUNT>
    DEVICE void copy(const Source<COUNT>&, u32, u32, int) const {}
  };
};
