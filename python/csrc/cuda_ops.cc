// The operators on CUDA tensors: blocks without a convolution, and whole ones where the convolution is thin,
// on the current stream of the tensors' GPU. All memory, the workspace included, is PyTorch's: its allocator
// orders reuse by stream and serves graph captures.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "boxed.h"
#include "cuda_counters.h"
#include "cuda_problem.h"
#include "cuda_stream.h"
#include "cuda_tuning.h"
#include "onepass/cuda.h"
#include "onepass/onepass.h"
#include "plan_cache.h"

namespace onepass::torch_binding {
namespace {

using TorchDType = torch::headeronly::ScalarType;

struct CudaForward {
  Plan plan;
  Layout layout;
  std::vector<bool> copied;
  TensorSpec statistics;
};

struct CudaBackward {
  BackwardPlan plan;
  Layout layout;
  std::vector<bool> copied;
  bool copies_output_gradient;
  TensorSpec statistics;
};

PlanKey key_of(const std::string& block, const CallTensors& call, const std::string& numerics) {
  PlanKey key(block, call.place.index);
  key.add(numerics);
  call.add_to(key);
  return key;
}

PlanKey key_of(const std::string& block, const CallTensors& call, const std::string& numerics,
               const Tensor& output_gradient, const std::vector<bool>& wanted) {
  PlanKey key = key_of(block, call, numerics);
  key.add(output_gradient);
  for (const bool want : wanted) key.add(want);
  return key;
}

CudaForward make_forward(const std::string& block, const CallSpecs& specs, DType out_dtype,
                         const std::string& numerics, int device) {
  CudaProblem call(block, specs, out_dtype, numerics, device);
  TensorSpec statistics = statistics_spec(call.problem);
  return {plan(call.problem, plan_options(call.problem.device.index)), call.layout, std::move(call.copied),
          std::move(statistics)};
}

std::shared_ptr<const CudaForward> forward_plan(const std::string& block, const CallTensors& call,
                                                std::optional<TorchDType> out_dtype,
                                                const std::string& numerics) {
  static PlanCache<CudaForward> cache;
  const DType out = dtype_of(out_dtype.value_or(call.input.scalar_type()));
  PlanKey key = key_of(block, call, numerics);
  key.add(static_cast<int64_t>(out));
  return cache.get(key, [&] { return make_forward(block, call.specs(), out, numerics, call.place.index); });
}

CudaBackward make_backward(const std::string& block, const CallSpecs& specs,
                           const TensorSpec& output_gradient, const std::vector<bool>& wanted,
                           const std::string& numerics, int device) {
  auto call = cuda_backward_problem(block, specs, output_gradient, wanted, numerics, device);
  TensorSpec statistics = statistics_spec(call.problem.forward);
  return {plan_backward(call.problem, plan_options(call.problem.forward.device.index)), call.layout,
          std::move(call.copied), call.copies_output_gradient, std::move(statistics)};
}

std::shared_ptr<const CudaBackward> backward_plan(const std::string& block, const CallTensors& call,
                                                  const Tensor& output_gradient,
                                                  const std::vector<bool>& wanted,
                                                  const std::string& numerics) {
  static PlanCache<CudaBackward> cache;
  return cache.get(key_of(block, call, numerics, output_gradient, wanted), [&] {
    return make_backward(block, call.specs(), spec_of(output_gradient), wanted, numerics, call.place.index);
  });
}

// The tensors a plan reads, copied where it wants them otherwise; they own their memory until the launch.
struct Read {
  Tensor input;
  std::vector<Tensor> parameters;

  Read(const Tensor& given, const std::vector<Tensor>& given_parameters, const std::vector<bool>& copied,
       Layout layout)
      : input(copied[0] ? dense_copy(given, layout) : given), parameters(given_parameters) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const bool is_tensor = parameters[i].dim() == given.dim() && given.dim() > 2;
      if (copied[i + 1]) parameters[i] = dense_copy(parameters[i], is_tensor ? layout : Layout::nchw);
    }
  }
};

std::vector<const void*> addresses_of(const std::vector<Tensor>& tensors) {
  std::vector<const void*> list;
  list.reserve(tensors.size());
  for (const Tensor& tensor : tensors) list.push_back(tensor.const_data_ptr());
  return list;
}

// The workspace of one launch; most plans need none.
class Workspace {
 public:
  Workspace(size_t bytes, const Place& place) {
    if (bytes > 0) tensor_.emplace(empty_bytes(bytes, place));
  }
  void* data() const { return tensor_ ? tensor_->mutable_data_ptr() : nullptr; }

 private:
  std::optional<Tensor> tensor_;
};

Tensor run_forward(const CudaForward& prepared, const Tensor& input, const std::vector<Tensor>& parameters,
                   float* statistics, const Place& place) {
  const Plan& plan = prepared.plan;
  const Read read(input, parameters, prepared.copied, prepared.layout);
  Tensor output = empty(plan.problem().output, place);
  const Workspace workspace(plan.workspace_bytes(), place);
  plan.run(
      {read.input.const_data_ptr(), output.mutable_data_ptr(), addresses_of(read.parameters), statistics},
      workspace.data(), current_stream(place.index));
  return output;
}

Tensor forward(const Tensor& input, const std::vector<Tensor>& parameters, const std::string& block,
               std::optional<TorchDType> out_dtype, const std::string& numerics) {
  const CallTensors call(input, parameters);
  const auto prepared = forward_plan(block, call, out_dtype, numerics);
  return run_forward(*prepared, input, parameters, nullptr, call.place);
}

std::tuple<Tensor, Tensor> forward_with_statistics(const Tensor& input, const std::vector<Tensor>& parameters,
                                                   const std::string& block,
                                                   std::optional<TorchDType> out_dtype,
                                                   const std::string& numerics) {
  const CallTensors call(input, parameters);
  const auto prepared = forward_plan(block, call, out_dtype, numerics);
  Tensor statistics = empty(prepared->statistics, call.place);
  auto* memory = static_cast<float*>(statistics.mutable_data_ptr());
  return {run_forward(*prepared, input, parameters, memory, call.place), statistics};
}

// --- With the convolution ---
struct CudaWhole {
  Plan plan;
  std::vector<Layout> layouts;
  std::vector<bool> copied;
  TensorSpec statistics;
  uint64_t packing;  // of the plan
};

struct CudaWholeBackward {
  BackwardPlan plan;
  std::vector<Layout> layouts;
  std::vector<bool> copied;
  Layout output_layout;
  bool copies_output_gradient;
  TensorSpec statistics;
};

std::shared_ptr<const CudaWhole> whole_plan(const std::string& block, const CallTensors& call,
                                            const std::string& numerics) {
  static PlanCache<CudaWhole> cache;
  return cache.get(key_of(block, call, numerics), [&] {
    WholeProblem whole(block, call.specs(), numerics, call.place.index);
    TensorSpec statistics = statistics_spec(whole.problem);
    Plan made = plan(whole.problem, plan_options(call.place.index));
    const uint64_t packing = made.packing();
    return CudaWhole{std::move(made), std::move(whole.layouts), std::move(whole.copied),
                     std::move(statistics), packing};
  });
}

std::shared_ptr<const CudaWholeBackward> whole_backward_plan(const std::string& block,
                                                             const CallTensors& call,
                                                             const std::string& numerics,
                                                             const Tensor& output_gradient,
                                                             const std::vector<bool>& wanted) {
  static PlanCache<CudaWholeBackward> cache;
  return cache.get(key_of(block, call, numerics, output_gradient, wanted), [&] {
    WholeBackwardProblem whole(block, call.specs(), numerics, spec_of(output_gradient), wanted,
                               call.place.index);
    TensorSpec statistics = statistics_spec(whole.problem.forward);
    return CudaWholeBackward{plan_backward(whole.problem, plan_options(call.place.index)),
                             std::move(whole.layouts),
                             std::move(whole.copied),
                             whole.output_layout,
                             whole.copies_output_gradient,
                             std::move(statistics)};
  });
}

void copy_some(std::vector<Tensor>& parameters, const std::vector<bool>& copied,
               const std::vector<Layout>& layouts) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (copied[i]) parameters[i] = dense_copy(parameters[i], layouts[i]);
  }
}

// `packed`: weights that the plan has packed before, or null.
Tensor run_whole(const CudaWhole& prepared, const Tensor& input, std::vector<Tensor> parameters,
                 float* statistics, int64_t redone, const Place& place, const void* packed = nullptr) {
  const Plan& plan = prepared.plan;
  Tensor output = empty(plan.problem().output, place);
  copy_some(parameters, prepared.copied, prepared.layouts);
  const Workspace workspace(plan.workspace_bytes(), place);
  plan.run({input.const_data_ptr(), output.mutable_data_ptr(), addresses_of(parameters), statistics,
            counter_of(redone, place.index), packed},
           workspace.data(), current_stream(place.index));
  return output;
}

// `redone`: the number of a counter of samples that are computed again, or no_counter.
Tensor whole_forward(const Tensor& input, const std::vector<Tensor>& parameters, const std::string& block,
                     const std::string& numerics, int64_t redone) {
  const CallTensors call(input, parameters);
  return run_whole(*whole_plan(block, call, numerics), input, parameters, nullptr, redone, call.place);
}

std::tuple<Tensor, Tensor> whole_forward_with_statistics(const Tensor& input,
                                                         const std::vector<Tensor>& parameters,
                                                         const std::string& block,
                                                         const std::string& numerics, int64_t redone) {
  const CallTensors call(input, parameters);
  const auto prepared = whole_plan(block, call, numerics);
  Tensor statistics = empty(prepared->statistics, call.place);
  auto* memory = static_cast<float*>(statistics.mutable_data_ptr());
  return {run_whole(*prepared, input, parameters, memory, redone, call.place), statistics};
}

// --- With packed weights that a frozen model keeps (frozen_ops.cc) ---
int64_t frozen_packing(const Tensor& input, const std::vector<Tensor>& parameters, const std::string& block,
                       const std::string& numerics) {
  return static_cast<int64_t>(whole_plan(block, {input, parameters}, numerics)->packing);
}

Tensor frozen_pack(const Tensor& input, std::vector<Tensor> parameters, const std::string& block,
                   const std::string& numerics) {
  const CallTensors call(input, parameters);
  const Place place = call.place;
  const auto prepared = whole_plan(block, call, numerics);
  copy_some(parameters, prepared->copied, prepared->layouts);
  Tensor packed = empty_bytes(prepared->plan.packed_bytes(), place);
  prepared->plan.pack(addresses_of(parameters), packed.mutable_data_ptr(), current_stream(place.index));
  return packed;
}

// A plan that was made anew since may pack otherwise: then it packs itself.
Tensor frozen_forward(const Tensor& input, const std::vector<Tensor>& parameters, const std::string& block,
                      const std::string& numerics, const Tensor& packed, int64_t packing, int64_t redone) {
  const CallTensors call(input, parameters);
  require_place(packed, call.place);
  const auto prepared = whole_plan(block, call, numerics);
  const bool fits = static_cast<int64_t>(prepared->packing) == packing;
  return run_whole(*prepared, input, parameters, nullptr, redone, call.place,
                   fits ? packed.const_data_ptr() : nullptr);
}

bool is_worth_fusing(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                     const std::string& layout, const std::string& device) {
  return cuda::is_worth_fusing(described_problem(block, sizes, mode, layout, device));
}

bool dithers_weights(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                     const std::string& layout, const std::string& device) {
  return cuda::dithers_weights(described_problem(block, sizes, mode, layout, device));
}

double predicted_gain(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                      const std::string& layout, const std::string& device) {
  return cuda::predicted_gain(described_problem(block, sizes, mode, layout, device));
}

bool is_worth_training(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                       const std::string& layout, const std::string& device,
                       const std::vector<bool>& wanted) {
  BackwardProblem problem(described_problem(block, sizes, mode, layout, device));
  problem.wanted = wanted;
  problem.validate();
  return cuda::is_worth_training(problem);
}

void check_statistics(const Tensor& statistics, const BackwardPlan& plan, const TensorSpec& expected) {
  if (!plan.reads_statistics() || spec_of(statistics) == expected) return;
  throw Error("the statistics must be float32 and contiguous of sizes " + to_string(expected.sizes) +
              ", as the forward with statistics gives them");
}

// All tensors lie as the plan wants them.
std::vector<Tensor> run_backward(const BackwardPlan& plan, const Tensor& output_gradient, const Tensor& input,
                                 const std::vector<Tensor>& parameters, const Tensor& statistics,
                                 const void* output, const Place& place) {
  const BackwardProblem& problem = plan.problem();
  const auto gradient_of = [&](const TensorSpec& spec, bool is_wanted) {
    return empty(is_wanted ? spec : TensorSpec::dense(spec.dtype, {0}), place);
  };
  std::vector<Tensor> gradients{gradient_of(problem.input_gradient, problem.wants_input())};
  BackwardArguments arguments;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool is_wanted = problem.wants_parameter(i);
    gradients.push_back(gradient_of(problem.parameter_gradients[i], is_wanted));
    arguments.parameter_gradients.push_back(is_wanted ? gradients.back().mutable_data_ptr() : nullptr);
  }
  arguments.input = input.const_data_ptr();
  arguments.parameters = addresses_of(parameters);
  arguments.output_gradient = output_gradient.const_data_ptr();
  arguments.statistics = static_cast<const float*>(statistics.const_data_ptr());
  arguments.output = output;
  arguments.input_gradient = problem.wants_input() ? gradients[0].mutable_data_ptr() : nullptr;
  const Workspace workspace(plan.workspace_bytes(), place);
  plan.run(arguments, workspace.data(), current_stream(place.index));
  return gradients;
}

std::vector<Tensor> backward(const Tensor& output_gradient, const Tensor& input,
                             const std::vector<Tensor>& parameters, const Tensor& statistics,
                             const std::string& block, const std::vector<bool>& wanted,
                             const std::string& numerics) {
  const CallTensors call(input, parameters);
  const Place& place = call.place;
  require_place(output_gradient, place);
  require_place(statistics, place);
  const auto prepared = backward_plan(block, call, output_gradient, wanted, numerics);
  check_statistics(statistics, prepared->plan, prepared->statistics);
  const Read read(input, parameters, prepared->copied, prepared->layout);
  const Tensor gradient =
      prepared->copies_output_gradient ? dense_copy(output_gradient, prepared->layout) : output_gradient;
  return run_backward(prepared->plan, gradient, read.input, read.parameters, statistics, nullptr, place);
}

// `output`: the forward's output where the block ends in a mean. Otherwise it is not read and may be empty.
std::vector<Tensor> whole_backward(const Tensor& output_gradient, const Tensor& input,
                                   std::vector<Tensor> parameters, const Tensor& statistics,
                                   const Tensor& output, const std::string& block,
                                   const std::string& numerics, const std::vector<bool>& wanted) {
  const CallTensors call(input, parameters);
  const Place& place = call.place;
  require_place(output_gradient, place);
  require_place(statistics, place);
  const auto prepared = whole_backward_plan(block, call, numerics, output_gradient, wanted);
  check_statistics(statistics, prepared->plan, prepared->statistics);
  require_place(output, place);
  copy_some(parameters, prepared->copied, prepared->layouts);
  const Tensor gradient = prepared->copies_output_gradient
                              ? dense_copy(output_gradient, prepared->output_layout)
                              : output_gradient;
  const bool has_output = spec_of(output) == prepared->plan.problem().forward.output;
  return run_backward(prepared->plan, gradient, input, parameters, statistics,
                      has_output ? output.const_data_ptr() : nullptr, place);
}

// The plan of a block on "cuda", "cuda:1" or "cuda:sm_90a".
std::string explain(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                    const std::string& layout, const std::string& device, const std::string& strategy,
                    bool backward) {
  const Problem problem = described_problem(block, sizes, mode, layout, device);
  const PlanOptions options{strategy, {}};
  return backward ? plan_backward(BackwardProblem(problem), options).explain()
                  : plan(problem, options).explain();
}

int64_t device_count() { return cuda::device_count(); }

std::string describe_device(int64_t index) { return cuda::describe_device(static_cast<int>(index)); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, library) {
  library.def(
      "cuda_explain(str block, int[] sizes, str mode, str layout, str device, str strategy, bool backward) "
      "-> str");
  library.def(
      "whole_forward(Tensor input, Tensor[] parameters, str block, str numerics, int redone=-1) -> Tensor");
  library.def(
      "whole_forward_with_statistics(Tensor input, Tensor[] parameters, str block, str numerics, int "
      "redone=-1) "
      "-> (Tensor, Tensor)");
  library.def(
      "whole_backward(Tensor output_gradient, Tensor input, Tensor[] parameters, Tensor statistics, "
      "Tensor output, str block, str numerics, bool[] wanted) -> Tensor[]");
  library.def(
      "cuda_is_worth_training(str block, int[] sizes, str mode, str layout, str device, bool[] wanted) -> "
      "bool");
  library.def("cuda_is_worth_fusing(str block, int[] sizes, str mode, str layout, str device) -> bool");
  library.def("cuda_dithers_weights(str block, int[] sizes, str mode, str layout, str device) -> bool");
  library.def("cuda_predicted_gain(str block, int[] sizes, str mode, str layout, str device) -> float");
  library.def("cuda_unavailable_reason() -> str");
  library.def("cuda_device_count() -> int");
  library.def("cuda_describe_device(int index) -> str");
  library.def("cuda_cache_directory() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, library) {
  library.impl("forward", boxed<forward>);
  library.impl("forward_with_statistics", boxed<forward_with_statistics>);
  library.impl("backward", boxed<backward>);
  library.impl("whole_forward", boxed<whole_forward>);
  library.impl("whole_forward_with_statistics", boxed<whole_forward_with_statistics>);
  library.impl("whole_backward", boxed<whole_backward>);
  library.impl("frozen_packing", boxed<frozen_packing>);
  library.impl("frozen_pack", boxed<frozen_pack>);
  library.impl("frozen_forward", boxed<frozen_forward>);
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, library) {
  library.impl("cuda_explain", boxed<explain>);
  library.impl("cuda_is_worth_fusing", boxed<is_worth_fusing>);
  library.impl("cuda_dithers_weights", boxed<dithers_weights>);
  library.impl("cuda_predicted_gain", boxed<predicted_gain>);
  library.impl("cuda_is_worth_training", boxed<is_worth_training>);
  library.impl("cuda_unavailable_reason", boxed<cuda::unavailable_reason>);
  library.impl("cuda_device_count", boxed<device_count>);
  library.impl("cuda_describe_device", boxed<describe_device>);
  library.impl("cuda_cache_directory", boxed<cuda::cache_directory>);
}

}  // namespace onepass::torch_binding
