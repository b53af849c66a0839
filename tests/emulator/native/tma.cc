// Bulk copies between global and shared memory, of bytes and by tensor maps: cp.async.bulk and cp.reduce.async.bulk.

#include <cmath>
#include <set>

#include "machine.h"

namespace {

u64 generic(Warp& w, const Instruction& i, int operand, int lane) { return w.get64(i.list[operand], lane); }

const TensorMap& map_at(Machine& m, u64 address) {
  if (address >> SPACE_SHIFT != PARAM_WINDOW)
    fault("a tensor map at 0x%llx, which is no parameter", static_cast<unsigned long long>(address));
  auto found = m.maps.find(static_cast<u32>(address));
  if (found == m.maps.end()) fault("byte %u of the parameters is no tensor map", static_cast<u32>(address));
  return found->second;
}

// Calls f(tensor offset in bytes, or -1 outside of the tensor; offset in shared memory; bytes) for each row of a copy.
// A row is along dimension 0, whole or, where it is cut, in elements.
template <class F>
void walk(const TensorMap& map, const std::vector<i64>& at, const std::vector<i64>& offsets, F f) {
  i64 row = map.box[0], inner = 0;
  auto emit = [&](const i64* place) {  // of a row that begins at this place
    bool outside = false;
    i64 offset = 0;
    for (int d = 1; d < map.rank; ++d) {
      outside |= place[d] < 0 || place[d] >= map.dims[d];
      offset += place[d] * map.strides[d];
    }
    if (!outside && place[0] >= 0 && place[0] + row <= map.dims[0]) {
      f(offset + place[0] * map.element_bytes, inner, row * map.element_bytes);
    } else {
      for (i64 e = 0; e < row; ++e) {
        bool there = !outside && place[0] + e >= 0 && place[0] + e < map.dims[0];
        f(there ? offset + (place[0] + e) * map.element_bytes : -1, inner + e * map.element_bytes, map.element_bytes);
      }
    }
    inner += row * map.element_bytes;
  };
  if (map.im2col) {
    std::vector<i64> pixel(at);
    for (i64 p = 0; p < map.box[1]; ++p) {
      i64 place[5];
      for (int d = 0; d < map.rank; ++d)
        place[d] = pixel[d] + (d >= 1 && d <= static_cast<int>(offsets.size()) ? offsets[d - 1] : 0);
      emit(place);
      int d = 1;
      for (; d < map.rank - 1; ++d) {  // to the next pixel of the bounding box
        pixel[d] += map.steps[d];
        if (pixel[d] <= map.dims[d] - 1 + map.upper[d - 1]) break;
        pixel[d] = map.lower[d - 1];
      }
      if (d == map.rank - 1) ++pixel[d];
    }
    return;
  }
  i64 sizes[5] = {1, 1, 1, 1, 1}, index[5] = {};
  for (int d = 1; d < map.rank; ++d) sizes[d] = (map.box[d] + map.steps[d] - 1) / map.steps[d];
  for (bool more = true; more;) {
    i64 place[5] = {at[0]};
    for (int d = 1; d < map.rank; ++d) place[d] = at[d] + index[d] * map.steps[d];
    emit(place);
    more = false;
    for (int d = 1; d < map.rank && !more; ++d) {
      if (++index[d] < sizes[d])
        more = true;
      else
        index[d] = 0;
    }
  }
}

u32 swizzled(const TensorMap& map, u32 address) {
  u32 mask = map.swizzle ? static_cast<u32>(map.swizzle) / 16 - 1 : 0;
  return address ^ (address >> 7 & mask) << 4;
}

void check_map(const TensorMap& map, int rank, u32 address) {
  if (map.rank != rank) fault("a copy of rank %d by a tensor map of rank %lld", rank, static_cast<long long>(map.rank));
  if (map.interleave) fault("interleaved tensor maps are not modelled");
  if (address % 128) fault("a tensor's copy at 0x%x of shared memory, no multiple of 128", address);
}

// The bytes of what a copy moves, in pieces that no swizzle divides: 16 bytes are the smallest it moves.
template <class F>
void pieces(i64 inner, i64 bytes, F f) {
  while (bytes > 0) {
    i64 n = std::min(bytes, 16 - inner % 16);
    f(inner, n);
    inner += n, bytes -= n;
  }
}

void land(Machine& m, Block& b, const TensorMap& map, const std::vector<i64>& at, const std::vector<i64>& offsets,
          u32 to) {
  walk(map, at, offsets, [&](i64 from, i64 inner, i64 bytes) {
    const u8* data = from < 0 ? nullptr : global(m, static_cast<u64>(map.address + from), static_cast<u64>(bytes));
    i64 start = inner;
    pieces(inner, bytes, [&](i64 place, i64 n) {
      u8 piece[16] = {};
      if (data)
        memcpy(piece, data + (place - start), static_cast<size_t>(n));
      else if (map.fill_nan)
        memset(piece, 0xff, static_cast<size_t>(n));
      if (map.element == 11 || map.element == 12)
        for (int e = 0; e + 4 <= n; e += 4) {  // tfloat32
          u32 x;
          memcpy(&x, piece + e, 4);
          x = (x + 0x1000) & ~0x1fffu;
          memcpy(piece + e, &x, 4);
        }
      write_shared(b, swizzled(map, to + static_cast<u32>(place)), static_cast<u32>(n), piece, true);
    });
  });
}

i64 bytes_of(const TensorMap& map) {
  i64 bytes = map.box[0] * map.element_bytes;
  if (map.im2col) return bytes * map.box[1];
  for (int d = 1; d < map.rank; ++d) bytes *= (map.box[d] + map.steps[d] - 1) / map.steps[d];
  return bytes;
}

// The blocks that a copy goes to, and where: its own address, or, multicast, the same one in each block of a mask.
std::vector<std::pair<Block*, u32>> receivers(Block& own, u32 to, i64 mask) {
  std::vector<std::pair<Block*, u32>> found;
  if (mask < 0) return {{&block_of(own, to), to}};
  for (u32 rank = 0; rank < 16; ++rank)
    if (mask >> rank & 1) {
      u32 address = (to & ((1u << RANK_SHIFT) - 1)) | rank << RANK_SHIFT;
      found.emplace_back(&block_of(own, address), address);
    }
  return found;
}

void fly(Warp& w, u32 to, u32 barrier, i64 mask, i64 bytes, std::function<void(Block&, u32)> copy) {
  Machine& m = *w.machine;
  for (auto [block, address] : receivers(*w.block, to, mask)) {
    u32 rank = address & ~((1u << RANK_SHIFT) - 1),
        theirs = mask < 0 ? barrier : (barrier & ((1u << RANK_SHIFT) - 1)) | rank;
    Shared& s = block->shared;
    u32 offset = offset_of(address);
    check_shared(s, offset, static_cast<u32>(bytes));
    if (block->exited == static_cast<int>(block->warps.size()))
      fault("copies to block %u, which has exited", block->rank);
    for (u32 i = offset; i < offset + bytes; ++i) {
      if (s.state[i] == Shared::IN_FLIGHT)
        fault("copies to byte %u of shared memory, which another copy is about to write", i);
      s.state[i] = Shared::IN_FLIGHT;
    }
    memset(s.data.data() + offset, 0xff, static_cast<size_t>(bytes));
    Block *b = block, *own = w.block;
    u32 to_address = address;
    m.flying.push_back({b, [=, &m] {
                          copy(*b, to_address);
                          Mbarrier& found = mbarrier(*own, theirs);
                          found.bytes -= static_cast<int>(bytes);
                          complete(m, found);
                          ++m.changes;
                        }});
  }
}

// destination, map, coordinates, barrier, offsets, mask: x[0] rank, x[1] offsets, x[2] whether there is a mask.
Step load_tensor(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) {
    int rank = static_cast<int>(i.x[0]);
    const TensorMap& map = map_at(*w.machine, generic(w, i, 1, l));
    u32 to = w.get32(i.list[0], l), barrier = w.get32(i.list[2 + rank], l);
    check_map(map, rank, to);
    if ((i.x[1] > 0) != (map.im2col != 0)) fault("a copy whose tensor map has another mode: im2col, or a box");
    std::vector<i64> at, offsets;
    for (int d = 0; d < rank; ++d) at.push_back(static_cast<i32>(w.get32(i.list[2 + d], l)));
    for (int d = 0; d < i.x[1]; ++d) offsets.push_back(w.get32(i.list[3 + rank + d], l) & 0xffff);
    i64 receivers = i.x[2] ? static_cast<i64>(w.get32(i.list[3 + rank + i.x[1]], l) & 0xffff) : -1;
    Machine& m = *w.machine;
    fly(w, to, barrier, receivers, bytes_of(map),
        [&m, &map, at, offsets](Block& b, u32 address) { land(m, b, map, at, offsets, address); });
  });
  return NEXT;
}

// destination, source, bytes, barrier, mask: x[2] whether there is one.
Step load_bytes(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) {
    u64 from = generic(w, i, 1, l);
    u32 to = w.get32(i.list[0], l), bytes = w.get32(i.list[2], l);
    if (from % 16 || to % 16 || bytes % 16)
      fault("a bulk copy of %u bytes to 0x%x: all are to be multiples of 16", bytes, to);
    Machine& m = *w.machine;
    global(m, from, bytes);
    fly(w, to, w.get32(i.list[3], l), i.x[2] ? static_cast<i64>(w.get32(i.list[4], l) & 0xffff) : -1, bytes,
        [&m, from, bytes](Block& b, u32 address) { write_shared(b, address, bytes, global(m, from, bytes), true); });
  });
  return NEXT;
}

void store(Warp& w, int lane, std::function<std::function<void()>()> read) {
  auto result = std::make_shared<std::function<void()>>();
  Copy copy{[=] { *result = read(); }, [=] { (*result)(); }};
  if (w.bulk[lane].empty()) w.bulk[lane].emplace_back();
  if (w.machine->early()) {
    copy.read(), copy.read = {};
    if (w.machine->early()) copy.write(), copy.write = {};
  }
  w.bulk[lane].back().push_back(std::move(copy));
}

template <class T>
void add_to(u8* to, const u8* from, i64 bytes) {
  for (i64 e = 0; e < bytes; e += sizeof(T)) {
    T x, y;
    memcpy(&x, to + e, sizeof x), memcpy(&y, from + e, sizeof y);
    x = static_cast<T>(x + y);
    memcpy(to + e, &x, sizeof x);
  }
}
void add_elements(i64 element, u8* to, const u8* from, i64 bytes) {
  switch (element) {  // CUtensorMapDataType
    case 2:
    case 3:
      return add_to<u32>(to, from, bytes);
    case 4:
    case 5:
      return add_to<u64>(to, from, bytes);
    case 7:
      return add_to<float>(to, from, bytes);
    case 8:
      return add_to<double>(to, from, bytes);
    default:
      fault("cp.reduce of this type is not modelled");
  }
}

// map, coordinates, source: x[0] rank, x[3] whether it adds.
Step store_tensor(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) {
    int rank = static_cast<int>(i.x[0]);
    const TensorMap& map = map_at(*w.machine, generic(w, i, 0, l));
    u32 from = w.get32(i.list[1 + rank], l);
    check_map(map, rank, from);
    std::vector<i64> at;
    for (int d = 0; d < rank; ++d) at.push_back(static_cast<i32>(w.get32(i.list[1 + d], l)));
    Block* b = w.block;
    Machine* m = w.machine;
    bool adds = i.x[3];
    store(w, l, [=, &map]() -> std::function<void()> {
      auto data = std::make_shared<std::vector<u8>>(static_cast<size_t>(bytes_of(map)));
      walk(map, at, {}, [&](i64 to, i64 inner, i64 bytes) {
        if (to < 0) return;
        pieces(inner, bytes, [&](i64 place, i64 n) {
          read_shared(*b, swizzled(map, from + static_cast<u32>(place)), static_cast<u32>(n), data->data() + place,
                      true);
        });
      });
      return [=, &map] {
        walk(map, at, {}, [&](i64 to, i64 inner, i64 bytes) {
          if (to < 0) return;
          u8* there = global(*m, static_cast<u64>(map.address + to), static_cast<u64>(bytes));
          if (adds)
            add_elements(map.element, there, data->data() + inner, bytes);
          else
            memcpy(there, data->data() + inner, static_cast<size_t>(bytes));
        });
      };
    });
  });
  return NEXT;
}

// destination, source, bytes.
Step store_bytes(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) {
    u64 to = generic(w, i, 0, l);
    u32 from = w.get32(i.list[1], l), bytes = w.get32(i.list[2], l);
    if (from % 16 || to % 16 || bytes % 16)
      fault("a bulk copy of %u bytes from 0x%x: all are to be multiples of 16", bytes, from);
    Machine* m = w.machine;
    Block* b = w.block;
    global(*m, to, bytes);
    i64 adds = i.x[3] ? i.x[3] : 0;
    store(w, l, [=]() -> std::function<void()> {
      auto data = std::make_shared<std::vector<u8>>(bytes);
      read_shared(*b, from, bytes, data->data(), true);
      return [=] {
        if (adds)
          add_elements(adds - 1, global(*m, to, bytes), data->data(), bytes);
        else
          memcpy(global(*m, to, bytes), data->data(), bytes);
      };
    });
  });
  return NEXT;
}

}  // namespace

// Of a thread's groups of bulk stores all but the newest `keep` have read shared memory, or have been written too.
void finish_bulk(Warp& w, int lane, size_t keep, bool written) {
  auto& groups = w.bulk[lane];
  size_t open = groups.empty() ? 0 : 1;
  size_t done = groups.size() - open > keep ? groups.size() - open - keep : 0;
  for (size_t g = 0; g < done; ++g)
    for (Copy& copy : groups[g]) {
      if (copy.read) copy.read(), copy.read = {};
      if (written && copy.write) copy.write(), copy.write = {};
    }
  if (written)
    for (size_t g = 0; g < done; ++g) groups.pop_front();
}

void add_tma(Table& table) {
  table.push_back({"tma.load", load_tensor});
  table.push_back({"tma.store", store_tensor});
  table.push_back({"bulk.load", load_bytes});
  table.push_back({"bulk.store", store_bytes});
  table.push_back({"cp.async.bulk.commit_group", [](Warp& w, const Instruction&, u32 mask) -> Step {
                     lanes(mask, [&](int l) {
                       if (w.bulk[l].empty()) w.bulk[l].emplace_back();
                       w.bulk[l].emplace_back();
                     });
                     return NEXT;
                   }});
  table.push_back({"cp.async.bulk.wait_group", [](Warp& w, const Instruction& i, u32 mask) -> Step {
                     lanes(mask, [&](int l) { finish_bulk(w, l, static_cast<size_t>(i.x[0]), i.x[1] == 0); });
                     return NEXT;
                   }});
}
