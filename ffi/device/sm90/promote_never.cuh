// Promotion: how the sums of wgmma go to the accumulators. Here they are the accumulators.
//
// A promotion that is EVER done adds them up in others, by `add`: after EACH block of k, in parts (promote_each.cuh),
// or after `first` and then `count` of them. What it is told beside is an Argument to "promotion". One that takes BYTES
// of shared memory for each warpgroup has a `begin`, which is called for each tile.

struct Promotion {
  static constexpr bool EVER = false, EACH = false;
  static constexpr u32 BYTES = 0;
  static constexpr int COPIERS = 0, ARRIVALS = 0;
};
