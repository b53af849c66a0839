// Instructions that read other threads' registers, and those that decide which instruction is next.

#include "machine.h"

namespace {

#define RUN [](Warp& w, const Instruction& i, u32 mask)->Step

// Threads of a mask wait for each other: returns false where some of those named are elsewhere.
bool together(Warp& w, u32 mask, u32 members) {
  if ((members & w.live) != members) fault("members 0x%08x include threads that have exited", members & ~w.live);
  return (mask & members) == members;
}

// x[0] says which lane a lane reads: 0 idx, 1 up, 2 down, 3 bfly. d | p, a, b, c, members.
Step shuffle(Warp& w, const Instruction& i, u32 mask) {
  u32 first = static_cast<u32>(std::countr_zero(mask)), members = w.get32(i.list[5], first);
  if (!together(w, mask, members)) return PARK;
  u32 old[LANES];
  memcpy(old, w.at<u32>(i.list[2]), sizeof old);
  lanes(mask & members, [&](int l) {
    int b = w.get32(i.list[3], l) & 31, c = w.get32(i.list[4], l), segment = c >> 8 & 31, clamp = c & 31;
    int most = (l & segment) | (clamp & ~segment), least = l & segment;
    int from = i.x[0] == 0 ? least | (b & ~segment) : i.x[0] == 1 ? l - b : i.x[0] == 2 ? l + b : l ^ b;
    bool there = i.x[0] == 1 ? from >= most : from <= most;
    if (!there) from = l;
    if (!(members >> from & 1)) fault("shfl.sync reads lane %d, which is no member of 0x%08x", from, members);
    if (i.list[0] >= 0) w.at<u32>(i.list[0])[l] = old[from];
    if (i.list[1] >= 0) w.at<u32>(i.list[1])[l] = there;
  });
  return NEXT;
}

// d, p, members, and x[0] whether the predicate is negated.
template <class F>
Step vote(Warp& w, const Instruction& i, u32 mask, F f) {
  u32 members = w.get32(i.o[2], std::countr_zero(mask));
  if (!together(w, mask, members)) return PARK;
  u32 ballot = 0;
  lanes(members, [&](int l) { ballot |= static_cast<u32>((w.get32(i.o[1], l) != 0) != (i.x[0] != 0)) << l; });
  u32 d = f(ballot, members);
  lanes(members, [&](int l) { w.at<u32>(i.o[0])[l] = d; });
  return NEXT;
}

template <class T, class F>
Step reduce(Warp& w, const Instruction& i, u32 mask, F f) {
  u32 members = w.get32(i.o[2], std::countr_zero(mask));
  if (!together(w, mask, members)) return PARK;
  bool first = true;
  T all{};
  lanes(members, [&](int l) {
    T x = decode<T>(w.get32(i.o[1], l));
    all = first ? x : f(all, x);
    first = false;
  });
  lanes(members, [&](int l) { w.at<u32>(i.o[0])[l] = encode<T>(all); });
  return NEXT;
}
#define REDUCE(name, T, expression)                                                                                  \
  table.push_back({"redux.sync." name, RUN { return reduce<T>(w, i, mask, [](T a, T b) -> T { return expression; }); \
  }                                                                                                                  \
  })

template <class T>
Step match_any(Warp& w, const Instruction& i, u32 mask) {
  u32 members = w.get32(i.o[2], std::countr_zero(mask));
  if (!together(w, mask, members)) return PARK;
  auto* a = w.at<T>(i.o[1]);
  u32 found[LANES] = {};
  lanes(members,
        [&](int l) { lanes(members, [&](int other) { found[l] |= static_cast<u32>(a[l] == a[other]) << other; }); });
  lanes(members, [&](int l) { w.at<u32>(i.o[0])[l] = found[l]; });
  return NEXT;
}

// Matrices of 8 x 8 elements of 16 bits; the list is registers, then the address, or the reverse. x: transposed,
// displacement.
Step load_matrix(Warp& w, const Instruction& i, u32 mask) {
  if (mask != w.live || mask != ALL) return mask == w.live ? fault("threads have exited"), NEXT : PARK;
  int count = i.count - 1;
  u16 matrix[4][8][8];
  for (int l = 0; l < 8 * count; ++l) {
    u32 address = w.get32(i.list[count], l) + static_cast<u32>(i.x[1]);
    if (address % 16) fault("a row of ldmatrix at 0x%x, no multiple of 16", address);
    read_shared(*w.block, address, 16, matrix[l / 8][l % 8]);
  }
  for (int j = 0; j < count; ++j)
    for (int l = 0; l < LANES; ++l) {
      int g = l / 4, q = l % 4 * 2;
      u32 low = i.x[0] ? matrix[j][q][g] : matrix[j][g][q], high = i.x[0] ? matrix[j][q + 1][g] : matrix[j][g][q + 1];
      w.at<u32>(i.list[j])[l] = low | high << 16;
    }
  return NEXT;
}

Step store_matrix(Warp& w, const Instruction& i, u32 mask) {
  if (mask != w.live || mask != ALL) return mask == w.live ? fault("threads have exited"), NEXT : PARK;
  int count = i.count - 1;
  u16 matrix[4][8][8];
  for (int j = 0; j < count; ++j)
    for (int l = 0; l < LANES; ++l) {
      int g = l / 4, q = l % 4 * 2;
      u32 x = w.get32(i.list[1 + j], l);
      (i.x[0] ? matrix[j][q][g] : matrix[j][g][q]) = static_cast<u16>(x);
      (i.x[0] ? matrix[j][q + 1][g] : matrix[j][g][q + 1]) = static_cast<u16>(x >> 16);
    }
  for (int l = 0; l < 8 * count; ++l) {
    u32 address = w.get32(i.list[0], l) + static_cast<u32>(i.x[1]);
    if (address % 16) fault("a row of stmatrix at 0x%x, no multiple of 16", address);
    write_shared(*w.block, address, 16, matrix[l / 8][l % 8]);
  }
  return NEXT;
}

// One matrix of 8 x 8 elements of 16 bits, transposed.
Step move_matrix(Warp& w, const Instruction& i, u32 mask) {
  if (mask != w.live || mask != ALL) return mask == w.live ? fault("threads have exited"), NEXT : PARK;
  u16 matrix[8][8];
  for (int l = 0; l < LANES; ++l) {
    u32 x = w.get32(i.o[1], l);
    matrix[l % 4 * 2][l / 4] = static_cast<u16>(x), matrix[l % 4 * 2 + 1][l / 4] = static_cast<u16>(x >> 16);
  }
  for (int l = 0; l < LANES; ++l)
    w.at<u32>(i.o[0])[l] = matrix[l / 4][l % 4 * 2] | static_cast<u32>(matrix[l / 4][l % 4 * 2 + 1]) << 16;
  return NEXT;
}

Step branch(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) { w.pc[l] = static_cast<int>(i.x[0]); });
  return JUMP;
}

// A call keeps in a register where to go on.
Step call(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) {
    w.at<u32>(i.o[0])[l] = static_cast<u32>(&i - w.machine->code.data()) + 1;
    w.pc[l] = static_cast<int>(i.x[0]);
  });
  return JUMP;
}
Step come_back(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) { w.pc[l] = static_cast<int>(w.get32(i.o[0], l)); });
  return JUMP;
}

// brx.idx: the list is the index, then places; they are no registers.
Step branch_by_index(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) {
    u32 at = w.get32(i.list[0], l);
    if (at + 1 >= static_cast<u32>(i.count)) fault("brx.idx of %u, which has %d targets", at, i.count - 1);
    w.pc[l] = i.list[1 + at];
  });
  return JUMP;
}

// Registers of x[0] bits, packed in a wider one, or the reverse.
Step pack(Warp& w, const Instruction& i, u32 mask) {
  int bits = static_cast<int>(i.x[0]), count = i.count - 1;
  lanes(mask, [&](int l) {
    u64 x = 0;
    for (int j = 0; j < count; ++j) {
      u64 part = bits == 64 ? w.get64(i.list[1 + j], l) : w.get32(i.list[1 + j], l);
      x |= (bits < 64 ? part & ((1ull << bits) - 1) : part) << bits * j;
    }
    if (bits * count == 64)
      w.at<u64>(i.list[0])[l] = x;
    else
      w.at<u32>(i.list[0])[l] = static_cast<u32>(x);
  });
  return NEXT;
}
Step unpack(Warp& w, const Instruction& i, u32 mask) {
  int bits = static_cast<int>(i.x[0]), count = i.count - 1;
  lanes(mask, [&](int l) {
    u64 x = bits * count == 64 ? w.get64(i.list[count], l) : w.get32(i.list[count], l);
    for (int j = 0; j < count; ++j)
      if (i.list[j] >= 0) w.at<u32>(i.list[j])[l] = static_cast<u32>(x >> bits * j & ((1ull << bits) - 1));
  });
  return NEXT;
}

}  // namespace

void add_warp(Table& table) {
  table.push_back({"shfl.sync", shuffle});
  table.push_back({"vote.sync.all.pred", RUN { return vote(w, i, mask, [](u32 b, u32 m) {
    return b == m; });
}
});
  table.push_back({"vote.sync.any.pred", RUN { return vote(w, i, mask, [](u32 b, u32) {
  return b != 0; });
  }
  });
  table.push_back({"vote.sync.uni.pred", RUN { return vote(w, i, mask, [](u32 b, u32 m) {
  return b == 0 || b == m; });
  }
  });
  table.push_back({"vote.sync.ballot.b32", RUN { return vote(w, i, mask, [](u32 b, u32) {
  return b; });
  }
  });
  REDUCE("add.s32", u32, a + b), REDUCE("add.u32", u32, a + b), REDUCE("or.b32", u32, a | b),
      REDUCE("and.b32", u32, a& b);
  REDUCE("min.s32", i32, std::min(a, b)), REDUCE("max.s32", i32, std::max(a, b)), REDUCE("xor.b32", u32, a ^ b);
  REDUCE("min.u32", u32, std::min(a, b)), REDUCE("max.u32", u32, std::max(a, b));
  table.push_back({"match.any.sync.b32", match_any<u32>});
  table.push_back({"match.any.sync.b64", match_any<u64>});
  table.push_back({"elect.sync", RUN {
                     u32 members = w.get32(i.list[2], std::countr_zero(mask));
                     if (!together(w, mask, members)) return PARK;
                     int leader = std::countr_zero(members);
                     lanes(members, [&](int l) {
  if (i.list[0] >= 0) w.at<u32>(i.list[0])[l] = leader;
  w.at<u32>(i.list[1])[l] = l == leader;
                     });
                     return NEXT;
  }
  });
  table.push_back({"activemask.b32", RUN {
                     lanes(mask, [&](int l) {
  w.at<u32>(i.o[0])[l] = mask; });
                     return NEXT;
  }
  });
  table.push_back({"bar.warp.sync", RUN {
                     return together(w, mask, w.get32(i.o[0], std::countr_zero(mask))) ? NEXT : PARK;
  }
  });
  table.push_back({"ldmatrix", load_matrix});
  table.push_back({"stmatrix", store_matrix});
  table.push_back({"movmatrix", move_matrix});
  table.push_back({"bra", branch});
  table.push_back({"brx.idx", branch_by_index});
  table.push_back({"call", call});
  table.push_back({"return", come_back});
  table.push_back({"ret", RUN {
                     w.live &= ~mask;
                     return JUMP;
  }
  });
  table.push_back({"trap", RUN { fault("trap");
  }
  });
  table.push_back({"pack", pack});
  table.push_back({"unpack", unpack});
  // Which threads see what is ordered, since what one writes all others see at once.
  table.push_back({"nop", RUN { return NEXT;
  }
  });
  table.push_back({"clock", RUN {
                     lanes(mask, [&](int l) {
  if (i.x[0])
    w.at<u64>(i.o[0])[l] = w.machine->executed;
  else
    w.at<u32>(i.o[0])[l] = static_cast<u32>(w.machine->executed);
                     });
                     return NEXT;
  }
  });
  }
