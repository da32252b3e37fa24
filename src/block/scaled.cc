// Blocks whose convolution is a product with a value of the channel, as tails.
#include "block/scaled.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace onepass {
namespace {

bool all_are(const Extents& values, int rank, int64_t wanted) {
  return std::all_of(values.begin(), values.begin() + rank, [&](int64_t value) { return value == wanted; });
}

// One value a channel, wherever it lies in the convolution's parameter.
TensorSpec of_channels(const TensorSpec& spec) { return {spec.dtype, {spec.sizes[0]}, {spec.strides[0]}}; }

size_t conv_parameters(const Problem& problem) { return problem.block.conv()->bias ? 2 : 1; }

}  // namespace

std::string scaled_refusal(const Problem& problem) {
  const Conv* const conv = problem.block.conv();
  if (conv == nullptr) return "the block has no convolution";
  if (conv->groups != conv->in_channels || conv->groups != conv->out_channels)
    return "a group of the convolution has several channels";
  if (!all_are(conv->kernel, conv->rank, 1)) return "a kernel of more than one tap";
  if (!all_are(conv->stride, conv->rank, 1)) return "the convolution has a stride";
  if (!all_are(conv->padding_before, conv->rank, 0) || !all_are(conv->padding_after, conv->rank, 0) ||
      !all_are(conv->output_padding, conv->rank, 0)) {
    return "the convolution has padding";
  }
  return "";
}

Problem scaled_tail(const Problem& problem) {
  std::vector<Stage> stages{Pointwise{.op = Op::channel_mul, .per = Per::channel}};
  if (problem.block.conv()->bias) stages.emplace_back(Pointwise{.op = Op::channel_add, .per = Per::channel});
  const std::vector<Stage>& all = problem.block.stages();
  stages.insert(stages.end(), all.begin() + 1, all.end());
  Problem tail(problem);
  tail.block = Block(std::move(stages));
  if (tail.numerics == Numerics::fast) tail.numerics = Numerics::pytorch;  // no tail is coarser in it
  for (size_t i = 0; i < conv_parameters(problem); ++i)
    tail.parameters[i] = of_channels(problem.parameters[i]);
  return tail;
}

BackwardProblem scaled_tail(const BackwardProblem& problem) {
  BackwardProblem tail(problem);
  tail.forward = scaled_tail(problem.forward);
  for (size_t i = 0; i < conv_parameters(problem.forward); ++i)
    tail.parameter_gradients[i] = of_channels(problem.parameter_gradients[i]);
  return tail;
}

}  // namespace onepass
