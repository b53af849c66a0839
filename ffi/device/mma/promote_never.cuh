// Promotion: how the sums of blocks of k go to the accumulators. Here they are added up there.
//
// Another one has sums of its own to multiply blocks into, and adds them to the accumulators after each. What it is
// told beside is an Argument to "promotion"; `begin` is called for each tile.

struct Promotion {
  DEVICE void begin(const Work&, const Warp&) {}
  DEVICE Accumulators& sums(Accumulators& d) { return d; }
  DEVICE void end_block(Accumulators& d) {}
};
