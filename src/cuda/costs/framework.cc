// Whether a block with a convolution is worth running whole where PyTorch could run the convolution instead.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "cuda/costs/gpu.h"
#include "cuda/tail/tail.h"
#include "onepass/cuda.h"
#include "plan/strategy.h"

namespace onepass::cuda {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr int64_t wide_channels = 16;  // of a convolution that runs on PyTorch's tensor cores

// Of a group, of the input or of the output.
int64_t least_channels(const Conv& conv) {
  return std::min(conv.in_channels, conv.out_channels) / conv.groups;
}

// The least prediction of the rows whose name begins so; infinite where none takes the problem.
double least_seconds(const Problem& problem, std::string_view prefix) {
  double least = infinity;
  for (const Strategy* row : strategies(Device::Kind::cuda)) {
    if (row->name.starts_with(prefix) && row->refusal(problem).empty())
      least = std::min(least, row->seconds(problem, {}));
  }
  return least;
}

// The same of the gradients.
double least_seconds(const BackwardProblem& problem, std::string_view prefix) {
  double least = infinity;
  for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) {
    if (row->name.starts_with(prefix) && row->refusal(problem).empty())
      least = std::min(least, row->seconds(problem, {}));
  }
  return least;
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

// Operations a second of PyTorch's convolution as tensors come, cuDNN 9.19 on an H200. It does s27's (3 to 16
// channels in three dimensions) at 21 TFLOP/s and s60's, a transposed one, at 2.3; s19's and s61's,
// transposed ones of 64 channels and more, at 92 in tf32 and 126 in bf16; layers of U-Nets and decoders (128
// to 2560 channels) at 110 to 250 and at 230 to 430, volumes of 32 channels at 80 and 118, transposed ones of
// 64 to 32 at 8 and 5; thin two-dimensional ones at 14 (8 to 8 channels, kernel 5) to 25 (8 to 64, kernel 4).
double convolution_rate(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  const int64_t channels = std::min(conv.in_channels, conv.out_channels);
  if (channels >= wide_channels) {
    const bool few = channels < 64 && conv.rank == 3;
    const auto rate = [&](double transposed, double transposed_few, double ordinary, double ordinary_few) {
      if (conv.transposed) return few ? transposed_few : transposed;
      return few ? ordinary_few : ordinary;
    };
    if (problem.input.dtype != DType::f32) return rate(130e12, 5e12, 340e12, 118e12);
    if (!problem.rounds_to_tf32()) return 45e12;
    return rate(95e12, 8e12, 200e12, 80e12);
  }
  return conv.transposed ? 2.3e12 : conv.rank == 3 ? 21e12 : 20e12;
}

// The part of a GPU that PyTorch's wide convolution keeps busy: tiles of 128 channels by 128 positions, of
// which sums are split where they are few. 320 channels at 8^3 (two samples, 24 tiles) take 65 us in tf32 and
// 40 in bf16, two to three times as long as at the full rate.
double filled_part(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  if (std::min(conv.in_channels, conv.out_channels) < wide_channels) return 1;
  const Shape sizes = problem.block.conv_output_shape(problem.input.sizes);
  const auto positions = static_cast<double>(element_count(sizes)) / static_cast<double>(conv.out_channels);
  const double tiles = std::ceil(static_cast<double>(conv.out_channels) / 128) * std::ceil(positions / 128);
  return std::min(1.0, 2.5 * tiles / gpu_of(problem.device).multiprocessors);
}

// A rate of an H200 on the problem's GPU: they differ in how much tensor cores do beside the others.
double on_gpu(const Problem& problem, double rate) {
  const Gpu& gpu = gpu_of(problem.device);
  rate *= gpu.flops / 66.9e12;
  const bool is_f32 = problem.input.dtype == DType::f32;
  if (is_f32 && !problem.rounds_to_tf32()) return rate;
  const double products = gpu.tensor_products() * (is_f32 ? 1.0 : 2.0);
  return std::min(rate, 0.8 * 2 * products * gpu.multiprocessors * gpu.clock());
}

// PyTorch's convolution in groups of c channels, as cuDNN 9.19 computed ten layers of 16 to 112 on an H200.
// In 16 bits with channels last 45 to 49 TFLOP/s of 16 channels, 77 to 157 of 32, 24 to 185 of more; in tf32
// two thirds of it; other tensors are copied there and back, at 0.5 and 0.8 of what a plain copy moves.
// Without tensor cores 2 to 17. Transposed ones 2 in tf32, 6 to 9 in 16 bits.
double grouped_convolution_seconds(const Problem& problem) {
  const Gpu& gpu = gpu_of(problem.device);
  const Conv& conv = *problem.block.conv();
  const bool is_f32 = problem.input.dtype == DType::f32;
  const auto channels = static_cast<double>(least_channels(conv));
  double rate = (is_f32 ? 8e12 : 12e12) * std::sqrt(channels);
  if (is_f32 && !problem.rounds_to_tf32()) rate = 10e12;
  if (conv.transposed) rate = is_f32 ? 2e12 : 8e12;
  rate = on_gpu(problem, std::min(rate, convolution_rate(problem)));
  const auto bytes =
      static_cast<double>((element_count(problem.input.sizes) +
                           element_count(problem.block.conv_output_shape(problem.input.sizes))) *
                          byte_size(problem.input.dtype));
  const bool is_copied = problem.input.strides[1] != 1;
  const double copies = is_copied ? 2 * bytes / gpu.bytes_per_second / (is_f32 ? 0.8 : 0.5) : 0;
  return 5e-6 + copies +
         std::max(2 * static_cast<double>(problem.conv_multiply_adds()) / rate, bytes / gpu.bytes_per_second);
}

double convolution_seconds(const Problem& problem) {
  if (problem.block.conv()->groups > 1) return grouped_convolution_seconds(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const double rate = on_gpu(problem, convolution_rate(problem)) * filled_part(problem);
  const double elements =
      static_cast<double>(element_count(problem.input.sizes)) +
      static_cast<double>(element_count(problem.block.conv_output_shape(problem.input.sizes)));
  // Thin ones go through copies in other orders: one sample of s27, 0.2 M elements, takes 45 us, 1 to 8
  // channels of 16 images (9 M) 76.
  const Conv& conv = *problem.block.conv();
  const bool is_copied = std::min(conv.in_channels, conv.out_channels) < wide_channels && elements > 1e5;
  return (is_copied ? 2e-5 : 5e-6) +
         std::max(2 * static_cast<double>(problem.conv_multiply_adds()) / rate,
                  (is_copied ? 2 : 1) * elements * static_cast<double>(byte_size(problem.input.dtype)) /
                      gpu.bytes_per_second);
}

// The same of its gradients, of eight layers. With channels last in 16 bits 71 to 79 TFLOP/s of 16 channels,
// 119 to 192 of 32, 130 to 370 of 64, 54 to 80 of 112; in tf32 two thirds of it for the input's and a third
// for the weights'.
double grouped_backward_rate(const Problem& forward, bool of_weight) {
  const Conv& conv = *forward.block.conv();
  const auto channels = static_cast<double>(least_channels(conv));
  if (forward.input.dtype == DType::f32) return (of_weight ? 6e12 : 13e12) * std::sqrt(channels);
  return channels <= 64 ? 20e12 * std::sqrt(channels) : 75e12;
}

// PyTorch's gradients of a wide convolution, as cuDNN 9.19 computes those of eleven layers on an H200. With
// channels last and 96 channels and more: 290 TFLOP/s for the input's and 155 for the weights' in tf32, 620
// in 16 bits; with fewer channels as much less. Other tensors are copied there and back, at 0.8 and 0.5 of
// what a plain copy moves.
double wide_backward_seconds(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  const Gpu& gpu = gpu_of(forward.device);
  const Conv& conv = *forward.block.conv();
  const bool is_f32 = forward.input.dtype == DType::f32;
  const double filled =
      std::min(1.0, static_cast<double>(std::min(conv.in_channels, conv.out_channels)) / 96);
  const double scale = gpu.flops / 66.9e12;
  const double operations = 2 * static_cast<double>(forward.conv_multiply_adds());
  const double of_output = static_cast<double>(problem.output_gradient.byte_span());
  const double bytes = of_output + static_cast<double>(forward.input.byte_span());
  const double copies =
      forward.input.strides[1] == 1 ? 0 : 1e-5 + 2 * bytes / gpu.bytes_per_second / (is_f32 ? 0.8 : 0.5);
  const auto product = [&](double ungrouped, bool of_weight) {
    const double rate = conv.groups == 1 ? ungrouped * filled : grouped_backward_rate(forward, of_weight);
    return 5e-6 + copies + std::max(operations / rate / scale, bytes / gpu.bytes_per_second);
  };
  double seconds = 0;
  if (problem.wants_input()) seconds += product(is_f32 ? 290e12 : 620e12, false);
  if (problem.wants_parameter(0)) seconds += product(is_f32 ? 155e12 : 620e12, true);
  if (conv.bias && problem.wants_parameter(1)) seconds += 1e-5 + of_output / gpu.bytes_per_second;
  return seconds;
}

// Of s60's step of 10.4 ms on an H200 at its best settings some 6 are those of the convolution's gradients
// (1.7 TFLOP/s), of s27's 19.4 some 15 (9; without cudnn.benchmark it takes 130 ms).
double convolution_backward_seconds(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  const Gpu& gpu = gpu_of(forward.device);
  const Conv& conv = *forward.block.conv();
  if (std::min(conv.in_channels, conv.out_channels) >= wide_channels) return wide_backward_seconds(problem);
  const double rate = (conv.transposed ? 1.7e12 : conv.rank == 3 ? 9e12 : 60e12) * gpu.flops / 66.9e12;
  const double products = (problem.wants_input() ? 1 : 0) + (problem.wants_parameter(0) ? 1 : 0);
  const double elements =
      static_cast<double>(element_count(forward.input.sizes)) +
      static_cast<double>(element_count(forward.block.conv_output_shape(forward.input.sizes)));
  return products * (5e-6 + std::max(2 * static_cast<double>(forward.conv_multiply_adds()) / rate,
                                     elements * static_cast<double>(byte_size(forward.input.dtype)) /
                                         gpu.bytes_per_second));
}

double tail_backward_seconds(const BackwardProblem& problem) {
  std::optional<Problem> tail = tail_of(problem.forward);
  return tail ? least_seconds(BackwardProblem(std::move(*tail)), "tail_") : 0;
}

}  // namespace

bool is_worth_training(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  if (forward.block.conv() == nullptr || element_count(forward.input.sizes) == 0) return false;
  // A wide convolution is alone: its forward may be PyTorch's all the same.
  if (least_seconds(problem, "gemm_") < convolution_backward_seconds(problem)) return true;
  const double whole = least_seconds(forward, "thin_") + least_seconds(problem, "thin_");
  return whole < infinity && whole < convolution_seconds(forward) + tail_seconds(forward) +
                                         convolution_backward_seconds(problem) +
                                         tail_backward_seconds(problem);
}

double predicted_gain(const Problem& problem) {
  if (problem.block.conv() == nullptr || element_count(problem.input.sizes) == 0) return 0;
  const double whole = std::min(least_seconds(problem, "thin_"), least_seconds(problem, "gemm_"));
  return whole < infinity ? (convolution_seconds(problem) + tail_seconds(problem)) / whole : 0;
}

bool is_worth_fusing(const Problem& problem) { return predicted_gain(problem) > 1; }

}  // namespace onepass::cuda
