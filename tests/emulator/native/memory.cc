// Loads, stores and atomics, and the addresses of all spaces.

#include <algorithm>

#include "machine.h"

u8* global(Machine& m, u64 address, u64 bytes) {
  u64 index = address >> SPACE_SHIFT, offset = address & ((1ull << SPACE_SHIFT) - 1);
  if (index == 0 || index > m.buffers.size())
    fault("address 0x%llx is in no buffer", static_cast<unsigned long long>(address));
  Buffer& b = m.buffers[index - 1];
  if (offset + bytes > b.bytes)
    fault("%llu bytes at %lld of buffer %llu, which has %llu", static_cast<unsigned long long>(bytes),
          static_cast<long long>(offset << (64 - SPACE_SHIFT)) >> (64 - SPACE_SHIFT),
          static_cast<unsigned long long>(index - 1), static_cast<unsigned long long>(b.bytes));
  return b.data + offset;
}

Block& block_of(Block& b, u32 address) {
  u32 rank = address >> RANK_SHIFT;
  if (rank >= b.cluster->blocks.size()) fault("shared address 0x%x is of block %u of the cluster", address, rank);
  return *b.cluster->blocks[rank];
}

u32 offset_of(u32 address) { return (address & ((1u << RANK_SHIFT) - 1)) - SHARED_BASE; }

void check_shared(Shared& s, u32 offset, u32 bytes) {
  if (offset >= s.data.size() || offset + bytes > s.data.size())
    fault("%u bytes at %d of shared memory, which has %zu", bytes, static_cast<i32>(offset), s.data.size());
}

void read_shared(Block& from, u32 address, u32 bytes, void* to, bool async_proxy) {
  Block& b = block_of(from, address);
  Shared& s = b.shared;
  u32 offset = offset_of(address);
  check_shared(s, offset, bytes);
  for (u32 i = offset; i < offset + bytes; ++i) {
    if (s.state[i] == Shared::WRITTEN) continue;
    if (s.state[i] == Shared::IN_FLIGHT) fault("reads byte %u of shared memory, which a copy is about to write", i);
    if (b.machine->unwritten) fault("reads byte %u of shared memory, which nobody has written", i);
  }
  if (async_proxy)
    for (u32 i = offset / 4; i <= (offset + bytes - 1) / 4; ++i)
      if (s.fenced[i] > b.fences)
        fault("reads byte %u of shared memory by the async proxy, which a thread wrote without fence.proxy.async",
              i * 4);
  memcpy(to, s.data.data() + offset, bytes);
}

void write_shared(Block& from, u32 address, u32 bytes, const void* data, bool async_proxy) {
  Block& b = block_of(from, address);
  Shared& s = b.shared;
  u32 offset = offset_of(address);
  check_shared(s, offset, bytes);
  if (!async_proxy)
    for (u32 i = offset; i < offset + bytes; ++i)
      if (s.state[i] == Shared::IN_FLIGHT) fault("writes byte %u of shared memory, which a copy is about to write", i);
  // What was there before is there whoever's write the async proxy sees.
  const u8* state = s.state.data() + offset;
  bool same = std::all_of(state, state + bytes, [](u8 x) { return x == Shared::WRITTEN; });
  if (!async_proxy && same && memcmp(s.data.data() + offset, data, bytes) == 0) return;
  memcpy(s.data.data() + offset, data, bytes);
  memset(s.state.data() + offset, Shared::WRITTEN, bytes);
  for (u32 i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) s.fenced[i] = async_proxy ? 0 : b.fences + 1;
}

namespace {

u64 address_at(Warp& w, int reg, bool wide, i64 displacement, int lane) {
  u64 base = wide ? w.get64(reg, lane) : w.get32(reg, lane);
  return wide ? base + displacement : static_cast<u32>(base + displacement);
}

// A generic address tells its space.
Space space_of(Space space, u64& address) {
  if (space != GENERIC) return space;
  u64 window = address >> SPACE_SHIFT;
  if (window == SHARED_WINDOW || window == LOCAL_WINDOW || window == PARAM_WINDOW) {
    address &= (1ull << SPACE_SHIFT) - 1;
    return window == SHARED_WINDOW ? CLUSTER : window == LOCAL_WINDOW ? LOCAL : PARAM;
  }
  return GLOBAL;
}

u8* plain_memory(Warp& w, Space space, u64 address, u32 bytes, int lane) {
  if (space == GLOBAL) return global(*w.machine, address, bytes);
  std::vector<u8>& memory = space == PARAM ? w.machine->params : w.local[lane];
  address &= (1ull << SPACE_SHIFT) - 1;
  if (address + bytes > memory.size())
    fault("%u bytes at %lld of local memory or parameters, which have %zu", bytes, static_cast<long long>(address),
          memory.size());
  return memory.data() + address;
}

u32 own(Warp& w, Space space, u64 address) {
  u32 at = static_cast<u32>(address);
  if (space == SHARED && at >> RANK_SHIFT != w.block->rank) fault("shared::cta address 0x%x of another block", at);
  return at;
}

void load(Warp& w, Space space, u64 address, u32 bytes, int lane, u8* to) {
  if (address % bytes) fault("%u bytes are read at 0x%llx", bytes, static_cast<unsigned long long>(address));
  space = space_of(space, address);
  if (space == SHARED || space == CLUSTER)
    read_shared(*w.block, own(w, space, address), bytes, to);
  else
    memcpy(to, plain_memory(w, space, address, bytes, lane), bytes);
}

void store(Warp& w, Space space, u64 address, u32 bytes, int lane, const u8* from) {
  if (address % bytes) fault("%u bytes are written at 0x%llx", bytes, static_cast<unsigned long long>(address));
  space = space_of(space, address);
  if (space == PARAM) fault("writes parameters");
  if (space == SHARED || space == CLUSTER)
    write_shared(*w.block, own(w, space, address), bytes, from);
  else
    memcpy(plain_memory(w, space, address, bytes, lane), from, bytes);
}

// ld and st: x is space, bytes of an element, whether it has a sign, displacement, bits of the address and of
// registers. The list is the registers, then the address; of st the address comes first.
constexpr int WIDE_ADDRESS = 1, WIDE_REGISTERS = 2;

Step run_load(Warp& w, const Instruction& i, u32 mask) {
  int count = i.count - 1, bytes = static_cast<int>(i.x[1]);
  lanes(mask, [&](int l) {
    u8 data[32];
    load(w, static_cast<Space>(i.x[0]), address_at(w, i.list[count], i.x[4] & WIDE_ADDRESS, i.x[3], l), bytes * count,
         l, data);
    for (int j = 0; j < count; ++j) {
      u64 x = 0;
      memcpy(&x, data + j * bytes, bytes);
      if (i.x[2]) x = static_cast<u64>(static_cast<i64>(x << (64 - 8 * bytes)) >> (64 - 8 * bytes));
      if (i.list[j] < 0) continue;
      if (i.x[4] & WIDE_REGISTERS)
        w.at<u64>(i.list[j])[l] = x;
      else
        w.at<u32>(i.list[j])[l] = static_cast<u32>(x);
    }
  });
  return NEXT;
}

Step run_store(Warp& w, const Instruction& i, u32 mask) {
  int count = i.count - 1, bytes = static_cast<int>(i.x[1]);
  lanes(mask, [&](int l) {
    u8 data[32];
    for (int j = 0; j < count; ++j) {
      u64 x = i.x[4] & WIDE_REGISTERS ? w.get64(i.list[1 + j], l) : w.get32(i.list[1 + j], l);
      memcpy(data + j * bytes, &x, bytes);
    }
    store(w, static_cast<Space>(i.x[0]), address_at(w, i.list[0], i.x[4] & WIDE_ADDRESS, i.x[3], l), bytes * count, l,
          data);
  });
  return NEXT;
}

// Address, value, and the mbarrier that counts the bytes when they have come.
Step store_async(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) {
    u32 to = w.get32(i.list[0], l), value = w.get32(i.list[1], l), barrier = w.get32(i.list[2], l);
    Warp* warp = &w;
    w.machine->flying.push_back({&block_of(*w.block, to), [=] {
                                   write_shared(*warp->block, to, 4, reinterpret_cast<const u8*>(&value));
                                   Mbarrier& found = mbarrier(*warp->block, barrier);
                                   found.bytes -= 4;
                                   complete(*warp->machine, found);
                                   ++warp->machine->changes;
                                 }});
  });
  return NEXT;
}

// atom and red: as ld's, behind a result (-1 of red) an address and one or two values.
template <class T, class F>
Step atomic(Warp& w, const Instruction& i, u32 mask, F f) {
  lanes(mask, [&](int l) {
    u64 address = address_at(w, i.list[1], i.x[4] & WIDE_ADDRESS, i.x[3], l);
    Slot<T> old = 0;
    T b = decode<T>(w.at<Slot<T>>(i.list[2])[l]), c = i.count > 3 ? decode<T>(w.at<Slot<T>>(i.list[3])[l]) : T{};
    Space space = static_cast<Space>(i.x[0]);
    load(w, space, address, sizeof(T), l, reinterpret_cast<u8*>(&old));
    T changed = f(decode<T>(old), b, c);
    store(w, space, address, sizeof(T), l, reinterpret_cast<const u8*>(&changed));
    if (i.list[0] >= 0) w.at<Slot<T>>(i.list[0])[l] = old;
  });
  ++w.machine->changes;
  return NEXT;
}
#define ATOMIC(name, T, expression)                                                                                \
  table.push_back({"atom." name, [](Warp& w, const Instruction& i, u32 mask) -> Step {                             \
                     return atomic<T>(w, i, mask, [](T a, T b, [[maybe_unused]] T c) -> T { return expression; }); \
                   }})

Step cvta(Warp& w, const Instruction& i, u32 mask, u64 window, bool to_space) {
  lanes(mask, [&](int l) {
    u64 a = i.x[0] ? w.get64(i.o[1], l) : w.get32(i.o[1], l);
    u64 d = to_space ? (window ? a & ((1ull << SPACE_SHIFT) - 1) : a) : (window ? a | window << SPACE_SHIFT : a);
    if (i.x[1])
      w.at<u64>(i.o[0])[l] = d;
    else
      w.at<u32>(i.o[0])[l] = static_cast<u32>(d);
  });
  return NEXT;
}
#define CVTA(name, window)                                                                                      \
  table.push_back(                                                                                              \
      {"cvta." name, [](Warp& w, const Instruction& i, u32 mask) { return cvta(w, i, mask, window, false); }}), \
      table.push_back(                                                                                          \
          {"cvta.to." name, [](Warp& w, const Instruction& i, u32 mask) { return cvta(w, i, mask, window, true); }})

// cp.async: x is bytes, displacements of both addresses; a register says how many of them are read, or is -1.
Step copy_async(Warp& w, const Instruction& i, u32 mask) {
  u32 bytes = static_cast<u32>(i.x[0]);
  lanes(mask, [&](int l) {
    u32 to = w.get32(i.o[0], l) + static_cast<u32>(i.x[1]);
    u64 from = w.get64(i.o[1], l) + i.x[2];
    u32 there = i.o[2] >= 0 ? w.get32(i.o[2], l) : bytes;
    if (there > bytes) fault("cp.async of %u bytes is to read %u", bytes, there);
    if (to % bytes || (there && from % bytes))
      fault("cp.async of %u bytes from 0x%llx to 0x%x", bytes, static_cast<unsigned long long>(from), to);
    Block* block = w.block;
    Machine* m = w.machine;
    if (there) global(*m, from, there);
    u32 offset = offset_of(own(w, SHARED, to));
    check_shared(block->shared, offset, bytes);
    memset(block->shared.state.data() + offset, Shared::IN_FLIGHT, bytes);
    Copy copy{[=] {
                u8 data[16] = {};
                if (there) memcpy(data, global(*m, from, there), there);
                memset(block->shared.state.data() + offset, Shared::UNWRITTEN, bytes);
                write_shared(*block, to, bytes, data);
              },
              {}};
    if (w.copies[l].empty()) w.copies[l].emplace_back();
    if (m->early()) copy.read(), copy.read = {};
    w.copies[l].back().push_back(std::move(copy));
  });
  return NEXT;
}

void land_copies(Warp& w, int lane, size_t keep, bool uncommitted) {
  auto& groups = w.copies[lane];
  size_t open = groups.empty() ? 0 : 1, done = groups.size() - open > keep ? groups.size() - open - keep : 0;
  for (size_t g = 0; g < groups.size(); ++g)
    if (g < done || uncommitted)
      for (Copy& copy : groups[g])
        if (copy.read) copy.read(), copy.read = {};
  for (size_t g = 0; g < done; ++g) groups.pop_front();
  if (uncommitted) groups.clear();
}

}  // namespace

void add_memory(Table& table) {
  table.push_back({"ld", run_load});
  table.push_back({"st", run_store});
  table.push_back({"st.async", store_async});
  ATOMIC("add.u32", u32, a + b), ATOMIC("add.s32", u32, a + b), ATOMIC("add.u64", u64, a + b);
  ATOMIC("add.f32", float, a + b), ATOMIC("add.f64", double, a + b), ATOMIC("exch.b32", u32, b);
  ATOMIC("exch.b64", u64, b), ATOMIC("cas.b32", u32, a == b ? c : a), ATOMIC("cas.b64", u64, a == b ? c : a);
  ATOMIC("min.s32", i32, std::min(a, b)), ATOMIC("max.s32", i32, std::max(a, b)),
      ATOMIC("min.u32", u32, std::min(a, b));
  ATOMIC("max.u32", u32, std::max(a, b)), ATOMIC("or.b32", u32, a | b), ATOMIC("and.b32", u32, a & b);
  ATOMIC("xor.b32", u32, a ^ b), ATOMIC("inc.u32", u32, a >= b ? 0 : a + 1);
  CVTA("global", 0), CVTA("shared", SHARED_WINDOW), CVTA("local", LOCAL_WINDOW), CVTA("param", PARAM_WINDOW);
  table.push_back({"cp.async", copy_async});
  table.push_back({"cp.async.commit_group", [](Warp& w, const Instruction&, u32 mask) -> Step {
                     lanes(mask, [&](int l) {
                       if (w.copies[l].empty()) w.copies[l].emplace_back();
                       w.copies[l].emplace_back();
                     });
                     return NEXT;
                   }});
  table.push_back({"cp.async.wait_group", [](Warp& w, const Instruction& i, u32 mask) -> Step {
                     lanes(mask, [&](int l) { land_copies(w, l, static_cast<size_t>(i.x[0]), false); });
                     return NEXT;
                   }});
  table.push_back({"cp.async.wait_all", [](Warp& w, const Instruction&, u32 mask) -> Step {
                     lanes(mask, [&](int l) { land_copies(w, l, 0, true); });
                     return NEXT;
                   }});
}
