// Features of a convolution, and the trees that predict PyTorch's time from them.
#include "cuda/costs/convolution.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

namespace onepass::cuda {
namespace {

constexpr double launch_seconds = 4e-6;
constexpr double halves_per_tf32 = 1.88;  // operations of 16 bits in the time of one in TF32 (H200)
constexpr double f32_share = 0.75;        // of the CUDA cores' peak

// A complete binary tree of three levels: splits from the root on, a row after the other, then leaves. The
// left branch has features up to the threshold.
struct Tree {
  std::array<uint8_t, 7> features;
  std::array<float, 7> thresholds;
  std::array<float, 8> leaves;
};

// Logarithms to base 2 of the factor on ConvolutionFeatures::base_seconds. The first tree has one value in
// all leaves: where the sum begins.
constexpr Tree forward_trees[] = {
#include "cuda/costs/convolution_forward.inc"
};
constexpr Tree input_trees[] = {
#include "cuda/costs/convolution_input.inc"
};
constexpr Tree weight_trees[] = {
#include "cuda/costs/convolution_weight.inc"
};

std::span<const Tree> trees_of(ConvolutionPass pass) {
  switch (pass) {
    case ConvolutionPass::input_gradient:
      return input_trees;
    case ConvolutionPass::weight_gradient:
      return weight_trees;
    default:
      return forward_trees;
  }
}

double value_of(const Tree& tree, const ConvolutionFeatures& features) {
  size_t at = 0;
  while (at < tree.features.size())
    at = 2 * at + (features.values[tree.features[at]] <= static_cast<double>(tree.thresholds[at]) ? 1 : 2);
  return static_cast<double>(tree.leaves[at - tree.features.size()]);
}

double as_double(int64_t value) { return static_cast<double>(value); }
double logarithm(int64_t value) { return std::log2(as_double(std::max<int64_t>(1, value))); }

int64_t positions_of(const Shape& sizes) { return element_count({sizes.begin() + 2, sizes.end()}); }

}  // namespace

ConvolutionFeatures::ConvolutionFeatures(const Problem& problem, const Gpu& gpu) {
  const Conv& conv = *problem.block.conv();
  const Shape& sizes = problem.input.sizes;
  const Shape output = problem.block.conv_output_shape(sizes);
  const auto rank = static_cast<std::ptrdiff_t>(conv.rank);
  const auto product = [&](const auto& all) {
    return std::accumulate(all.begin(), all.begin() + rank, int64_t{1}, std::multiplies<>());
  };
  const auto largest = [&](const auto& all) { return *std::max_element(all.begin(), all.begin() + rank); };
  const bool is_f32 = problem.input.dtype == DType::f32;
  const int mode = !is_f32 ? 2 : problem.precision == Precision::f32 ? 0 : 1;
  const double bytes =
      as_double(element_count(sizes) + element_count(output)) * as_double(byte_size(problem.input.dtype));
  const double taps = as_double(product(conv.kernel));
  // Every tap of every position, also on padding.
  const double operations =
      2 * taps * as_double(conv.transposed ? positions_of(sizes) : positions_of(output)) *
      as_double(sizes[0] * conv.in_channels) * as_double(conv.out_channels) / as_double(conv.groups);
  const double tensor = reached_tensor_flops(gpu);
  const double rate = mode == 0 ? f32_share * gpu.flops : mode == 1 ? tensor : halves_per_tf32 * tensor;
  const int64_t inputs = conv.in_channels / conv.groups, outputs = conv.out_channels / conv.groups;
  const auto alignment = [](int64_t channels) { return logarithm(std::gcd(channels, int64_t{8})); };
  values = {std::log2(std::max(bytes, 1.0)),
            std::log2(std::max(operations / std::max(bytes, 1.0), 1e-3)),
            logarithm(inputs),
            logarithm(outputs),
            logarithm(conv.groups),
            std::log2(taps),
            as_double(conv.rank),
            as_double(largest(conv.stride)),
            conv.transposed ? 1.0 : 0.0,
            problem.input.strides[1] == 1 ? 1.0 : 0.0,
            static_cast<double>(mode),
            logarithm(sizes[0]),
            logarithm(positions_of(output)),
            logarithm(positions_of(sizes)),
            alignment(conv.in_channels),
            alignment(conv.out_channels),
            largest(conv.padding_before) > 0 ? 1.0 : 0.0,
            logarithm(std::min(inputs, outputs)),
            output.back() % 8 == 0 ? 1.0 : 0.0};
  base_seconds = launch_seconds + bytes / gpu.bytes_per_second + operations / rate;
}

double torch_convolution_seconds(const Problem& problem, const Gpu& gpu, ConvolutionPass pass) {
  const ConvolutionFeatures features(problem, gpu);
  double sum = 0;
  for (const Tree& tree : trees_of(pass)) sum += value_of(tree, features);
  return features.base_seconds * std::exp2(sum);
}

}  // namespace onepass::cuda
