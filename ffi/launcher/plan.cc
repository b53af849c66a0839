#include "plan.h"

#include <algorithm>
#include <sstream>

#include "error.h"

namespace cutjax {
namespace {

constexpr int64_t kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // by CUtensorMapDataType
constexpr int64_t kSwizzleBytes[] = {0, 32, 64, 128};                         // by CUtensorMapSwizzle
constexpr int64_t kL2PromotionBytes[] = {0, 64, 128, 256};                    // by CUtensorMapL2promotion

template <typename... Parts>
ffi::Error Invalid(const Parts&... parts) {
  std::ostringstream message;
  message << "cutjax_launch: ";
  (message << ... << parts);
  return ffi::Error::InvalidArgument(message.str());
}

// Reads params[] record by record; every read is checked against the end.
class Reader {
 public:
  explicit Reader(ffi::Span<const int64_t> words) : words_(words) {}

  bool done() const { return position_ == words_.size(); }

  // The next word, or an error if there is none or it is outside [low, high].
  ffi::Error Read(const char* what, int64_t low, int64_t high, int64_t& value) {
    if (done()) return Invalid("params end where ", what, " should be");
    value = words_[position_++];
    if (value < low || value > high) {
      return Invalid(what, " is ", value, ", expected ", low, " to ", high, " (params word ", position_ - 1, ")");
    }
    return ffi::Error::Success();
  }

 private:
  ffi::Span<const int64_t> words_;
  size_t position_ = 0;
};

ffi::Error DecodeBuffer(Reader& reader, Param& param, Plan& plan) {
  int64_t byte_offset;
  CUTJAX_RETURN_IF_ERROR(reader.Read("buffer index", 0, kMaxBuffers - 1, param.buffer));
  CUTJAX_RETURN_IF_ERROR(reader.Read("byte offset", 0, INT64_MAX, byte_offset));
  param.byte_offset = byte_offset;
  plan.num_buffers = std::max(plan.num_buffers, param.buffer + 1);
  return ffi::Error::Success();
}

// The rules of cuTensorMapEncodeTiled for interleave none and unit element strides.
ffi::Error DecodeTensorMap(Reader& reader, Param& param, Plan& plan) {
  int64_t dtype, rank, swizzle, l2_promotion, word;
  CUTJAX_RETURN_IF_ERROR(DecodeBuffer(reader, param, plan));
  if (param.byte_offset % 16 != 0) return Invalid("tensor map offset ", param.byte_offset, " is not 16-byte aligned");
  CUTJAX_RETURN_IF_ERROR(reader.Read("tensor map dtype", 0, std::size(kElementBytes) - 1, dtype));
  CUTJAX_RETURN_IF_ERROR(reader.Read("tensor map rank", 1, kMaxRank, rank));
  CUTJAX_RETURN_IF_ERROR(reader.Read("tensor map swizzle", 0, std::size(kSwizzleBytes) - 1, swizzle));
  CUTJAX_RETURN_IF_ERROR(reader.Read("tensor map L2 promotion", 0, std::size(kL2PromotionBytes) - 1, l2_promotion));

  TensorMap map;
  map.dtype = static_cast<CUtensorMapDataType>(dtype);
  map.swizzle = static_cast<CUtensorMapSwizzle>(swizzle);
  map.l2_promotion = static_cast<CUtensorMapL2promotion>(l2_promotion);
  map.rank = static_cast<uint32_t>(rank);
  for (int64_t i = 0; i < rank; ++i) {
    CUTJAX_RETURN_IF_ERROR(reader.Read("tensor map dimension", 1, int64_t{1} << 32, word));
    map.dims[i] = word;
  }
  for (int64_t i = 0; i < rank - 1; ++i) {
    CUTJAX_RETURN_IF_ERROR(reader.Read("tensor map stride", 0, (int64_t{1} << 40) - 1, word));
    if (word % 16 != 0) return Invalid("tensor map stride ", word, " is not a multiple of 16 bytes");
    map.strides[i] = word;
  }
  for (int64_t i = 0; i < rank; ++i) {
    CUTJAX_RETURN_IF_ERROR(reader.Read("tensor map box", 1, 256, word));
    map.box[i] = static_cast<uint32_t>(word);
  }
  const int64_t inner_bytes = map.box[0] * kElementBytes[dtype];
  if (inner_bytes % 16 != 0) return Invalid("tensor map box row of ", inner_bytes, " bytes is not a multiple of 16");
  if (swizzle != 0 && inner_bytes > kSwizzleBytes[swizzle]) {
    return Invalid("tensor map box row of ", inner_bytes, " bytes exceeds its swizzle of ", kSwizzleBytes[swizzle]);
  }

  map.extent_bytes = map.dims[0] * kElementBytes[dtype];
  for (int64_t i = 0; i < rank - 1; ++i) {
    uint64_t span;
    if (__builtin_mul_overflow(map.dims[i + 1] - 1, map.strides[i], &span) ||
        __builtin_add_overflow(map.extent_bytes, span, &map.extent_bytes)) {
      return Invalid("tensor map covers more than 2^64 bytes");
    }
  }
  param.map = plan.maps.size();
  plan.maps.push_back(map);
  return ffi::Error::Success();
}

ffi::Error DecodeParam(Reader& reader, Plan& plan) {
  int64_t kind, value;
  CUTJAX_RETURN_IF_ERROR(reader.Read("parameter kind", 0, 3, kind));
  if (plan.params.size() == kMaxParams) return Invalid("more than ", kMaxParams, " kernel parameters");
  Param param{static_cast<Param::Kind>(kind)};
  switch (param.kind) {
    case Param::Kind::kTensorMap:
      CUTJAX_RETURN_IF_ERROR(DecodeTensorMap(reader, param, plan));
      break;
    case Param::Kind::kPointer:
      CUTJAX_RETURN_IF_ERROR(DecodeBuffer(reader, param, plan));
      break;
    case Param::Kind::kInt32:
      CUTJAX_RETURN_IF_ERROR(reader.Read("32-bit scalar", INT32_MIN, UINT32_MAX, value));
      param.value = static_cast<uint64_t>(value);
      break;
    case Param::Kind::kInt64:
      CUTJAX_RETURN_IF_ERROR(reader.Read("64-bit scalar", INT64_MIN, INT64_MAX, value));
      param.value = static_cast<uint64_t>(value);
      break;
  }
  plan.params.push_back(param);
  return ffi::Error::Success();
}

ffi::Error DecodeShape(const char* what, ffi::Span<const int64_t> words, std::array<int64_t, 3> high,
                       std::array<unsigned, 3>& shape) {
  if (words.size() != 3) return Invalid(what, " has ", words.size(), " entries, expected 3");
  for (size_t i = 0; i < 3; ++i) {
    if (words[i] < 1 || words[i] > high[i]) {
      return Invalid(what, "[", i, "] is ", words[i], ", expected 1 to ", high[i]);
    }
    shape[i] = static_cast<unsigned>(words[i]);
  }
  return ffi::Error::Success();
}

ffi::Error Decode(const PlanAttributes& attributes, Plan& plan) {
  if (attributes.kernel.empty()) return Invalid("kernel has no name");
  if (attributes.cubin.empty()) return Invalid("cubin is empty");
  plan.kernel = attributes.kernel;

  CUTJAX_RETURN_IF_ERROR(DecodeShape("grid", attributes.grid, {INT32_MAX, 65535, 65535}, plan.grid));
  CUTJAX_RETURN_IF_ERROR(DecodeShape("block", attributes.block, {1024, 1024, 64}, plan.block));
  CUTJAX_RETURN_IF_ERROR(DecodeShape("cluster", attributes.cluster, {8, 8, 8}, plan.cluster));
  if (plan.block[0] * plan.block[1] * plan.block[2] > 1024) return Invalid("block has more than 1024 threads");
  if (plan.cluster[0] * plan.cluster[1] * plan.cluster[2] > 8) return Invalid("cluster has more than 8 blocks");
  for (size_t i = 0; i < 3; ++i) {
    if (plan.grid[i] % plan.cluster[i] != 0) {
      return Invalid("grid[", i, "] = ", plan.grid[i], " is not a multiple of cluster[", i, "] = ", plan.cluster[i]);
    }
  }

  if (attributes.shared_bytes < 0 || attributes.shared_bytes > (1 << 20)) {
    return Invalid("shared_bytes is ", attributes.shared_bytes, ", expected 0 to ", 1 << 20);
  }
  if (attributes.blocks_per_sm < 0 || attributes.blocks_per_sm > 64) {
    return Invalid("blocks_per_sm is ", attributes.blocks_per_sm, ", expected 0 to 64");
  }
  plan.shared_bytes = static_cast<unsigned>(attributes.shared_bytes);
  plan.blocks_per_sm = static_cast<unsigned>(attributes.blocks_per_sm);

  for (Reader reader(attributes.params); !reader.done();) CUTJAX_RETURN_IF_ERROR(DecodeParam(reader, plan));
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

}  // namespace

unsigned Plan::GridX(unsigned sm_count) const {
  if (blocks_per_sm == 0) return grid[0];
  const unsigned blocks = std::min(grid[0], blocks_per_sm * sm_count);
  return std::max(blocks - blocks % cluster[0], cluster[0]);
}

ffi::ErrorOr<Plan> DecodePlan(const PlanAttributes& attributes) {
  Plan plan;
  if (ffi::Error error = Decode(attributes, plan); error.failure()) return ffi::Unexpected(std::move(error));
  return plan;
}

std::string Describe(const Plan& plan) {
  std::ostringstream out;
  out << plan.kernel << " grid=" << plan.grid << " block=" << plan.block << " cluster=" << plan.cluster
      << " shared_bytes=" << plan.shared_bytes << " blocks_per_sm=" << plan.blocks_per_sm;
  for (const Param& param : plan.params) {
    switch (param.kind) {
      case Param::Kind::kTensorMap: {
        const TensorMap& map = plan.maps[param.map];
        out << "\ntensor_map buffer=" << param.buffer << " byte_offset=" << param.byte_offset << " dtype=" << map.dtype
            << " swizzle=" << kSwizzleBytes[map.swizzle] << " l2_bytes=" << kL2PromotionBytes[map.l2_promotion];
        Join(out, "dims", map.dims, map.rank);
        Join(out, "strides", map.strides, map.rank - 1);
        Join(out, "box", map.box, map.rank);
        out << " extent_bytes=" << map.extent_bytes;
        break;
      }
      case Param::Kind::kPointer:
        out << "\npointer buffer=" << param.buffer << " byte_offset=" << param.byte_offset;
        break;
      case Param::Kind::kInt32:
        out << "\nint32 " << static_cast<int32_t>(param.value);
        break;
      case Param::Kind::kInt64:
        out << "\nint64 " << static_cast<int64_t>(param.value);
        break;
    }
  }
  return out.str();
}

}  // namespace cutjax
