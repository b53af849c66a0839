// Named barriers, barriers of clusters, and mbarriers.

#include "machine.h"

#define RUN [](Warp& w, const Instruction& i, u32 mask)->Step

Mbarrier& mbarrier(Block& from, u32 address) {
  Block& b = block_of(from, address);
  u32 offset = offset_of(address);
  check_shared(b.shared, offset, 8);
  if (offset % 8) fault("an mbarrier at 0x%x, no multiple of 8", address);
  if (&b != &from && b.exited == static_cast<int>(b.warps.size()))
    fault("an mbarrier of block %u, which has exited", b.rank);
  Mbarrier& found = b.shared.barriers[offset];
  if (!found.ready) fault("the mbarrier at byte %u of block %u is not initialised", offset, b.rank);
  return found;
}

void complete(Machine& m, Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  ++m.changes;
}

namespace {

u32 address_of(Warp& w, const Instruction& i, int operand, int lane) {
  // x[4] has 1 where the address is a generic one, of 64 bits.
  return (i.x[4] & 1 ? static_cast<u32>(w.get64(i.list[operand], lane)) : w.get32(i.list[operand], lane)) +
         static_cast<u32>(i.x[3]);
}

void arrive(Warp& w, Mbarrier& barrier, int count) {
  if ((barrier.pending -= count) < 0)
    fault("more threads arrive on an mbarrier than the %d it expects", barrier.expected);
  complete(*w.machine, barrier);
}

void expect(Mbarrier& barrier, u32 bytes) {
  if ((barrier.bytes += static_cast<int>(bytes)) >= 1 << 20)
    fault("an mbarrier expects %d bytes, over 2^20 - 1", barrier.bytes);
}

// state, address, count (or bytes): x[0] arrivals that are fixed, or 0; x[1] whether the value is bytes; x[2] dropping.
Step mbarrier_arrive(Warp& w, const Instruction& i, u32 mask) {
  lanes(mask, [&](int l) {
    Mbarrier& barrier = mbarrier(*w.block, address_of(w, i, 1, l));
    if (i.list[0] >= 0) w.at<u64>(i.list[0])[l] = static_cast<u64>(barrier.phase);
    u32 value = i.count > 2 ? w.get32(i.list[2], l) : 1;
    if (i.x[1]) expect(barrier, value);
    if (i.x[2]) --barrier.expected;
    arrive(w, barrier, i.x[1] ? 1 : static_cast<int>(value));
  });
  return NEXT;
}

// predicate, address, state or parity: x[0] whether it is parity, x[1] whether it may wait.
Step mbarrier_wait(Warp& w, const Instruction& i, u32 mask) {
  u32 done = 0;
  lanes(mask, [&](int l) {
    Mbarrier& barrier = mbarrier(*w.block, address_of(w, i, 1, l));
    bool over = i.x[0] ? (barrier.phase & 1) != static_cast<int>(w.get32(i.list[2], l) & 1)
                       : barrier.phase != static_cast<int>(w.get64(i.list[2], l));
    done |= static_cast<u32>(over) << l;
  });
  if (!done && i.x[1]) return PARK;
  lanes(mask, [&](int l) { w.at<u32>(i.list[0])[l] = done >> l & 1; });
  return NEXT;
}

// Arrives on a named barrier, once; true where all have.
bool meets(Warp& w, NamedBarrier& barrier, int threads, int live) {
  if (!w.arrived) {
    if (barrier.arrived && barrier.expected != threads)
      fault("a barrier of %d threads, for which others wait with %d", threads, barrier.expected);
    barrier.expected = threads;
    w.arrived = true;
    w.phase = barrier.phase;
    barrier.arrived += LANES;
  }
  if (w.phase == barrier.phase && barrier.arrived >= (threads ? threads : live)) {
    if (threads && barrier.arrived > threads) fault("more than %d threads come to a barrier", threads);
    ++barrier.phase;
    barrier.arrived = 0;
    barrier.result_any = barrier.any, barrier.result_all = barrier.all, barrier.result_count = barrier.count;
    barrier.any = false, barrier.all = true, barrier.count = 0;
    ++w.machine->changes;
  }
  if (w.phase == barrier.phase) return false;
  w.arrived = false;
  return true;
}

NamedBarrier& barrier_of(Warp& w, const Instruction& i, int operand, int& threads) {
  u32 index = w.get32(i.list[operand], std::countr_zero(w.live));
  if (index > 15) fault("barrier %u of 16", index);
  threads = i.count > operand + 1 ? static_cast<int>(w.get32(i.list[operand + 1], std::countr_zero(w.live))) : 0;
  if (threads % LANES) fault("a barrier of %d threads, no multiple of 32", threads);
  return w.block->barriers[index];
}

int live_threads(Block& b) { return (static_cast<int>(b.warps.size()) - b.exited) * LANES; }

Step bar_sync(Warp& w, const Instruction& i, u32 mask) {
  if (mask != w.live) return PARK;
  int threads;
  NamedBarrier& barrier = barrier_of(w, i, 0, threads);
  return meets(w, barrier, threads, live_threads(*w.block)) ? NEXT : PARK;
}

Step bar_arrive(Warp& w, const Instruction& i, u32 mask) {
  if (mask != w.live) return PARK;
  int threads;
  NamedBarrier& barrier = barrier_of(w, i, 0, threads);
  meets(w, barrier, threads, 0);
  w.arrived = false;
  return NEXT;
}

// d, barrier, threads, predicate: x[0] is 0 of or, 1 of and, 2 of popc; x[1] whether there are threads; x[2] whether
// the predicate is negated.
Step bar_reduce(Warp& w, const Instruction& i, u32 mask) {
  if (mask != w.live) return PARK;
  int threads;
  NamedBarrier& barrier = barrier_of(w, i, 1, threads);
  if (!i.x[1]) threads = 0;
  if (!w.arrived)
    lanes(mask, [&](int l) {
      bool x = (w.get32(i.list[i.count - 1], l) != 0) != (i.x[2] != 0);
      barrier.any |= x, barrier.all &= x, barrier.count += x;
    });
  if (!meets(w, barrier, threads, live_threads(*w.block))) return PARK;
  u32 d = i.x[0] == 0 ? barrier.result_any : i.x[0] == 1 ? barrier.result_all : static_cast<u32>(barrier.result_count);
  lanes(mask, [&](int l) { w.at<u32>(i.list[0])[l] = d; });
  return NEXT;
}

Step cluster_arrive(Warp& w, const Instruction&, u32 mask) {
  if (mask != w.live) return PARK;
  if (w.cluster_arrived) fault("arrives twice on the cluster's barrier");
  w.cluster_arrived = true;
  w.cluster_phase = w.block->cluster->phase;
  ++w.block->cluster->arrived;
  ++w.machine->changes;
  return NEXT;
}

Step cluster_wait(Warp& w, const Instruction&, u32 mask) {
  if (mask != w.live) return PARK;
  if (!w.cluster_arrived) fault("waits for the cluster without having arrived");
  Cluster& c = *w.block->cluster;
  if (c.phase == w.cluster_phase) {
    if (c.arrived < c.live_warps()) return PARK;
    ++c.phase;
    c.arrived = 0;
    ++w.machine->changes;
  }
  w.cluster_arrived = false;
  return NEXT;
}

}  // namespace

void add_barriers(Table& table) {
  table.push_back({"bar.sync", bar_sync});
  table.push_back({"bar.arrive", bar_arrive});
  table.push_back({"bar.red", bar_reduce});
  table.push_back({"barrier.cluster.arrive", cluster_arrive});
  table.push_back({"barrier.cluster.wait", cluster_wait});
  table.push_back({"mbarrier.init", RUN {
                     lanes(mask, [&](int l) {
    u32 address = address_of(w, i, 0, l), offset = offset_of(address);
    if (&block_of(*w.block, address) != w.block) fault("initialises an mbarrier of another block");
    check_shared(w.block->shared, offset, 8);
    int count = static_cast<int>(w.get32(i.list[1], l));
    w.block->shared.barriers[offset] = {true, count, count, 0, 0};
                     });
                     return NEXT;
}
});
  table.push_back({"mbarrier.inval", RUN {
                     lanes(mask, [&](int l) {
  mbarrier(*w.block, address_of(w, i, 0, l)).ready = false; });
                     return NEXT;
  }
  });
  table.push_back({"mbarrier.expect_tx", RUN {
                     lanes(mask, [&](int l) {
  expect(mbarrier(*w.block, address_of(w, i, 0, l)), w.get32(i.list[1], l));
                     });
                     return NEXT;
  }
  });
  table.push_back({"mbarrier.arrive", mbarrier_arrive});
  table.push_back({"mbarrier.wait", mbarrier_wait});
  // When all that the thread has copied by cp.async has landed: x[0] whether the barrier expects that (noinc).
  table.push_back({"cp.async.mbarrier.arrive", RUN {
                     lanes(mask, [&](int l) {
  u32 address = address_of(w, i, 0, l);
  Mbarrier& barrier = mbarrier(*w.block, address);
  if (!i.x[0]) ++barrier.pending;
  auto copies = std::make_shared<std::vector<Copy>>();
  for (auto& group : w.copies[l])
    for (Copy& copy : group)
      if (copy.read) copies->push_back(std::move(copy)), copy.read = {};
  Warp* warp = &w;
  w.machine->flying.push_back({w.block, [=] {
                                 for (Copy& copy : *copies) copy.read();
                                 arrive(*warp, mbarrier(*warp->block, address), 1);
                               }});
                     });
                     return NEXT;
  }
  });
  table.push_back({"mapa", RUN {
                     lanes(mask, [&](int l) {
  u32 rank = w.get32(i.o[2], l), at = w.get32(i.o[1], l);
  if (rank >= w.block->cluster->blocks.size()) fault("mapa to block %u of the cluster", rank);
  w.at<u32>(i.o[0])[l] = (at & ((1u << RANK_SHIFT) - 1)) | rank << RANK_SHIFT;
                     });
                     return NEXT;
  }
  });
  table.push_back({"fence.proxy.async", RUN {
                     for (auto& b : w.block->cluster->blocks) ++b->fences;
                     return NEXT;
  }
  });
  }
