// Backward problems: built from a forward problem, checked, printed.
#include <utility>

#include "block/spec_checks.h"
#include "onepass/backward.h"
#include "onepass/error.h"

namespace onepass {
namespace {

// The layout in which the tensor is dense; the usual one for any other strides.
Layout layout_of(const TensorSpec& spec) {
  const bool nhwc = spec.strides == TensorSpec::dense(spec.dtype, spec.sizes, Layout::nhwc).strides &&
                    spec.strides != TensorSpec::dense(spec.dtype, spec.sizes, Layout::nchw).strides;
  return nhwc ? Layout::nhwc : Layout::nchw;
}

TensorSpec dense_like(const TensorSpec& spec) {
  return TensorSpec::dense(spec.dtype, spec.sizes, layout_of(spec));
}

}  // namespace

BackwardProblem::BackwardProblem(Problem problem)
    : forward(std::move(problem)),
      output_gradient(dense_like(forward.output)),
      input_gradient(dense_like(forward.input)),
      wanted(forward.parameters.size() + 1, true) {
  const std::vector<Parameter> parameters = forward.block.parameters(forward.input.sizes);
  for (size_t i = 0; i < parameters.size() && i < forward.parameters.size(); ++i) {
    const TensorSpec& spec = forward.parameters[i];
    const bool any = is_tensor_operand(forward.block, parameters[i]);
    parameter_gradients.push_back(any ? dense_like(spec) : TensorSpec::dense(spec.dtype, spec.sizes));
  }
}

void BackwardProblem::validate() const {
  forward.validate();
  if (parameter_gradients.size() != forward.parameters.size() ||
      wanted.size() != forward.parameters.size() + 1) {
    throw Error(forward.block.text() + ": " + std::to_string(parameter_gradients.size()) +
                " parameter gradients and " + std::to_string(wanted.size()) + " entries of wanted, must be " +
                std::to_string(forward.parameters.size()) + " and one more");
  }
  check_spec("output_gradient", output_gradient, forward.output.sizes);
  if (wants_input()) {
    check_spec("input_gradient", input_gradient, forward.input.sizes);
    check_no_overlap("input_gradient", input_gradient);
  }
  const std::vector<Parameter> parameters = forward.block.parameters(forward.input.sizes);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!wants_parameter(i)) continue;
    const std::string name = "gradient of " + parameters[i].name;
    check_spec(name, parameter_gradients[i], parameters[i].sizes);
    check_no_overlap(name, parameter_gradients[i]);
    if (!is_tensor_operand(forward.block, parameters[i])) check_contiguous(name, parameter_gradients[i]);
  }
}

std::string BackwardProblem::text() const {
  const std::vector<Parameter> parameters = forward.block.parameters(forward.input.sizes);
  std::string names = wants_input() ? "input" : "";
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (wants_parameter(i)) names += (names.empty() ? "" : ", ") + parameters[i].name;
  }
  return "backward of " + forward.text() + ": " + (names.empty() ? "nothing" : names);
}

}  // namespace onepass
