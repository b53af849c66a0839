// The machine that interprets PTX: blocks of a grid, their warps, their memories, and what is asynchronous.
//
// A warp executes one instruction for all of its threads that are at the same place, so each thread has its own. A
// register is an array of 32 values, one a thread, of 4 bytes (predicates and what is narrower too) or 8.

#pragma once

#include <bit>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

using u8 = uint8_t;
using i8 = int8_t;
using u16 = uint16_t;
using i16 = int16_t;
using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;

constexpr int LANES = 32;
constexpr u32 ALL = ~0u;

struct Warp;
struct Block;
struct Machine;

// What an instruction did: the next one follows; its threads wait, and it runs again later; threads have other places.
enum Step { NEXT, PARK, JUMP };

struct Instruction {
  Step (*run)(Warp&, const Instruction&, u32 mask);
  int guard;     // the register of a predicate, or -1
  bool negated;  // whether that is to be false
  int o[4];      // the first operands: where their registers are, in bytes; -1 for none
  const int* list;
  int count;  // of all operands
  i64 x[5];   // modifiers, as ptx.py makes them of the instruction's name
};

struct Entry {
  const char* name;
  Step (*run)(Warp&, const Instruction&, u32);
};
using Table = std::vector<Entry>;

// Thrown where a program does what it may not.
struct Fault {
  std::string text, where = {};
};
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A tensor map, as cutjax.runtime.tensor_map has it.
struct TensorMap {
  i64 address, element_bytes, rank, swizzle, im2col, interleave, fill_nan, element;  // element: CUtensorMapDataType
  i64 dims[5], strides[5], box[5], steps[5];  // strides[0] is element_bytes; box of im2col: channels, pixels
  i64 lower[3], upper[3];
};

struct Mbarrier {
  bool ready = false;  // initialised
  int expected = 0, pending = 0, bytes = 0, phase = 0;
};

// Shared memory of a block, and what is known of each byte.
struct Shared {
  enum State : u8 { UNWRITTEN, WRITTEN, IN_FLIGHT };
  std::vector<u8> data, state;
  std::vector<u32> fenced;  // for each 4 bytes, how many proxy fences there were when a thread wrote them, and one more
  std::unordered_map<u32, Mbarrier> barriers;
};

// The largest address of a block's shared memory is below this; the rank in its cluster is above it.
constexpr u32 RANK_SHIFT = 24;
constexpr u32 SHARED_BASE = 1024;  // of the first byte that a program may use
// 64-bit addresses: buffers begin at multiples of 2^40; these have numbers of their own.
constexpr int SPACE_SHIFT = 40;
enum Space { GENERIC, GLOBAL, SHARED, CLUSTER, LOCAL, PARAM };
constexpr u64 SHARED_WINDOW = 0x1001, LOCAL_WINDOW = 0x1002, PARAM_WINDOW = 0x1003;

struct NamedBarrier {
  int arrived = 0, expected = 0, phase = 0;
  bool any = false, all = true, result_any = false, result_all = false;
  int count = 0, result_count = 0;
};

// A copy by one thread that nobody has waited for.
struct Copy {
  std::function<void()> read, write;  // each is called once, or is empty
};

// wgmma: sums that a warp is computing. `values` is [registers][32]; the registers themselves hold poison.
struct Sums {
  std::vector<int> registers;
  std::vector<u32> values;
  int last_group = 0;  // the newest group that adds to them
};
struct Wgmma {
  int group;
  i64 number;  // of those that the warp has issued
  const Instruction* instruction;
  u64 a, b;                   // descriptors
  std::function<void()> run;  // empty once it has
};

struct Warp {
  Machine* machine;
  Block* block;
  int index;             // in the block
  std::vector<u8> file;  // registers
  int pc[LANES];
  u32 live, parked = 0;
  u64 seen = 0;  // the machine's changes when threads were parked
  std::vector<u8> local[LANES];

  // bar.sync and barrier.cluster: whether it has arrived, at which phase.
  bool arrived = false;
  int phase = 0, cluster_phase = 0;
  bool cluster_arrived = false;

  std::deque<std::vector<Copy>> copies[LANES], bulk[LANES];  // groups, the oldest first; the last is not committed
  std::deque<Wgmma> wgmmas;
  int wgmma_group = 0;  // the one not committed yet
  i64 wgmma_count = 0;
  bool wgmma_fenced = false;  // since it last waited
  std::map<int, Sums> sums;

  template <class T>
  T* at(int offset) {
    return reinterpret_cast<T*>(file.data() + offset);
  }
  u32 get32(int offset, int lane) { return at<u32>(offset)[lane]; }
  u64 get64(int offset, int lane) { return at<u64>(offset)[lane]; }
  void run_slice(int budget);
  bool runnable() const;
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  int arrived = 0, phase = 0;
  int live_warps() const;
};

struct Block {
  Machine* machine;
  Cluster* cluster;
  u32 rank;
  u32 id[3];
  Shared shared;
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  u32 fences = 0;
  int exited = 0;  // warps that have
};

struct Buffer {
  u8* data;
  u64 bytes;
};

struct Pending {
  Block* block;
  std::function<void()> land;
};

struct Machine {
  std::vector<Instruction> code;
  std::vector<int> pool;
  std::vector<u8> constants;  // the first registers of each warp: special ones (below), then constants
  std::vector<Buffer> buffers;
  std::vector<u8> params;
  std::map<u32, TensorMap> maps;  // by offset in params
  u32 grid[3], block[3], cluster[3];
  int shared_bytes, register_bytes, local_bytes;
  u64 state;       // of random numbers
  int eagerness;   // of what is asynchronous: 0 as late as can be, else one in so many is done early
  bool unwritten;  // whether reading shared memory that nobody has written is a fault
  u64 changes = 1, executed = 0, limit;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<Pending> flying;
  std::vector<std::function<void()>> stores;  // bulk stores that have read, and have not written

  u32 random() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<u32>(state >> 33);
  }
  bool early() { return eagerness && random() % eagerness == 0; }
  void run();
  void start_cluster(int index);
  std::string where() const;
};

// The special registers, in the order of ptx.py: SPECIAL.
void set_special(Warp& w);

// Memory. `lane` is whose; faults say what is wrong with an address.
u8* global(Machine& m, u64 address, u64 bytes);
Block& block_of(Block& b, u32 address);               // of an address in shared::cluster
u32 offset_of(u32 address);                           // in its block's Shared
void check_shared(Shared& s, u32 offset, u32 bytes);  // bounds
void read_shared(Block& b, u32 address, u32 bytes, void* to, bool async_proxy = false);
void write_shared(Block& b, u32 address, u32 bytes, const void* from, bool async_proxy = false);
Mbarrier& mbarrier(Block& b, u32 address);
void complete(Machine& m, Mbarrier& barrier);  // its phase, where nothing is missing
void finish_bulk(Warp& w, int lane, size_t keep, bool written);
Step finish_wgmma(Warp& w, int groups_left);

void add_arithmetic(Table& table);
void add_conversions(Table& table);
void add_memory(Table& table);
void add_warp(Table& table);
void add_barriers(Table& table);
void add_mma(Table& table);
void add_wgmma(Table& table);
void add_tma(Table& table);

template <class F>
inline void lanes(u32 mask, F f) {
  if (mask == ALL) {
    for (int l = 0; l < LANES; ++l) f(l);
  } else {
    for (; mask; mask &= mask - 1) f(std::countr_zero(mask));
  }
}

// How values of a type lie in registers.
template <class T>
using Slot = std::conditional_t<sizeof(T) == 8, u64, u32>;
template <class T>
inline T decode(Slot<T> bits) {
  if constexpr (std::is_same_v<T, bool>) {
    return bits != 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    return std::bit_cast<T>(bits);
  }
}
template <class T>
inline Slot<T> encode(T x) {
  if constexpr (std::is_same_v<T, bool>) {
    return x;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<std::make_unsigned_t<T>>(x);
  } else {
    return std::bit_cast<Slot<T>>(x);
  }
}

// Floating-point formats of 16 bits and less, as float.
float of_half(u16 x);
float of_bfloat(u16 x);
float of_e4m3(u8 x);
float of_e5m2(u8 x);
u16 to_half(double x);
u16 to_bfloat(double x);
float to_tf32(float x);  // truncated, as tensor cores read it
