// Plans of a CPU, and the run of a forward one on PyTorch's memory.
#include "forward_plan.h"

#include <algorithm>
#include <utility>

#include "torch_executor.h"

namespace onepass::torch_binding {
namespace {

// A predicted run this short stays on the calling thread: to wake PyTorch's pool takes 5 to 20 microseconds.
// Results do not depend on the number of threads.
constexpr double least_seconds_to_share = 30e-6;

template <class AnyPlan>
bool is_short(const AnyPlan& plan) {
  const auto is_chosen = [&](const Candidate& row) { return row.strategy == plan.strategy(); };
  return std::ranges::find_if(plan.candidates(), is_chosen)->seconds < least_seconds_to_share;
}

}  // namespace

Plan plan_for_threads(Problem problem, int threads, const PlanOptions& options) {
  problem.device = Device::cpu(1);
  Plan serial = plan(problem, options);
  if (threads == 1 || is_short(serial)) return serial;
  problem.device = Device::cpu(threads);
  return plan(problem, options);
}

BackwardPlan plan_for_threads(BackwardProblem problem, int threads) {
  problem.forward.device = Device::cpu(1);
  BackwardPlan serial = plan_backward(problem);
  if (threads == 1 || is_short(serial)) return serial;
  problem.forward.device = Device::cpu(threads);
  return plan_backward(problem);
}

PlanKey key_of(const std::string& block, const CallTensors& call, int threads) {
  PlanKey key(block, threads);
  call.add_to(key);
  return key;
}

PlanKey key_of(const std::string& block, const CallTensors& call, DType out_dtype, int threads) {
  PlanKey key = key_of(block, call, threads);
  key.add(static_cast<int64_t>(out_dtype));
  return key;
}

ForwardPlan make_forward(const std::string& block, const CallSpecs& specs, DType out_dtype, int threads) {
  CallProblem call(block, specs, out_dtype, Copies::few);
  Plan made = plan_for_threads(call.problem, threads);
  const uint64_t packing = made.packing();
  return {std::move(made), std::move(call.copied), statistics_spec(call.problem), packing};
}

std::shared_ptr<const ForwardPlan> forward_plan(const std::string& block, const CallTensors& call,
                                                std::optional<TorchDType> out_dtype, int threads) {
  static PlanCache<ForwardPlan> cache;
  const DType out = dtype_of(out_dtype.value_or(call.input.scalar_type()));
  return cache.get(key_of(block, call, out, threads),
                   [&] { return make_forward(block, call.specs(), out, threads); });
}

Tensor run_forward(const ForwardPlan& prepared, const Tensor& input, std::span<const Tensor> parameters,
                   float* statistics, const void* packed) {
  const Plan& plan = prepared.plan;
  ReadParameters read(parameters, prepared.copied);
  Tensor output = empty(plan.problem().output);
  Workspace workspace(plan.workspace_bytes());
  TorchExecutor executor(plan.problem().device.threads);
  Arguments arguments{input.const_data_ptr(), output.mutable_data_ptr(), read.take_addresses(), statistics};
  arguments.packed = packed;
  plan.run(arguments, workspace.data(), executor);
  return output;
}

}  // namespace onepass::torch_binding
