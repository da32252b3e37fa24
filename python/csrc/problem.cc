// Problems from tensors.
#include "problem.h"

#include <torch/csrc/stable/ops.h>

#include "onepass/error.h"

namespace onepass::torch_binding {
namespace {

bool is_tensor_operand(const Block& block, const Parameter& parameter) {
  const auto* pointwise = std::get_if<Pointwise>(&block.stages()[parameter.stage]);
  return pointwise && argument_kind(pointwise->op) == ArgumentKind::tensor;
}

bool lies(const TensorSpec& spec, Layout layout) {
  const Shape strides = TensorSpec::dense(spec.dtype, spec.sizes, layout).strides;
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (spec.sizes[d] > 1 && spec.strides[d] != strides[d]) return false;
  }
  return true;
}

bool is_contiguous(const TensorSpec& spec) { return lies(spec, Layout::nchw); }

Layout layout_of(const TensorSpec& spec) { return is_channels_last(spec) ? Layout::nhwc : Layout::nchw; }

Layout output_layout(const Block& block, const CallSpecs& specs) {
  const bool from_weight = block.conv() && !specs.parameters.empty() && is_channels_last(specs.parameters[0]);
  return from_weight ? Layout::nhwc : layout_of(specs.input);
}

}  // namespace

CallTensors::CallTensors(const Tensor& given, std::span<const Tensor> given_parameters)
    : input(given), parameters(given_parameters), place(place_of(given)) {
  for (const Tensor& parameter : parameters) require_place(parameter, place);
}

void CallTensors::add_to(PlanKey& key) const {
  key.add(input);
  for (const Tensor& parameter : parameters) key.add(parameter);
}

CallSpecs CallTensors::specs() const {
  CallSpecs specs{spec_of(input), {}};
  for (const Tensor& parameter : parameters) specs.parameters.push_back(spec_of(parameter));
  return specs;
}

CallProblem::CallProblem(const std::string& block, const CallSpecs& specs, DType out_dtype, Copies copies)
    : problem(Block::parse(block), specs.input.sizes, specs.input.dtype),
      copied(specs.parameters.size(), false) {
  const Layout layout = output_layout(problem.block, specs);
  problem.output = TensorSpec::dense(out_dtype, problem.output.sizes, layout);
  problem.input = specs.input;
  problem.parameters = specs.parameters;
  const auto expected = problem.block.parameters(specs.input.sizes);
  for (size_t i = 0; i < expected.size() && i < problem.parameters.size(); ++i) {
    TensorSpec& spec = problem.parameters[i];
    if (is_tensor_operand(problem.block, expected[i]) || is_contiguous(spec)) continue;
    const bool weights = expected[i].role == Parameter::Role::conv_weight;
    if (weights && copies == Copies::few && lies(spec, Layout::nhwc)) continue;
    spec = TensorSpec::dense(spec.dtype, spec.sizes);
    copied[i] = true;
  }
  problem.validate();
}

BackwardProblem backward_problem(Problem forward, const CallSpecs& specs, const TensorSpec& output_gradient,
                                 std::vector<bool> wanted) {
  if (wanted.size() != specs.parameters.size() + 1) {
    throw Error("wanted has " + std::to_string(wanted.size()) + " values, must have " +
                std::to_string(specs.parameters.size() + 1) + ": the input's, then each parameter's");
  }
  const auto dense = [](const TensorSpec& spec) {
    return TensorSpec::dense(spec.dtype, spec.sizes, layout_of(spec));
  };
  BackwardProblem problem(std::move(forward));
  problem.output_gradient = output_gradient;
  problem.input_gradient = dense(specs.input);
  problem.parameter_gradients.clear();
  const auto expected = problem.forward.block.parameters(specs.input.sizes);
  for (size_t i = 0; i < expected.size(); ++i) {
    const TensorSpec& spec = problem.forward.parameters[i];
    const bool any = is_tensor_operand(problem.forward.block, expected[i]);
    problem.parameter_gradients.push_back(any ? dense(spec) : TensorSpec::dense(spec.dtype, spec.sizes));
  }
  problem.wanted = std::move(wanted);
  return problem;
}

TensorSpec statistics_spec(const Problem& problem) {
  const Norm* norm = problem.block.norm();
  if (!norm) return TensorSpec::dense(DType::f32, {0});
  const Shape shape = problem.block.conv_output_shape(problem.input.sizes);
  return TensorSpec::dense(DType::f32, {shape[0], norm->group_count(shape[1]), 2});
}

ReadParameters::ReadParameters(std::span<const Tensor> parameters, const std::vector<bool>& copied) {
  addresses_.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (copied[i]) copies_.push_back(torch::stable::contiguous(parameters[i]));
    addresses_.push_back((copied[i] ? copies_.back() : parameters[i]).const_data_ptr());
  }
}

}  // namespace onepass::torch_binding
