// Columns of pixels, which TMA loads, of images of IMAGE_AXES axes.

constexpr int AXES = IMAGE_AXES;
constexpr int PHASES_OF[3] = {PHASES0, PHASES1, PHASES2};  // of a result, along each axis
constexpr int PHASES = PHASES0 * PHASES1 * PHASES2;

// One column of pixels, at `first` and of image first[AXES], from channel c on.
template <int SHARE>
DEVICE void tma_load_im2col(u32 destination, const TensorMap* map, u32 barrier, int c, const int (&first)[AXES + 1],
                            const u16 (&offset)[AXES]) {
  u64 p = reinterpret_cast<u64>(map);
  u16 mask = (1 << SHARE) - 1;
#define IM2COL(RANK, MULTICAST) \
  "cp.async.bulk.tensor." RANK "d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes" MULTICAST " "
  if constexpr (AXES == 1) {
    if constexpr (SHARE > 1) {
      asm volatile(IM2COL("3", ".multicast::cluster") "[%0], [%1, {%3, %4, %5}], [%2], {%6}, %7;" ::"r"(destination),
                   "l"(p), "r"(barrier), "r"(c), "r"(first[0]), "r"(first[1]), "h"(offset[0]), "h"(mask)
                   : "memory");
    } else {
      asm volatile(IM2COL("3", "") "[%0], [%1, {%3, %4, %5}], [%2], {%6};" ::"r"(destination), "l"(p), "r"(barrier),
                   "r"(c), "r"(first[0]), "r"(first[1]), "h"(offset[0])
                   : "memory");
    }
  } else if constexpr (AXES == 2) {
    if constexpr (SHARE > 1) {
      asm volatile(
          IM2COL("4", ".multicast::cluster") "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(destination),
          "l"(p), "r"(barrier), "r"(c), "r"(first[0]), "r"(first[1]), "r"(first[2]), "h"(offset[0]), "h"(offset[1]),
          "h"(mask)
          : "memory");
    } else {
      asm volatile(IM2COL("4", "") "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(destination), "l"(p),
                   "r"(barrier), "r"(c), "r"(first[0]), "r"(first[1]), "r"(first[2]), "h"(offset[0]), "h"(offset[1])
                   : "memory");
    }
  } else {
    if constexpr (SHARE > 1) {
      asm volatile(
          IM2COL("5", ".multicast::cluster") "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10}, %11;" ::"r"(
              destination),
          "l"(p), "r"(barrier), "r"(c), "r"(first[0]), "r"(first[1]), "r"(first[2]), "r"(first[3]), "h"(offset[0]),
          "h"(offset[1]), "h"(offset[2]), "h"(mask)
          : "memory");
    } else {
      asm volatile(IM2COL("5", "") "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(destination), "l"(p),
                   "r"(barrier), "r"(c), "r"(first[0]), "r"(first[1]), "r"(first[2]), "r"(first[3]), "h"(offset[0]),
                   "h"(offset[1]), "h"(offset[2])
                   : "memory");
    }
  }
#undef IM2COL
}
