// The row "scaled": a block whose convolution has one tap and one input channel for each output. It is the
// tail that the block is, by the row that is fastest for it: x is read once, and no f32 values in between.
#include "cuda/direct/scaled.h"

#include <algorithm>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda/notes.h"
#include "cuda/row_numbers.h"
#include "cuda/tail/tail.h"

namespace onepass {
namespace cuda {
namespace {

bool all_are(const Extents& values, int rank, int64_t wanted) {
  return std::all_of(values.begin(), values.begin() + rank, [&](int64_t value) { return value == wanted; });
}

// One value a channel, wherever it lies in the convolution's parameter.
TensorSpec of_channels(const TensorSpec& spec) { return {spec.dtype, {spec.sizes[0]}, {spec.strides[0]}}; }

size_t conv_parameters(const Problem& problem) { return problem.block.conv()->bias ? 2 : 1; }

class Scaled final : public Kernel {
 public:
  explicit Scaled(const Problem& problem) : problem_(problem), tail_(build_tail(scaled_tail(problem))) {}

  static std::string refusal(const Problem& problem) {
    std::string reason = scaled_refusal(problem);
    if (!reason.empty()) return reason;
    const Problem tail = scaled_tail(problem);
    reason = tail_refusal(tail);
    return reason.empty() && tail_row(tail) == nullptr ? "no row takes the block as a tail" : reason;
  }

  static double seconds(const Problem& problem, const PlanOptions&) {
    const Problem tail = scaled_tail(problem);
    return tail_row(tail)->seconds(tail, {});
  }

  Accuracy accuracy() const override { return tail_.kernel->accuracy(); }
  size_t workspace_bytes() const override { return tail_.kernel->workspace_bytes(); }

  std::string describe() const override {
    return "convolution: one factor" + std::string(problem_.block.conv()->bias ? " and one addend" : "") +
           " a channel, stages of the tail\nruns: " + tail_.row + '\n' + tail_.kernel->describe();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_rounding(problem_) + tail_.kernel->numerics();
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    tail_.kernel->launch(arguments, workspace, stream);
  }

 private:
  Problem problem_;
  BuiltTail tail_;
};

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
  tail.numerics = tail_numerics(problem);
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

}  // namespace cuda

extern const Strategy cuda_scaled = cuda::row_of<cuda::Scaled>("scaled");

}  // namespace onepass
