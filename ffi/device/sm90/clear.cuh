// What the k blocks of a group hold of others, where the contraction is divided in groups.

// The bytes of a word from one on, all bits of them.
DEVICE u32 bytes_from(int byte) { return byte >= 4 ? 0 : ~0u << 8 * max(byte, 0); }

// Zeroes what a tile holds of `rows` rows or columns from `row` on, in k before `head` and from `depth` on. One that is
// MN-major has no head.
template <typename Operand>
DEVICE void clear_tile(u32 tile, int row, int rows, int head, int depth, int thread) {
  constexpr int SPAN = Operand::SPAN, CHUNK = Operand::CHUNK;
  if constexpr (Operand::K_MAJOR) {
    constexpr int UNITS = BK * Operand::ELEMENT / 16;
    int first = head * Operand::ELEMENT, last = depth * Operand::ELEMENT;
#pragma unroll 1
    for (int i = thread; i < rows * UNITS; i += 128) {
      int at = row + i / UNITS, unit = i % UNITS, byte = unit * 16;
      if (byte >= first && byte + 16 <= last) continue;
      u32 address = tile + byte / SPAN * Operand::ROWS * SPAN + swizzle<SPAN>(at * SPAN + byte % SPAN);
      auto kept = [&](int word) {
        int from = byte + 4 * word;
        return bytes_from(first - from) & ~bytes_from(last - from);
      };
      Bytes16 v = ld_shared_v4(address);
      st_shared_v4(address, v.x & kept(0), v.y & kept(1), v.z & kept(2), v.w & kept(3));
    }
  } else {
    int span = (BK - depth) * SPAN;
    for (int chunk = row / CHUNK; chunk < (row + rows + CHUNK - 1) / CHUNK; ++chunk)
      for (int i = thread * 16; i < span; i += 128 * 16)
        st_shared_v4(tile + (chunk * BK + depth) * SPAN + i, 0, 0, 0, 0);
  }
}

// One warpgroup: zeroes what of a stage is of other groups than a contraction's: 0 * NaN is NaN. The first one of those
// that share a tile does so in B, for all.
DEVICE void clear(SharedTiles shared, int stage, int row, int head, int depth, int thread, int barrier) {
  clear_tile<OperandA>(shared.a(stage), row, M_BLOCKS * 64, head, depth, thread);
  if (row == 0) clear_tile<OperandB>(shared.b(stage), 0, PRODUCTS * BN, head, depth, thread);
  fence_proxy_async();
  bar_sync(CONSUMERS_PER_TILE > 1 ? TURN_BARRIER : barrier, 128 * CONSUMERS_PER_TILE);
}

// The same of a k block of a work item, where there is anything to zero.
DEVICE void clear_block(SharedTiles shared, int stage, int row, const Work& work, int block, int thread, int barrier) {
  int depth = work.k_end - work.k - block * BK, head = K_ALIGNED && block == 0 ? work.head : 0;
  if (depth < BK || head > 0) clear(shared, stage, row, head, max(depth, 0), thread, barrier);
}
