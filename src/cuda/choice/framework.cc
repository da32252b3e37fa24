// Whether to run a block whole, or PyTorch's convolution and then the block's tail.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "cuda/costs/framework.h"
#include "cuda/runtime/gpu.h"
#include "cuda/tail/tail.h"
#include "onepass/cuda.h"
#include "plan/fitted.h"
#include "plan/strategy.h"

namespace onepass::cuda {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Of a group, of the input or of the output.
int64_t least_channels(const Conv& conv) {
  return std::min(conv.in_channels, conv.out_channels) / conv.groups;
}

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

double as_double(int64_t value) { return static_cast<double>(value); }

// Of the convolution, input and output together.
double moved_elements(const Problem& problem) {
  return as_double(element_count(problem.input.sizes)) +
         as_double(element_count(problem.block.conv_output_shape(problem.input.sizes)));
}

double operations(const Problem& problem) { return 2 * as_double(problem.conv_multiply_adds()); }

bool is_f32(const Problem& problem) { return problem.input.dtype == DType::f32; }
bool is_channels_last(const Problem& problem) { return problem.input.strides[1] == 1; }

// A convolution of whole tensors: a wide one runs on tensor cores.
int64_t narrow_side(const Conv& conv) { return std::min(conv.in_channels, conv.out_channels); }
bool is_wide(const Conv& conv) { return narrow_side(conv) >= framework::wide_channels; }

bool is_few(const Conv& conv) { return narrow_side(conv) < framework::few_channels && conv.rank == 3; }

double rate_of(const framework::WideRates& rates, const Conv& conv) {
  const bool few = is_few(conv);
  if (conv.transposed) return few ? rates.transposed_few : rates.transposed;
  return few ? rates.ordinary_few : rates.ordinary;
}

double rate_of(const framework::ThinRates& rates, const Conv& conv) {
  return conv.transposed ? rates.transposed : conv.rank == 3 ? rates.volume : rates.other;
}

// A convolution whose rate is that of tensors with channels last.
bool is_wide_last(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  return is_wide(conv) && !conv.transposed && !is_few(conv) && is_channels_last(problem) &&
         (!is_f32(problem) || problem.rounds_to_tf32());
}

// Operations a second of PyTorch's convolution on an H200.
double convolution_rate(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  if (!is_wide(conv)) return rate_of(framework::thin, conv);
  if (is_wide_last(problem)) return is_f32(problem) ? framework::wide_last_tf32 : framework::wide_last_short;
  if (!is_f32(problem)) return rate_of(framework::wide_short, conv);
  return problem.rounds_to_tf32() ? rate_of(framework::wide_tf32, conv) : framework::wide_f32;
}

// The part of a GPU that PyTorch's wide convolution keeps busy.
double filled_part(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  if (!is_wide(conv)) return 1;
  const Shape sizes = problem.block.conv_output_shape(problem.input.sizes);
  const double positions = as_double(element_count(sizes)) / as_double(conv.out_channels);
  const double tiles = std::ceil(as_double(conv.out_channels) / framework::tile_channels) *
                       std::ceil(positions / framework::tile_positions);
  const double filled = tiles / gpu_of(problem.device).multiprocessors;
  return std::min(1.0, is_wide_last(problem) ? std::sqrt(filled) : framework::most_splits * filled);
}

// A rate of an H200 on the problem's GPU. GPUs differ in the ratio of tensor cores to CUDA cores.
double on_gpu(const Problem& problem, double rate) {
  const Gpu& gpu = gpu_of(problem.device);
  rate *= gpu.flops / framework::measured_flops;
  if (is_f32(problem) && !problem.rounds_to_tf32()) return rate;
  const double products = gpu.most_tensor_products() * (is_f32(problem) ? 1.0 : 2.0);
  return std::min(rate, framework::most_of_tensor_peak * 2 * products * gpu.multiprocessors * gpu.clock());
}

// Of tensors of so many bytes that are copied to cuDNN's layout and back.
double copy_seconds(const Problem& problem, double bytes) {
  const double share = is_f32(problem) ? framework::f32_copy_share : framework::short_copy_share;
  return 2 * bytes / gpu_of(problem.device).bytes_per_second / share;
}

double grouped_convolution_rate(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  if (conv.transposed) {
    return is_f32(problem) ? framework::grouped_transposed_f32 : framework::grouped_transposed_short;
  }
  if (is_f32(problem) && !problem.rounds_to_tf32()) return framework::grouped_f32;
  return (is_f32(problem) ? framework::grouped_tf32_per_root : framework::grouped_short_per_root) *
         std::sqrt(as_double(least_channels(conv)));
}

// The class of a convolution of PyTorch in the table of fitted costs (scripts/fit_costs.py has the same).
double fitted_class_factor(const Problem& problem, bool backward) {
  const Conv& conv = *problem.block.conv();
  const bool is_depthwise = conv.in_channels == conv.groups && conv.out_channels == conv.groups;
  std::string name = "torch_";
  name += conv.groups == 1 ? (is_wide(conv) ? "wide" : "thin") : is_depthwise ? "depthwise" : "grouped";
  if (conv.transposed) name += "_transposed";
  if (backward) name += "_backward";
  return fitted_factor(name, byte_size(problem.input.dtype));
}

double grouped_convolution_seconds(const Problem& problem) {
  const Gpu& gpu = gpu_of(problem.device);
  const double rate = on_gpu(problem, std::min(grouped_convolution_rate(problem), convolution_rate(problem)));
  const double bytes = moved_elements(problem) * as_double(byte_size(problem.input.dtype));
  const double copies = is_channels_last(problem) ? 0 : copy_seconds(problem, bytes);
  return framework::launch_seconds + copies +
         std::max(operations(problem) / rate, bytes / gpu.bytes_per_second);
}

double dense_convolution_seconds(const Problem& problem) {
  const Gpu& gpu = gpu_of(problem.device);
  const double rate = on_gpu(problem, convolution_rate(problem)) * filled_part(problem);
  const double elements = moved_elements(problem);
  // Thin ones are copied into other layouts. One sample of s27 (0.2 M elements) takes 45 us; 16 images of 1
  // to 8 channels (9 M) take 76.
  const bool is_copied = !is_wide(*problem.block.conv()) && elements > framework::copied_elements;
  return (is_copied ? framework::thin_launch_seconds : framework::launch_seconds) +
         std::max(operations(problem) / rate, (is_copied ? 2 : 1) * elements *
                                                  as_double(byte_size(problem.input.dtype)) /
                                                  gpu.bytes_per_second);
}

double convolution_seconds(const Problem& problem) {
  const bool is_grouped = problem.block.conv()->groups > 1;
  return fitted_class_factor(problem, false) *
         (is_grouped ? grouped_convolution_seconds(problem) : dense_convolution_seconds(problem));
}

enum class Product : uint8_t { input_gradient, weight_gradient };

double rate_of(const framework::GradientRates& rates, Product product) {
  return product == Product::weight_gradient ? rates.weight : rates.input;
}

double depthwise_backward_rate(const Problem& forward, Product product) {
  const Conv& conv = *forward.block.conv();
  const auto rank = static_cast<std::ptrdiff_t>(conv.rank);
  const auto is_one = [&](const auto& values) {
    return std::all_of(values.begin(), values.begin() + rank, [](int64_t value) { return value == 1; });
  };
  if (conv.rank == 1) return rate_of(framework::depthwise_gradient_line, product);
  if (conv.rank == 3) {
    return rate_of(conv.transposed       ? framework::depthwise_gradient_transposed_volume
                   : is_one(conv.stride) ? framework::depthwise_gradient_volume
                                         : framework::depthwise_gradient_strided_volume,
                   product);
  }
  if (conv.transposed || conv.in_channels != conv.out_channels || !is_one(conv.stride) ||
      !is_one(conv.dilation)) {
    return rate_of(framework::depthwise_gradient_other, product);
  }
  return rate_of(is_f32(forward) ? framework::depthwise_gradient_f32 : framework::depthwise_gradient_short,
                 product);
}

double grouped_backward_rate(const Problem& forward, Product product) {
  const Conv& conv = *forward.block.conv();
  const double channels = as_double(least_channels(conv));
  if (channels == 1) return depthwise_backward_rate(forward, product);
  const double few =
      channels * channels *
      (is_f32(forward) ? framework::few_gradient_tf32_per_square : framework::few_gradient_short_per_square);
  const bool is_few = least_channels(conv) < framework::wide_channels;
  if (is_f32(forward) && !forward.rounds_to_tf32()) {
    if (conv.rank == 3) return rate_of(framework::grouped_gradient_f32_volume, product);
    const double rate = rate_of(framework::grouped_gradient_f32, product);
    return is_few ? std::min(rate, few) : rate;
  }
  if (is_few) return few;
  if (is_f32(forward)) {
    return (product == Product::weight_gradient ? framework::grouped_weight_gradient_tf32_per_root
                                                : framework::grouped_input_gradient_tf32_per_root) *
           std::sqrt(channels);
  }
  return channels <= framework::grouped_gradient_short_most_channels
             ? framework::grouped_gradient_short_per_root * std::sqrt(channels)
             : framework::grouped_gradient_short_beyond;
}

// Whether rates are of tensors as they come: no copies into another layout are added.
bool is_few_grouped(const Conv& conv) {
  return conv.groups > 1 && least_channels(conv) < framework::wide_channels;
}

double wide_backward_rate(const Problem& forward, Product product) {
  const Conv& conv = *forward.block.conv();
  if (conv.groups > 1) return grouped_backward_rate(forward, product);
  const double filled = std::min(1.0, as_double(narrow_side(conv)) / framework::full_gradient_channels);
  if (!is_f32(forward)) return framework::wide_gradient_short * filled;
  return (product == Product::weight_gradient ? framework::wide_weight_gradient_tf32
                                              : framework::wide_input_gradient_tf32) *
         filled;
}

double bias_gradient_seconds(const BackwardProblem& problem) {
  if (!problem.forward.block.conv()->bias || !problem.wants_parameter(1)) return 0;
  return framework::bias_gradient_seconds +
         as_double(problem.output_gradient.byte_span()) / gpu_of(problem.forward.device).bytes_per_second;
}

double wide_backward_seconds(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  const Gpu& gpu = gpu_of(forward.device);
  const double scale = gpu.flops / framework::measured_flops;
  const double of_output = as_double(problem.output_gradient.byte_span());
  const double bytes = of_output + as_double(forward.input.byte_span());
  const double copies = is_channels_last(forward) || is_few_grouped(*forward.block.conv())
                            ? 0
                            : framework::backward_copy_seconds + copy_seconds(forward, bytes);
  const auto seconds_of = [&](Product product) {
    return framework::launch_seconds + copies +
           std::max(operations(forward) / wide_backward_rate(forward, product) / scale,
                    bytes / gpu.bytes_per_second);
  };
  double seconds = 0;
  if (problem.wants_input()) seconds += seconds_of(Product::input_gradient);
  if (problem.wants_parameter(0)) seconds += seconds_of(Product::weight_gradient);
  return seconds + bias_gradient_seconds(problem);
}

// Without groups.
double thin_backward_rate(const Conv& conv, const Problem& forward, Product product) {
  const bool is_exact = is_f32(forward) && !forward.rounds_to_tf32();
  const bool is_slow = conv.in_channels == 1 || conv.out_channels < framework::few_gradient_channels ||
                       (is_exact && conv.in_channels < framework::few_gradient_channels);
  if (!conv.transposed && conv.rank < 3 && is_slow) return rate_of(framework::few_gradient, product);
  return rate_of(framework::thin_backward, conv);
}

double convolution_backward_seconds(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  const Gpu& gpu = gpu_of(forward.device);
  const Conv& conv = *forward.block.conv();
  const double factor = fitted_class_factor(forward, true);
  if (is_wide(conv) || conv.groups > 1) return factor * wide_backward_seconds(problem);
  const double bytes = moved_elements(forward) * as_double(byte_size(forward.input.dtype));
  const auto seconds_of = [&](Product product) {
    const double rate = thin_backward_rate(conv, forward, product) * gpu.flops / framework::measured_flops;
    return framework::launch_seconds + std::max(operations(forward) / rate, bytes / gpu.bytes_per_second);
  };
  return factor * ((problem.wants_input() ? seconds_of(Product::input_gradient) : 0) +
                   (problem.wants_parameter(0) ? seconds_of(Product::weight_gradient) : 0) +
                   bias_gradient_seconds(problem));
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
  double alone = std::min(least_seconds(problem, "gemm_"), least_seconds(problem, "narrow_"));
  if (forward.block.stages().size() == 1) alone = std::min(alone, least_seconds(problem, "scaled_"));
  if (alone < convolution_backward_seconds(problem)) return true;
  const double whole = std::min(least_seconds(forward, "thin_") + least_seconds(problem, "thin_"),
                                least_seconds(forward, "scaled") + least_seconds(problem, "scaled_"));
  return whole < infinity && whole < convolution_seconds(forward) + tail_seconds(forward) +
                                         convolution_backward_seconds(problem) +
                                         tail_backward_seconds(problem);
}

double predicted_gain(const Problem& problem) {
  if (problem.block.conv() == nullptr || element_count(problem.input.sizes) == 0) return 0;
  double whole = infinity;
  for (const char* const family : {"thin_", "gemm_", "scaled", "narrow"})
    whole = std::min(whole, least_seconds(problem, family));
  return whole < infinity ? (convolution_seconds(problem) + tail_seconds(problem)) / whole : 0;
}

double framework_seconds(const Problem& problem) {
  return problem.block.conv() == nullptr ? 0 : convolution_seconds(problem);
}

double framework_seconds(const BackwardProblem& problem) {
  return problem.forward.block.conv() == nullptr ? 0 : convolution_backward_seconds(problem);
}

bool is_worth_fusing(const Problem& problem) { return predicted_gain(problem) > 1; }

}  // namespace onepass::cuda
