// The operators of torch.ops.onepass, through the stable interface: one build serves PyTorch 2.10 and newer.
// Those of CUDA tensors are in cuda_ops.cc.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "boxed.h"
#include "describe.h"
#include "forward_plan.h"
#include "onepass/onepass.h"
#include "problem.h"
#include "torch_executor.h"

namespace onepass::torch_binding {
namespace {

struct BackwardPlanOfCall {
  BackwardPlan plan;
  std::vector<bool> copied;
};

BackwardPlanOfCall make_backward(const std::string& block, const CallSpecs& specs, const TensorSpec& gradient,
                                 std::vector<bool> wanted, int threads) {
  CallProblem call(block, specs, gradient.dtype, Copies::few);
  auto problem = backward_problem(std::move(call.problem), specs, gradient, std::move(wanted));
  return {plan_for_threads(std::move(problem), threads), std::move(call.copied)};
}

std::shared_ptr<const BackwardPlanOfCall> backward_plan(const std::string& block, const CallTensors& call,
                                                        const Tensor& output_gradient,
                                                        const std::vector<bool>& wanted, int threads) {
  static PlanCache<BackwardPlanOfCall> cache;
  PlanKey key = key_of(block, call, threads);
  key.add(output_gradient);
  for (const bool want : wanted) key.add(want);
  return cache.get(
      key, [&] { return make_backward(block, call.specs(), spec_of(output_gradient), wanted, threads); });
}

// On a CPU all numerics are the same arithmetic.
void check_numerics(const std::string& words) {
  if (!words.empty()) Mode::parse(words);
}

Tensor forward(const Tensor& input, const std::vector<Tensor>& parameters, const std::string& block,
               std::optional<TorchDType> out_dtype, const std::string& numerics) {
  check_numerics(numerics);
  const auto prepared = forward_plan(block, {input, parameters}, out_dtype, torch_threads());
  return run_forward(*prepared, input, parameters, nullptr);
}

std::tuple<Tensor, Tensor> forward_with_statistics(const Tensor& input, const std::vector<Tensor>& parameters,
                                                   const std::string& block,
                                                   std::optional<TorchDType> out_dtype,
                                                   const std::string& numerics) {
  check_numerics(numerics);
  const auto prepared = forward_plan(block, {input, parameters}, out_dtype, torch_threads());
  Tensor statistics = empty(prepared->statistics);
  auto* memory = static_cast<float*>(statistics.mutable_data_ptr());
  return {run_forward(*prepared, input, parameters, memory), statistics};
}

// A tensor of the spec where it is wanted, otherwise one without elements.
Tensor gradient_of(const TensorSpec& spec, bool wanted) {
  return empty(wanted ? spec : TensorSpec::dense(spec.dtype, {0}));
}

void check_statistics(const Tensor& statistics, const BackwardPlan& plan) {
  const TensorSpec wanted = statistics_spec(plan.problem().forward);
  if (!plan.reads_statistics() || spec_of(statistics) == wanted) return;
  throw Error("the statistics must be float32 and contiguous of sizes " + to_string(wanted.sizes) +
              ", as forward_with_statistics gives them");
}

// Where the input's gradient goes.
enum class InputGradient : bool { own_memory, over_input };

// The gradients of the input and of the problem's parameters. A gradient that is written over the input is
// an empty tensor in the result.
std::vector<Tensor> run_backward(const BackwardPlanOfCall& prepared, const Tensor& output_gradient,
                                 const Tensor& input, std::span<const Tensor> parameters,
                                 const Tensor& statistics, InputGradient where = InputGradient::own_memory) {
  const BackwardPlan& plan = prepared.plan;
  const BackwardProblem& problem = plan.problem();
  check_statistics(statistics, plan);
  const size_t count = problem.parameter_gradients.size();
  const bool over_input = problem.wants_input() && where == InputGradient::over_input;
  std::vector<Tensor> gradients{gradient_of(problem.input_gradient, problem.wants_input() && !over_input)};
  for (size_t i = 0; i < count; ++i) {
    gradients.push_back(gradient_of(problem.parameter_gradients[i], problem.wants_parameter(i)));
  }
  ReadParameters read(parameters, prepared.copied);
  BackwardArguments arguments{input.const_data_ptr(),
                              read.take_addresses(),
                              output_gradient.const_data_ptr(),
                              static_cast<const float*>(statistics.const_data_ptr()),
                              nullptr,
                              {}};
  if (problem.wants_input()) {
    arguments.input_gradient = over_input ? input.mutable_data_ptr() : gradients[0].mutable_data_ptr();
  }
  for (size_t i = 0; i < count; ++i) {
    arguments.parameter_gradients.push_back(problem.wants_parameter(i) ? gradients[i + 1].mutable_data_ptr()
                                                                       : nullptr);
  }
  Workspace workspace(plan.workspace_bytes());
  TorchExecutor executor(problem.forward.device.threads);
  plan.run(arguments, workspace.data(), executor);
  return gradients;
}

std::vector<Tensor> backward_to(InputGradient where, const Tensor& output_gradient, const Tensor& input,
                                const std::vector<Tensor>& parameters, const Tensor& statistics,
                                const std::string& block, const std::vector<bool>& wanted) {
  const CallTensors call(input, parameters);
  require_cpu(output_gradient);
  require_cpu(statistics);
  const auto prepared = backward_plan(block, call, output_gradient, wanted, torch_threads());
  return run_backward(*prepared, output_gradient, input, parameters, statistics, where);
}

std::vector<Tensor> backward(const Tensor& output_gradient, const Tensor& input,
                             const std::vector<Tensor>& parameters, const Tensor& statistics,
                             const std::string& block, const std::vector<bool>& wanted,
                             const std::string& numerics) {
  check_numerics(numerics);
  return backward_to(InputGradient::own_memory, output_gradient, input, parameters, statistics, block,
                     wanted);
}

std::vector<Tensor> backward_over_input(const Tensor& output_gradient, const Tensor& input,
                                        const std::vector<Tensor>& parameters, const Tensor& statistics,
                                        const std::string& block, const std::vector<bool>& wanted) {
  return backward_to(InputGradient::over_input, output_gradient, input, parameters, statistics, block,
                     wanted);
}

bool may_overwrite_input(const Tensor& output_gradient, const Tensor& input,
                         const std::vector<Tensor>& parameters, const std::string& block,
                         const std::vector<bool>& wanted) {
  const CallTensors call(input, parameters);
  require_cpu(output_gradient);
  return backward_plan(block, call, output_gradient, wanted, torch_threads())->plan.may_overwrite_input();
}

// ---------------------------------------------- blocks with a convolution, differentiated as it and a tail

// A block's convolution and what follows it; the tail is empty where nothing does.
struct Parts {
  std::string conv;
  std::string tail;
  size_t conv_parameters = 0;

  explicit Parts(const std::string& text) {
    const Block block = Block::parse(text);
    if (!block.conv()) throw Error(text + ": must have a convolution");
    conv = Block({*block.conv()}).text();
    conv_parameters = block.conv()->bias ? 2 : 1;
    const std::vector<Stage> rest(block.stages().begin() + 1, block.stages().end());
    if (!rest.empty()) tail = Block(rest).text();
  }
};

template <class List>
List first_of(const List& list, size_t count) {
  return List(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(std::min(count, list.size())));
}

template <class List>
List rest_of(const List& list, size_t count) {
  return List(list.begin() + static_cast<std::ptrdiff_t>(std::min(count, list.size())), list.end());
}

struct TrainingForward {
  size_t conv_parameters;
  ForwardPlan conv;
  std::optional<ForwardPlan> tail;
};

TrainingForward make_training_forward(const std::string& block, const CallSpecs& specs, DType out,
                                      int threads) {
  const Parts parts(block);
  CallSpecs conv = specs;
  conv.parameters = first_of(specs.parameters, parts.conv_parameters);
  const DType between = parts.tail.empty() ? out : specs.input.dtype;
  TrainingForward made{parts.conv_parameters, make_forward(parts.conv, conv, between, threads), {}};
  if (parts.tail.empty()) return made;
  CallSpecs tail = specs;
  tail.input = made.conv.plan.problem().output;
  tail.parameters = rest_of(specs.parameters, parts.conv_parameters);
  made.tail.emplace(make_forward(parts.tail, tail, out, threads));
  return made;
}

// The output, and what block_backward reads besides what it was computed from: the convolution's output and
// the statistics of its norm, both empty without a tail.
std::tuple<Tensor, Tensor, Tensor> block_forward(const Tensor& input, const std::vector<Tensor>& parameters,
                                                 const std::string& block,
                                                 std::optional<TorchDType> out_dtype) {
  static PlanCache<TrainingForward> cache;
  const CallTensors call(input, parameters);
  const DType out = dtype_of(out_dtype.value_or(input.scalar_type()));
  const int threads = torch_threads();
  const auto prepared = cache.get(key_of(block, call, out, threads),
                                  [&] { return make_training_forward(block, call.specs(), out, threads); });
  const size_t count = prepared->conv_parameters;
  Tensor activation = run_forward(prepared->conv, input, call.parameters.first(count), nullptr);
  const TensorSpec nothing = TensorSpec::dense(DType::f32, {0});
  if (!prepared->tail) return {activation, empty(nothing), empty(nothing)};
  Tensor statistics = empty(prepared->tail->statistics);
  auto* memory = static_cast<float*>(statistics.mutable_data_ptr());
  Tensor output = run_forward(*prepared->tail, activation, call.parameters.subspan(count), memory);
  return {output, activation, statistics};
}

struct TrainingBackward {
  size_t conv_parameters;
  std::optional<BackwardPlanOfCall> tail;
  std::optional<BackwardPlanOfCall> conv;
};

TrainingBackward make_training_backward(const std::string& block, const CallSpecs& specs,
                                        const TensorSpec& activation, const TensorSpec& output_gradient,
                                        const std::vector<bool>& wanted, int threads) {
  const Parts parts(block);
  const size_t entries = specs.parameters.size() + parts.conv_parameters;
  if (specs.parameters.empty() || wanted.size() != entries) {
    throw Error(block + ": " + std::to_string(specs.parameters.size()) + " parameters and wanted of " +
                std::to_string(wanted.size()) +
                " values, must be all but the convolution's bias and one value for each and for the input");
  }
  TrainingBackward made{parts.conv_parameters, {}, {}};
  std::vector<bool> conv_wanted = first_of(wanted, 1 + parts.conv_parameters);
  const bool any = std::ranges::find(conv_wanted, true) != conv_wanted.end();
  TensorSpec gradient = output_gradient;
  if (!parts.tail.empty()) {
    CallSpecs tail = specs;
    tail.input = activation;
    tail.parameters = rest_of(specs.parameters, 1);
    std::vector<bool> tail_wanted = rest_of(wanted, parts.conv_parameters);
    tail_wanted[0] = any;
    made.tail.emplace(make_backward(parts.tail, tail, output_gradient, tail_wanted, threads));
    gradient = made.tail->plan.problem().input_gradient;
  }
  if (!any) return made;
  CallSpecs conv = specs;
  conv.parameters = first_of(specs.parameters, 1);
  if (parts.conv_parameters == 2) {
    const int64_t channels = Block::parse(parts.conv).conv()->out_channels;
    conv.parameters.push_back(TensorSpec::dense(conv.parameters[0].dtype, {channels}));
  }
  made.conv.emplace(make_backward(parts.conv, conv, gradient, conv_wanted, threads));
  return made;
}

// `parameters` are the block's without the convolution's bias, whose value no gradient depends on; `wanted`
// and the result are the input's and those of all parameters.
std::vector<Tensor> block_backward(const Tensor& output_gradient, const Tensor& input,
                                   const Tensor& activation, const std::vector<Tensor>& parameters,
                                   const Tensor& statistics, const std::string& block,
                                   const std::vector<bool>& wanted) {
  static PlanCache<TrainingBackward> cache;
  const CallTensors call(input, parameters);
  require_cpu(output_gradient);
  require_cpu(activation);
  require_cpu(statistics);
  const int threads = torch_threads();
  PlanKey key = key_of(block, call, threads);
  key.add(output_gradient);
  key.add(activation);
  for (const bool want : wanted) key.add(want);
  const auto prepared = cache.get(key, [&] {
    return make_training_backward(block, call.specs(), spec_of(activation), spec_of(output_gradient), wanted,
                                  threads);
  });
  std::vector<Tensor> tail;
  if (prepared->tail) {
    tail = run_backward(*prepared->tail, output_gradient, activation, call.parameters.subspan(1), statistics);
  }
  const TensorSpec nothing = TensorSpec::dense(dtype_of(input), {0});
  std::vector<Tensor> gradients;
  if (prepared->conv) {
    std::vector<Tensor> conv = first_of(parameters, 1);
    if (prepared->conv_parameters == 2) {
      conv.push_back(empty(prepared->conv->plan.problem().forward.parameters[1]));
    }
    gradients =
        run_backward(*prepared->conv, tail.empty() ? output_gradient : tail[0], input, conv, empty(nothing));
  } else {
    for (size_t i = 0; i <= prepared->conv_parameters; ++i) gradients.push_back(empty(nothing));
  }
  for (size_t i = 1; i < tail.size(); ++i) gradients.push_back(std::move(tail[i]));
  return gradients;
}

// The plan that a call with this many threads runs.
Problem problem_to_explain(const std::string& block, const std::vector<int64_t>& sizes,
                           const std::string& dtype, const std::string& layout, int64_t threads) {
  constexpr int64_t most_threads = 1024;
  if (threads < 1 || threads > most_threads) {
    throw Error("threads is " + std::to_string(threads) + ", must be 1 to " + std::to_string(most_threads));
  }
  return Problem(Block::parse(block), sizes, parse_dtype(dtype), Device::cpu(), parse_layout(layout));
}

std::string explain(const std::string& block, const std::vector<int64_t>& sizes, const std::string& dtype,
                    const std::string& layout, int64_t threads, const std::string& strategy) {
  const Problem problem = problem_to_explain(block, sizes, dtype, layout, threads);
  return plan_for_threads(problem, static_cast<int>(threads), {strategy, {}}).explain();
}

std::string explain_backward(const std::string& block, const std::vector<int64_t>& sizes,
                             const std::string& dtype, const std::string& layout, int64_t threads) {
  const BackwardProblem problem(problem_to_explain(block, sizes, dtype, layout, threads));
  return plan_for_threads(problem, static_cast<int>(threads)).explain();
}

std::string describe_text(const std::string& block) { return describe(Block::parse(block)); }

std::string refusal() { return last_refusal(); }

}  // namespace

std::string& last_refusal() {
  static thread_local std::string text;
  return text;
}

STABLE_TORCH_LIBRARY(onepass, library) {
  library.def(
      "forward(Tensor input, Tensor[] parameters, str block, ScalarType? out_dtype=None, str numerics=\"\") "
      "-> Tensor");
  library.def(
      "forward_with_statistics(Tensor input, Tensor[] parameters, str block, ScalarType? out_dtype=None, "
      "str numerics=\"\") -> (Tensor, Tensor)");
  library.def(
      "backward(Tensor output_gradient, Tensor input, Tensor[] parameters, Tensor statistics, str block, "
      "bool[] wanted, str numerics=\"\") -> Tensor[]");
  library.def(
      "backward_(Tensor output_gradient, Tensor(a!) input, Tensor[] parameters, Tensor statistics, str "
      "block, "
      "bool[] wanted) -> Tensor[]");
  library.def(
      "may_overwrite_input(Tensor output_gradient, Tensor input, Tensor[] parameters, str block, "
      "bool[] wanted) -> bool");
  library.def(
      "block_forward(Tensor input, Tensor[] parameters, str block, ScalarType? out_dtype=None) -> "
      "(Tensor, Tensor, Tensor)");
  library.def(
      "block_backward(Tensor output_gradient, Tensor input, Tensor activation, Tensor[] parameters, "
      "Tensor statistics, str block, bool[] wanted) -> Tensor[]");
  library.def("explain(str block, int[] sizes, str dtype, str layout, int threads, str strategy) -> str");
  library.def("explain_backward(str block, int[] sizes, str dtype, str layout, int threads) -> str");
  library.def("describe(str block) -> str");
  library.def("describe_library() -> str");
  library.def("last_refusal() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, library) {
  library.impl("forward", boxed<forward>);
  library.impl("forward_with_statistics", boxed<forward_with_statistics>);
  library.impl("backward", boxed<backward>);
  library.impl("backward_", boxed<backward_over_input>);
  library.impl("may_overwrite_input", boxed<may_overwrite_input>);
  library.impl("block_forward", boxed<block_forward>);
  library.impl("block_backward", boxed<block_backward>);
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, library) {
  library.impl("explain", boxed<explain>);
  library.impl("explain_backward", boxed<explain_backward>);
  library.impl("describe", boxed<describe_text>);
  library.impl("describe_library", boxed<describe_library>);
  library.impl("last_refusal", boxed<refusal>);
}

}  // namespace onepass::torch_binding
