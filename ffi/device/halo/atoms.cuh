// TMA's loads of boxes of images with AXES axes.

// A box of pixels from `at` on, of channels from c on: at[AXES] is the image.
DEVICE void tma_load_box(u32 destination, const TensorMap* map, u32 barrier, int c, const int (&at)[AXES + 1]) {
  u64 p = reinterpret_cast<u64>(map);
  if constexpr (AXES == 1) {
    tma_load(destination, map, barrier, c, at[0], at[1]);
  } else if constexpr (AXES == 2) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(destination),
        "l"(p), "r"(barrier), "r"(c), "r"(at[0]), "r"(at[1]), "r"(at[2])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(destination),
        "l"(p), "r"(barrier), "r"(c), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
        : "memory");
  }
}
