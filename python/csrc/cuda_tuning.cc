// The switch of tuning, and the choices that Python measures.
#include "cuda_tuning.h"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "boxed.h"
#include "cuda_stream.h"
#include "onepass/cuda.h"

namespace onepass::torch_binding {
namespace {

std::atomic<bool> tuning{false};

bool set_tuning(bool wanted) { return tuning.exchange(wanted); }

std::string remembered_choice(int64_t device, const std::string& question) {
  return cuda::remembered_choice(static_cast<int>(device), question);
}

// An operator returns something.
bool remember_choice(int64_t device, const std::string& question, const std::string& answer) {
  cuda::remember_choice(static_cast<int>(device), question, answer);
  return true;
}

}  // namespace

PlanOptions plan_options(int device) {
  PlanOptions options;
  options.tune = tuning && !cuda::is_captured(device, current_stream(device));
  return options;
}

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, library) {
  library.def("cuda_set_tuning(bool wanted) -> bool");
  library.def("cuda_remembered_choice(int device, str question) -> str");
  library.def("cuda_remember_choice(int device, str question, str answer) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, library) {
  library.impl("cuda_set_tuning", boxed<set_tuning>);
  library.impl("cuda_remembered_choice", boxed<remembered_choice>);
  library.impl("cuda_remember_choice", boxed<remember_choice>);
}

}  // namespace onepass::torch_binding
