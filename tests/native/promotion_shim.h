// Host stand-ins for what a promotion by scales takes from PTX. Threads take turns, so that copies have landed.

#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#define DEVICE inline

using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;

template <int SPAN, u32 LEADING_BYTES, u32 STRIDE_BYTES>
struct WgmmaDescriptor {};

static std::vector<unsigned char> shared_memory;

inline void st_shared_v4(u32, u32, u32, u32, u32) {}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline void cp_async_word(u32 to, const void* from, int bytes = 4) {
  std::memset(&shared_memory.at(to), 0, 4);
  std::memcpy(&shared_memory.at(to), from, bytes);
}
inline void st_shared_f32(u32 to, float x) { std::memcpy(&shared_memory.at(to), &x, 4); }
struct float4 {
  float x, y, z, w;
};
inline float4 ld_global_v4(const float* from) { return {from[0], from[1], from[2], from[3]}; }
static struct {
  unsigned int x;
} threadIdx;

inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __uint_as_float(u32 x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}

inline u32 __float_as_uint(float x) {
  u32 y;
  std::memcpy(&y, &x, 4);
  return y;
}

inline u32 ld_shared_u32(u32 address) {
  u32 x;
  std::memcpy(&x, &shared_memory.at(address), 4);
  return x;
}
inline float ld_shared_f32(u32 address) { return __uint_as_float(ld_shared_u32(address)); }
inline void ld_shared_v2(u32 address, u32& x, u32& y) {
  x = ld_shared_u32(address);
  y = ld_shared_u32(address + 4);
}
inline void mbarrier_arrive(u32) {}
inline void mbarrier_arrive_cluster(u32, u32) {}
