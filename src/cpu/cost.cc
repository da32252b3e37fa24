// The cost model of the CPU strategies.
#include "cpu/cost.h"

#include <algorithm>
#include <string_view>

namespace onepass::cpu {
namespace {

// Rates of one core. Measured with `onepass bench` where a comment says so, else scaled by lane count and
// clock; they rank strategies, so ratios matter more than values.
struct Rates {
  std::string_view target;
  double channel_tile_flops;  // multiply-add counts as two
  double pixel_tile_flops;
  double cheap_step_ns;  // per element: relu, clamp, add, mul
  double exp_step_ns;    // per element: one exponential or error function
  double move_ns;        // per element: staging, statistics, transposition
  double bytes_per_second;
};

constexpr Rates rates[] = {
    // Neoverse-V1, 2.6 GHz: tiles 64 GFLOP/s of a peak of 83, swish 0.45 ns, one core writes about 20 GB/s.
    {"neon", 62e9, 24e9, 0.10, 0.45, 0.30, 20e9},
    {"neon_without_aes", 62e9, 24e9, 0.10, 0.45, 0.30, 20e9},
    {"avx3", 110e9, 50e9, 0.05, 0.15, 0.15, 12e9},
    {"avx2", 70e9, 35e9, 0.07, 0.30, 0.20, 12e9},
};

const Rates& rates_of(const Isa& isa) {
  for (const Rates& row : rates) {
    if (row.target == isa.name) return row;
  }
  return rates[0];
}

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

constexpr double hand_out_seconds = 2e-6;  // one pass of one wave, on any number of threads

}  // namespace

double predicted_seconds(const Problem& problem, const Isa& isa, const BlockKernel& kernel) {
  const Rates& rate = rates_of(isa);
  const Shape shape = problem.block.conv_output_shape(problem.input.sizes);
  const auto elements = static_cast<double>(element_count(shape));
  double step_ns = 0;
  for (const Stage& stage : problem.block.stages()) {
    if (const auto* pointwise = std::get_if<Pointwise>(&stage)) {
      step_ns += is_cheap(pointwise->op) ? rate.cheap_step_ns : rate.exp_step_ns;
    } else if (std::holds_alternative<Norm>(stage)) {
      step_ns += rate.cheap_step_ns + rate.move_ns;
    }
  }
  double seconds = elements * (step_ns + rate.move_ns) * 1e-9;
  if (const ConvolutionStage* convolution = kernel.convolution()) {
    const bool channels = convolution->orientation() == Orientation::interleaved;
    const double flops = channels ? rate.channel_tile_flops : rate.pixel_tile_flops;
    seconds += 2 * convolution->padded_multiply_adds() / flops;
    seconds += static_cast<double>(convolution->packed_floats()) * rate.move_ns * 1e-9;
  }
  const double bytes = static_cast<double>(problem.input.byte_span() + problem.output.byte_span());
  seconds = std::max(seconds, bytes / rate.bytes_per_second);
  return seconds / problem.device.threads + hand_out_seconds;
}

}  // namespace onepass::cpu
