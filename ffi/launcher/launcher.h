// The handlers of the custom call cutjax_launch.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace cutjax {

namespace ffi = ::xla::ffi;

// The type of the state that Instantiate makes, to be registered with XLA.
ffi::TypeId* StateTypeId();
ffi::TypeInfo* StateTypeInfo();

XLA_FFI_DECLARE_HANDLER_SYMBOL(CutjaxInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CutjaxInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CutjaxExecute);
// Execute on XLA's CPU, which has no stream: the null stream stands in. For tests against a stand-in libcuda.
XLA_FFI_DECLARE_HANDLER_SYMBOL(CutjaxRehearse);

}  // namespace cutjax
