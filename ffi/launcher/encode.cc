#include "encode.h"

#include "error.h"

namespace cutjax {

ffi::Error EncodeMap(const Driver& driver, const TensorMap& map, const std::string& kernel, void* address,
                     CUtensorMap& encoded) {
  switch (map.mode) {
    case TensorMap::Mode::kTiled:
      CUTJAX_CUDA(driver, kernel,
                  cuTensorMapEncodeTiled(&encoded, map.dtype, map.rank, address, map.dims, map.strides, map.box,
                                         map.element_strides, map.interleave, map.swizzle, map.l2_promotion, map.fill));
      break;
    case TensorMap::Mode::kIm2col:
      CUTJAX_CUDA(driver, kernel,
                  cuTensorMapEncodeIm2col(&encoded, map.dtype, map.rank, address, map.dims, map.strides, map.lower,
                                          map.upper, map.channels, map.pixels, map.element_strides, map.interleave,
                                          map.swizzle, map.l2_promotion, map.fill));
      break;
    case TensorMap::Mode::kIm2colW:
    case TensorMap::Mode::kIm2colW128: {
      if (driver.cuTensorMapEncodeIm2colWide == nullptr) {
        return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                          "cutjax_launch: kernel " + kernel +
                              ": the NVIDIA driver has no cuTensorMapEncodeIm2colWide; CUDA 12.8 (R570) or newer is "
                              "needed");
      }
      const auto mode = map.mode == TensorMap::Mode::kIm2colW ? CU_TENSOR_MAP_IM2COL_WIDE_MODE_W
                                                              : CU_TENSOR_MAP_IM2COL_WIDE_MODE_W128;
      CUTJAX_CUDA(driver, kernel,
                  cuTensorMapEncodeIm2colWide(&encoded, map.dtype, map.rank, address, map.dims, map.strides,
                                              map.lower[0], map.upper[0], map.channels, map.pixels, map.element_strides,
                                              map.interleave, mode, map.swizzle, map.l2_promotion, map.fill));
      break;
    }
  }
  return ffi::Error::Success();
}

}  // namespace cutjax
