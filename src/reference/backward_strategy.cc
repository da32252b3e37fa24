// The reference as the last row of the backward table: it takes every problem and is never fast.
#include <span>

#include "plan/strategy.h"
#include "reference/backward.h"
#include "reference/tensor_access.h"

namespace onepass {
namespace {

// As the forward's constants; a convolution runs three times: recomputed, and once for each gradient.
constexpr double seconds_per_multiply_add = 3 * 10e-9;
constexpr double seconds_per_element = 150e-9;

size_t elements(const TensorSpec& spec) { return static_cast<size_t>(element_count(spec.sizes)); }

class ReferenceBackwardKernel final : public BackwardKernel {
 public:
  explicit ReferenceBackwardKernel(const BackwardProblem& problem)
      : problem_(problem),
        block_(reference::with_limits_of(problem.forward.input.dtype, problem.forward.block)),
        input_sizes_(problem.forward.input.sizes),
        activation_sizes_(problem.forward.block.conv_output_shape(problem.forward.input.sizes)),
        scratch_elements_(static_cast<size_t>(
            reference::backward_scratch_elements(problem.forward.block, activation_sizes_))) {
    for (const TensorSpec& spec : problem.forward.parameters) parameter_elements_ += elements(spec);
  }

  size_t workspace_bytes() const override { return workspace_elements() * sizeof(double); }
  bool reads_statistics() const override { return false; }

  std::string describe() const override {
    return "arithmetic: double, all activations recomputed\nworkspace: " + std::to_string(workspace_bytes()) +
           " bytes\n";
  }

  void run(const BackwardArguments& arguments, void* workspace, Executor& executor) const override {
    std::span<double> rest(static_cast<double*>(workspace), workspace_elements());
    const auto take = [&rest](size_t count) {
      const std::span<double> taken = rest.first(count);
      rest = rest.subspan(count);
      return taken;
    };
    const Problem& forward = problem_.forward;
    const std::span<double> input = take(elements(forward.input));
    const std::span<double> output_gradient = take(elements(forward.output));
    const std::span<double> parameters = take(parameter_elements_);
    const std::span<double> scratch = take(scratch_elements_);
    const std::span<double> input_gradient = take(problem_.wants_input() ? elements(forward.input) : 0);
    const std::span<double> parameter_gradients = take(parameter_elements_);

    load_tensor(forward.input, arguments.input, input);
    load_tensor(problem_.output_gradient, arguments.output_gradient, output_gradient);
    for_each_parameter([&](size_t i, size_t at, size_t count) {
      load_tensor(forward.parameters[i], arguments.parameters[i], parameters.subspan(at, count));
    });
    reference::backward(block_, input_sizes_, activation_sizes_, input, parameters, output_gradient, scratch,
                        input_gradient, parameter_gradients, executor);
    if (problem_.wants_input())
      store_tensor(problem_.input_gradient, input_gradient, arguments.input_gradient);
    for_each_parameter([&](size_t i, size_t at, size_t count) {
      if (!problem_.wants_parameter(i)) return;
      store_tensor(problem_.parameter_gradients[i], parameter_gradients.subspan(at, count),
                   arguments.parameter_gradients[i]);
    });
  }

 private:
  size_t workspace_elements() const {
    return elements(problem_.forward.input) * (problem_.wants_input() ? 2 : 1) +
           elements(problem_.forward.output) + 2 * parameter_elements_ + scratch_elements_;
  }

  // f(index, first of its values among those of all parameters, how many)
  template <class F>
  void for_each_parameter(F&& f) const {
    size_t at = 0;
    for (size_t i = 0; i < problem_.forward.parameters.size(); ++i) {
      const size_t count = elements(problem_.forward.parameters[i]);
      f(i, at, count);
      at += count;
    }
  }

  BackwardProblem problem_;
  Block block_;
  reference::Sizes input_sizes_;
  reference::Sizes activation_sizes_;
  size_t scratch_elements_ = 0;
  size_t parameter_elements_ = 0;
};

std::string refusal(const BackwardProblem&) { return {}; }

double seconds(const BackwardProblem& problem, const PlanOptions&) {
  const Problem& forward = problem.forward;
  const int64_t activation = element_count(forward.block.conv_output_shape(forward.input.sizes));
  const auto count = static_cast<double>(element_count(forward.input.sizes) + activation);
  return static_cast<double>(forward.conv_multiply_adds()) * seconds_per_multiply_add /
             forward.device.threads +
         count * seconds_per_element;
}

std::shared_ptr<const BackwardKernel> build(const BackwardProblem& problem, const PlanOptions&) {
  return std::make_shared<ReferenceBackwardKernel>(problem);
}

}  // namespace

extern const BackwardStrategy reference_backward_strategy;
const BackwardStrategy reference_backward_strategy = {"reference_backward", refusal, seconds, build};

}  // namespace onepass
