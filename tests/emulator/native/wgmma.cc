// wgmma, for each warp its 16 of the 64 rows. Nothing is read or added up before a random time up to the wait for its
// group; until then its registers hold poison.

#include "machine.h"

namespace {

enum Kind { F16, BF16, TF32, E4M3, E5M2, S8, U8 };
constexpr int BITS_OF[] = {16, 16, 32, 8, 8, 8, 8};
constexpr u32 POISON = 0x7fffdead;  // NaN, of float16 too

float value(Kind kind, u32 x) {
  switch (kind) {
    case F16:
      return of_half(static_cast<u16>(x));
    case BF16:
      return of_bfloat(static_cast<u16>(x));
    case TF32:
      return to_tf32(std::bit_cast<float>(x));
    case E4M3:
      return of_e4m3(static_cast<u8>(x));
    case E5M2:
      return of_e5m2(static_cast<u8>(x));
    case S8:
      return static_cast<i8>(x);
    default:
      return static_cast<u8>(x);
  }
}

// A matrix in shared memory, as its descriptor says: where the element (row, k) is. Offsets and swizzles are those of
// the canonical layouts: K-major, groups of 8 rows `stride` bytes apart; MN-major, groups of 8 of k `stride` bytes
// apart, and spans of the swizzle `leading` bytes apart. Without a swizzle the spans are 16 bytes, and both offsets
// change places.
struct Descriptor {
  u32 start, leading, stride, span, mask;
  bool k_major;

  Descriptor(u64 bits, bool k_major, u32 rank) : k_major(k_major) {
    start = static_cast<u32>(bits & 0x3fff) << 4;
    leading = static_cast<u32>(bits >> 16 & 0x3fff) << 4;
    stride = static_cast<u32>(bits >> 32 & 0x3fff) << 4;
    int mode = static_cast<int>(bits >> 62);
    span = mode == 0 ? 16 : mode == 1 ? 128 : mode == 2 ? 64 : 32;
    mask = span / 16 - 1;
    if (bits >> 49 & 7) fault("a descriptor with a base offset is not modelled");
    if (bits >> 14 & 3 || bits >> 30 & 3 || bits >> 46 & 7 || bits >> 52 & 0x3ff)
      fault("the descriptor 0x%016llx has bits that are none of its fields", static_cast<unsigned long long>(bits));
    start |= rank << RANK_SHIFT;
  }

  u32 at(int row, int k, int bytes) const {
    u32 r = static_cast<u32>(row), b = static_cast<u32>(k * bytes), address;
    if (k_major) {
      address = r % 8 * span + r / 8 * stride + (span == 16 ? b / 16 * leading + b % 16 : b);
    } else {
      u32 each = span / bytes, p = static_cast<u32>(k);
      address = r % each * bytes + r / each * (span == 16 ? stride : leading) + p % 8 * span +
                p / 8 * (span == 16 ? leading : stride);
    }
    address += start;
    return address ^ (address >> 7 & mask) << 4;
  }
};

void read_tile(Block& b, const Descriptor& from, Kind kind, int first, int rows, int k, float* to) {
  int bytes = BITS_OF[kind] / 8;
  for (int r = 0; r < rows; ++r)
    for (int p = 0; p < k;) {  // along k, 16 bytes are beside each other
      int run = from.k_major ? 16 / bytes : 1;
      u8 data[16];
      read_shared(b, from.at(first + r, p, bytes), static_cast<u32>(run * bytes), data, true);
      for (int e = 0; e < run; ++e, ++p) {
        u32 x = 0;
        memcpy(&x, data + e * bytes, bytes);
        to[r * k + p] = value(kind, x);
      }
    }
}

// Adds a 16 x k by k x n product to sums, which lie as registers do.
template <class T>
void multiply(const float* a, const float* b, int n, int k, u32* sums, bool add, bool halves, bool negated) {
  std::vector<T> right(static_cast<size_t>(n) * k), row(n);
  for (int j = 0; j < n; ++j)
    for (int p = 0; p < k; ++p) right[p * n + j] = static_cast<T>(b[j * k + p]);
  for (int m = 0; m < 16; ++m) {
    auto place = [&](int j) -> u32& {  // of a register's values, column j of row m
      int lane = m % 8 * 4 + j % 8 / 2, r = j / 8 * 4 + m / 8 * 2 + j % 2;
      return sums[(halves ? r / 2 : r) * LANES + lane];
    };
    for (int j = 0; j < n; ++j)
      row[j] = !add     ? T{}
               : halves ? static_cast<T>(of_half(static_cast<u16>(place(j) >> 16 * (j % 2))))
                        : std::bit_cast<T>(place(j));
    for (int p = 0; p < k; ++p) {
      T x = static_cast<T>(a[m * k + p]);
      if (negated) x = -x;
      for (int j = 0; j < n; ++j) {
        if constexpr (std::is_same_v<T, i32>)
          row[j] = static_cast<i32>(static_cast<u32>(row[j]) + static_cast<u32>(x * right[p * n + j]));
        else
          row[j] += x * right[p * n + j];
      }
    }
    for (int j = 0; j < n; ++j) {
      if (halves) {
        u32& x = place(j);
        u32 bits = to_half(static_cast<double>(row[j]));
        x = j % 2 ? (x & 0xffff) | bits << 16 : (x & 0xffff0000) | bits;
      } else {
        place(j) = std::bit_cast<u32>(row[j]);
      }
    }
  }
}

// Runs what the warp has issued, up to a number; its siblings that have run the same have multiplied the same.
void run_until(Warp& w, i64 number) {
  for (Wgmma& one : w.wgmmas) {
    if (one.number > number) return;
    if (!one.run) continue;
    for (Warp* other = &w.block->warps[w.index / 4 * 4]; other < &w.block->warps[w.index / 4 * 4] + 4; ++other)
      for (Wgmma& theirs : other->wgmmas)
        if (theirs.number == one.number &&
            (theirs.instruction != one.instruction || theirs.a != one.a || theirs.b != one.b))
          fault("the warps of a warpgroup issue different wgmmas");
    one.run();
    one.run = {};
  }
}

// The list: d; a's descriptor or 4 registers; b's descriptor; scale-d. x[0] n, x[1] kinds of a (low byte) and b, x[2]
// is 1 where a is in registers, 2 where sums are float16, 4 where a, 8 where b is MN-major, 16 where a is negated, 32
// b.
Step run_wgmma(Warp& w, const Instruction& i, u32 mask) {
  if (mask != w.live || mask != ALL) return mask == w.live ? fault("threads have exited"), NEXT : PARK;
  int n = static_cast<int>(i.x[0]), flags = static_cast<int>(i.x[2]), count = n / 2 / (flags & 2 ? 2 : 1);
  Kind of_a = static_cast<Kind>(i.x[1] & 255), of_b = static_cast<Kind>(i.x[1] >> 8);
  const int *a = i.list + count, *b = a + (flags & 1 ? 4 : 1);
  bool add = w.get32(b[1], 0) != 0;
  auto [found, fresh] = w.sums.try_emplace(i.list[0]);
  Sums& sums = found->second;
  if (fresh) {
    if (!w.wgmma_fenced) fault("wgmma of registers that other instructions wrote, without wgmma.fence");
    sums.registers.assign(i.list, i.list + count);
    sums.values.resize(static_cast<size_t>(count) * LANES);
    for (int r = 0; r < count; ++r) memcpy(&sums.values[r * LANES], w.at<u32>(i.list[r]), 4 * LANES);
  } else if (static_cast<int>(sums.registers.size()) != count) {
    fault("sums of %d registers are added to as %d, before a wait", static_cast<int>(sums.registers.size()), count);
  }
  for (int r = 0; r < count; ++r) std::fill_n(w.at<u32>(i.list[r]), LANES, POISON);
  sums.last_group = w.wgmma_group;
  int k = 256 / BITS_OF[of_a], warp = w.index % 4;
  u64 bits_a = w.get64(a[0], 0), bits_b = w.get64(b[0], 0);
  u32 rank = w.block->rank;
  auto run = [=, &w, &sums] {
    std::vector<float> left(16 * k), right(static_cast<size_t>(n) * k);
    if (flags & 1) {
      int each = 32 / BITS_OF[of_a];
      for (int l = 0; l < LANES; ++l)
        for (int r = 0; r < 4; ++r)
          for (int e = 0; e < each; ++e)
            left[(l / 4 + r % 2 * 8) * k + (l % 4 + r / 2 * 4) * each + e] =
                value(of_a, w.get32(a[r], l) >> BITS_OF[of_a] % 32 * e);
    } else {
      read_tile(*w.block, Descriptor(bits_a, !(flags & 4), rank), of_a, 16 * warp, 16, k, left.data());
    }
    read_tile(*w.block, Descriptor(bits_b, !(flags & 8), rank), of_b, 0, n, k, right.data());
    bool negated = ((flags & 16) != 0) != ((flags & 32) != 0);
    if (of_a >= S8)
      multiply<i32>(left.data(), right.data(), n, k, sums.values.data(), add, false, false);
    else
      multiply<float>(left.data(), right.data(), n, k, sums.values.data(), add, flags & 2, negated);
  };
  w.wgmmas.push_back({w.wgmma_group, w.wgmma_count++, &i, flags & 1 ? 0 : bits_a, bits_b, run});
  ++w.machine->changes;
  if (w.machine->early()) run_until(w, w.wgmma_count - 1);
  return NEXT;
}

}  // namespace

// Waits until at most so many of the newest groups are left: for all warps of the warpgroup, which multiply as one.
Step finish_wgmma(Warp& w, int left) {
  int last = w.wgmma_group - 1 - left;  // the newest group that is to be done
  i64 number = -1;
  for (Wgmma& one : w.wgmmas)
    if (one.group <= last) number = one.number;
  Warp* first = &w.block->warps[w.index / 4 * 4];
  for (int i = 0; i < 4; ++i)
    if (first[i].wgmma_count <= number) return PARK;
  for (int i = 0; i < 4; ++i) run_until(first[i], number);
  while (!w.wgmmas.empty() && w.wgmmas.front().group <= last) w.wgmmas.pop_front();
  for (auto at = w.sums.begin(); at != w.sums.end();) {
    Sums& sums = at->second;
    if (sums.last_group > last) {
      ++at;
      continue;
    }
    for (size_t r = 0; r < sums.registers.size(); ++r)
      memcpy(w.at<u32>(sums.registers[r]), &sums.values[r * LANES], 4 * LANES);
    at = w.sums.erase(at);
  }
  w.wgmma_fenced = false;
  return NEXT;
}

void add_wgmma(Table& table) {
  table.push_back({"wgmma", run_wgmma});
  table.push_back({"wgmma.commit_group", [](Warp& w, const Instruction&, u32 mask) -> Step {
                     if (mask != w.live) return PARK;
                     ++w.wgmma_group;
                     return NEXT;
                   }});
  table.push_back({"wgmma.fence", [](Warp& w, const Instruction&, u32 mask) -> Step {
                     if (mask != w.live) return PARK;
                     w.wgmma_fenced = true;
                     return NEXT;
                   }});
  table.push_back({"wgmma.wait_group", [](Warp& w, const Instruction& i, u32 mask) -> Step {
                     if (mask != w.live) return PARK;
                     return finish_wgmma(w, static_cast<int>(i.x[0]));
                   }});
}
