// Stages of boxes in shared memory, which one thread loads and others multiply.

// Each has a full barrier and an empty one.
struct Pipeline {
  u32 boxes, full, empty;  // addresses of the first ones
  int stage = 0;
  u32 phase = 0;

  DEVICE u32 full_barrier() const { return full + stage * 8; }
  DEVICE u32 empty_barrier() const { return empty + stage * 8; }

  DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};
