// What PyTorch's own convolution takes, learned from measurements: boosted trees that scripts/fit_costs.py
// writes.
//
// cuDNN chooses among many kernels, whose speed differs by 100 for neighbouring problems. No formula of rates
// came closer than a factor of 2 in the median and 10 in one of ten drawn problems; the trees are within 1.4
// and 3.1 of problems that they were not fitted to, 1.25 and 2.1 for layers of common networks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda/costs/gpu.h"
#include "onepass/problem.h"

namespace onepass::cuda {

enum class ConvolutionPass : uint8_t { forward, input_gradient, weight_gradient };

// A problem's convolution in numbers: what the trees compare, and the seconds that they are a factor on.
struct ConvolutionFeatures {
  static constexpr size_t count = 19;
  std::array<double, count> values{};
  double base_seconds = 0;  // a launch, bytes and operations at the GPU's rates

  ConvolutionFeatures(const Problem& problem, const Gpu& gpu);
};

// Seconds of PyTorch's convolution without its bias, or of one of its gradients.
double torch_convolution_seconds(const Problem& problem, const Gpu& gpu, ConvolutionPass pass);

}  // namespace onepass::cuda
