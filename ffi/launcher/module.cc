// The Python module cutjax._ffi: capsules for jax.ffi, and what tests need.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "driver.h"
#include "launcher.h"
#include "plan.h"

namespace nb = nanobind;

namespace cutjax {
namespace {

using Words = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

ffi::Span<const int64_t> AsSpan(const Words& words) { return {words.data(), words.size()}; }

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict Handlers() {
  nb::dict stages;
  stages["instantiate"] = Capsule(CutjaxInstantiate);
  stages["initialize"] = Capsule(CutjaxInitialize);
  stages["execute"] = Capsule(CutjaxExecute);
  return stages;
}

nb::dict RehearsalHandlers() {
  nb::dict stages;
  stages["instantiate"] = Capsule(CutjaxInstantiate);
  stages["execute"] = Capsule(CutjaxRehearse);
  return stages;
}

nb::dict StateType() {
  nb::dict type;
  type["type_id"] = nb::capsule(StateTypeId());
  type["type_info"] = nb::capsule(StateTypeInfo());
  return type;
}

std::string CheckPlan(const std::string& kernel, nb::bytes cubin, Words plan, std::optional<int64_t> format) {
  if (ffi::Error error = CheckFormat(format); error.failure()) throw nb::value_error(error.message().c_str());
  auto decoded = DecodePlan({*format, kernel, {static_cast<const char*>(cubin.data()), cubin.size()}, AsSpan(plan)});
  if (!decoded) throw nb::value_error(decoded.error().message().c_str());
  return Describe(*decoded);
}

void LoadDriver(const std::string& path) {
  if (!SetDriverPath(path)) throw nb::value_error("cutjax: a driver is open already");
}

NB_MODULE(_ffi, m) {
  m.def("handlers", &Handlers);
  m.def("rehearsal_handlers", &RehearsalHandlers);
  m.def("state_type", &StateType);
  m.def("check_plan", &CheckPlan, nb::kw_only(), nb::arg("kernel"), nb::arg("cubin"), nb::arg("plan"),
        nb::arg("format") = nb::none());
  m.attr("PLAN_FORMAT") = kPlanFormat;
  m.def("load_driver", &LoadDriver, nb::arg("path"));
}

}  // namespace
}  // namespace cutjax
