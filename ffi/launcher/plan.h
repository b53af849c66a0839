// The launch plan: what a custom call's attributes say, decoded and validated once. Knows no device and no stream.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "xla/ffi/api/ffi.h"

namespace cutjax {

// Bounds that let a launch live on the stack. A kernel takes at most 4 KiB of parameters, which is 31 tensor maps.
inline constexpr size_t kMaxParams = 48;
inline constexpr int64_t kMaxBuffers = 32;
inline constexpr int64_t kMaxRank = 5;

// One kernel parameter.
struct Param {
  enum class Kind : int64_t { kTensorMap = 0, kPointer = 1, kInt32 = 2, kInt64 = 3 };
  Kind kind;
  size_t map = 0;            // kTensorMap: index into Plan::maps
  int64_t buffer = 0;        // kTensorMap, kPointer: arguments first, then results
  uint64_t byte_offset = 0;  // kTensorMap, kPointer
  uint64_t value = 0;        // kInt32, kInt64
};

// What cuTensorMapEncodeTiled is given, besides the address.
struct TensorMap {
  CUtensorMapDataType dtype;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
  uint32_t rank;
  uint64_t dims[kMaxRank];          // inner first
  uint64_t strides[kMaxRank] = {};  // in bytes, of dims[1] and up
  uint32_t box[kMaxRank];
  uint64_t extent_bytes;  // from the first byte of the tensor to the last it can reach
};

struct Plan {
  std::string kernel;
  std::array<unsigned, 3> grid, block, cluster;
  unsigned shared_bytes;
  unsigned blocks_per_sm;  // 0: launch `grid`; else no more than this many blocks for each SM
  std::vector<Param> params;
  std::vector<TensorMap> maps;
  int64_t num_buffers = 0;  // one past the highest buffer index of any parameter

  bool clustered() const { return cluster[0] * cluster[1] * cluster[2] != 1; }

  // Blocks along x on a device with this many SMs: whole clusters, at least one.
  unsigned GridX(unsigned sm_count) const;
};

// The attributes as they arrive.
struct PlanAttributes {
  std::string_view kernel, cubin;
  ffi::Span<const int64_t> grid, block, cluster, params;
  int64_t shared_bytes, blocks_per_sm;
};

ffi::ErrorOr<Plan> DecodePlan(const PlanAttributes& attributes);

// The plan as text, for tests and bug reports.
std::string Describe(const Plan& plan);

}  // namespace cutjax
