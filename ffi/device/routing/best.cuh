// The K experts of the largest scores of a token, the best first; of equal ones the first.
//
// Keys are unsigned integers in the order of the scores. Their low bits are the complement of the expert's number, so
// of equal scores the first expert has the greater key, and no two are equal. Zeros of either sign differ, as they do
// to XLA's sort, and a NaN counts as infinity. A lane keeps the greatest keys of what it reads, sorted; then the
// greatest of all lanes is taken K times, and the choices are dealt out: lane i has the choices i, i + LANES, ...

constexpr bool SHORT = HALVES && !BIASED;  // scores of 16 bits
constexpr int LIST = K < PIECES * VECTOR ? K : PIECES * VECTOR;
constexpr bool SKIPS = PIECES * VECTOR > 32 * LIST;  // what most keys are less than
constexpr int HELD = (K + LANES - 1) / LANES;

template <bool SHORT_SCORES>
struct KeyOf {
  using Type = u64;
};
template <>
struct KeyOf<true> {
  using Type = u32;
};
using Key = KeyOf<SHORT>::Type;

// The bits of a float in the order of floats, as unsigned integers.
DEVICE u32 in_order(u32 bits) { return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000); }

// Of a score of 16 bits, in the high half.
DEVICE u32 short_key(int expert, u32 bits) {
  constexpr u32 INFINITE = LOGITS == Dtype::bf16 ? 0x7f800000 : 0x7c000000;
  if ((bits & 0x7fff0000) > INFINITE) bits = INFINITE;
  return (in_order(bits) & 0xffff0000) | (0xffff - expert);
}

DEVICE u64 long_key(int expert, float score) {
  u32 bits = score == score ? __float_as_uint(score) : 0x7f800000;
  return static_cast<u64>(in_order(bits)) << 32 | ~static_cast<u32>(expert);
}

DEVICE int expert_of(u32 key) { return 0xffff - (key & 0xffff); }
DEVICE int expert_of(u64 key) { return static_cast<int>(~static_cast<u32>(key)); }

struct Best {
  Key list[LIST];

  DEVICE Best() {
#pragma unroll
    for (int i = 0; i < LIST; ++i) list[i] = 0;  // less than any key
  }

  DEVICE void insert(Key key) {
    if (SKIPS && key < list[LIST - 1]) return;
#pragma unroll
    for (int i = 0; i < LIST; ++i) {
      Key greater = max(list[i], key);
      key = min(list[i], key);
      list[i] = greater;
    }
  }

  // Takes the K greatest of all lanes, which all call.
  DEVICE void deal(int (&experts)[HELD]) {
    int lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < K; ++i) {
      Key best = of_lanes(list[0], [](Key a, Key b) { return max(a, b); });
      if (i % LANES == lane) experts[i / LANES] = expert_of(best);
      if (list[0] == best) {
#pragma unroll
        for (int j = 0; j + 1 < LIST; ++j) list[j] = list[j + 1];
        list[LIST - 1] = 0;
      }
    }
  }
};

// Chooses the experts of a token, all lanes of whose warp call. `score` is of an expert and its logit, where there is a
// bias.
template <typename F>
DEVICE void choose(const char* row, int (&experts)[HELD], F score) {
  Best best;
  each(row, [&](int expert, u32 bits) {
    if constexpr (SHORT) {
      best.insert(short_key(expert, bits));
    } else if constexpr (BIASED) {
      best.insert(long_key(expert, score(expert, value_of(bits))));
    } else {
      best.insert(long_key(expert, value_of(bits)));
    }
  });
  best.deal(experts);
}
