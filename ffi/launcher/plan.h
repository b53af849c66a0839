// The launch plan: what a custom call's attributes say, decoded and validated once. Knows no device and no stream.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "xla/ffi/api/ffi.h"

namespace cutjax {

// What cutjax/runtime/launch.py writes: raised whenever the attributes change their meaning. Older ones from the oldest
// on are read too, since exported programs outlive the build that made them. Those from before there was a number have
// none.
//   1: tensor maps of boxes, without element strides
//   2: every tensor map that the driver encodes
inline constexpr int64_t kPlanFormat = 2;
inline constexpr int64_t kOldestPlanFormat = 1;

// Bounds that let a launch live on the stack. A kernel takes at most 4 KiB of parameters, which is 31 tensor maps.
inline constexpr size_t kMaxParams = 48;
inline constexpr int64_t kMaxLaunches = 16;
inline constexpr int64_t kMaxBuffers = 32;
inline constexpr int64_t kMaxRank = 5;

// One kernel parameter.
struct Param {
  enum class Kind : int64_t { kTensorMap = 0, kPointer = 1, kInt32 = 2, kInt64 = 3, kFloat32 = 4, kFloat64 = 5 };
  Kind kind;
  size_t map = 0;            // kTensorMap: index into Launch::maps
  int64_t buffer = 0;        // kTensorMap, kPointer: arguments first, then results
  uint64_t byte_offset = 0;  // kTensorMap, kPointer
  uint64_t value = 0;        // of a scalar: its bits, from the lowest up

  bool reads_buffer() const { return kind == Kind::kTensorMap || kind == Kind::kPointer; }
  size_t size_bytes() const {
    if (kind == Kind::kTensorMap) return sizeof(CUtensorMap);
    return kind == Kind::kInt32 || kind == Kind::kFloat32 ? 4 : 8;
  }
};

// What cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col or cuTensorMapEncodeIm2colWide is given, besides the address.
struct TensorMap {
  enum class Mode : int64_t { kTiled = 0, kIm2col = 1, kIm2colW = 2, kIm2colW128 = 3 };
  Mode mode = Mode::kTiled;
  CUtensorMapDataType dtype;
  CUtensorMapInterleave interleave = CU_TENSOR_MAP_INTERLEAVE_NONE;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
  CUtensorMapFloatOOBfill fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  uint32_t rank;
  uint64_t dims[kMaxRank];          // inner first, as all that follow
  uint64_t strides[kMaxRank] = {};  // in bytes, of dims[1] and up
  uint32_t element_strides[kMaxRank] = {1, 1, 1, 1, 1};
  uint32_t box[kMaxRank] = {};        // kTiled
  int lower[kMaxRank - 2] = {};       // kIm2col: of dims[1] up to the last but one; kIm2colW*: of dims[1]
  int upper[kMaxRank - 2] = {};       // the same
  uint32_t channels = 0, pixels = 0;  // all but kTiled
  uintptr_t alignment = 16;           // of the first byte of the tensor
  uint64_t extent_bytes;              // from there to the last byte it can reach

  size_t corners() const { return mode == Mode::kTiled ? 0 : mode == Mode::kIm2col ? rank - 2 : 1; }
};

// One kernel, to be launched.
struct Launch {
  std::string kernel;
  size_t cubin_offset, cubin_bytes;  // where in the attribute `cubin` its code is
  std::array<unsigned, 3> grid, block, cluster;
  unsigned shared_bytes;
  unsigned blocks_per_sm;  // 0: launch `grid`; else no more than this many blocks for each SM
  std::vector<Param> params;
  std::vector<TensorMap> maps;

  bool clustered() const { return cluster[0] * cluster[1] * cluster[2] != 1; }

  // Blocks along x on a device with this many SMs: whole clusters, at least one.
  unsigned GridX(unsigned sm_count) const;
};

struct Plan {
  std::vector<Launch> launches;  // in order; at least one
  int64_t num_buffers = 0;       // one past the highest buffer index of any parameter
};

// The attributes as they arrive.
struct PlanAttributes {
  int64_t format;
  std::string_view kernel;           // the launches' names, separated by spaces
  std::string_view cubin;            // their cubins, one after the other
  ffi::Span<const int64_t> records;  // the number of launches, then a record each; see Decode in plan.cc
};

// Success if there is an attribute `format`, and it is a number that this build reads. Comes before all decoding.
ffi::Error CheckFormat(std::optional<int64_t> format);

ffi::ErrorOr<Plan> DecodePlan(const PlanAttributes& attributes);

// The plan as text, for tests and bug reports.
std::string Describe(const Plan& plan);

}  // namespace cutjax
