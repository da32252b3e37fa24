// Whether to run a block whole, or PyTorch's convolution and then the block's tail.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/costs/convolution.h"
#include "cuda/costs/framework.h"
#include "cuda/runtime/gpu.h"
#include "cuda/tail/tail.h"
#include "onepass/cuda.h"
#include "plan/fitted.h"
#include "plan/strategy.h"

namespace onepass::cuda {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// PyTorch's convolution is taken where it is predicted to be so many times as fast as a row. Its times lie
// further above their predictions than below: 1.3 times them in the mean, with groups and in volumes 1.6 and
// more; a row's lie near theirs. Of 39 drawn blocks with floors of 20 us and more, the choice without a
// factor takes 1.18 times the faster one's time, with 1.3 for all 1.14, with 1.6 for all 1.11.
double doubt_of(const Conv& conv) { return conv.groups > 1 || conv.rank == 3 ? 1.6 : 1.3; }

// The least prediction of the rows of a family, whose names begin with it; infinite where none takes the
// problem.
template <class Row, class AnyProblem>
double least_seconds(std::span<const Row* const> table, const AnyProblem& problem, std::string_view family) {
  double least = infinity;
  for (const Row* row : table) {
    if (row->name.starts_with(family) && row->refusal(problem).empty())
      least = std::min(least, fitted_seconds(*row, problem, {}));
  }
  return least;
}

double least_seconds(const Problem& problem, std::string_view family) {
  return least_seconds(strategies(Device::Kind::cuda), problem, family);
}

double least_seconds(const BackwardProblem& problem, std::string_view family) {
  return least_seconds(backward_strategies(Device::Kind::cuda), problem, family);
}

// The block without its convolution, of the convolution's output; none where that is all of it.
std::optional<Problem> tail_of(const Problem& problem) {
  const std::vector<Stage>& all = problem.block.stages();
  if (all.size() == 1) return std::nullopt;
  std::vector<Stage> stages(all.begin() + 1, all.end());
  const Layout layout = problem.input.strides[1] == 1 ? Layout::nhwc : Layout::nchw;
  Problem tail(Block(std::move(stages)), problem.block.conv_output_shape(problem.input.sizes),
               problem.input.dtype, problem.device, layout);
  tail.numerics = tail_numerics(problem);
  return tail;
}

double tail_seconds(const Problem& problem) {
  const std::optional<Problem> tail = tail_of(problem);
  return tail ? least_seconds(*tail, "tail_") : 0;
}

double bytes_of(const Shape& sizes, DType dtype) {
  return static_cast<double>(element_count(sizes) * byte_size(dtype));
}

// Without what follows it. A tail adds the bias.
double convolution_seconds(const Problem& problem) {
  const Gpu& gpu = gpu_of(problem.device);
  const double seconds = torch_convolution_seconds(problem, gpu, ConvolutionPass::forward);
  if (!problem.block.conv()->bias || problem.block.stages().size() > 1) return seconds;
  const double bytes = bytes_of(problem.block.conv_output_shape(problem.input.sizes), problem.input.dtype);
  return seconds + 2 * bytes / gpu.bytes_per_second / framework::bias_copy_share;
}

double convolution_backward_seconds(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  const Gpu& gpu = gpu_of(forward.device);
  double seconds = 0;
  if (problem.wants_input())
    seconds += torch_convolution_seconds(forward, gpu, ConvolutionPass::input_gradient);
  if (problem.wants_parameter(0))
    seconds += torch_convolution_seconds(forward, gpu, ConvolutionPass::weight_gradient);
  const bool adds_bias = forward.block.conv()->bias && problem.wants_parameter(1);
  if (!adds_bias || forward.block.stages().size() > 1) return seconds;
  return seconds + framework::bias_gradient_seconds +
         static_cast<double>(problem.output_gradient.byte_span()) / gpu.bytes_per_second;
}

double tail_backward_seconds(const BackwardProblem& problem) {
  std::optional<Problem> tail = tail_of(problem.forward);
  return tail ? least_seconds(BackwardProblem(std::move(*tail)), "tail_") : 0;
}

}  // namespace

bool is_worth_training(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  if (forward.block.conv() == nullptr || element_count(forward.input.sizes) == 0) return false;
  // Gradients of a convolution alone are kernels of their own: its forward may still be PyTorch's.
  const double doubt = doubt_of(*forward.block.conv());
  const double convolution = convolution_backward_seconds(problem);
  double alone = std::min(least_seconds(problem, "gemm_"), least_seconds(problem, "narrow_"));
  if (forward.block.stages().size() == 1) alone = std::min(alone, least_seconds(problem, "scaled_"));
  if (alone < doubt * convolution) return true;
  const double whole = std::min(least_seconds(forward, "thin_") + least_seconds(problem, "thin_"),
                                least_seconds(forward, "scaled") + least_seconds(problem, "scaled_"));
  return whole < infinity && whole < doubt * (convolution_seconds(forward) + convolution) +
                                         tail_seconds(forward) + tail_backward_seconds(problem);
}

double predicted_gain(const Problem& problem) {
  if (problem.block.conv() == nullptr || element_count(problem.input.sizes) == 0) return 0;
  double whole = infinity;
  for (const char* const family : {"thin_", "gemm_", "scaled", "narrow"})
    whole = std::min(whole, least_seconds(problem, family));
  const double convolution = doubt_of(*problem.block.conv()) * convolution_seconds(problem);
  return whole < infinity ? (convolution + tail_seconds(problem)) / whole : 0;
}

double framework_seconds(const Problem& problem) {
  return problem.block.conv() == nullptr ? 0 : convolution_seconds(problem);
}

double framework_seconds(const BackwardProblem& problem) {
  return problem.forward.block.conv() == nullptr ? 0 : convolution_backward_seconds(problem);
}

std::vector<double> convolution_features(const Problem& problem) {
  const ConvolutionFeatures features(problem, gpu_of(problem.device));
  std::vector<double> all(features.values.begin(), features.values.end());
  all.push_back(features.base_seconds);
  return all;
}

bool is_worth_fusing(const Problem& problem) { return predicted_gain(problem) > 1; }

}  // namespace onepass::cuda
