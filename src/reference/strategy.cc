// The reference as the last row of the strategy table: it takes every problem and is never fast.
#include <span>

#include "plan/strategy.h"
#include "reference/reference.h"
#include "reference/tensor_access.h"

namespace onepass {
namespace {

// Measured over tests/cases.txt on a Neoverse core. A tap takes 10 ns, with the check against the input's
// edges. An element takes 8 ns, and 50 here for the conversions on loading and storing. The reference should
// not win.
constexpr double seconds_per_multiply_add = 10e-9;
constexpr double seconds_per_element = 50e-9;

int64_t activation_elements(const Problem& problem) {
  return element_count(problem.block.conv_output_shape(problem.input.sizes));
}

// How many doubles of the workspace each tensor takes.
struct Parts {
  size_t input = 0;
  size_t parameters = 0;
  size_t scratch = 0;
  size_t output = 0;

  explicit Parts(const Problem& problem)
      : input(static_cast<size_t>(element_count(problem.input.sizes))),
        scratch(problem.block.has_mean() ? static_cast<size_t>(activation_elements(problem)) : 0),
        output(static_cast<size_t>(element_count(problem.output.sizes))) {
    for (const TensorSpec& spec : problem.parameters)
      parameters += static_cast<size_t>(element_count(spec.sizes));
  }
  size_t total() const { return input + parameters + scratch + output; }
};

class ReferenceKernel final : public Kernel {
 public:
  explicit ReferenceKernel(const Problem& problem)
      : problem_(problem),
        block_(reference::with_limits_of(problem.input.dtype, problem.block)),
        input_sizes_(problem.input.sizes),
        activation_sizes_(problem.block.conv_output_shape(problem.input.sizes)),
        parts_(problem) {
    for (const TensorSpec& spec : problem.parameters)
      parameter_elements_.push_back(static_cast<size_t>(element_count(spec.sizes)));
  }

  size_t workspace_bytes() const override { return parts_.total() * sizeof(double); }

  std::string describe() const override {
    return "arithmetic: double\nworkspace: " + std::to_string(workspace_bytes()) + " bytes\n";
  }

  void run(const Arguments& arguments, void* workspace, Executor& executor) const override {
    std::span<double> rest(static_cast<double*>(workspace), parts_.total());
    const auto take = [&rest](size_t count) {
      const std::span<double> taken = rest.first(count);
      rest = rest.subspan(count);
      return taken;
    };
    const std::span<double> input = take(parts_.input);
    const std::span<double> parameters = take(parts_.parameters);
    const std::span<double> scratch = take(parts_.scratch);
    const std::span<double> output = take(parts_.output);

    load_tensor(problem_.input, arguments.input, input);
    load_parameters(arguments, parameters);
    reference::forward(block_, input_sizes_, activation_sizes_, input, parameters, scratch, output, executor,
                       arguments.statistics);
    store_tensor(problem_.output, output, arguments.output);
  }

 private:
  void load_parameters(const Arguments& arguments, std::span<double> values) const {
    for (size_t i = 0; i < problem_.parameters.size(); ++i) {
      load_tensor(problem_.parameters[i], arguments.parameters[i], values.first(parameter_elements_[i]));
      values = values.subspan(parameter_elements_[i]);
    }
  }

  Problem problem_;
  Block block_;
  reference::Sizes input_sizes_;
  reference::Sizes activation_sizes_;
  Parts parts_;
  std::vector<size_t> parameter_elements_;
};

std::string refusal(const Problem&) { return {}; }

double seconds(const Problem& problem, const PlanOptions&) {
  const auto elements =
      static_cast<double>(element_count(problem.input.sizes) + activation_elements(problem));
  return static_cast<double>(problem.conv_multiply_adds()) * seconds_per_multiply_add /
             problem.device.threads +
         elements * seconds_per_element;
}

std::shared_ptr<const Kernel> build(const Problem& problem, const PlanOptions&) {
  return std::make_shared<ReferenceKernel>(problem);
}

}  // namespace

extern const Strategy reference_strategy;
const Strategy reference_strategy = {"reference", refusal, seconds, build};

}  // namespace onepass
