// Instantiate owns the cubins and the plan, Initialize prepares a device, Execute patches addresses and launches.
//
// One executable may run on several devices and threads at once: Execute writes only to its own stack and reads what
// was published once for each device.
#include "launcher.h"

#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "driver.h"
#include "encode.h"
#include "error.h"
#include "plan.h"

namespace cutjax {
namespace {

constexpr size_t kMaxDevices = 64;
constexpr uintptr_t kPlaceholderAddress = uintptr_t{1} << 20;

// As TMA wants the first byte of a tensor.
bool IsAligned(const void* address, const TensorMap& map) {
  return reinterpret_cast<uintptr_t>(address) % map.alignment == 0;
}

template <typename... Parts>
ffi::Error Failed(const Launch& launch, const Parts&... parts) {
  std::string message = "cutjax_launch: kernel " + launch.kernel + ": ";
  ((message += parts), ...);
  return ffi::Error::InvalidArgument(std::move(message));
}

// ---- Instantiate: the cubin
// -------------------------------------------------------------------------------------------

// Loads a cubin once for all custom calls that carry the same bytes, and keeps it for the life of the process: cubins
// are small, loading one again would cost the next executable milliseconds, and profilers that know kernels by their
// address would show a later kernel under the name of one that was unloaded.
ffi::ErrorOr<CUlibrary> LoadLibrary(const Driver& driver, std::string_view cubin, const std::string& kernel) {
  static auto& mutex = *new std::mutex;
  static auto& libraries = *new std::unordered_map<std::string, CUlibrary>;

  std::lock_guard lock(mutex);
  std::string code(cubin);
  if (auto found = libraries.find(code); found != libraries.end()) return found->second;
  CUlibrary library;
  CUTJAX_CUDA(driver, kernel, cuLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  libraries.emplace(std::move(code), library);
  return library;
}

// A launch on one device.
struct DeviceLaunch {
  unsigned grid_x;
  std::vector<CUtensorMap> maps;  // with the addresses of the call that prepared the device
};

// What one device needs, written once, then only read.
struct DeviceState {
  CUcontext context;
  std::vector<DeviceLaunch> launches;
};

struct State {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  State(const Driver& driver, Plan plan, std::vector<CUkernel> kernels)
      : driver(driver), plan(std::move(plan)), kernels(std::move(kernels)) {}
  State(const State&) = delete;
  ~State() {
    for (auto& device : devices) delete device.load(std::memory_order_acquire);
  }

  const Driver& driver;
  const Plan plan;
  const std::vector<CUkernel> kernels;  // of plan.launches
  std::mutex prepare_mutex;
  std::array<std::atomic<const DeviceState*>, kMaxDevices> devices{};  // by device ordinal
};

ffi::TypeId State::id = {};
ffi::TypeInfo State::info = ffi::MakeTypeInfo<State>();

ffi::ErrorOr<std::unique_ptr<State>> Instantiate(ffi::Dictionary attributes) {
  std::optional<int64_t> format;
  if (attributes.contains("format")) {
    auto found = attributes.get<int64_t>("format");
    if (!found) return AsError(found.error());
    format = *found;
  }
  if (ffi::Error error = CheckFormat(format); error.failure()) return AsError(std::move(error));
  auto kernel = attributes.get<std::string_view>("kernel");
  auto cubin = attributes.get<std::string_view>("cubin");
  auto records = attributes.get<ffi::Span<const int64_t>>("plan");
  if (!kernel) return AsError(kernel.error());
  if (!cubin) return AsError(cubin.error());
  if (!records) return AsError(records.error());

  auto plan = DecodePlan({*format, *kernel, *cubin, *records});
  if (!plan) return AsError(plan.error());
  auto driver = GetDriver();
  if (!driver) return AsError(driver.error());
  std::vector<CUkernel> kernels;
  for (const Launch& launch : plan->launches) {
    auto library = LoadLibrary(**driver, cubin->substr(launch.cubin_offset, launch.cubin_bytes), launch.kernel);
    if (!library) return AsError(library.error());
    CUTJAX_CUDA(**driver, launch.kernel, cuLibraryGetKernel(&kernels.emplace_back(), *library, launch.kernel.c_str()));
  }
  return std::make_unique<State>(**driver, *std::move(plan), std::move(kernels));
}

// ---- Initialize: the device
// -------------------------------------------------------------------------------------------

// Makes a context current for a scope; free of cost when it is already.
class ScopedContext {
 public:
  explicit ScopedContext(const Driver& driver) : driver_(driver) {}
  ScopedContext(const ScopedContext&) = delete;
  ~ScopedContext() {
    CUcontext popped;
    if (pushed_) driver_.cuCtxPopCurrent(&popped);
  }

  ffi::Error Enter(CUcontext context, const std::string& kernel) {
    CUcontext current;
    CUTJAX_CUDA(driver_, kernel, cuCtxGetCurrent(&current));
    if (current == context) return ffi::Error::Success();
    CUTJAX_CUDA(driver_, kernel, cuCtxPushCurrent(context));
    pushed_ = true;
    return ffi::Error::Success();
  }

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// Lets this thread load code while a stream of its captures a graph, should Initialize not have come first.
class ScopedRelaxedCapture {
 public:
  explicit ScopedRelaxedCapture(const Driver& driver) : driver_(driver) {
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ScopedRelaxedCapture(const ScopedRelaxedCapture&) = delete;
  ~ScopedRelaxedCapture() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

struct Buffer {
  std::byte* data;
  uint64_t size_bytes;
};

// The call's buffer of this index: arguments first, then results. The plan's indices were checked against the count.
Buffer GetBuffer(size_t index, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const ffi::AnyBuffer buffer =
      index < args.size() ? *args.get<ffi::AnyBuffer>(index) : **rets.get<ffi::AnyBuffer>(index - args.size());
  return {static_cast<std::byte*>(buffer.untyped_data()), buffer.size_bytes()};
}

ffi::Error CheckBufferCount(const Plan& plan, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (static_cast<size_t>(plan.num_buffers) <= args.size() + rets.size()) return ffi::Error::Success();
  return Failed(plan.launches.front(), "the plan uses ", std::to_string(plan.num_buffers), " buffers, the call has ",
                std::to_string(args.size()), " arguments and ", std::to_string(rets.size()), " results");
}

// Checks the plan's parameters against the kernel's own. Asking for one past the kernel's last would be an API error,
// which memory checkers report, so a kernel that takes more than the plan passes is for the tests to find.
ffi::Error CheckSignature(const Driver& driver, const Launch& launch, CUkernel kernel) {
  if (driver.cuKernelGetParamInfo == nullptr) return ffi::Error::Success();
  for (size_t i = 0; i < launch.params.size(); ++i) {
    size_t offset, size;
    if (driver.cuKernelGetParamInfo(kernel, i, &offset, &size) != CUDA_SUCCESS) {
      return Failed(launch, "it takes ", std::to_string(i), " parameters, the plan passes ",
                    std::to_string(launch.params.size()));
    }
    if (const size_t expected = launch.params[i].size_bytes(); size != expected) {
      return Failed(launch, "parameter ", std::to_string(i), " has ", std::to_string(size), " bytes, the plan passes ",
                    std::to_string(expected));
    }
  }
  return ffi::Error::Success();
}

ffi::Error EncodeMaps(const Driver& driver, const Launch& launch, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      std::vector<CUtensorMap>& maps) {
  for (const Param& param : launch.params) {
    if (!param.reads_buffer()) continue;
    const Buffer buffer = GetBuffer(param.buffer, args, rets);
    const bool is_map = param.kind == Param::Kind::kTensorMap;
    const uint64_t extent_bytes = is_map ? launch.maps[param.map].extent_bytes : 0;
    if (param.byte_offset > buffer.size_bytes || extent_bytes > buffer.size_bytes - param.byte_offset) {
      return Failed(launch, is_map ? "a tensor map" : "a pointer", " reaches ", std::to_string(extent_bytes),
                    " bytes from offset ", std::to_string(param.byte_offset), " into buffer ",
                    std::to_string(param.buffer), " of ", std::to_string(buffer.size_bytes), " bytes");
    }
    if (!is_map) continue;

    // Every launch replaces the address, so any that TMA accepts will do: this call's own, unless Initialize ran before
    // the buffer had its place, or it is misaligned, which the launch reports.
    std::byte* address = buffer.data + param.byte_offset;
    const TensorMap& map = launch.maps[param.map];
    if (buffer.data == nullptr || !IsAligned(address, map)) address = reinterpret_cast<std::byte*>(kPlaceholderAddress);
    CUTJAX_RETURN_IF_ERROR(EncodeMap(driver, map, launch.kernel, address, maps[param.map]));
  }
  return ffi::Error::Success();
}

// Lets a kernel have as much dynamic shared memory as any launch of it wants. A cubin is loaded once, so launches of
// other sizes, of this program or another, may share the kernel, and a device has one limit for it.
ffi::Error AllowSharedMemory(const Driver& driver, const Launch& launch, CUkernel kernel, CUdevice device) {
  static auto& mutex = *new std::mutex;
  static auto& limits = *new std::map<std::pair<CUkernel, CUdevice>, unsigned>;

  std::lock_guard lock(mutex);
  unsigned& limit = limits[{kernel, device}];
  limit = std::max(limit, launch.shared_bytes);
  CUTJAX_CUDA(
      driver, launch.kernel,
      cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(limit), kernel, device));
  return ffi::Error::Success();
}

ffi::Error PrepareLaunch(const State& state, size_t index, CUdevice device, int sm_count, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, DeviceLaunch& prepared) {
  const Driver& driver = state.driver;
  const Launch& launch = state.plan.launches[index];
  const CUkernel kernel = state.kernels[index];
  prepared.grid_x = launch.GridX(static_cast<unsigned>(sm_count));

  // Loading is lazy by default: asking for the function loads the code now, not inside a graph capture.
  CUfunction function;
  CUTJAX_CUDA(driver, launch.kernel, cuKernelGetFunction(&function, kernel));
  CUTJAX_RETURN_IF_ERROR(AllowSharedMemory(driver, launch, kernel, device));
  CUTJAX_RETURN_IF_ERROR(CheckSignature(driver, launch, kernel));
  prepared.maps.resize(launch.maps.size());
  return EncodeMaps(driver, launch, args, rets, prepared.maps);
}

ffi::Error Prepare(State& state, int32_t ordinal, CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Driver& driver = state.driver;
  const Launch& first = state.plan.launches.front();
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= kMaxDevices) {
    return Failed(first, "device ordinal ", std::to_string(ordinal), " is not below ", std::to_string(kMaxDevices));
  }
  std::lock_guard lock(state.prepare_mutex);
  if (state.devices[ordinal].load(std::memory_order_relaxed) != nullptr) return ffi::Error::Success();
  CUTJAX_RETURN_IF_ERROR(CheckBufferCount(state.plan, args, rets));

  auto device = std::make_unique<DeviceState>();
  CUTJAX_CUDA(driver, first.kernel, cuStreamGetCtx(stream, &device->context));
  ScopedContext context(driver);
  CUTJAX_RETURN_IF_ERROR(context.Enter(device->context, first.kernel));
  ScopedRelaxedCapture relaxed(driver);
  CUdevice cuda_device;
  int sm_count;
  CUTJAX_CUDA(driver, first.kernel, cuCtxGetDevice(&cuda_device));
  CUTJAX_CUDA(driver, first.kernel,
              cuDeviceGetAttribute(&sm_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, cuda_device));
  device->launches.resize(state.plan.launches.size());
  for (size_t i = 0; i < device->launches.size(); ++i) {
    CUTJAX_RETURN_IF_ERROR(PrepareLaunch(state, i, cuda_device, sm_count, args, rets, device->launches[i]));
  }
  state.devices[ordinal].store(device.release(), std::memory_order_release);
  return ffi::Error::Success();
}

ffi::Error Initialize(State* state, CUstream stream, int32_t ordinal, ffi::RemainingArgs args,
                      ffi::RemainingRets rets) {
  return Prepare(*state, ordinal, stream, args, rets);
}

// ---- Execute: the launches
// ----------------------------------------------------------------------------------------------

// In the device's context. Allocates nothing.
ffi::Error LaunchKernel(const Driver& driver, const Launch& launch, CUkernel kernel, const DeviceLaunch& prepared,
                        CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  // The plan is bounded, so the kernel's parameters fit here.
  alignas(64) CUtensorMap maps[kMaxParams];
  std::byte* pointers[kMaxParams];
  void* values[kMaxParams];
  for (size_t i = 0; i < launch.params.size(); ++i) {
    const Param& param = launch.params[i];
    switch (param.kind) {
      case Param::Kind::kTensorMap: {
        std::byte* address = GetBuffer(param.buffer, args, rets).data + param.byte_offset;
        if (const TensorMap& map = launch.maps[param.map]; !IsAligned(address, map)) {
          return Failed(launch, "buffer ", std::to_string(param.buffer), " is not ", std::to_string(map.alignment),
                        "-byte aligned, as TMA needs");
        }
        maps[param.map] = prepared.maps[param.map];
        CUTJAX_CUDA(driver, launch.kernel, cuTensorMapReplaceAddress(&maps[param.map], address));
        values[i] = &maps[param.map];
        break;
      }
      case Param::Kind::kPointer:
        pointers[i] = GetBuffer(param.buffer, args, rets).data + param.byte_offset;
        values[i] = &pointers[i];
        break;
      default:  // a scalar of 32 bits is the low half of the value: every host of CUDA is little-endian
        values[i] = const_cast<uint64_t*>(&param.value);
        break;
    }
  }

  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
  CUlaunchConfig config{};
  config.gridDimX = prepared.grid_x;
  config.gridDimY = launch.grid[1];
  config.gridDimZ = launch.grid[2];
  config.blockDimX = launch.block[0];
  config.blockDimY = launch.block[1];
  config.blockDimZ = launch.block[2];
  config.sharedMemBytes = launch.shared_bytes;
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = launch.clustered() ? 1 : 0;
  CUTJAX_CUDA(driver, launch.kernel, cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel), values, nullptr));
  return ffi::Error::Success();
}

ffi::Error Execute(State* state, CUstream stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const DeviceState* device = nullptr;
  if (ordinal >= 0 && static_cast<size_t>(ordinal) < kMaxDevices) {
    device = state->devices[ordinal].load(std::memory_order_acquire);
  }
  if (device == nullptr) {
    CUTJAX_RETURN_IF_ERROR(Prepare(*state, ordinal, stream, args, rets));
    device = state->devices[ordinal].load(std::memory_order_acquire);
  }
  const std::vector<Launch>& launches = state->plan.launches;
  CUTJAX_RETURN_IF_ERROR(CheckBufferCount(state->plan, args, rets));
  ScopedContext context(state->driver);
  CUTJAX_RETURN_IF_ERROR(context.Enter(device->context, launches.front().kernel));
  for (size_t i = 0; i < launches.size(); ++i) {
    CUTJAX_RETURN_IF_ERROR(
        LaunchKernel(state->driver, launches[i], state->kernels[i], device->launches[i], stream, args, rets));
  }
  return ffi::Error::Success();
}

ffi::Error Rehearse(State* state, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Execute(state, nullptr, ordinal, args, rets);
}

}  // namespace

ffi::TypeId* StateTypeId() { return &State::id; }
ffi::TypeInfo* StateTypeInfo() { return &State::info; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(CutjaxInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CutjaxInitialize, Initialize,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                  .Ctx<ffi::State<State>>()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CutjaxExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<State>>()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CutjaxRehearse, Rehearse,
    ffi::Ffi::Bind().Ctx<ffi::State<State>>().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets());

}  // namespace cutjax
