// Which threads run, and when what is asynchronous happens: by random numbers of a seed.

#include "machine.h"

void fault(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Fault{text};
}

int Cluster::live_warps() const {
  int live = 0;
  for (auto& b : blocks) live += static_cast<int>(b->warps.size()) - b->exited;
  return live;
}

// In the order of ptx.py: SPECIAL.
void set_special(Warp& w) {
  Machine& m = *w.machine;
  Block& b = *w.block;
  for (u32 l = 0; l < LANES; ++l) {
    u32 thread = static_cast<u32>(w.index) * LANES + l, rank = b.rank;
    u32 values[] = {
        thread % m.block[0],
        thread / m.block[0] % m.block[1],
        thread / m.block[0] / m.block[1],
        m.block[0],
        m.block[1],
        m.block[2],
        b.id[0],
        b.id[1],
        b.id[2],
        m.grid[0],
        m.grid[1],
        m.grid[2],
        l,
        static_cast<u32>(w.index),
        rank,
        m.cluster[0] * m.cluster[1] * m.cluster[2],
        b.id[0] % m.cluster[0],
        b.id[1] % m.cluster[1],
        b.id[2] % m.cluster[2],
        m.cluster[0],
        m.cluster[1],
        m.cluster[2],
        b.id[0] / m.cluster[0],
        b.id[1] / m.cluster[1],
        b.id[2] / m.cluster[2],
        m.grid[0] / m.cluster[0],
        m.grid[1] / m.cluster[1],
        m.grid[2] / m.cluster[2],
        1u << l,
        (1u << l) - 1,
        (2u << l) - 1,
        ~((1u << l) - 1),
        ~((2u << l) - 1),
        static_cast<u32>(m.shared_bytes),
        0,
        0,
        SHARED_BASE | rank << RANK_SHIFT,
    };
    for (size_t s = 0; s < std::size(values); ++s) w.at<u32>(static_cast<int>(s) * 4 * LANES)[l] = values[s];
  }
}

bool Warp::runnable() const { return (live & ~parked) || (live && seen != machine->changes); }

namespace {

void exit_lanes(Warp& w, u32 before) {
  lanes(before & ~w.live, [&](int l) {
    for (auto& group : w.bulk[l])
      for (Copy& copy : group) {
        if (copy.read) fault("exits while its bulk stores may still read shared memory");
        if (copy.write) w.machine->stores.push_back(copy.write);
      }
    for (auto& group : w.copies[l])
      for (Copy& copy : group)
        if (copy.read) fault("exits while its asynchronous copies are in flight");
  });
  if (w.live) return;
  if (!w.wgmmas.empty()) fault("exits while wgmma is running");
  ++w.block->exited;
  ++w.machine->changes;
}

}  // namespace

// Runs threads that are at one place until they wait, part, meet others, or have had their turn.
void Warp::run_slice(int budget) {
  if (seen != machine->changes) parked = 0;
  seen = machine->changes;
  u32 ready = live & ~parked;
  if (!ready) return;
  int here = std::numeric_limits<int>::max();
  if (machine->random() % 8) {
    lanes(ready, [&](int l) { here = std::min(here, pc[l]); });
  } else {
    int skip = static_cast<int>(machine->random() % std::popcount(ready));
    lanes(ready, [&](int l) {
      if (skip-- == 0) here = pc[l];
    });
  }
  u32 mask = 0;
  int next = std::numeric_limits<int>::max();  // where others are
  lanes(live, [&](int l) {
    if (pc[l] == here)
      mask |= 1u << l;
    else if (pc[l] > here)
      next = std::min(next, pc[l]);
  });
  bool alone = mask == live;
  int at = here;
  const Instruction* code = machine->code.data();
  auto put = [&] { lanes(mask & live, [&](int l) { pc[l] = at; }); };
  try {
    for (; budget > 0; --budget) {
      const Instruction& i = code[at];
      u32 m = mask;
      if (i.guard >= 0) {
        const u32* p = reinterpret_cast<const u32*>(file.data() + i.guard);
        lanes(mask, [&](int l) {
          if ((p[l] != 0) == i.negated) m &= ~(1u << l);
        });
      }
      machine->executed += LANES;
      if (!m) {
        ++at;
      } else {
        u32 before = live;
        Step step = i.run(*this, i, m);
        if (step == NEXT) {
          ++at;
        } else if (step == PARK) {
          put();
          parked |= mask;
          return;
        } else if (live != before) {  // some have exited
          at = at + 1;
          put();
          exit_lanes(*this, before);
          parked = 0;
          return;
        } else if (m == mask && alone) {
          at = pc[std::countr_zero(m)];
          bool same = true;
          lanes(m, [&](int l) { same &= pc[l] == at; });
          if (!same) return;
        } else {
          int target = pc[std::countr_zero(m)];
          at = at + 1;
          lanes(mask & ~m, [&](int l) { pc[l] = at; });
          (void)target;
          parked = 0;
          return;
        }
      }
      if (at >= next) break;
    }
  } catch (Fault& found) {
    const Instruction& i = code[at];
    int lane = std::countr_zero(mask);
    found.where = ", thread " + std::to_string(lane) + " at @" + std::to_string(at) + ", operands";
    for (int j = 0; j < std::min(i.count, 8); ++j) {
      char value[24];
      snprintf(value, sizeof value, " 0x%x", i.list[j] < 0 || i.list[j] % 4 ? 0 : get32(i.list[j], lane));
      found.where += value;
    }
    throw;
  }
  put();
  if (!alone) parked &= ~mask, parked = 0;
}

void Machine::start_cluster(int index) {
  u32 counts[3] = {grid[0] / cluster[0], grid[1] / cluster[1], grid[2] / cluster[2]};
  u32 at[3] = {index % counts[0], index / counts[0] % counts[1], index / counts[0] / counts[1]};
  auto made = std::make_unique<Cluster>();
  u32 size = cluster[0] * cluster[1] * cluster[2];
  for (u32 rank = 0; rank < size; ++rank) {
    auto b = std::make_unique<Block>();
    b->machine = this, b->cluster = made.get(), b->rank = rank;
    u32 within[3] = {rank % cluster[0], rank / cluster[0] % cluster[1], rank / cluster[0] / cluster[1]};
    for (int d = 0; d < 3; ++d) b->id[d] = at[d] * cluster[d] + within[d];
    b->shared.data.assign(shared_bytes, 0xff);
    b->shared.state.assign(shared_bytes, Shared::UNWRITTEN);
    b->shared.fenced.assign(shared_bytes / 4 + 1, 0);
    int threads = static_cast<int>(block[0] * block[1] * block[2]), count = (threads + LANES - 1) / LANES;
    b->warps = std::vector<Warp>(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      Warp& w = b->warps[i];
      w.machine = this, w.block = b.get(), w.index = i;
      w.file.resize(register_bytes);
      memcpy(w.file.data(), constants.data(), constants.size());
      set_special(w);
      std::fill_n(w.pc, LANES, 0);
      int rest = threads - i * LANES;
      w.live = rest >= LANES ? ALL : (1u << rest) - 1;
      for (auto& memory : w.local) memory.assign(local_bytes, 0xff);
    }
    made->blocks.push_back(std::move(b));
  }
  clusters.push_back(std::move(made));
}

void Machine::run() {
  int total = static_cast<int>(grid[0] / cluster[0] * (grid[1] / cluster[1]) * (grid[2] / cluster[2]));
  int next = 0, resident = 1 + static_cast<int>(random() % 8);  // clusters that run at one time
  std::vector<Warp*> warps;
  auto gather = [&] {
    warps.clear();
    for (auto& c : clusters)
      for (auto& b : c->blocks)
        for (Warp& w : b->warps)
          if (w.live) warps.push_back(&w);
  };
  auto land = [&] {
    size_t at = random() % flying.size();
    Pending one = std::move(flying[at]);
    flying.erase(flying.begin() + static_cast<i64>(at));
    one.land();
  };
  u64 at_changes = 0;
  size_t turn = 0;
  while (true) {
    if (at_changes != changes) {
      at_changes = changes;
      for (size_t c = 0; c < clusters.size(); ++c) {
        if (clusters[c]->live_warps()) continue;
        for (auto& b : clusters[c]->blocks) {
          for (auto& one : flying)
            if (one.block == b.get())
              fault("block (%u, %u, %u) exited while copies to its shared memory were in flight", b->id[0], b->id[1],
                    b->id[2]);
          for (auto& [offset, barrier] : b->shared.barriers)
            if (barrier.bytes) fault("the mbarrier at byte %u still awaits %d bytes at the end", offset, barrier.bytes);
        }
        clusters.erase(clusters.begin() + static_cast<i64>(c--));
      }
      while (next < total && static_cast<int>(clusters.size()) < resident) start_cluster(next++);
      gather();
      if (clusters.empty()) break;
    }
    if (executed > limit)
      fault("after %llu instructions of threads it still runs:\n%s", static_cast<unsigned long long>(executed),
            where().c_str());
    if (!flying.empty() && early()) land();
    if (!stores.empty() && early()) stores.back()(), stores.pop_back();
    turn = random() % warps.size();
    size_t tried = 0;
    for (; tried < warps.size() && !warps[turn]->runnable(); ++tried) turn = (turn + 1) % warps.size();
    if (tried < warps.size()) {
      try {
        warps[turn]->run_slice(1 + static_cast<int>(random() % 400));
      } catch (Fault& found) {
        Warp& w = *warps[turn];
        char place[128];
        snprintf(place, sizeof place, "block (%u, %u, %u), warp %d", w.block->id[0], w.block->id[1], w.block->id[2],
                 w.index);
        throw Fault{found.text + "\n  in " + place + found.where};
      }
    } else if (!flying.empty()) {
      land();
    } else {
      fault("deadlock:\n%s", where().c_str());
    }
  }
  for (auto& one : stores) one();
  stores.clear();
}

// Where each warp's threads are, for a person to read: «@n» is an instruction's number.
std::string Machine::where() const {
  std::string text;
  for (auto& c : clusters)
    for (auto& b : c->blocks)
      for (const Warp& w : b->warps) {
        std::map<int, u32> places;
        lanes(w.live, [&](int l) { places[w.pc[l]] |= 1u << l; });
        for (auto [pc, mask] : places) {
          char line[160];
          snprintf(line, sizeof line, "  block (%u, %u, %u), warp %d, threads 0x%08x at @%d\n", b->id[0], b->id[1],
                   b->id[2], w.index, mask, pc);
          text += line;
        }
      }
  for (auto& c : clusters)
    for (auto& b : c->blocks)
      for (auto& [offset, barrier] : b->shared.barriers) {
        char line[200];
        snprintf(line, sizeof line,
                 "  block (%u, %u, %u), mbarrier at byte %u: phase %d, awaits %d of %d arrivals and %d bytes\n",
                 b->id[0], b->id[1], b->id[2], offset, barrier.phase, barrier.pending, barrier.expected, barrier.bytes);
        text += line;
      }
  return text;
}
