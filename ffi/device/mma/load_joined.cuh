// Several arrays beside each other along k (load_plain.cuh), which make a product a sum of products. Each is plain: a
// tile begins anew with the next one where one ends (operands_joined.cuh).

struct Joined : Plain {
  // Lines, matrices, and how much of k there is, are each array's own.
  template <int>
  struct Source {
    const char* bases[SUMMANDS];
    int pitches[SUMMANDS];
    i64 apart[SUMMANDS];
    int depths[SUMMANDS];

    DEVICE Plain::Source<1> of(int summand) const {
      Plain::Source<1> found{{bases[0]}, pitches[0], apart[0]};
#pragma unroll
      for (int i = 1; i < SUMMANDS; ++i)
        if (summand == i) found = {{bases[i]}, pitches[i], apart[i]};
      return found;
    }

    DEVICE int depth(int summand) const {
      int found = depths[0];
#pragma unroll
      for (int i = 1; i < SUMMANDS; ++i)
        if (summand == i) found = depths[i];
      return found;
    }
  };
};
