// Host stand-ins for what a kernel of ffi/device/mma takes from PTX and from CUDA, after device_shim.h: threads of a
// block are contexts that switch where they wait for each other, so that g++ runs a kernel, slowly, with every address
// checked. Copies that are asynchronous on a device are done at once, but bulk copies as late as a device may.

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <type_traits>
#include <vector>

using std::fabs;
using std::max;
using std::min;

#define __device__
#define __global__
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)

struct Dim {
  unsigned x = 0;
};
static Dim threadIdx, blockIdx, gridDim;
static int block_threads;
static ucontext_t outside;
static std::vector<ucontext_t> contexts;

static void wait_for_others() { swapcontext(&contexts[threadIdx.x], &outside); }

[[noreturn]] static void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// ---- what threads do together ----

struct Barrier {
  int arrived = 0, phase = 0;

  void wait(int threads) {
    int before = phase;
    if (++arrived == threads) {
      arrived = 0, ++phase;
    } else {
      while (phase == before) wait_for_others();
    }
  }
};
static Barrier of_block, of_warp[32];
inline void __syncthreads() { of_block.wait(block_threads); }
inline void __syncwarp() { of_warp[threadIdx.x / 32].wait(32); }

// What each lane of the warp shows the others: [lane][word].
static u32 shown[32][32][64];
static u32 (&lanes())[32][64] { return shown[threadIdx.x / 32]; }
static int lane() { return threadIdx.x % 32; }

// The result of f, which reads what all lanes show.
template <typename F>
auto together(std::initializer_list<u32> words, F f) {
  std::copy(words.begin(), words.end(), lanes()[lane()]);
  __syncwarp();
  auto result = f();
  __syncwarp();
  return result;
}

template <typename T>
T __shfl_sync(unsigned, T x, int from) {
  static_assert(sizeof(T) == 4);
  return together({std::bit_cast<u32>(x)}, [&] { return std::bit_cast<T>(lanes()[from % 32][0]); });
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int other) {
  u32 words[4] = {};
  std::memcpy(words, &x, sizeof x);
  return together({words[0], words[1], words[2], words[3]}, [&] {
    T theirs;
    std::memcpy(&theirs, lanes()[(threadIdx.x ^ other) % 32], sizeof theirs);
    return theirs;
  });
}
inline u32 __shfl_up_sync(unsigned, u32 x, int down) {
  return together({x}, [&] { return lanes()[lane() < down ? lane() : lane() - down][0]; });
}
inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
inline u32 in_register(u32 x) { return x; }
inline bool __all_sync(unsigned, bool x) {
  return together({x}, [] { return std::all_of(lanes(), lanes() + 32, [](auto& words) { return words[0] != 0; }); });
}

inline u32 __ballot_sync(unsigned, bool x) {
  return together({x}, [] {
    u32 found = 0;
    for (int i = 0; i < 32; ++i) found |= lanes()[i][0] << i;
    return found;
  });
}

// ---- arithmetic ----

inline int __popc(u32 x) { return std::popcount(x); }
inline int __ffs(u32 x) { return x ? std::countr_zero(x) + 1 : 0; }

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) { return u32((u64(high) << 32 | low) >> (shift & 31)); }
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  u64 both = u64(high) << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; ++i) found |= u32(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}
// Of two halves each.
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  auto half = [](u32 x, int i) { return __uint_as_float(x >> 16 * i << 16); };
  return cvt_bf16x2(half(a, 0) * half(b, 0) + half(c, 0), half(a, 1) * half(b, 1) + half(c, 1));
}
inline u32 add_f16x2(u32 a, u32 b) {
  return cvt_f16x2(f16_to_f32(a & 0xffff) + f16_to_f32(b & 0xffff), f16_to_f32(a >> 16) + f16_to_f32(b >> 16));
}
inline u32 mul_f16x2(u32 a, u32 b) {
  return cvt_f16x2(f16_to_f32(a & 0xffff) * f16_to_f32(b & 0xffff), f16_to_f32(a >> 16) * f16_to_f32(b >> 16));
}
inline u32 cvt_rna_tf32(float x) {  // leaves the bits that it has rounded
  u32 bits = __float_as_uint(x);
  return (bits & 0x7f800000) == 0x7f800000 ? bits : bits + 0x1000;
}

// ---- shared memory, by offsets ----

alignas(1024) static unsigned char shared_memory[1 << 18];
inline u32 shared_address(const void*) { return 0; }
inline void* __cvta_shared_to_generic(u32 address) { return shared_memory + address; }

struct alignas(16) Bytes16 {
  u32 x, y, z, w;
};
struct alignas(8) Bytes8 {
  u32 x, y;
};

template <int BYTES>
unsigned char* shared_at(u32 address) {
  if (address % BYTES || address + BYTES > sizeof shared_memory) fail("an address outside shared memory, or odd");
  return shared_memory + address;
}
template <typename T>
T load_shared(u32 address) {
  T x;
  std::memcpy(&x, shared_at<sizeof x>(address), sizeof x);
  return x;
}
template <typename T>
void store_shared(u32 address, T x) {
  std::memcpy(shared_at<sizeof x>(address), &x, sizeof x);
}

template <int SPAN>
u32 swizzle(u32 offset) {
  return offset ^ ((offset >> 7) & (SPAN / 16 - 1)) << 4;
}
inline void st_shared_v2(u32 address, u32 x, u32 y) { store_shared(address, Bytes8{x, y}); }
inline void st_shared_u32(u32 address, u32 x) { store_shared(address, x); }
inline void st_shared_u16(u32 address, u16 x) { store_shared(address, x); }
inline void st_shared_v4(u32 address, u32 x, u32 y, u32 z, u32 w) { store_shared(address, Bytes16{x, y, z, w}); }
inline Bytes16 ld_shared_v4(u32 address) { return load_shared<Bytes16>(address); }
inline void ld_shared_v2(u32 address, u32& x, u32& y) {
  auto v = load_shared<Bytes8>(address);
  x = v.x, y = v.y;
}
inline void ld_shared_v2(u32 address, double& x, double& y) {
  auto v = load_shared<Bytes16>(address);
  x = __hiloint2double(v.y, v.x), y = __hiloint2double(v.w, v.z);
}
inline double ld_shared_f64(u32 address) { return load_shared<double>(address); }
inline u32 ld_shared_u32(u32 address) { return load_shared<u32>(address); }
inline u16 ld_shared_u16(u32 address) { return load_shared<u16>(address); }
inline u32 ld_shared_u8(u32 address) { return load_shared<unsigned char>(address); }
template <int BYTES>
Bytes16 ld_shared(u32 address) {
  Bytes16 v{};
  std::memcpy(&v, shared_at<BYTES>(address), BYTES);
  return v;
}

// The i-th matrix of ldmatrix, whose rows lanes 8 i on address.
inline u32 matrix(int i) { return load_shared<u32>(lanes()[8 * i + lane() / 4][0] + lane() % 4 * 4); }
inline u32 transposed_matrix(int i) {
  int row = 8 * i + lane() % 4 * 2, byte = lane() / 4 * 2;
  return load_shared<u16>(lanes()[row][0] + byte) | u32(load_shared<u16>(lanes()[row + 1][0] + byte)) << 16;
}
inline void ldmatrix_x4(u32 address, u32& x, u32& y, u32& z, u32& w) {
  Bytes16 v = together({address}, [] { return Bytes16{matrix(0), matrix(1), matrix(2), matrix(3)}; });
  x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void ldmatrix_x4_trans(u32 address, u32& x, u32& y, u32& z, u32& w) {
  auto load = [] {
    return Bytes16{transposed_matrix(0), transposed_matrix(1), transposed_matrix(2), transposed_matrix(3)};
  };
  Bytes16 v = together({address}, load);
  x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void stmatrix_x4(u32 address, u32 x, u32 y, u32 z, u32 w) {
  together({address}, [&] {
    u32 words[4] = {x, y, z, w};
    for (int i = 0; i < 4; ++i) store_shared(lanes()[8 * i + lane() / 4][0] + lane() % 4 * 4, words[i]);
    return 0;
  });
}

// ---- global memory: the arrays that a launch is given ----

static std::vector<std::pair<const char*, size_t>> arrays;

template <int BYTES>
void check_global(const void* p) {
  auto at = static_cast<const char*>(p);
  if (reinterpret_cast<u64>(p) % BYTES) fail("an odd address of global memory");
  // Loads of whole words may begin before, or end behind, an array, within the allocation that holds it.
  for (auto [first, size] : arrays)
    if (at + BYTES > first && at < first + size && (BYTES <= 4 || (at >= first && at + BYTES <= first + size))) return;
  fail("an address outside all arrays");
}
template <typename T>
T load_global(const void* p) {
  check_global<sizeof(T)>(p);
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <int BYTES>
void st_global(void* p, Bytes16 v) {
  check_global<BYTES>(p);
  std::memcpy(p, &v, BYTES);
}
template <int BYTES>
void copy_to_global(void* p, u32 address) {
  check_global<BYTES>(p);
  std::memcpy(p, shared_at<BYTES>(address), BYTES);
}
using u8 = unsigned char;
// Words that follow each other, loaded at once: kernel_host.py puts this in place of the instruction.
template <typename T, typename... Words>
void load_words(const void* p, Words&... words) {
  auto at = static_cast<const char*>(p);
  if (reinterpret_cast<u64>(at) % (sizeof(T) * sizeof...(words))) fail("an address of words that is odd");
  ((words = load_global<T>(at), at += sizeof(T)), ...);
}
inline int ld_global(const int* p) { return load_global<int>(p); }
template <typename T>
void st_global_v2(T* p, T x, T y) {
  check_global<2 * sizeof(T)>(p);
  p[0] = x, p[1] = y;
}
inline u32 ld_global_u32(const char* p) { return load_global<u32>(p); }
inline u32 ld_global_u16(const char* p) { return load_global<u16>(p); }
inline u32 ld_global_u8(const char* p) { return load_global<unsigned char>(p); }
inline Bytes16 ld_global_v4(const char* p) { return load_global<Bytes16>(p); }
inline u32 ld_global_u32_if(bool there, const char* p) { return there ? ld_global_u32(p) : 0; }
template <int BYTES>
u32 ld_global_if(bool there, const char* p) {
  return !there ? 0 : BYTES == 4 ? ld_global_u32(p) : BYTES == 2 ? ld_global_u16(p) : ld_global_u8(p);
}
inline void ld_global_v4_if(bool there, const char* p, u32 (&x)[4]) {
  Bytes16 v = there ? ld_global_v4(p) : Bytes16{};
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

constexpr bool HAS_CP_ASYNC = __CUDA_ARCH__ >= 800;
template <int BYTES>
void cp_async(u32 destination, const void* p, bool there) {
  if (there) check_global<BYTES>(p);
  if (there) std::memcpy(shared_at<BYTES>(destination), p, BYTES);
  if (!there) std::memset(shared_at<BYTES>(destination), 0, BYTES);
}
inline void cp_async_commit_group() {}
template <int>
void cp_async_wait_group() {}

// ---- mbarriers and TMA ----

// Of sizes, strides and boxes the innermost first; an element has `bytes`, a row of the box at most `span`, or any
// where that is 0, and nothing swizzled.
struct TensorMap {
  const char* base;
  long long dims[5], strides[4];
  int box[5], bytes, span, tf32;
};

struct Mbarrier {
  int expected = 0, pending = 0, bytes = 0;
  u32 phase = 0;

  void update(int arrivals, int more) {
    pending -= arrivals, bytes += more;
    if (pending < 0) fail("an mbarrier has more arrivals than it expects");
    if (pending == 0 && bytes == 0) pending = expected, phase ^= 1;
  }
};
static std::map<u32, Mbarrier> mbarriers;

// Bulk copies to shared memory are done when a thread waits for their barrier, with NaN there until then; those from it
// when their thread waits for their group, or never, where it does not.
struct Bulk {
  void* to;
  const void* from;
  u32 bytes;
};
static std::map<u32, std::vector<Bulk>> bulk_loads;
static std::map<unsigned, std::vector<std::vector<Bulk>>> bulk_stores;  // of a thread, by groups; the last is open

template <typename Copies>
void carry_out(Copies& copies) {
  for (auto [to, from, bytes] : copies) std::memcpy(to, from, bytes);
  copies.clear();
}
inline void check_bulk(u32 address, const void* p, u32 bytes) {
  if (!bytes || bytes % 16) fail("a bulk copy of no whole 16 bytes");
  for (u32 i = 0; i < bytes; i += 16) shared_at<16>(address + i), check_global<16>(static_cast<const char*>(p) + i);
}
static void cp_async_bulk_store(void* p, u32 address, u32 bytes) {
  check_bulk(address, p, bytes);
  auto& groups = bulk_stores[threadIdx.x];
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({p, shared_memory + address, bytes});
}
static void cp_async_bulk_commit_group() {
  auto& groups = bulk_stores[threadIdx.x];
  groups.resize(std::max<size_t>(groups.size(), 1) + 1);
}
template <int PENDING>
void cp_async_bulk_wait_group_read() {
  auto& groups = bulk_stores[threadIdx.x];
  while (static_cast<int>(groups.size()) > PENDING + 1) carry_out(groups.front()), groups.erase(groups.begin());
}
static void cp_async_bulk_wait_group() { cp_async_bulk_wait_group_read<0>(); }

static bool elect() { return lane() == 0; }
static void mbarrier_init(u32 barrier, u32 arrivals) {
  shared_at<8>(barrier);
  mbarriers[barrier] = {static_cast<int>(arrivals), static_cast<int>(arrivals)};
}
static void fence_mbarrier_init() {}
static void fence_proxy_async() {}
static void mbarrier_arrive(u32 barrier) { mbarriers.at(barrier).update(1, 0); }
static void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { mbarriers.at(barrier).update(1, bytes); }
static void mbarrier_wait(u32 barrier, u32 parity) {
  if (auto& loads = bulk_loads[barrier]; !loads.empty()) {
    int bytes = 0;
    for (auto& load : loads) bytes += load.bytes;
    carry_out(loads);
    mbarriers.at(barrier).update(0, -bytes);
  }
  while (mbarriers.at(barrier).phase == parity) wait_for_others();
}
static void cp_async_bulk_load(u32 address, const void* p, u32 bytes, u32 barrier) {
  check_bulk(address, p, bytes);
  std::memset(shared_memory + address, 0xff, bytes);
  bulk_loads[barrier].push_back({shared_memory + address, p, bytes});
}

template <int RANK>
void tma_load(u32 destination, const TensorMap* map, u32 barrier, const long long (&from)[RANK]) {
  if (destination % std::max(128, 8 * map->span)) fail("a box that does not begin where its swizzle does");
  int row = map->box[0] * map->bytes, lines = 1;
  for (int d = 1; d < RANK; ++d) lines *= map->box[d];
  for (int line = 0; line < lines; ++line)
    for (int i = 0; i < map->box[0]; ++i) {
      bool inside = true;
      const char* p = map->base;
      for (int d = 0, rest = line; d < RANK; ++d) {
        long long at = from[d] + (d == 0 ? i : rest % map->box[d]);
        inside &= 0 <= at && at < map->dims[d];
        p += at * (d == 0 ? map->bytes : map->strides[d - 1]);
        if (d > 0) rest /= map->box[d];
      }
      unsigned char element[8] = {};
      if (inside) {
        check_global<1>(p);
        std::memcpy(element, p, map->bytes);
        if (map->tf32) {
          u32 rounded = cvt_rna_tf32(std::bit_cast<float>(*reinterpret_cast<u32*>(element))) & 0xffffe000;
          std::memcpy(element, &rounded, sizeof rounded);
        }
      }
      u32 offset = destination + line * row + i * map->bytes;
      if (map->span) offset ^= (offset >> 7 & (map->span / 16 - 1)) << 4;
      std::memcpy(shared_memory + offset, element, map->bytes);
    }
  mbarriers.at(barrier).update(0, -row * lines);
}
static void tma_load(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z) {
  tma_load<3>(destination, map, barrier, {x, y, z});
}

// ---- the tensor cores: fragments as PTX has them ----

// What one operand is, of two dtypes the second's where so said.
constexpr Math kind_of(Math x, bool second) {
  if (x == Math::s8_u8 || x == Math::u8_s8) return (x == Math::u8_s8) == second ? Math::s8 : Math::u8;
  if (x == Math::e4m3_e5m2 || x == Math::e5m2_e4m3) return (x == Math::e5m2_e4m3) == second ? Math::e4m3 : Math::e5m2;
  return x;
}

// Element e of 4 bytes.
template <Math MATH>
double element(u32 word, int e) {
  u32 half = word >> e * 16 & 0xffff, byte = word >> e * 8 & 0xff;
  if constexpr (MATH == Math::tf32) return __uint_as_float(word & 0xffffe000);
  if constexpr (MATH == Math::bf16) return __uint_as_float(half << 16);
  if constexpr (MATH == Math::f16) return f16_to_f32(half);
  if constexpr (MATH == Math::s8) return static_cast<signed char>(byte);
  if constexpr (MATH == Math::u8) return byte;
  if constexpr (MATH == Math::e4m3) return f16_to_f32(e4m3_to_f16(byte));
  return f16_to_f32(byte << 8);
}

template <Math MATH, typename T>
void mma(T (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  constexpr int EACH = MATH == Math::tf32 ? 1 : MATH == Math::bf16 || MATH == Math::f16 ? 2 : 4;
  together({a[0], a[1], a[2], a[3], b[0], b[1]}, [&] {
    for (int i = 0; i < 4; ++i) {
      int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
      double sum = 0;
      for (int unit = 0; unit < 8; ++unit) {
        u32 x = lanes()[row % 8 * 4 + unit % 4][row / 8 + unit / 4 * 2],
            y = lanes()[column * 4 + unit % 4][4 + unit / 4];
        for (int e = 0; e < EACH; ++e) sum += element<kind_of(MATH, false)>(x, e) * element<kind_of(MATH, true)>(y, e);
      }
      if constexpr (std::is_floating_point_v<T>) {
        d[i] = static_cast<T>(d[i] + sum);
      } else {
        d[i] += static_cast<T>(static_cast<long long>(sum));
      }
    }
    return 0;
  });
}

inline void mma_f16(u32 (&d)[2], const u32 (&a)[4], const u32 (&b)[2]) {
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = f16_to_f32(d[i / 2] >> i % 2 * 16 & 0xffff);
  mma<Math::f16>(sums, a, b);
  d[0] = cvt_f16x2(sums[0], sums[1]), d[1] = cvt_f16x2(sums[2], sums[3]);
}

template <int OF_A, int OF_B>
void dmma(double& d0, double& d1, double& d2, double& d3, const double (&a)[OF_A], const double (&b)[OF_B]) {
  std::memcpy(lanes()[lane()], a, sizeof a);
  std::memcpy(lanes()[lane()] + 32, b, sizeof b);
  together({}, [&] {
    double* d[4] = {&d0, &d1, &d2, &d3};
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 4 * OF_B; ++k) {
        int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        double x, y;
        std::memcpy(&x, &lanes()[row % 8 * 4 + k % 4][2 * (k / 4 * 2 + row / 8)], sizeof x);
        std::memcpy(&y, &lanes()[column * 4 + k % 4][32 + k / 4 * 2], sizeof y);
        *d[i] += x * y;
      }
    return 0;
  });
}

inline void fma_rn(float& d, float a, float b) { d = std::fma(a, b, d); }
inline void pass_pair(u32&, u32&, u32) {}
inline u32 pinned(u32 x) { return x; }
inline u32 kept(u32 x) { return x; }
