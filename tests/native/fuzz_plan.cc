// Altered launch plans, run by the launcher's own handlers against a driver that checks every address it is given.
//
//   fuzz_plan CORPUS SECONDS SEED
//
// Built with AddressSanitizer and UndefinedBehaviorSanitizer by tests/fuzz_plan.py, which writes the corpus: sound
// plans. Each is altered a little, and the program as a call would be: instantiated, initialised and executed with one
// argument and one result. Whatever a plan says, it is refused, or all that the kernel is told lies within these two
// buffers.
#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "driver.h"
#include "launcher.h"
#include "plan.h"

using cutjax::Launch;
using cutjax::Param;
using cutjax::Plan;

namespace {

struct Program {
  int64_t format = 0;
  std::string kernel, cubin;
  std::vector<int64_t> words;
};

#define CHECK(condition)                                                     \
  if (!(condition)) {                                                        \
    std::fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
    std::abort();                                                            \
  }

// ---- the call: buffers, attributes and the few functions of XLA that the handlers use

constexpr int64_t kBufferBytes = 32 * 64 * 4;
alignas(256) std::byte memory[2][kBufferBytes + 256];
std::byte* buffers[2];
void* state = nullptr;
std::string last_error;

struct Allocation {
  std::unique_ptr<char[]> bytes;  // of the exact size: AddressSanitizer sees a read past its end
  size_t size;
  explicit Allocation(const std::string& text) : bytes(new char[text.size() ? text.size() : 1]), size(text.size()) {
    std::memcpy(bytes.get(), text.data(), size);
  }
};

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api a{};
    a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    a.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    a.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return reinterpret_cast<XLA_FFI_Error*>(new std::string(args->message));
    };
    a.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = reinterpret_cast<std::string*>(args->error)->c_str();
    };
    a.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) {
      delete reinterpret_cast<std::string*>(args->error);
    };
    a.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) -> XLA_FFI_Error* {
      state = args->state;
      return nullptr;
    };
    a.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
      args->state = state;
      return nullptr;
    };
    a.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = nullptr;
      return nullptr;
    };
    a.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      args->device_ordinal = 0;
      return nullptr;
    };
    return a;
  }();
  return &api;
}

// Calls a handler; true if it succeeded.
bool Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, XLA_FFI_Attrs attrs) {
  static int64_t dims[2] = {32, 64};
  XLA_FFI_Buffer arrays[2];
  for (int i = 0; i < 2; ++i) {
    arrays[i] = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, buffers[i], 2, dims};
  }
  XLA_FFI_ArgType arg_type = XLA_FFI_ArgType_BUFFER;
  XLA_FFI_RetType ret_type = XLA_FFI_RetType_BUFFER;
  void *arg = &arrays[0], *ret = &arrays[1];
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.stage = stage;
  const bool runs = stage != XLA_FFI_ExecutionStage_INSTANTIATE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, runs, &arg_type, &arg};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, runs, &ret_type, &ret};
  frame.attrs = attrs;
  auto* error = reinterpret_cast<std::string*>(handler(&frame));
  if (error == nullptr) return true;
  last_error = std::move(*error);
  delete error;
  return false;
}

// ---- the driver

const Plan* plan = nullptr;  // of the program that runs, as the decoder reads it
size_t kernels_found = 0;
int64_t launched = 0, refused = 0, maps_encoded = 0;
std::vector<std::string> images;  // the cubins of the corpus

struct Encoded {  // what is in a CUtensorMap of this driver
  uintptr_t address;
  unsigned __int128 bytes;
  uintptr_t alignment;
};
static_assert(sizeof(Encoded) <= sizeof(CUtensorMap));

CUresult Encode(CUtensorMap* out, CUtensorMapDataType dtype, cuuint32_t rank, void* address, const cuuint64_t* dims,
                const cuuint64_t* strides, CUtensorMapInterleave interleave) {
  static constexpr int kBits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
  CHECK(rank >= 1 && rank <= 5);
  CHECK(static_cast<size_t>(dtype) < std::size(kBits));
  unsigned __int128 bytes = (static_cast<unsigned __int128>(dims[0]) * kBits[dtype] + 7) / 8;
  for (cuuint32_t i = 1; i < rank; ++i) bytes += static_cast<unsigned __int128>(dims[i] - 1) * strides[i - 1];
  const uintptr_t alignment = interleave == CU_TENSOR_MAP_INTERLEAVE_32B || dtype >= 14 ? 32 : 16;
  CHECK(reinterpret_cast<uintptr_t>(address) % alignment == 0);
  Encoded encoded{reinterpret_cast<uintptr_t>(address), bytes, alignment};
  std::memcpy(out, &encoded, sizeof encoded);
  ++maps_encoded;
  return CUDA_SUCCESS;
}

// True if so many bytes from an address are of a buffer of the call.
bool IsInside(uintptr_t address, unsigned __int128 bytes, int64_t buffer) {
  CHECK(buffer == 0 || buffer == 1);
  const auto first = reinterpret_cast<uintptr_t>(buffers[buffer]);
  return address >= first && bytes <= kBufferBytes && address - first <= kBufferBytes - static_cast<uintptr_t>(bytes);
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** name) { return *name = "CUDA_ERROR_FAKE", CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "refused", CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = nullptr, CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext* context) { return *context = nullptr, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return *value = 132, CUDA_SUCCESS; }
CUresult cuStreamGetCtx(CUstream, CUcontext* context) { return *context = nullptr, CUDA_SUCCESS; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*,
                           void**, unsigned) {
  for (const std::string& image : images) {  // the code that is handed over has no size: it says so itself
    if (std::strncmp(static_cast<const char*>(code), image.c_str(), image.size() + 1) == 0) {
      *library = reinterpret_cast<CUlibrary>(1);
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char*) {
  *kernel = reinterpret_cast<CUkernel>(++kernels_found);  // in the order of the plan's launches
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
CUresult cuKernelSetAttribute(CUfunction_attribute, int bytes, CUkernel, CUdevice) {
  CHECK(bytes >= 0 && bytes <= 1 << 20);
  return CUDA_SUCCESS;
}
CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  const Launch& launch = plan->launches.at(reinterpret_cast<size_t>(kernel) - 1);
  *offset = 0;
  *size = launch.params.at(index).size_bytes();  // whether they are the kernel's is not asked here
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t*, const cuuint32_t*,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  return Encode(out, dtype, rank, address, dims, strides, interleave);
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap* out, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                                 const cuuint64_t* dims, const cuuint64_t* strides, const int*, const int*, cuuint32_t,
                                 cuuint32_t, const cuuint32_t*, CUtensorMapInterleave interleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return Encode(out, dtype, rank, address, dims, strides, interleave);
}
CUresult cuTensorMapEncodeIm2colWide(CUtensorMap* out, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                                     const cuuint64_t* dims, const cuuint64_t* strides, int, int, cuuint32_t,
                                     cuuint32_t, const cuuint32_t*, CUtensorMapInterleave interleave,
                                     CUtensorMapIm2ColWideMode, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                     CUtensorMapFloatOOBfill) {
  return Encode(out, dtype, rank, address, dims, strides, interleave);
}
CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  Encoded encoded;
  std::memcpy(&encoded, map, sizeof encoded);
  encoded.address = reinterpret_cast<uintptr_t>(address);
  std::memcpy(map, &encoded, sizeof encoded);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** values, void**) {
  const Launch& launch = plan->launches.at(reinterpret_cast<size_t>(function) - 1);
  CHECK(config->gridDimX >= 1 && config->gridDimX <= launch.grid[0]);
  CHECK(config->blockDimX * config->blockDimY * config->blockDimZ <= 1024);
  for (size_t i = 0; i < launch.params.size(); ++i) {
    const Param& param = launch.params[i];
    if (param.kind == Param::Kind::kPointer) {
      CHECK(IsInside(*static_cast<uintptr_t*>(values[i]), 0, param.buffer));
    } else if (param.kind == Param::Kind::kTensorMap) {
      Encoded encoded;
      std::memcpy(&encoded, values[i], sizeof encoded);
      CHECK(IsInside(encoded.address, encoded.bytes, param.buffer));
      CHECK(encoded.address % encoded.alignment == 0);
    } else {
      CHECK(std::memcmp(values[i], &param.value, param.size_bytes()) == 0);
    }
  }
  ++launched;
  return CUDA_SUCCESS;
}

}  // extern "C"

namespace {

// ---- alterations

using Random = std::mt19937_64;

int64_t Pick(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

int64_t Word(Random& random, int64_t old) {
  static constexpr int64_t kEdges[] = {0,
                                       1,
                                       2,
                                       3,
                                       4,
                                       5,
                                       8,
                                       15,
                                       16,
                                       17,
                                       31,
                                       32,
                                       33,
                                       48,
                                       49,
                                       63,
                                       64,
                                       128,
                                       255,
                                       256,
                                       257,
                                       1023,
                                       1024,
                                       8176,
                                       8191,
                                       8192,
                                       8193,
                                       65535,
                                       65536,
                                       INT32_MAX,
                                       int64_t{1} << 31,
                                       UINT32_MAX,
                                       int64_t{1} << 32,
                                       int64_t{1} << 40,
                                       INT64_MAX - 15,
                                       INT64_MAX};
  switch (Pick(random, 0, 4)) {
    case 0:
      return kEdges[Pick(random, 0, std::size(kEdges) - 1)];
    case 1:
      return -kEdges[Pick(random, 0, std::size(kEdges) - 1)];
    case 2:
      return static_cast<int64_t>(static_cast<uint64_t>(old) ^ uint64_t{1} << Pick(random, 0, 63));
    case 3:
      return static_cast<int64_t>(static_cast<uint64_t>(old) + static_cast<uint64_t>(Pick(random, -64, 64)));
    default:
      return static_cast<int64_t>(static_cast<uint64_t>(old) * 2);
  }
}

void Alter(Random& random, Program& program, const std::vector<Program>& corpus) {
  std::vector<int64_t>& words = program.words;
  const auto place = [&] { return Pick(random, 0, static_cast<int64_t>(words.size()) - 1); };
  const int64_t kind = words.empty() ? 17 : Pick(random, 0, 19);
  if (kind < 12) {
    int64_t& word = words[place()];
    word = Word(random, word);
  } else if (kind == 12) {
    words.erase(words.begin() + place());
  } else if (kind == 13) {
    words.insert(words.begin() + place(), Word(random, words[place()]));
  } else if (kind == 14) {
    words.resize(place());
  } else if (kind == 15) {  // another's end
    const std::vector<int64_t>& other = corpus[Pick(random, 0, corpus.size() - 1)].words;
    const int64_t from = Pick(random, 0, static_cast<int64_t>(other.size()) - 1);
    words.resize(place());
    words.insert(words.end(), other.begin() + from, other.end());
  } else if (kind == 16) {
    std::swap(words[place()], words[place()]);
  } else if (kind == 17) {
    program.format = Pick(random, 0, 9) ? Pick(random, 1, 2) : Word(random, program.format);
  } else if (kind == 18) {
    program.kernel.insert(Pick(random, 0, program.kernel.size()), 1, " a\t\0\xff"[Pick(random, 0, 4)]);
  } else {
    program.cubin.resize(Pick(random, 0, 2 * program.cubin.size()), 'x');
  }
}

// ---- a run

// A program as a call has it, or, if it is not sound, with other attributes now and then.
void Run(Random& random, const Program& program, bool sound) {
  for (int i = 0; i < 2; ++i) buffers[i] = memory[i] + (Pick(random, 0, 7) ? 0 : 8 * Pick(random, 1, 31));
  const Allocation kernel(program.kernel), cubin(program.cubin);
  std::vector<int64_t> words(program.words);
  words.shrink_to_fit();
  int64_t format = program.format;

  const auto decoded = cutjax::DecodePlan(
      {format, {kernel.bytes.get(), kernel.size}, {cubin.bytes.get(), cubin.size}, {words.data(), words.size()}});
  if (decoded) CHECK(!cutjax::Describe(*decoded).empty());
  plan = decoded ? &*decoded : nullptr;
  kernels_found = 0;

  XLA_FFI_ByteSpan name_cubin{"cubin", 5}, name_format{"format", 6}, name_kernel{"kernel", 6}, name_plan{"plan", 4};
  XLA_FFI_ByteSpan text{kernel.bytes.get(), kernel.size}, code{cubin.bytes.get(), cubin.size};
  XLA_FFI_Scalar number{XLA_FFI_DataType_S64, &format};
  XLA_FFI_Array array{XLA_FFI_DataType_S64, words.size(), words.data()};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_STRING, XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_STRING,
                              XLA_FFI_AttrType_ARRAY};
  XLA_FFI_ByteSpan* names[] = {&name_cubin, &name_format, &name_kernel, &name_plan};
  void* values[] = {&code, &number, &text, &array};
  int64_t count = 4;
  switch (sound ? 99 : Pick(random, 0, 99)) {
    case 0:
      array.dtype = XLA_FFI_DataType_S32;
      break;
    case 1:
      number.dtype = XLA_FFI_DataType_S32;
      break;
    case 2:
      std::swap(types[0], types[3]);
      std::swap(values[0], values[3]);
      break;
    case 3:
      count = Pick(random, 0, 3);
      break;
  }
  const XLA_FFI_Attrs attrs{XLA_FFI_Attrs_STRUCT_SIZE, nullptr, count, types, names, values};
  const XLA_FFI_Attrs none{XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 0, nullptr, nullptr, nullptr};

  state = nullptr;
  last_error.clear();
  const int64_t before = launched;
  bool ran = Call(cutjax::CutjaxInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE, attrs);
  if (ran) {
    CHECK(plan != nullptr);
    ran = Call(cutjax::CutjaxInitialize, XLA_FFI_ExecutionStage_INITIALIZE, none) &&
          Call(cutjax::CutjaxExecute, XLA_FFI_ExecutionStage_EXECUTE, none);
  }
  if (state != nullptr) cutjax::StateTypeInfo()->deleter(state);
  CHECK(ran == last_error.empty());
  CHECK(!ran || launched > before);
  refused += !ran;
}

// A corpus is, of each program, five numbers (format; sizes of kernel, cubin and words) and what they are the sizes of.
std::vector<Program> Read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<Program> corpus;
  int64_t sizes[4];
  while (file.read(reinterpret_cast<char*>(sizes), sizeof sizes)) {
    Program& program = corpus.emplace_back();
    program.format = sizes[0];
    program.kernel.resize(sizes[1]);
    program.cubin.resize(sizes[2]);
    program.words.resize(sizes[3]);
    file.read(program.kernel.data(), sizes[1]);
    file.read(program.cubin.data(), sizes[2]);
    file.read(reinterpret_cast<char*>(program.words.data()), 8 * sizes[3]);
  }
  return corpus;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 4);
  const std::vector<Program> corpus = Read(argv[1]);
  CHECK(!corpus.empty());
  for (const Program& program : corpus) {
    const auto sound = cutjax::DecodePlan(
        {program.format, program.kernel, program.cubin, {program.words.data(), program.words.size()}});
    CHECK(sound);
    for (const Launch& x : sound->launches) images.push_back(program.cubin.substr(x.cubin_offset, x.cubin_bytes));
  }
  CHECK(cutjax::SetDriverPath(""));    // this program
  cutjax::StateTypeId()->type_id = 1;  // as XLA registers it
  Random random(std::strtoull(argv[3], nullptr, 10));

  for (const Program& program : corpus) {  // as they are, all run
    do Run(random, program, true);
    while (last_error.find("aligned, as TMA needs") != std::string::npos);
    if (!last_error.empty()) std::fprintf(stderr, "%s\n", last_error.c_str());
    CHECK(last_error.empty());
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::strtod(argv[2], nullptr));
  int64_t runs = 0;
  launched = refused = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    Program program = corpus[Pick(random, 0, corpus.size() - 1)];
    for (int64_t i = Pick(random, 1, 4); i > 0; --i) Alter(random, program, corpus);
    Run(random, program, false);
  }
  std::printf("%ld altered plans: %ld refused, %ld launches, %ld tensor maps, each within its buffer\n", runs, refused,
              launched, maps_encoded);
  CHECK(refused > runs / 10 && launched > runs / 100);
  return 0;
}
