// The cost model of the CPU strategies.
#include "cpu/cost.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "cpu/convolution_stage.h"
#include "cpu/gathered_convolution.h"
#include "cpu/group_convolution.h"
#include "cpu/indirect_convolution.h"
#include "cpu/plane_convolution.h"
#include "cpu/run_convolution.h"

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
  // Shares of the tiles' rates: convolutions by pointers and by runs of the channel tile's, planes of the
  // pixel tile's.
  double pointer_share;
  double run_share;
  double plane_share;
  double gather_ns;      // per gathered term
  double gather_run_ns;  // per run of them
};

constexpr Rates rates[] = {
    // Neoverse-V1, 2.6 GHz: tiles 64 and 52 GFLOP/s of a peak of 83, swish 0.8 ns, one core writes about 20
    // GB/s.
    {"neon", 64e9, 52e9, 0.20, 0.80, 0.30, 0.15, 1.3, 20e9, 1.12, 0.9, 1, 0.30, 1.2},
    {"neon_without_aes", 64e9, 52e9, 0.20, 0.80, 0.30, 0.15, 1.3, 20e9, 1.12, 0.9, 1, 0.30, 1.2},
    // Xeon with AVX-512, peak 165 to 180 GFLOP/s. Eight convolutions of 2 to 64 channels: channel tiles run
    // at 78 to 125 GFLOP/s, pixel tiles at 49 to 79. On AVX2 they run at 35 to 68 and 33 to 48. Turning
    // panels takes 0.3 to 1.3 ns an element on AVX-512, 0.2 to 0.7 on AVX2; swish 0.3 and 0.4, gelu 0.5 and
    // 0.65. The shares and the rate of memory: another Xeon, peak 243 GFLOP/s, 116 drawn blocks on every row,
    // 2026-11-18. Gathered terms: runs of 2, 3 and 128 take 0.78, 0.66 and 0.62 ns each, 2026-11-19. Runs:
    // twelve convolutions of 1 to 12 outputs, 2026-11-19 (docs/lab/map.md); on the others an estimate.
    {"avx3", 100e9, 72e9, 0.14, 0.30, 0.10, 0.50, 0.7, 20e9, 1.4, 1.15, 1.5, 0.60, 0.30},
    {"avx2", 55e9, 40e9, 0.15, 0.40, 0.12, 0.40, 0.7, 12e9, 1.12, 0.9, 1, 0.60, 0.30},
};

const Rates& rates_of(const Isa& isa) {
  for (const Rates& row : rates) {
    if (row.target == isa.name) return row;
  }
  return rates[0];
}

// Of a row of an interleaved panel in each step: a vector that channels do not fill goes through memory, and
// one or two vectors wait for their results.
constexpr double partial_vector_ns = 5;
constexpr double narrow_row_ns = 1;
constexpr double hand_out_seconds = 2e-6;  // one pass of one wave, on any number of threads

double step_ns(const Rates& rate, Op op) { return is_cheap(op) ? rate.cheap_step_ns : rate.exp_step_ns; }

// Of a part of an input row in staging, and of a sum that is stored alone (Neoverse-V1, 2026-11-18).
constexpr double staged_row_ns = 2.5;
constexpr double scattered_sum_ns = 0.5;
constexpr double tile_call_ns = 30;
constexpr double row_call_ns = 30;        // of a channel tile, beside its products
constexpr double position_ns = 16;        // that is read by pointers to taps
constexpr double pointer_ns = 2;          // of a position and a tap
constexpr double tile_run_ns = 4;         // of a tap of a register tile by pointers
constexpr double partial_run_ns = 10;     // of one that ends in a part of a vector
constexpr double chunk_sum_ns = 4;        // of adding the lanes of up to four sums
constexpr double copied_weight_ns = 0.7;  // from channels last
constexpr double panel_ns = 300;          // of handing a panel of sums on through the steps

// Elements that are read one by one take three times as long as vectors do, and 5 ns where each is on a cache
// line of its own: a depthwise convolution of 64 channels in channels last, 1.5 ms for 0.2 million
// (Neoverse-V1).
double staging_ns(const Rates& rate, const ConvolutionStage& convolution) {
  const int64_t stride = convolution.staged_stride_bytes();
  if (stride == 0) return rate.move_ns;
  return stride < 64 ? 3 * rate.move_ns : 5.0;
}

// Weights that the tasks read come from L2 or L3, at twice the rate of memory, where L1 does not hold them.
double weight_seconds(const Rates& rate, const Convolver& convolution) {
  constexpr int64_t l1_floats = 16 * 1024;
  const double read_floats = convolution.packed_floats() > l1_floats ? convolution.read_weights() : 0;
  return read_floats * sizeof(float) / (2 * rate.bytes_per_second);
}

// Convolutions by windows and packed weights.
double tiled_seconds(const Rates& rate, const ConvolutionStage& convolution) {
  // A pixel tile loads a vector of pixels for each of its channels' multiply-adds.
  const auto tile =
      static_cast<double>(std::min<int64_t>(max_pixel_tile_channels, convolution.max_segment_channels()));
  const double flops = convolution.lanes() == Lanes::channels
                           ? rate.channel_tile_flops
                           : rate.pixel_tile_flops * (tile + 1) / (max_pixel_tile_channels + 1);
  return 2 * convolution.padded_multiply_adds() / flops + weight_seconds(rate, convolution) +
         static_cast<double>(convolution.packed_floats()) * rate.pack_ns * 1e-9 +
         convolution.staged_elements() * staging_ns(rate, convolution) * 1e-9 +
         convolution.staged_rows() * staged_row_ns * 1e-9 + convolution.row_calls() * row_call_ns * 1e-9 +
         convolution.scattered_sums() * scattered_sum_ns * 1e-9;
}

// Convolutions by gathered terms. Planes that are turned or get a border are copied before. Terms that are
// read in place miss L1, again for every eight channels beyond the first 16.
double gathered_seconds(const Rates& rate, const GatheredConvolution& convolution) {
  const double products = 2 * convolution.padded_multiply_adds() / (rate.channel_tile_flops * 0.9);
  const double weights = convolution.read_weights() * sizeof(float) / rate.bytes_per_second;
  double gather_ns = rate.gather_ns + rate.gather_run_ns / static_cast<double>(convolution.run_width());
  if (convolution.has_one_tap()) gather_ns = (convolution.copies_rows() ? 2.4 : 1.2) * rate.move_ns;
  if (convolution.in_place()) gather_ns = rate.move_ns * (0.5 + 0.3 * convolution.passes_from_l2());
  return std::max(products, weights) + convolution.staged_elements() * gather_ns * 1e-9 +
         convolution.copied_elements() * rate.move_ns * 1e-9 +
         convolution.copied_rows() * staged_row_ns * 1e-9 +
         convolution.turned_weights() * rate.pack_ns * 1e-9;
}

// Convolutions in groups of few channels. Spreading channels over lanes, and turning contiguous ones, takes
// as long as two to three copies.
double grouped_seconds(const Rates& rate, const GroupConvolution& convolution) {
  const GroupWindows& windows = convolution.windows();
  const double products = 2 * convolution.padded_multiply_adds() / (rate.pixel_tile_flops * 0.7);
  double staging_ns = rate.move_ns;
  if (!windows.is_copy()) staging_ns *= 2;
  if (!windows.has_channels_last()) staging_ns *= 1.2;
  if (windows.in_place()) staging_ns *= 0.5;  // misses of L1
  return products + convolution.staged_elements() * staging_ns * 1e-9 +
         static_cast<double>(convolution.packed_floats()) * rate.pack_ns * 1e-9;
}

// Convolutions of one tap over planes in place: a pixel tile that, with several chunks, also reads and writes
// its sums. With one, planes are measured at 0.7 of what pixel lanes take.
double plane_seconds(const Rates& rate, const PlaneConvolution& convolution) {
  const auto tile =
      static_cast<double>(std::min<int64_t>(max_pixel_tile_channels, convolution.max_segment_channels()));
  const double share = rate.plane_share * (convolution.has_one_chunk() ? 1.4 : 0.75);
  const double flops = share * rate.pixel_tile_flops * (tile + 1) / (max_pixel_tile_channels + 1);
  return 2 * convolution.padded_multiply_adds() / flops +
         convolution.staged_elements() * 0.5 * rate.move_ns * 1e-9 +
         convolution.calls() * tile_call_ns * 1e-9 +
         static_cast<double>(convolution.packed_floats()) * rate.pack_ns * 1e-9;
}

// Convolutions by pointers to positions. Inputs that are not in channels last are turned.
double indirect_seconds(const Rates& rate, const IndirectConvolution& convolution) {
  const double products =
      2 * convolution.padded_multiply_adds() / (rate.pointer_share * rate.channel_tile_flops);
  return products + convolution.packed_weights() * rate.pack_ns * 1e-9 +
         convolution.staged_elements() * 1.5 * rate.move_ns * 1e-9 +
         convolution.pointers() * pointer_ns * 1e-9 + convolution.tile_runs() * tile_run_ns * 1e-9 +
         convolution.positions() * position_ns * 1e-9;
}

// Convolutions by runs. Inputs that are not in channels last are turned. With one tap, neighbouring positions
// share nothing, and each is read from L2: conv2d(512,16,k=1) @ 1x512x80x44 nhwc 0.91 ms, by pointers 0.74.
double run_seconds(const Rates& rate, const RunConvolution& convolution) {
  const double share = convolution.has_one_tap() ? 0.65 * rate.run_share : rate.run_share;
  const double products = 2 * convolution.padded_multiply_adds() / (rate.channel_tile_flops * share);
  return products + weight_seconds(rate, convolution) +
         static_cast<double>(convolution.packed_floats()) * rate.pack_ns * 1e-9 +
         convolution.staged_elements() * (0.5 * rate.turn_ns + 1.5 * rate.move_ns) * 1e-9 +
         convolution.tile_runs() * tile_run_ns * 1e-9 + convolution.partial_runs() * partial_run_ns * 1e-9 +
         convolution.chunk_sums() * chunk_sum_ns * 1e-9 + convolution.positions() * position_ns * 1e-9;
}

double convolution_seconds(const Rates& rate, const Convolver& convolution) {
  if (const auto* runs = dynamic_cast<const RunConvolution*>(&convolution)) return run_seconds(rate, *runs);
  if (const auto* indirect = dynamic_cast<const IndirectConvolution*>(&convolution)) {
    return indirect_seconds(rate, *indirect);
  }
  if (const auto* gathered = dynamic_cast<const GatheredConvolution*>(&convolution)) {
    return gathered_seconds(rate, *gathered);
  }
  if (const auto* grouped = dynamic_cast<const GroupConvolution*>(&convolution)) {
    return grouped_seconds(rate, *grouped);
  }
  if (const auto* planes = dynamic_cast<const PlaneConvolution*>(&convolution)) {
    return plane_seconds(rate, *planes);
  }
  return tiled_seconds(rate, dynamic_cast<const ConvolutionStage&>(convolution));
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

namespace {

// What a row of a panel and a slab cost besides their elements, Neoverse-V1, 2026-11-18. A planar row ends in
// a partial vector, and each channel has statistics to merge.
constexpr double channel_ns = 25;
constexpr double backward_row_ns = 60;
constexpr double backward_unit_ns = 100;
constexpr double slab_ns = 20;
// Of a tail whose slabs stay in a core's cache: its share of move_ns for an element, and of channels last; a
// slab, and a column of channels last. Norms alone take 0.29 to 0.36 and 0.45 to 0.65 ns an element, where
// those of panels from memory take 0.4 to 0.8.
constexpr double held_move = -0.6;
constexpr double held_strided_move = 0.2;
constexpr double held_slab_ns = 8;
constexpr double held_column_ns = 1;
// Strips of fewer columns than this are short streams from memory: 0.5 ns more an element of each tensor.
constexpr int64_t wide_strip = 128;
constexpr double narrow_strip_ns = 0.5;

double elements_of(const Problem& problem) {
  return static_cast<double>(element_count(problem.block.conv_output_shape(problem.input.sizes)));
}

// Threads that a tail keeps busy. All of its rows divide by the same number, and small problems by one: which
// row is chosen, and so the bits of a result, do not depend on the threads.
double tail_threads(const Problem& problem) {
  const double tasks = std::ceil(elements_of(problem) / static_cast<double>(stream_task_elements));
  return std::clamp<double>(tasks, 1, problem.device.threads);
}

bool has_narrow_strips(const Slabs& slabs) {
  return slabs.rows > 1 && slabs.panels > 1 && slabs.panel_slabs * slabs.slab_columns < wide_strip;
}

double slabs_of(const Slabs& slabs) {
  return static_cast<double>(slabs.batch) * static_cast<double>(slabs.groups);
}

bool is_planar(const TensorSpec& spec) { return orientation_of(TensorMap(spec)) == Orientation::planar; }

double channels_of(const Problem& problem) {
  return static_cast<double>(problem.input.sizes[0]) * static_cast<double>(problem.input.sizes[1]);
}

double forward_element_ns(const Rates& rate, const Block& block) {
  double element_ns = rate.move_ns;
  for (const Stage& stage : block.stages()) {
    if (const auto* pointwise = std::get_if<Pointwise>(&stage)) {
      element_ns += step_ns(rate, pointwise->op);
    } else if (std::holds_alternative<Norm>(stage)) {
      element_ns += rate.cheap_step_ns + rate.move_ns;
    }
  }
  return element_ns;
}

// A step taken back costs about as much as the step. Steps before the norm are recomputed in each pass and
// differentiated in the last. Steps after it are recomputed and differentiated in each, unless the first pass
// keeps its result.
double backward_element_ns(const Rates& rate, const Block& block, int passes, Kept kept) {
  double element_ns = passes * rate.move_ns;
  bool after = false;
  for (const Stage& stage : block.stages()) {
    if (const auto* pointwise = std::get_if<Pointwise>(&stage)) {
      const bool once = kept == (after ? Kept::norm_gradient : Kept::norm_input);
      const int recomputed = once ? 1 : passes;
      element_ns += (recomputed + (after ? recomputed : 1)) * step_ns(rate, pointwise->op);
    } else if (std::holds_alternative<Norm>(stage)) {
      after = true;
      element_ns += passes * rate.cheap_step_ns;
    }
  }
  return element_ns;
}

// What rows of few channels cost besides their elements.
double narrow_rows_ns(const Problem& problem, const Isa& isa, const BlockKernel& kernel) {
  const Convolver* convolution = kernel.convolution();
  if (convolution == nullptr || convolution->orientation() == Orientation::planar || kernel.turns_panels()) {
    return 0;
  }
  double row_ns = 0;
  // Rows of few channels are folded then.
  const bool dense = convolution->lanes() == Lanes::groups || convolution->lanes() == Lanes::runs;
  for (const Segment& segment : convolution->segments_of_one_thread()) {
    if (dense && segment.channels.size() < isa.lanes) continue;
    if (segment.channels.size() % isa.lanes != 0) row_ns += partial_vector_ns;
    if (segment.channels.size() <= 2 * isa.lanes) row_ns += narrow_row_ns;
  }
  // Panels without gaps are one row for steps that know no channel: those before the norm.
  bool counts = !dense;
  int64_t passes = problem.block.has_mean() ? 1 : 0;
  for (const Stage& stage : problem.block.stages()) {
    counts |= std::holds_alternative<Norm>(stage);
    if (counts && std::holds_alternative<Pointwise>(stage)) ++passes;
    if (std::holds_alternative<Norm>(stage)) passes += 2;
  }
  const Shape shape = problem.block.conv_output_shape(problem.input.sizes);
  return elements_of(problem) / static_cast<double>(shape[1]) * row_ns * static_cast<double>(passes);
}

// Panels of sums that a convolution hands on.
double panels_of(const Problem& problem, const Convolver& convolution) {
  const int64_t blocks = convolution.block_count();
  const int64_t panels =
      ceil_div(convolution.block_pixels(0), std::max<int64_t>(1, convolution.max_panel_pixels()));
  return static_cast<double>(problem.input.sizes[0] * blocks * panels) *
         static_cast<double>(convolution.segments_of_one_thread().size());
}

double gradient_bytes(const BackwardProblem& problem) {
  auto bytes = static_cast<double>(problem.forward.input.byte_span() + problem.output_gradient.byte_span());
  if (problem.wants_input()) bytes += static_cast<double>(problem.input_gradient.byte_span());
  return bytes;
}

}  // namespace

double predicted_seconds(const Problem& problem, const Isa& isa, const BlockKernel& kernel) {
  const Rates& rate = rates_of(isa);
  const double elements = elements_of(problem);
  double element_ns = forward_element_ns(rate, problem.block);
  if (kernel.turns_panels()) element_ns += rate.turn_ns;
  double seconds = (elements * element_ns + narrow_rows_ns(problem, isa, kernel)) * 1e-9;
  const bool per_channel =
      problem.block.norm() != nullptr || problem.block.has_mean() || is_planar(problem.input);
  if (kernel.convolution() == nullptr && per_channel) seconds += channels_of(problem) * channel_ns * 1e-9;
  if (const Convolver* convolution = kernel.convolution()) {
    seconds += convolution_seconds(rate, *convolution);
    seconds += panels_of(problem, *convolution) * panel_ns * 1e-9;
    seconds += static_cast<double>(kernel.copied_weights()) * copied_weight_ns * 1e-9;
  }
  const double bytes = static_cast<double>(problem.input.byte_span() + problem.output.byte_span());
  // Where memory bounds both of two rows, the one that computes less is taken.
  constexpr double tie = 1e-3;
  seconds = std::max(seconds, bytes / rate.bytes_per_second) + tie * seconds;
  const double threads = kernel.convolution() == nullptr ? tail_threads(problem) : problem.device.threads;
  return seconds / threads + hand_out_seconds;
}

double predicted_seconds(const Problem& problem, const Isa& isa, const SlabTail& kernel) {
  const Rates& rate = rates_of(isa);
  const bool strided = kernel.slabs().rows > 1;
  double element_ns = forward_element_ns(rate, problem.block);
  if (kernel.slabs().norm) element_ns += ((strided ? held_strided_move : held_move) - 1) * rate.move_ns;
  double ns = elements_of(problem) * element_ns;
  if (kernel.slabs().norm) ns += slabs_of(kernel.slabs()) * held_slab_ns;
  if (strided) ns += channels_of(problem) * held_column_ns;
  if (has_narrow_strips(kernel.slabs())) ns += elements_of(problem) * narrow_strip_ns;
  const double bytes = static_cast<double>(problem.input.byte_span() + problem.output.byte_span());
  const double seconds = std::max(ns * 1e-9, bytes / rate.bytes_per_second);
  return seconds / tail_threads(problem) + hand_out_seconds;
}

double predicted_seconds(const BackwardProblem& problem, const Isa& isa, const SlabBackward& kernel) {
  const Rates& rate = rates_of(isa);
  double ns =
      elements_of(problem.forward) * backward_element_ns(rate, problem.forward.block, 1, Kept::nothing);
  if (kernel.slabs().norm) ns += slabs_of(kernel.slabs()) * slab_ns;
  if (has_narrow_strips(kernel.slabs())) ns += 3 * elements_of(problem.forward) * narrow_strip_ns;
  const double seconds = std::max(ns * 1e-9, gradient_bytes(problem) / rate.bytes_per_second);
  return seconds / tail_threads(problem.forward) + hand_out_seconds;
}

double predicted_seconds(const BackwardProblem& problem, const Isa& isa, const TailBackward& kernel) {
  const Rates& rate = rates_of(isa);
  const Problem& forward = problem.forward;
  const int passes = kernel.pass_count();
  double ns = elements_of(forward) * backward_element_ns(rate, forward.block, passes, kernel.kept());
  if (is_planar(forward.input)) {
    ns += channels_of(forward) * backward_row_ns;
    ns += static_cast<double>(kernel.unit_count()) * backward_unit_ns;
  } else if (forward.block.norm() != nullptr) {
    ns += channels_of(forward) * channel_ns;
  }
  const double seconds = std::max(ns * 1e-9, gradient_bytes(problem) / rate.bytes_per_second);
  return seconds / tail_threads(forward) + hand_out_seconds;
}

// The input's gradient has a plan of its own.
double predicted_seconds(const BackwardProblem& problem, const Isa& isa, const ConvBackward& kernel) {
  const Rates& rate = rates_of(isa);
  const auto gradient_bytes = static_cast<double>(problem.output_gradient.byte_span());
  double seconds = 0;
  if (const WeightSums* weight = kernel.weight()) {
    const bool groups = weight->lanes() == Lanes::groups;
    seconds +=
        2 * weight->padded_multiply_adds() / (groups ? rate.pixel_tile_flops : rate.channel_tile_flops);
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
