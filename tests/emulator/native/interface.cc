// What device.py calls.

#include <cfenv>

#include "machine.h"

namespace {

const Table& table() {
  static const Table* const found = [] {
    auto* t = new Table;
    add_arithmetic(*t), add_conversions(*t), add_memory(*t), add_warp(*t), add_barriers(*t), add_mma(*t), add_wgmma(*t);
    add_tma(*t);
    return t;
  }();
  return *found;
}

}  // namespace

extern "C" {

// The number of an instruction, -1 of one that is unknown.
int emulator_opcode(const char* name) {
  static const auto* const numbers = [] {
    auto* found = new std::unordered_map<std::string, int>;
    for (size_t i = 0; i < table().size(); ++i) found->emplace(table()[i].name, static_cast<int>(i));
    return found;
  }();
  auto at = numbers->find(name);
  return at == numbers->end() ? -1 : at->second;
}

struct Request {
  const i64* code;  // [instructions][ROW]: opcode, guard, negated, begin and count in pool, x
  i64 instructions;
  const int* pool;
  i64 pooled;
  const u8* constants;
  i64 constant_bytes, register_bytes, local_bytes, shared_bytes;
  const i64* shape;  // grid, block, cluster
  const u8* params;
  i64 param_bytes;
  const i64* maps;  // [maps][1 + fields]: place in params, then TensorMap's fields
  i64 map_count;
  u8* const* buffers;
  const i64* buffer_bytes;
  i64 buffer_count;
  i64 seed, eagerness, unwritten, limit;
};

// Runs a launch; returns 0, or 1 and what is wrong in `message`. `executed` is how many instructions of threads ran.
int emulator_run(const Request* r, char* message, i64 message_bytes, i64* executed) {
  constexpr int ROW = 10;
  struct Environment {  // XLA's threads flush denormal numbers, GPUs do not
    std::fenv_t before;
    Environment() { std::fegetenv(&before), std::fesetenv(FE_DFL_ENV); }
    ~Environment() { std::fesetenv(&before); }
  } environment;
  Machine m;
  m.pool.assign(r->pool, r->pool + r->pooled);
  for (i64 n = 0; n < r->instructions; ++n) {
    const i64* row = r->code + n * ROW;
    Instruction i;
    i.run = table()[row[0]].run;
    i.guard = static_cast<int>(row[1]), i.negated = row[2];
    i.list = m.pool.data() + row[3], i.count = static_cast<int>(row[4]);
    for (int j = 0; j < 4; ++j) i.o[j] = j < i.count ? i.list[j] : -1;
    std::copy_n(row + 5, 5, i.x);
    m.code.push_back(i);
  }
  m.constants.assign(r->constants, r->constants + r->constant_bytes);
  m.register_bytes = static_cast<int>(r->register_bytes), m.local_bytes = static_cast<int>(r->local_bytes);
  m.shared_bytes = static_cast<int>(r->shared_bytes);
  for (int d = 0; d < 3; ++d) {
    m.grid[d] = static_cast<u32>(r->shape[d]), m.block[d] = static_cast<u32>(r->shape[3 + d]);
    m.cluster[d] = static_cast<u32>(r->shape[6 + d]);
  }
  m.params.assign(r->params, r->params + r->param_bytes);
  constexpr int FIELDS = sizeof(TensorMap) / sizeof(i64);
  for (i64 n = 0; n < r->map_count; ++n) {
    TensorMap map;
    memcpy(&map, r->maps + n * (1 + FIELDS) + 1, sizeof map);
    m.maps[static_cast<u32>(r->maps[n * (1 + FIELDS)])] = map;
  }
  for (i64 n = 0; n < r->buffer_count; ++n) m.buffers.push_back({r->buffers[n], static_cast<u64>(r->buffer_bytes[n])});
  m.state = static_cast<u64>(r->seed) * 0x9e3779b97f4a7c15ull + 1;
  m.eagerness = static_cast<int>(r->eagerness), m.unwritten = r->unwritten, m.limit = static_cast<u64>(r->limit);
  int failed = 0;
  try {
    m.run();
  } catch (Fault& found) {
    snprintf(message, static_cast<size_t>(message_bytes), "%s", found.text.c_str());
    failed = 1;
  }
  *executed = static_cast<i64>(m.executed);
  return failed;
}
}
