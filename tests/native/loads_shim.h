// Host stand-ins for what the loads of the sm_90 kernels take from PTX: TMA copies at once, of tensor maps in the
// clear, and without a swizzle. Each CTA of a cluster has shared memory of its own.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define DEVICE inline

using i64 = long long;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Dim3 {
  int x = 0;
};
static Dim3 blockIdx, gridDim, threadIdx;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

struct TensorMap {
  const char* base;
  int size, rank;  // bytes of an element
  i64 dims[5], strides[5];
  int box[5];
  bool im2col;  // box is of channels and pixels
  int lower[3], upper[3], steps[3];
};

static std::vector<char> shared_memory[2];
static std::vector<i64> landed[2];  // bytes, by the barrier they are signalled to
static int current;                 // CTA of the cluster

template <int SPAN, u32 LEADING_BYTES, u32 STRIDE_BYTES>
struct WgmmaDescriptor {};

inline void st_shared_v4(u32, u32, u32, u32, u32) {}
inline bool elect() { return true; }
inline void __syncwarp() {}
inline void mbarrier_wait(u32, u32) {}
inline void mbarrier_arrive(u32) {}
inline void mbarrier_arrive_cluster(u32, u32) {}
inline void prefetch_tensormap(const TensorMap*) {}
inline int uniform(int x) { return x; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { landed[current][barrier / 8] -= bytes; }

// Elements of a row from `at` on, of which those outside of the tensor are zero.
inline void row(const TensorMap& map, u32 destination, u32 barrier, int count, const int (&at)[5], u32 mask) {
  for (int cta = 0; cta < 2; ++cta) {
    if (!(mask >> cta & 1)) continue;
    if (destination + count * map.size > shared_memory[cta].size()) fail("past the end of shared memory");
    for (int i = 0; i < count; ++i) {
      char* to = &shared_memory[cta][destination + i * map.size];
      const char* from = map.base;
      bool inside = true;
      for (int axis = 0; axis < map.rank; ++axis) {
        int place = at[axis] + (axis == 0 ? i : 0);
        inside = inside && place >= 0 && place < map.dims[axis];
        from += place * map.strides[axis];
      }
      if (inside) {
        std::memcpy(to, from, map.size);
      } else {
        std::memset(to, 0, map.size);
      }
    }
    landed[cta][barrier / 8] += count * map.size;
  }
}

inline void cp_async_mbarrier_arrive_noinc(u32) { fail("threads copy"); }

template <bool FIRST = false>
void tma_load_multicast(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z, u16 mask) {
  if (map->im2col || map->rank != 3) fail("a box of a map of columns");
  for (int k = 0; k < map->box[2]; ++k)
    for (int j = 0; j < map->box[1]; ++j) {
      row(*map, destination, barrier, map->box[0], {x, y + j, z + k}, mask);
      destination += map->box[0] * map->size;
    }
}

template <bool FIRST = false>
void tma_load(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z) {
  tma_load_multicast(destination, map, barrier, x, y, z, 1 << current);
}

#ifdef IMAGES
constexpr int AXES = IMAGES, PHASES_OF[3] = {PHASES0, PHASES1, PHASES2}, PHASES = PHASES0 * PHASES1 * PHASES2;

template <int SHARE>
void tma_load_im2col(u32 destination, const TensorMap* map, u32 barrier, int c, const int (&first)[AXES + 1],
                     const u16 (&offset)[AXES]) {
  const TensorMap& m = *map;
  if (!m.im2col || m.rank != AXES + 2) fail("columns of a map of boxes");
  u32 mask = SHARE > 1 ? (1 << SHARE) - 1 : 1 << current;
  int at[AXES + 1];
  for (int i = 0; i <= AXES; ++i) at[i] = first[i];
  for (int i = 0; i < AXES; ++i) {
    if (offset[i] >= (AXES == 1 ? 1 << 16 : AXES == 2 ? 1 << 8 : 1 << 5)) fail("an offset out of range");
    if (at[i] < m.lower[i] || at[i] > m.dims[i + 1] - 1 + m.upper[i]) fail("a column begins outside of its box");
    if ((at[i] - m.lower[i]) % m.steps[i]) fail("a column begins between pixels");
  }
  for (int pixel = 0; pixel < m.box[1]; ++pixel) {
    int place[5] = {c};
    for (int i = 0; i < AXES; ++i) place[1 + i] = at[i] + offset[i];
    place[AXES + 1] = at[AXES];
    row(m, destination, barrier, m.box[0], place, mask);
    destination += m.box[0] * m.size;
    int axis = 0;
    for (; axis < AXES; ++axis) {
      at[axis] += m.steps[axis];
      if (at[axis] <= m.dims[axis + 1] - 1 + m.upper[axis]) break;
      at[axis] = m.lower[axis];
    }
    if (axis == AXES) ++at[AXES];
  }
}
#endif
