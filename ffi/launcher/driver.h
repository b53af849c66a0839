// libcuda, opened at run time, so that the extension imports on a machine without a driver.
#pragma once

#include <cuda.h>

#include <string>
#include <string_view>

#include "error.h"
#include "xla/ffi/api/ffi.h"

namespace cutjax {

// cuda.h renames some functions to a version of theirs (cuCtxPushCurrent is cuCtxPushCurrent_v2). Both the members and
// the symbols looked up go through the same renaming, so a type always belongs to its symbol.
#define CUTJAX_DRIVER_FUNCTIONS(F)     \
  F(cuInit)                            \
  F(cuDriverGetVersion)                \
  F(cuGetErrorName)                    \
  F(cuGetErrorString)                  \
  F(cuCtxGetCurrent)                   \
  F(cuCtxPushCurrent)                  \
  F(cuCtxPopCurrent)                   \
  F(cuCtxGetDevice)                    \
  F(cuDeviceGetAttribute)              \
  F(cuStreamGetCtx)                    \
  F(cuThreadExchangeStreamCaptureMode) \
  F(cuLibraryLoadData)                 \
  F(cuLibraryGetKernel)                \
  F(cuKernelGetFunction)               \
  F(cuKernelSetAttribute)              \
  F(cuTensorMapEncodeTiled)            \
  F(cuTensorMapEncodeIm2col)           \
  F(cuTensorMapReplaceAddress)         \
  F(cuLaunchKernelEx)

struct Driver {
#define CUTJAX_MEMBER(name) decltype(&::name) name = nullptr;
  CUTJAX_DRIVER_FUNCTIONS(CUTJAX_MEMBER)
  CUTJAX_MEMBER(cuKernelGetParamInfo)         // since CUDA 12.4; null on an older driver
  CUTJAX_MEMBER(cuTensorMapEncodeIm2colWide)  // since CUDA 12.8
#undef CUTJAX_MEMBER

  // The failed call as an error: file, line, expression, the driver's name and text for the status, and the kernel.
  ffi::Error Error(CUresult status, const char* file, int line, const char* expression, std::string_view kernel) const;
};

// The process's driver, opened and initialised by the first call.
ffi::ErrorOr<const Driver*> GetDriver();

// Opens `path` in place of libcuda.so.1; for tests. False, and nothing changes, if a driver is open already.
bool SetDriverPath(std::string path);

// Calls a driver function and returns its failure from the enclosing function.
#define CUTJAX_CUDA(driver, kernel, call)                                                       \
  if (CUresult cutjax_status = (driver).call; cutjax_status != CUDA_SUCCESS) {                  \
    return ::cutjax::AsError((driver).Error(cutjax_status, __FILE__, __LINE__, #call, kernel)); \
  }

}  // namespace cutjax
