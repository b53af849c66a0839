// Promotion: how the sums of wgmma go to the accumulators. Here they are the accumulators.
//
// A promotion that is EVER done adds them up in others, after `first` and then `count` blocks of k, by `add`. What it
// is told beside is an Argument to "promotion"; `begin` is called for each tile.

struct Promotion {
  static constexpr bool EVER = false;

  DEVICE void begin(const Work&, int row, int thread) {}
};
