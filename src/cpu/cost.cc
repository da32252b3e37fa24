// The cost model of the CPU strategies.
#include "cpu/cost.h"

#include <algorithm>
#include <string_view>

#include "cpu/gathered_convolution.h"

namespace onepass::cpu {
namespace {

// Rates of one core, measured with `onepass bench` and forced strategies; they rank strategies, so ratios
// matter more than values.
struct Rates {
  std::string_view target;
  double channel_tile_flops;  // multiply-add counts as two
  double pixel_tile_flops;    // with four channels
  double cheap_step_ns;       // per element: relu, clamp, add, mul
  double exp_step_ns;         // per element: one exponential or error function
  double move_ns;             // per element: staging, statistics
  double turn_ns;             // per element: a panel's change of orientation
  double pack_ns;             // per weight
  double bytes_per_second;
};

constexpr Rates rates[] = {
    // Neoverse-V1, 2.6 GHz: tiles 64 and 52 GFLOP/s of a peak of 83, swish 0.8 ns, one core writes about 20
    // GB/s.
    {"neon", 64e9, 52e9, 0.20, 0.80, 0.30, 0.15, 1.3, 20e9},
    {"neon_without_aes", 64e9, 52e9, 0.20, 0.80, 0.30, 0.15, 1.3, 20e9},
    // Xeon with AVX-512, peak 165 to 180 GFLOP/s. Eight convolutions of 2 to 64 channels: channel tiles run
    // at 78 to 125 GFLOP/s, pixel tiles at 49 to 79. On AVX2 they run at 35 to 68 and 33 to 48. Turning
    // panels takes 0.3 to 1.3 ns an element on AVX-512, 0.2 to 0.7 on AVX2; swish 0.3 and 0.4, gelu 0.5 and
    // 0.65. One core writes 8 GB/s.
    {"avx3", 100e9, 65e9, 0.14, 0.30, 0.10, 0.50, 0.7, 12e9},
    {"avx2", 55e9, 40e9, 0.15, 0.40, 0.12, 0.40, 0.7, 12e9},
};

const Rates& rates_of(const Isa& isa) {
  for (const Rates& row : rates) {
    if (row.target == isa.name) return row;
  }
  return rates[0];
}

constexpr double hand_out_seconds = 2e-6;  // one pass of one wave, on any number of threads

double step_ns(const Rates& rate, Op op) { return is_cheap(op) ? rate.cheap_step_ns : rate.exp_step_ns; }

// Elements that are read one by one take three times as long as vectors do, and 5 ns where each is on a cache
// line of its own: a depthwise convolution of 64 channels in channels last, 1.5 ms for 0.2 million
// (Neoverse-V1).
double staging_ns(const Rates& rate, const Convolver& convolution) {
  const int64_t stride = convolution.staged_stride_bytes();
  if (stride == 0) return rate.move_ns;
  return stride < 64 ? 3 * rate.move_ns : 5.0;
}

// Convolutions by windows and packed weights.
double tiled_seconds(const Rates& rate, const Convolver& convolution) {
  // A pixel tile loads a vector of pixels for each of its channels' multiply-adds.
  const auto tile =
      static_cast<double>(std::min<int64_t>(max_pixel_tile_channels, convolution.max_segment_channels()));
  const double flops = convolution.lanes() == Lanes::channels
                           ? rate.channel_tile_flops
                           : rate.pixel_tile_flops * (tile + 1) / (max_pixel_tile_channels + 1);
  // Packed weights come from L2 or L3, at twice the rate of memory.
  constexpr int64_t l1_floats = 16 * 1024;
  const double read_floats = convolution.packed_floats() > l1_floats ? convolution.read_weights() : 0;
  return 2 * convolution.padded_multiply_adds() / flops +
         read_floats * sizeof(float) / (2 * rate.bytes_per_second) +
         static_cast<double>(convolution.packed_floats()) * rate.pack_ns * 1e-9 +
         convolution.staged_elements() * staging_ns(rate, convolution) * 1e-9;
}

// Convolutions by gathered terms: a run of taps takes as long to begin as four elements to copy.
double gathered_seconds(const Rates& rate, const GatheredConvolution& convolution) {
  const double products = 2 * convolution.padded_multiply_adds() / (rate.channel_tile_flops * 0.9);
  const double weights = convolution.read_weights() * sizeof(float) / rate.bytes_per_second;
  const double gather_ns = rate.move_ns * (1 + 4 / static_cast<double>(convolution.run_width()));
  return std::max(products, weights) + convolution.staged_elements() * gather_ns * 1e-9;
}

}  // namespace

bool is_cheap(Op op) {
  switch (op) {
    case Op::elu:
    case Op::gelu:
    case Op::gelu_tanh:
    case Op::swish:
    case Op::sigmoid:
    case Op::tanh:
    case Op::mish:
    case Op::softplus:
      return false;
    default:
      return true;
  }
}

double predicted_seconds(const Problem& problem, const Isa& isa, const BlockKernel& kernel) {
  const Rates& rate = rates_of(isa);
  const Shape shape = problem.block.conv_output_shape(problem.input.sizes);
  const auto elements = static_cast<double>(element_count(shape));
  double element_ns = rate.move_ns;
  for (const Stage& stage : problem.block.stages()) {
    if (const auto* pointwise = std::get_if<Pointwise>(&stage)) {
      element_ns += step_ns(rate, pointwise->op);
    } else if (std::holds_alternative<Norm>(stage)) {
      element_ns += rate.cheap_step_ns + rate.move_ns;
    }
  }
  if (kernel.turns_panels()) element_ns += rate.turn_ns;
  double seconds = elements * element_ns * 1e-9;
  if (const Convolver* convolution = kernel.convolution()) {
    const auto* gathered = dynamic_cast<const GatheredConvolution*>(convolution);
    seconds += gathered != nullptr ? gathered_seconds(rate, *gathered) : tiled_seconds(rate, *convolution);
  }
  const double bytes = static_cast<double>(problem.input.byte_span() + problem.output.byte_span());
  seconds = std::max(seconds, bytes / rate.bytes_per_second);
  return seconds / problem.device.threads + hand_out_seconds;
}

// A step taken back costs about as much as the step. Steps before the norm are recomputed in each pass and
// differentiated in the last. Steps after it are recomputed and differentiated in each, unless the first pass
// keeps its result.
double predicted_seconds(const BackwardProblem& problem, const Isa& isa, const TailBackward& kernel) {
  const Rates& rate = rates_of(isa);
  const auto elements = static_cast<double>(element_count(problem.forward.input.sizes));
  const int passes = kernel.pass_count();
  double element_ns = passes * rate.move_ns;
  bool after = false;
  for (const Stage& stage : problem.forward.block.stages()) {
    if (const auto* pointwise = std::get_if<Pointwise>(&stage)) {
      const bool once = kernel.kept() == (after ? Kept::norm_gradient : Kept::norm_input);
      const int recomputed = once ? 1 : passes;
      element_ns += (recomputed + (after ? recomputed : 1)) * step_ns(rate, pointwise->op);
    } else if (std::holds_alternative<Norm>(stage)) {
      after = true;
      element_ns += passes * rate.cheap_step_ns;
    }
  }
  double bytes = static_cast<double>(problem.forward.input.byte_span() + problem.output_gradient.byte_span());
  if (problem.wants_input()) bytes += static_cast<double>(problem.input_gradient.byte_span());
  const double seconds = std::max(elements * element_ns * 1e-9, bytes / rate.bytes_per_second);
  return seconds / problem.forward.device.threads + hand_out_seconds * passes;
}

// The input's gradient has a plan of its own.
double predicted_seconds(const BackwardProblem& problem, const Isa& isa, const ConvBackward& kernel) {
  const Rates& rate = rates_of(isa);
  const auto gradient_bytes = static_cast<double>(problem.output_gradient.byte_span());
  double seconds = 0;
  if (const auto& weight = kernel.weight()) {
    seconds += 2 * weight->padded_multiply_adds() / rate.channel_tile_flops;
    seconds += weight->staged_elements() * rate.move_ns * 1e-9;
  }
  seconds = std::max(seconds, gradient_bytes / rate.bytes_per_second);
  seconds = seconds / problem.forward.device.threads + 2 * hand_out_seconds;
  if (const auto& input = kernel.input()) {
    for (const Candidate& row : input->candidates()) {
      if (row.strategy == input->strategy()) seconds += row.seconds;
    }
  }
  return seconds;
}

}  // namespace onepass::cpu
