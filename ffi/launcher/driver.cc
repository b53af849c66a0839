#include "driver.h"

#include <dlfcn.h>

#include <mutex>

namespace cutjax {
namespace {

std::mutex driver_mutex;
std::string driver_path = "libcuda.so.1";
bool driver_opened = false;

#define CUTJAX_STRING_(x) #x
#define CUTJAX_STRING(x) CUTJAX_STRING_(x)

ffi::ErrorOr<const Driver*> Open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return AsError(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                              "cutjax: cannot open the NVIDIA driver " + path + ": " + (reason ? reason : "unknown")));
  }

  static Driver driver;
#define CUTJAX_LOAD(name) driver.name = reinterpret_cast<decltype(driver.name)>(dlsym(library, CUTJAX_STRING(name)));
#define CUTJAX_LOAD_REQUIRED(name)                                                                        \
  CUTJAX_LOAD(name)                                                                                       \
  if (driver.name == nullptr) {                                                                           \
    return AsError(ffi::Error(ffi::ErrorCode::kFailedPrecondition,                                        \
                              "cutjax: the NVIDIA driver " + path +                                       \
                                  " has no " CUTJAX_STRING(name) "; "                                     \
                                                                 "CUDA 12.0 (R525) or newer is needed")); \
  }
  CUTJAX_DRIVER_FUNCTIONS(CUTJAX_LOAD_REQUIRED)
  CUTJAX_LOAD(cuKernelGetParamInfo)
  CUTJAX_LOAD(cuTensorMapEncodeIm2colWide)
#undef CUTJAX_LOAD_REQUIRED
#undef CUTJAX_LOAD

  CUTJAX_CUDA(driver, "", cuInit(0));
  return &driver;
}

}  // namespace

ffi::Error Driver::Error(CUresult status, const char* file, int line, const char* expression,
                         std::string_view kernel) const {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(status, &name);
  cuGetErrorString(status, &text);
  std::string message = std::string(file) + ":" + std::to_string(line) + ": " + expression + ": " +
                        (name ? name : "CUresult " + std::to_string(static_cast<int>(status))) +
                        (text ? std::string(" (") + text + ")" : "");
  if (!kernel.empty()) message += ", kernel " + std::string(kernel);
  return ffi::Error::Internal(std::move(message));
}

ffi::ErrorOr<const Driver*> GetDriver() {
  std::lock_guard lock(driver_mutex);
  driver_opened = true;
  static const ffi::ErrorOr<const Driver*>& result = *new ffi::ErrorOr<const Driver*>(Open(driver_path));
  return result;
}

bool SetDriverPath(std::string path) {
  std::lock_guard lock(driver_mutex);
  if (driver_opened) return false;
  driver_path = std::move(path);
  return true;
}

}  // namespace cutjax
