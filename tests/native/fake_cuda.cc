// A stand-in for libcuda: implements what the launcher and benchmarks/driver.py call, in the memory of the host, and
// records it as lines of JSON.
//
// A fake cubin is "FAKE", its length as u32, then anything. A kernel's name ends in its signature after the last
// underscore, one letter for each parameter: m tensor map, p pointer, i and l integers of 32 and 64 bits, f and d
// floats, which are recorded as their bits. Any symbol but "missing" exists.
#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <utility>

namespace {

std::recursive_mutex mutex;
std::string log_text;
std::string failing_call;
CUresult failing_status = CUDA_SUCCESS;
int context_object;
CUcontext const the_context = reinterpret_cast<CUcontext>(&context_object);
thread_local CUcontext current = nullptr;

std::string LastPart(const char* name) {
  const char* underscore = std::strrchr(name, '_');
  return underscore ? underscore + 1 : "";
}

// Records a call; returns the failure that the test asked for, once.
CUresult Record(const std::string& call, const std::string& fields = "") {
  std::lock_guard lock(mutex);
  log_text += "{\"call\": \"" + call + "\"" + (fields.empty() ? "" : ", " + fields) + "}\n";
  if (call != failing_call) return CUDA_SUCCESS;
  failing_call.clear();
  return failing_status;
}

template <typename T>
std::string List(const T* values, size_t count) {
  std::ostringstream out;
  for (size_t i = 0; i < count; ++i) out << (i ? ", " : "[") << values[i];
  return count ? out.str() + "]" : "[]";
}

// What the fake keeps in the 128 bytes of a tensor map.
struct Map {
  uint64_t address, dims[5], strides[4];
  uint16_t box[5];
  int16_t lower[3], upper[3];
  uint16_t channels, pixels;
  uint8_t mode, dtype, rank, interleave, swizzle, l2, fill, steps[5];
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));
constexpr const char* kModes[] = {"tiled", "im2col", "im2col_w", "im2col_w128"};

template <typename To, typename From>
void Copy(To* to, const From* from, size_t count) {
  std::transform(from, from + count, to, [](From x) { return static_cast<To>(x); });
}

// What the three functions have in common, and what only some have.
CUresult Encode(const char* call, CUtensorMap* out, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* steps,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
                CUtensorMapFloatOOBfill fill, Map map) {
  if (reinterpret_cast<uintptr_t>(out) % 64 || reinterpret_cast<uintptr_t>(address) % 16 || address == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  map.address = reinterpret_cast<uint64_t>(address);
  map.dtype = dtype, map.rank = rank, map.interleave = interleave, map.swizzle = swizzle, map.l2 = l2, map.fill = fill;
  Copy(map.dims, dims, rank);
  Copy(map.strides, strides, rank - 1);
  Copy(map.steps, steps, rank);
  std::memcpy(out, &map, sizeof map);
  return Record(call);
}

std::string Describe(const Map& map) {
  const unsigned steps[] = {map.steps[0], map.steps[1], map.steps[2], map.steps[3], map.steps[4]};
  std::ostringstream out;
  out << "{\"address\": " << map.address << ", \"mode\": \"" << kModes[map.mode] << "\", \"dtype\": " << +map.dtype
      << ", \"interleave\": " << +map.interleave << ", \"swizzle\": " << +map.swizzle << ", \"l2\": " << +map.l2
      << ", \"fill\": " << +map.fill << ", \"dims\": " << List(map.dims, map.rank)
      << ", \"strides\": " << List(map.strides, map.rank - 1) << ", \"element_strides\": " << List(steps, map.rank);
  if (map.mode == 0) {
    out << ", \"box\": " << List(map.box, map.rank);
  } else {
    const size_t corners = map.mode == 1 ? map.rank - 2 : 1;
    out << ", \"lower\": " << List(map.lower, corners) << ", \"upper\": " << List(map.upper, corners)
        << ", \"channels\": " << map.channels << ", \"pixels\": " << map.pixels;
  }
  return out.str() + "}";
}

}  // namespace

extern "C" {

const char* fake_log() { return log_text.c_str(); }
void fake_reset() {
  std::lock_guard lock(mutex);
  log_text.clear();
  failing_call.clear();
}
void fake_fail(const char* call, int status) {
  failing_call = call;
  failing_status = static_cast<CUresult>(status);
}

CUresult cuInit(unsigned) { return Record("cuInit"); }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** text) { return *text = "CUDA_ERROR_FAKE", CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "the test asked for it", CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext context) { return current = context, Record("push"); }
CUresult cuCtxPopCurrent(CUcontext* context) {
  *context = current;
  current = nullptr;
  return Record("pop");
}
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return current == the_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return *value = 132, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  return std::strncpy(name, "NVIDIA H200", size), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = the_context, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream) { return Record("cuStreamSynchronize"); }
CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  *address = reinterpret_cast<CUdeviceptr>(::operator new(size, std::align_val_t(256)));
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
  ::operator delete(reinterpret_cast<void*>(address), std::align_val_t(256));
  return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr address, unsigned word, size_t count, CUstream) {
  std::fill_n(reinterpret_cast<unsigned*>(address), count, word);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  return std::memcpy(to, reinterpret_cast<const void*>(from), size), CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::swap(*mode, thread_mode);
  return Record(thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED ? "relax" : "restore");
}
CUresult cuStreamGetCtx(CUstream, CUcontext* context) { return *context = the_context, CUDA_SUCCESS; }

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*,
                           void**, unsigned) {
  uint32_t length;
  if (std::memcmp(code, "FAKE", 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  std::memcpy(&length, static_cast<const char*>(code) + 4, 4);
  std::string bytes(static_cast<const char*>(code), length), hex;
  for (unsigned char byte : bytes) hex += "0123456789abcdef"[byte >> 4], hex += "0123456789abcdef"[byte & 15];
  *library = reinterpret_cast<CUlibrary>(new int);
  return Record("cuLibraryLoadData", "\"cubin\": \"" + hex + "\"");
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) {
  static std::set<std::string>& names = *new std::set<std::string>;
  std::lock_guard lock(mutex);
  if (std::string(name) == "missing") return CUDA_ERROR_NOT_FOUND;
  *kernel = reinterpret_cast<CUkernel>(const_cast<char*>(names.insert(name).first->c_str()));
  return Record("cuLibraryGetKernel");
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return current == the_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  const std::string signature = LastPart(reinterpret_cast<const char*>(kernel));
  if (index >= signature.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *size = signature[index] == 'm' ? 128 : signature[index] == 'i' || signature[index] == 'f' ? 4 : 8;
  return CUDA_SUCCESS;
}
CUresult cuKernelSetAttribute(CUfunction_attribute, int value, CUkernel, CUdevice) {
  return Record("cuKernelSetAttribute", "\"value\": " + std::to_string(value));
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  Map map{};
  Copy(map.box, box, rank);
  return Encode("cuTensorMapEncodeTiled", out, dtype, rank, address, dims, strides, steps, interleave, swizzle, l2,
                fill, map);
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap* out, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                                 const cuuint64_t* dims, const cuuint64_t* strides, const int* lower, const int* upper,
                                 cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* steps,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  Map map{};
  map.mode = 1, map.channels = channels, map.pixels = pixels;
  Copy(map.lower, lower, rank - 2);
  Copy(map.upper, upper, rank - 2);
  return Encode("cuTensorMapEncodeIm2col", out, dtype, rank, address, dims, strides, steps, interleave, swizzle, l2,
                fill, map);
}
CUresult cuTensorMapEncodeIm2colWide(CUtensorMap* out, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                                     const cuuint64_t* dims, const cuuint64_t* strides, int lower, int upper,
                                     cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* steps,
                                     CUtensorMapInterleave interleave, CUtensorMapIm2ColWideMode mode,
                                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
                                     CUtensorMapFloatOOBfill fill) {
  Map map{};
  map.mode = mode == CU_TENSOR_MAP_IM2COL_WIDE_MODE_W ? 2 : 3, map.channels = channels, map.pixels = pixels;
  Copy(map.lower, &lower, 1);
  Copy(map.upper, &upper, 1);
  return Encode("cuTensorMapEncodeIm2colWide", out, dtype, rank, address, dims, strides, steps, interleave, swizzle, l2,
                fill, map);
}
CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  if (reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(address) % 16)
    return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &address, sizeof address);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** values, void**) {
  if (current != the_context) return CUDA_ERROR_INVALID_CONTEXT;
  unsigned cluster[3] = {0, 0, 0};  // all zero: no attribute
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) return CUDA_ERROR_INVALID_VALUE;
    const auto& dims = config->attrs[i].value.clusterDim;
    cluster[0] = dims.x, cluster[1] = dims.y, cluster[2] = dims.z;
  }
  const char* name = reinterpret_cast<const char*>(function);
  const unsigned grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  const unsigned block[] = {config->blockDimX, config->blockDimY, config->blockDimZ};
  std::ostringstream out;
  out << "\"kernel\": \"" << name << "\", \"grid\": " << List(grid, 3) << ", \"block\": " << List(block, 3)
      << ", \"cluster\": " << List(cluster, 3) << ", \"shared_bytes\": " << config->sharedMemBytes << ", \"params\": [";
  const std::string signature = LastPart(name);
  for (size_t i = 0; i < signature.size(); ++i) {
    out << (i ? ", " : "");
    switch (signature[i]) {
      case 'm': {
        Map map;
        std::memcpy(&map, values[i], sizeof map);
        out << Describe(map);
        break;
      }
      case 'i':
        out << *static_cast<int32_t*>(values[i]);
        break;
      case 'f':
        out << *static_cast<uint32_t*>(values[i]);
        break;
      default:
        out << *static_cast<int64_t*>(values[i]);
    }
  }
  out << "]";
  return Record("cuLaunchKernelEx", out.str());
}

}  // extern "C"
