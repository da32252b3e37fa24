// Problems from CUDA tensors.
#include "cuda_problem.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <utility>

#include "onepass/error.h"

namespace onepass::torch_binding {
namespace {

// Whether the elements lie as in the dense tensor; strides of dimensions of one element say nothing.
bool lies(const TensorSpec& spec, Layout layout) {
  const Shape strides = TensorSpec::dense(spec.dtype, spec.sizes, layout).strides;
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (spec.sizes[d] > 1 && spec.strides[d] != strides[d]) return false;
  }
  return true;
}

// The tensor as it is read: where it lies, or as a dense copy.
bool make_dense(TensorSpec& spec, Layout layout) {
  if (lies(spec, layout)) return false;
  spec = TensorSpec::dense(spec.dtype, spec.sizes, layout);
  return true;
}

Block parse_tail(const std::string& text) {
  Block block = Block::parse(text);
  if (block.conv()) {
    throw Error(
        Block::text(*block.conv()) +
        ": on CUDA the operators run what follows a convolution; PyTorch runs the convolution itself");
  }
  return block;
}

void refuse_f64(const Problem& problem) {
  const auto is_f64 = [](const TensorSpec& spec) { return spec.dtype == DType::f64; };
  if (is_f64(problem.input) || is_f64(problem.output) || std::ranges::any_of(problem.parameters, is_f64)) {
    throw Error(problem.block.text() + ": float64 is not computed on the GPU");
  }
}

// The type is the tensors' own.
void set_numerics(Problem& problem, const std::string& numerics) {
  const Mode mode = Mode::parse(numerics);
  if (mode.dtype != DType::f32) {
    throw Error("numerics '" + numerics + "': the type is that of the tensors, write the other words alone");
  }
  problem.precision = mode.precision;
  problem.numerics = mode.numerics;
}

bool is_tensor_operand(const Block& block, const Parameter& parameter) {
  const auto* pointwise = std::get_if<Pointwise>(&block.stages()[parameter.stage]);
  return pointwise && argument_kind(pointwise->op) == ArgumentKind::tensor;
}

}  // namespace

CudaProblem::CudaProblem(const std::string& block, const CallSpecs& specs, DType out_dtype,
                         const std::string& numerics, int device)
    : problem(parse_tail(block), specs.input.sizes, specs.input.dtype, Device::cuda(device)),
      layout(is_channels_last(specs.input) ? Layout::nhwc : Layout::nchw) {
  const Layout output_layout = problem.block.has_mean() ? Layout::nchw : layout;
  problem.output = TensorSpec::dense(out_dtype, problem.output.sizes, output_layout);
  problem.input = specs.input;
  problem.parameters = specs.parameters;
  copied.push_back(make_dense(problem.input, layout));
  const auto expected = problem.block.parameters(specs.input.sizes);
  for (size_t i = 0; i < expected.size() && i < problem.parameters.size(); ++i) {
    const bool is_tensor = is_tensor_operand(problem.block, expected[i]);
    copied.push_back(make_dense(problem.parameters[i], is_tensor ? layout : Layout::nchw));
  }
  set_numerics(problem, numerics);
  problem.validate();
  refuse_f64(problem);
}

WholeProblem::WholeProblem(const std::string& block, const CallSpecs& specs, const std::string& numerics,
                           int device)
    : problem(Block::parse(block), specs.input.sizes, specs.input.dtype) {
  CallProblem call(block, specs, specs.input.dtype, Copies::all);
  problem = std::move(call.problem);
  copied = std::move(call.copied);
  problem.device = Device::cuda(device);
  set_numerics(problem, numerics);
  const Layout layout = lies(problem.output, Layout::nchw) ? Layout::nchw : Layout::nhwc;
  layouts.assign(problem.parameters.size(), Layout::nchw);
  const auto expected = problem.block.parameters(specs.input.sizes);
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!is_tensor_operand(problem.block, expected[i])) continue;
    layouts[i] = layout;
    copied[i] = make_dense(problem.parameters[i], layout);
  }
  problem.validate();
  refuse_f64(problem);
}

WholeBackwardProblem::WholeBackwardProblem(const std::string& block, const CallSpecs& specs,
                                           const std::string& numerics, const TensorSpec& output_gradient,
                                           std::vector<bool> wanted, int device)
    : WholeBackwardProblem(WholeProblem(block, specs, numerics, device), specs, output_gradient,
                           std::move(wanted)) {}

WholeBackwardProblem::WholeBackwardProblem(WholeProblem whole, const CallSpecs& specs,
                                           const TensorSpec& output_gradient, std::vector<bool> wanted)
    : problem(backward_problem(std::move(whole.problem), specs, output_gradient, std::move(wanted))),
      layouts(std::move(whole.layouts)),
      copied(std::move(whole.copied)),
      output_layout(lies(problem.forward.output, Layout::nchw) ? Layout::nchw : Layout::nhwc) {
  // The gradient of a mean is read by its strides.
  copies_output_gradient =
      !problem.forward.block.has_mean() && make_dense(problem.output_gradient, output_layout);
  for (size_t i = 0; i < problem.parameter_gradients.size(); ++i) {
    TensorSpec& spec = problem.parameter_gradients[i];
    spec = TensorSpec::dense(spec.dtype, spec.sizes, layouts[i]);
  }
}

CudaBackwardProblem cuda_backward_problem(const std::string& block, const CallSpecs& specs,
                                          const TensorSpec& output_gradient, std::vector<bool> wanted,
                                          const std::string& numerics, int device) {
  CudaProblem forward(block, specs, output_gradient.dtype, numerics, device);
  TensorSpec gradient = output_gradient;
  // The gradient of a mean is read by its strides.
  const bool copies = !forward.problem.block.has_mean() && make_dense(gradient, forward.layout);
  const auto expected = forward.problem.block.parameters(specs.input.sizes);
  auto problem = backward_problem(std::move(forward.problem), specs, gradient, std::move(wanted));
  for (size_t i = 0; i < problem.parameter_gradients.size(); ++i) {
    TensorSpec& spec = problem.parameter_gradients[i];
    const bool is_tensor = is_tensor_operand(problem.forward.block, expected[i]);
    if (is_tensor) spec = TensorSpec::dense(spec.dtype, spec.sizes, forward.layout);
  }
  return {std::move(problem), forward.layout, std::move(forward.copied), copies};
}

Problem described_problem(const std::string& block, const std::vector<int64_t>& sizes,
                          const std::string& mode, const std::string& layout, const std::string& device) {
  const Mode parsed = Mode::parse(mode);
  Problem problem(Block::parse(block), sizes, parsed.dtype, Device::parse(device), parse_layout(layout));
  problem.precision = parsed.precision;
  problem.numerics = parsed.numerics;
  problem.validate();
  return problem;
}

Tensor dense_copy(const Tensor& tensor, Layout layout) {
  using torch::headeronly::MemoryFormat;
  const bool is_volume = tensor.dim() == 5;
  const auto last = is_volume ? MemoryFormat::ChannelsLast3d : MemoryFormat::ChannelsLast;
  return torch::stable::contiguous(tensor, layout == Layout::nhwc ? last : MemoryFormat::Contiguous);
}

}  // namespace onepass::torch_binding
