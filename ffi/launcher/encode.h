// Tensor maps, encoded by the driver.
#pragma once

#include <cuda.h>

#include <string>

#include "driver.h"
#include "plan.h"

namespace cutjax {

// Encodes a tensor map at an address. An error names the kernel whose parameter it is.
ffi::Error EncodeMap(const Driver& driver, const TensorMap& map, const std::string& kernel, void* address,
                     CUtensorMap& encoded);

}  // namespace cutjax
