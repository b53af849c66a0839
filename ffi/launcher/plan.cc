#include "plan.h"

#include <algorithm>
#include <bit>
#include <sstream>

#include "error.h"

namespace cutjax {
namespace {

// By CUtensorMapDataType. The last are 16 elements of 4 bits, the same with gaps in shared memory, and of 6 bits with
// such.
constexpr int64_t kElementBits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
constexpr int64_t kFirstWithGaps = 14;
constexpr int64_t kSwizzleBytes[] = {0, 32, 64, 128, 128, 128, 128};  // by CUtensorMapSwizzle
constexpr const char* kSwizzleNames[] = {"0", "32", "64", "128", "128_atom_32", "128_atom_32_flip_8", "128_atom_64"};
constexpr int64_t kL2PromotionBytes[] = {0, 64, 128, 256};  // by CUtensorMapL2promotion
constexpr int64_t kInterleaveBytes[] = {0, 16, 32};         // by CUtensorMapInterleave
constexpr const char* kModeNames[] = {"tiled", "im2col", "im2col_w", "im2col_w128"};

template <typename... Parts>
ffi::Error Invalid(const Parts&... parts) {
  std::ostringstream message;
  message << "cutjax_launch: ";
  (message << ... << parts);
  return ffi::Error::InvalidArgument(message.str());
}

// Reads the attribute `plan` word by word; every read is checked against the end.
class Reader {
 public:
  explicit Reader(ffi::Span<const int64_t> words) : words_(words) {}

  bool done() const { return position_ == words_.size(); }

  // The next word, or an error if there is none or it is outside [low, high].
  ffi::Error Read(const char* what, int64_t low, int64_t high, int64_t& value) {
    if (done()) return Invalid("the plan ends where ", what, " should be");
    value = words_[position_++];
    if (value < low || value > high) {
      return Invalid(what, " is ", value, ", expected ", low, " to ", high, " (word ", position_ - 1, " of the plan)");
    }
    return ffi::Error::Success();
  }

 private:
  ffi::Span<const int64_t> words_;
  size_t position_ = 0;
};

ffi::Error DecodeBuffer(Reader& reader, Param& param, int64_t& num_buffers) {
  int64_t byte_offset;
  CUTJAX_RETURN_IF_ERROR(reader.Read("buffer index", 0, kMaxBuffers - 1, param.buffer));
  CUTJAX_RETURN_IF_ERROR(reader.Read("byte offset", 0, INT64_MAX, byte_offset));
  param.byte_offset = byte_offset;
  num_buffers = std::max(num_buffers, param.buffer + 1);
  return ffi::Error::Success();
}

// Reads as many words within [low, high] as there are values.
template <typename T>
ffi::Error ReadAll(Reader& reader, const char* what, int64_t low, int64_t high, size_t count, T* values) {
  for (size_t i = 0; i < count; ++i) {
    int64_t word;
    CUTJAX_RETURN_IF_ERROR(reader.Read(what, low, high, word));
    values[i] = static_cast<T>(word);
  }
  return ffi::Error::Success();
}

template <typename T>
ffi::Error ReadEnum(Reader& reader, const char* what, size_t count, T& value) {
  return ReadAll(reader, what, 0, static_cast<int64_t>(count) - 1, 1, &value);
}

// What is walked, past the tensor's dimensions and strides: a box, or a column of pixels.
ffi::Error DecodeWalk(Reader& reader, TensorMap& map) {
  if (map.mode == TensorMap::Mode::kTiled) return ReadAll(reader, "tensor map box", 1, 256, map.rank, map.box);
  const size_t corners = map.corners();
  const int64_t high = corners == 1 ? 1 << 15 : corners == 2 ? 1 << 7 : 1 << 4;
  CUTJAX_RETURN_IF_ERROR(ReadAll(reader, "tensor map lower corner", -high, high - 1, corners, map.lower));
  CUTJAX_RETURN_IF_ERROR(ReadAll(reader, "tensor map upper corner", -high, high - 1, corners, map.upper));
  CUTJAX_RETURN_IF_ERROR(ReadAll(reader, "tensor map channels", 1, 256, 1, &map.channels));
  return ReadAll(reader, "tensor map pixels", 1, 1024, 1, &map.pixels);
}

// From the first byte of the tensor to the last it can reach.
ffi::Error ComputeExtent(TensorMap& map) {
  map.extent_bytes = (map.dims[0] * kElementBits[map.dtype] + 7) / 8;
  uint64_t span = 0;
  bool fits = true;
  for (size_t i = 1; i < map.rank && fits; ++i) {
    fits = !__builtin_mul_overflow(map.dims[i] - 1, map.strides[i - 1], &span) &&
           !__builtin_add_overflow(map.extent_bytes, span, &map.extent_bytes);
  }
  if (fits && map.interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) {  // slices of channels lie between rows and images
    fits = !__builtin_mul_overflow(map.dims[map.rank - 1], map.strides[map.rank - 2], &span);
    map.extent_bytes = std::max(map.extent_bytes, span);
  }
  return fits ? ffi::Error::Success() : Invalid("tensor map covers more than 2^64 bytes");
}

// Checks every word, and the rules that say which memory is read. Others of the driver's it checks itself.
ffi::Error DecodeTensorMap(Reader& reader, int64_t format, Param& param, Launch& launch, int64_t& num_buffers) {
  CUTJAX_RETURN_IF_ERROR(DecodeBuffer(reader, param, num_buffers));
  TensorMap map;
  CUTJAX_RETURN_IF_ERROR(ReadEnum(reader, "tensor map dtype", std::size(kElementBits), map.dtype));
  CUTJAX_RETURN_IF_ERROR(ReadAll(reader, "tensor map rank", 1, kMaxRank, 1, &map.rank));
  CUTJAX_RETURN_IF_ERROR(ReadEnum(reader, "tensor map swizzle", std::size(kSwizzleBytes), map.swizzle));
  CUTJAX_RETURN_IF_ERROR(ReadEnum(reader, "tensor map L2 promotion", std::size(kL2PromotionBytes), map.l2_promotion));
  if (format > 1) {
    CUTJAX_RETURN_IF_ERROR(ReadEnum(reader, "tensor map mode", std::size(kModeNames), map.mode));
    CUTJAX_RETURN_IF_ERROR(ReadEnum(reader, "tensor map interleave", std::size(kInterleaveBytes), map.interleave));
    CUTJAX_RETURN_IF_ERROR(ReadEnum(reader, "tensor map fill", 2, map.fill));
  }
  const bool tiled = map.mode == TensorMap::Mode::kTiled, interleaved = map.interleave != CU_TENSOR_MAP_INTERLEAVE_NONE;
  if (map.rank < 3 && !tiled) return Invalid("tensor map of rank ", map.rank, ", im2col needs 3 to 5");
  if (map.rank < 3 && interleaved) return Invalid("tensor map of rank ", map.rank, ", interleaving needs 3 to 5");
  if (map.interleave == CU_TENSOR_MAP_INTERLEAVE_32B || map.dtype >= kFirstWithGaps) map.alignment = 32;
  if (param.byte_offset % map.alignment != 0) {
    return Invalid("tensor map offset ", param.byte_offset, " is not ", map.alignment, "-byte aligned");
  }

  CUTJAX_RETURN_IF_ERROR(ReadAll(reader, "tensor map dimension", 1, int64_t{1} << 32, map.rank, map.dims));
  CUTJAX_RETURN_IF_ERROR(ReadAll(reader, "tensor map stride", 0, (int64_t{1} << 40) - 1, map.rank - 1, map.strides));
  for (uint64_t stride : map.strides) {
    if (stride % map.alignment != 0) {
      return Invalid("tensor map stride ", stride, " is not a multiple of ", map.alignment, " bytes");
    }
  }
  if (format > 1) {
    CUTJAX_RETURN_IF_ERROR(ReadAll(reader, "tensor map element stride", 1, 8, map.rank, map.element_strides));
  }
  CUTJAX_RETURN_IF_ERROR(DecodeWalk(reader, map));
  const int64_t row_bits = (tiled ? map.box[0] : map.channels) * kElementBits[map.dtype];
  if (!interleaved && row_bits % 128 != 0) {
    return Invalid("tensor map box row of ", row_bits / 8, " bytes is not a multiple of 16");
  }
  if (!interleaved && map.swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && row_bits > 8 * kSwizzleBytes[map.swizzle]) {
    return Invalid("tensor map box row of ", row_bits / 8, " bytes exceeds its swizzle of ",
                   kSwizzleBytes[map.swizzle]);
  }
  CUTJAX_RETURN_IF_ERROR(ComputeExtent(map));
  param.map = launch.maps.size();
  launch.maps.push_back(map);
  return ffi::Error::Success();
}

ffi::Error DecodeParam(Reader& reader, int64_t format, Launch& launch, int64_t& num_buffers) {
  int64_t kind, value;
  CUTJAX_RETURN_IF_ERROR(reader.Read("parameter kind", 0, 5, kind));
  Param param{static_cast<Param::Kind>(kind)};
  switch (param.kind) {
    case Param::Kind::kTensorMap:
      CUTJAX_RETURN_IF_ERROR(DecodeTensorMap(reader, format, param, launch, num_buffers));
      break;
    case Param::Kind::kPointer:
      CUTJAX_RETURN_IF_ERROR(DecodeBuffer(reader, param, num_buffers));
      break;
    case Param::Kind::kInt32:
    case Param::Kind::kFloat32:
      CUTJAX_RETURN_IF_ERROR(reader.Read("32-bit scalar", INT32_MIN, UINT32_MAX, value));
      param.value = static_cast<uint64_t>(value);
      break;
    case Param::Kind::kInt64:
    case Param::Kind::kFloat64:
      CUTJAX_RETURN_IF_ERROR(reader.Read("64-bit scalar", INT64_MIN, INT64_MAX, value));
      param.value = static_cast<uint64_t>(value);
      break;
  }
  launch.params.push_back(param);
  return ffi::Error::Success();
}

ffi::Error DecodeShape(Reader& reader, const char* what, std::array<int64_t, 3> high, std::array<unsigned, 3>& shape) {
  for (size_t i = 0; i < 3; ++i) CUTJAX_RETURN_IF_ERROR(ReadAll(reader, what, 1, high[i], 1, &shape[i]));
  return ffi::Error::Success();
}

ffi::Error DecodeLaunch(Reader& reader, const PlanAttributes& attributes, Launch& launch, int64_t& num_buffers) {
  const int64_t bytes = static_cast<int64_t>(attributes.cubin.size());
  int64_t offset, size, shared_bytes, blocks_per_sm, params;
  CUTJAX_RETURN_IF_ERROR(reader.Read("cubin offset", 0, bytes, offset));
  CUTJAX_RETURN_IF_ERROR(reader.Read("cubin size", 1, bytes - offset, size));
  launch.cubin_offset = static_cast<size_t>(offset);
  launch.cubin_bytes = static_cast<size_t>(size);

  CUTJAX_RETURN_IF_ERROR(DecodeShape(reader, "grid", {INT32_MAX, 65535, 65535}, launch.grid));
  CUTJAX_RETURN_IF_ERROR(DecodeShape(reader, "block", {1024, 1024, 64}, launch.block));
  CUTJAX_RETURN_IF_ERROR(DecodeShape(reader, "cluster", {8, 8, 8}, launch.cluster));
  if (launch.block[0] * launch.block[1] * launch.block[2] > 1024) return Invalid("block has more than 1024 threads");
  if (launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > 8) return Invalid("cluster has more than 8 blocks");
  for (size_t i = 0; i < 3; ++i) {
    const unsigned grid = launch.grid[i], cluster = launch.cluster[i];
    if (grid % cluster != 0) {
      return Invalid("grid[", i, "] = ", grid, " is not a multiple of cluster[", i, "] = ", cluster);
    }
  }
  CUTJAX_RETURN_IF_ERROR(reader.Read("shared_bytes", 0, 1 << 20, shared_bytes));
  CUTJAX_RETURN_IF_ERROR(reader.Read("blocks_per_sm", 0, 64, blocks_per_sm));
  launch.shared_bytes = static_cast<unsigned>(shared_bytes);
  launch.blocks_per_sm = static_cast<unsigned>(blocks_per_sm);

  CUTJAX_RETURN_IF_ERROR(reader.Read("number of parameters", 0, kMaxParams, params));
  for (int64_t i = 0; i < params; ++i) {
    CUTJAX_RETURN_IF_ERROR(DecodeParam(reader, attributes.format, launch, num_buffers));
  }
  return ffi::Error::Success();
}

// records: the number of launches, then of each: cubin offset and size, grid, block, cluster, shared_bytes,
// blocks_per_sm, number of parameters, and a record of each of those.
ffi::Error Decode(const PlanAttributes& attributes, Plan& plan) {
  Reader reader(attributes.records);
  int64_t launches;
  CUTJAX_RETURN_IF_ERROR(reader.Read("number of launches", 1, kMaxLaunches, launches));
  std::string_view names = attributes.kernel;
  for (int64_t i = 0; i < launches; ++i) {
    const size_t end = std::min(names.find(' '), names.size());
    if (end == 0) return Invalid("kernel ", i, " of ", launches, " has no name");
    Launch& launch = plan.launches.emplace_back();
    launch.kernel = names.substr(0, end);
    names.remove_prefix(std::min(end + 1, names.size()));
    if (ffi::Error error = DecodeLaunch(reader, attributes, launch, plan.num_buffers); error.failure()) {
      return ffi::Error::InvalidArgument(error.message() + ", kernel " + launch.kernel);
    }
  }
  if (!names.empty()) return Invalid("more kernels are named than the plan's ", launches, ": ", names);
  if (!reader.done()) return Invalid("the plan goes on after its last launch");
  return ffi::Error::Success();
}

std::ostream& operator<<(std::ostream& out, const std::array<unsigned, 3>& shape) {
  return out << shape[0] << "x" << shape[1] << "x" << shape[2];
}

template <typename T>
void Join(std::ostream& out, const char* name, const T* values, size_t count) {
  out << " " << name << "=";
  for (size_t i = 0; i < count; ++i) out << (i ? "," : "") << values[i];
}

void Describe(std::ostream& out, const Launch& launch, const Param& param) {
  switch (param.kind) {
    case Param::Kind::kTensorMap: {
      const TensorMap& map = launch.maps[param.map];
      out << "tensor_map buffer=" << param.buffer << " byte_offset=" << param.byte_offset << " dtype=" << map.dtype
          << " swizzle=" << kSwizzleNames[map.swizzle] << " l2_bytes=" << kL2PromotionBytes[map.l2_promotion];
      if (map.interleave) out << " interleave=" << kInterleaveBytes[map.interleave];
      if (map.fill) out << " fill=nan";
      Join(out, "dims", map.dims, map.rank);
      Join(out, "strides", map.strides, map.rank - 1);
      const uint32_t* steps = map.element_strides;
      if (std::any_of(steps, steps + map.rank, [](uint32_t step) { return step != 1; })) {
        Join(out, "element_strides", steps, map.rank);
      }
      if (map.mode == TensorMap::Mode::kTiled) {
        Join(out, "box", map.box, map.rank);
      } else {
        out << " mode=" << kModeNames[static_cast<size_t>(map.mode)];
        Join(out, "lower", map.lower, map.corners());
        Join(out, "upper", map.upper, map.corners());
        out << " channels=" << map.channels << " pixels=" << map.pixels;
      }
      out << " extent_bytes=" << map.extent_bytes;
      break;
    }
    case Param::Kind::kPointer:
      out << "pointer buffer=" << param.buffer << " byte_offset=" << param.byte_offset;
      break;
    case Param::Kind::kInt32:
      out << "int32 " << static_cast<int32_t>(param.value);
      break;
    case Param::Kind::kInt64:
      out << "int64 " << static_cast<int64_t>(param.value);
      break;
    case Param::Kind::kFloat32:
      out << "float32 " << std::bit_cast<float>(static_cast<uint32_t>(param.value));
      break;
    case Param::Kind::kFloat64:
      out << "float64 " << std::bit_cast<double>(param.value);
      break;
  }
}

}  // namespace

unsigned Launch::GridX(unsigned sm_count) const {
  if (blocks_per_sm == 0) return grid[0];
  const unsigned blocks = std::min(grid[0], blocks_per_sm * sm_count);
  return std::max(blocks - blocks % cluster[0], cluster[0]);
}

ffi::Error CheckFormat(std::optional<int64_t> format) {
  if (format >= kOldestPlanFormat && format <= kPlanFormat) return ffi::Error::Success();
  const std::string found =
      format ? "format " + std::to_string(*format) : "no format number (an older version wrote it)";
  return ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      "cutjax_launch: this version of cutjax reads launch plans of formats " + std::to_string(kOldestPlanFormat) +
          " to " + std::to_string(kPlanFormat) + ", the program's has " + found +
          ": re-export the program with this version of cutjax, or run it with the version that wrote it");
}

ffi::ErrorOr<Plan> DecodePlan(const PlanAttributes& attributes) {
  Plan plan;
  if (ffi::Error error = Decode(attributes, plan); error.failure()) return ffi::Unexpected(std::move(error));
  return plan;
}

std::string Describe(const Plan& plan) {
  std::ostringstream out;
  for (const Launch& launch : plan.launches) {
    out << (&launch == &plan.launches.front() ? "" : "\n") << launch.kernel << " cubin=" << launch.cubin_offset << "+"
        << launch.cubin_bytes << " grid=" << launch.grid << " block=" << launch.block << " cluster=" << launch.cluster
        << " shared_bytes=" << launch.shared_bytes << " blocks_per_sm=" << launch.blocks_per_sm;
    for (const Param& param : launch.params) Describe(out << "\n", launch, param);
  }
  return out.str();
}

}  // namespace cutjax
