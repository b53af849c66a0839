// The work items of a cluster, in turns: every so many, as many as there are clusters.

struct Items {
  int begin, step;

  DEVICE static void init(u32) {}
  DEVICE Items(u32, u32, int step) : begin(blockIdx.x / (CLUSTER * CLUSTER_K)), step(step) {}

  // Of two consumers that take items in turn.
  DEVICE void alternate(int consumer) {
    begin += consumer * step;
    step *= 2;
  }

  DEVICE int first() const { return begin; }
  DEVICE int after(int item) const { return item + step; }
};

struct Producing : Items {
  using Items::Items;
  DEVICE void end() {}
};
