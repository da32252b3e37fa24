// Whether a block with a convolution is worth running whole where PyTorch could run the convolution instead.
#include <algorithm>
#include <limits>

#include "cuda/gpu.h"
#include "onepass/cuda.h"
#include "plan/strategy.h"

namespace onepass::cuda {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// The least prediction of the rows whose name begins so; infinite where none takes the problem.
double least_seconds(const Problem& problem, std::string_view prefix) {
  double least = infinity;
  for (const Strategy* row : strategies(Device::Kind::cuda)) {
    if (row->name.starts_with(prefix) && row->refusal(problem).empty())
      least = std::min(least, row->seconds(problem, {}));
  }
  return least;
}

// The block without its convolution, of the convolution's output.
double tail_seconds(const Problem& problem) {
  const std::vector<Stage>& all = problem.block.stages();
  if (all.size() == 1) return 0;
  std::vector<Stage> stages(all.begin() + 1, all.end());
  const Layout layout = problem.input.strides[1] == 1 ? Layout::nhwc : Layout::nchw;
  return least_seconds(Problem(Block(std::move(stages)), problem.block.conv_output_shape(problem.input.sizes),
                               problem.input.dtype, problem.device, layout),
                       "tail_");
}

// PyTorch's convolution at its best settings: cuDNN 9.19 on an H200 does s27's (3 to 16 channels in three
// dimensions) at 21 TFLOP/s and s60's, a transposed one, at 2.3. Two-dimensional ones were not measured: a
// rate at which PyTorch keeps them unless they are tiny.
double convolution_seconds(const Problem& problem) {
  const Gpu& gpu = gpu_of(problem.device);
  const Conv& conv = *problem.block.conv();
  const double rate = (conv.transposed ? 2.3e12 : conv.rank == 3 ? 21e12 : 80e12) * gpu.flops / 66.9e12;
  const double elements =
      static_cast<double>(element_count(problem.input.sizes)) +
      static_cast<double>(element_count(problem.block.conv_output_shape(problem.input.sizes)));
  return 5e-6 +
         std::max(2 * static_cast<double>(problem.conv_multiply_adds()) / rate,
                  elements * static_cast<double>(byte_size(problem.input.dtype)) / gpu.bytes_per_second);
}

}  // namespace

bool is_worth_fusing(const Problem& problem) {
  if (problem.block.conv() == nullptr || element_count(problem.input.sizes) == 0) return false;
  const double whole = least_seconds(problem, "thin_");
  return whole < infinity && whole < convolution_seconds(problem) + tail_seconds(problem);
}

}  // namespace onepass::cuda
