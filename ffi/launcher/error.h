// Errors are values; these return them early.
#pragma once

#include <utility>

#include "xla/ffi/api/ffi.h"

namespace cutjax {

namespace ffi = ::xla::ffi;

#define CUTJAX_RETURN_IF_ERROR(expression) \
  if (::xla::ffi::Error error = (expression); error.failure()) return error

// Converts to both ffi::Error and ffi::ErrorOr<T>, so that one macro serves functions that return either.
struct AsError {
  explicit AsError(ffi::Error error) : error(std::move(error)) {}
  operator ffi::Error() && { return std::move(error); }  // NOLINT(google-explicit-constructor)
  template <typename T>
  operator ffi::ErrorOr<T>() && {  // NOLINT(google-explicit-constructor)
    return ffi::Unexpected(std::move(error));
  }
  ffi::Error error;
};

}  // namespace cutjax
