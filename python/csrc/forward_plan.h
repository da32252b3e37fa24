// Plans of a CPU, and the run of a forward one on PyTorch's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "onepass/onepass.h"
#include "plan_cache.h"
#include "problem.h"
#include "torch_tensor.h"

namespace onepass::torch_binding {

// PyTorch's number of a type, as operators take it.
using TorchDType = torch::headeronly::ScalarType;

struct ForwardPlan {
  Plan plan;
  std::vector<bool> copied;
  TensorSpec statistics;
  uint64_t packing;  // of the plan
};

// For so many threads, or one where the run is short.
Plan plan_for_threads(Problem problem, int threads, const PlanOptions& options = {});
BackwardPlan plan_for_threads(BackwardProblem problem, int threads);

PlanKey key_of(const std::string& block, const CallTensors& call, int threads);
PlanKey key_of(const std::string& block, const CallTensors& call, DType out_dtype, int threads);
ForwardPlan make_forward(const std::string& block, const CallSpecs& specs, DType out_dtype, int threads);
std::shared_ptr<const ForwardPlan> forward_plan(const std::string& block, const CallTensors& call,
                                                std::optional<TorchDType> out_dtype, int threads);

// The workspace of one run. To ask PyTorch for memory takes a microsecond: a small one is on the stack.
class Workspace {
 public:
  explicit Workspace(size_t bytes) {
    if (bytes > sizeof(small_)) large_.emplace(empty_bytes(bytes, {}));
  }
  void* data() { return large_ ? large_->mutable_data_ptr() : small_; }

 private:
  alignas(64) std::byte small_[8192];
  std::optional<Tensor> large_;
};

// `packed`: weights that the plan has packed before, or null.
Tensor run_forward(const ForwardPlan& prepared, const Tensor& input, std::span<const Tensor> parameters,
                   float* statistics, const void* packed = nullptr);

}  // namespace onepass::torch_binding
