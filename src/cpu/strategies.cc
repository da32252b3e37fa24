// The CPU's rows of the strategy table.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "block/scaled.h"
#include "cpu/block_kernel.h"
#include "cpu/conv_backward.h"
#include "cpu/convolution_stage.h"
#include "cpu/cost.h"
#include "cpu/gathered_convolution.h"
#include "cpu/group_convolution.h"
#include "cpu/indirect_convolution.h"
#include "cpu/isa.h"
#include "cpu/plane_convolution.h"
#include "cpu/run_convolution.h"
#include "cpu/slab_backward.h"
#include "cpu/slab_tail.h"
#include "cpu/tail_backward.h"
#include "onepass/plan.h"
#include "plan/strategy.h"

namespace onepass {
namespace cpu {
namespace {

bool has_f64(const Problem& problem) {
  const auto is_f64 = [](const TensorSpec& spec) { return spec.dtype == DType::f64; };
  return is_f64(problem.input) || is_f64(problem.output) ||
         std::any_of(problem.parameters.begin(), problem.parameters.end(), is_f64);
}

// What no CPU strategy but the reference can do.
std::string common_refusal(const Problem& problem) {
  if (isas().empty()) return "this CPU has neither NEON nor AVX2";
  return has_f64(problem) ? "f64 is computed by the reference alone" : "";
}

std::string convolution_refusal(const Problem& problem) {
  if (problem.block.conv() == nullptr) return "the block has no convolution";
  std::string reason = common_refusal(problem);
  return reason.empty() ? ConvolutionStage::refusal(problem) : reason;
}

// Of a row for some convolutions.
template <class Convolution>
std::string own_refusal(const Problem& problem) {
  std::string reason = convolution_refusal(problem);
  return reason.empty() ? Convolution::refusal(problem) : reason;
}

std::string tail_refusal(const Problem& problem) {
  if (problem.block.conv() != nullptr) return "the block has a convolution";
  return common_refusal(problem);
}

std::string slab_tail_refusal(const Problem& problem) {
  std::string reason = tail_refusal(problem);
  return reason.empty() ? SlabTail::refusal(problem) : reason;
}

std::string gradients_refusal(const BackwardProblem& problem) {
  bool f64 = problem.output_gradient.dtype == DType::f64;
  f64 |= problem.wants_input() && problem.input_gradient.dtype == DType::f64;
  for (size_t i = 0; i < problem.parameter_gradients.size(); ++i) {
    f64 |= problem.wants_parameter(i) && problem.parameter_gradients[i].dtype == DType::f64;
  }
  return f64 ? "f64 is computed by the reference alone" : "";
}

std::string tail_backward_refusal(const BackwardProblem& problem) {
  std::string reason = tail_refusal(problem.forward);
  return reason.empty() ? gradients_refusal(problem) : reason;
}

std::string slab_backward_refusal(const BackwardProblem& problem) {
  std::string reason = tail_backward_refusal(problem);
  return reason.empty() ? SlabBackward::refusal(problem.forward) : reason;
}

template <Lanes lanes>
std::string conv_backward_refusal(const BackwardProblem& problem) {
  if (problem.forward.block.conv() == nullptr) return "the block has no convolution";
  if (problem.forward.block.stages().size() > 1) return "the block is more than a convolution";
  std::string reason = common_refusal(problem.forward);
  if (reason.empty()) reason = gradients_refusal(problem);
  return reason.empty() ? ConvBackward::refusal(problem, lanes) : reason;
}

// A forward row. Its kernel is a BlockKernel with these lanes; without a convolution it has none.
template <Lanes... lanes>
constexpr Strategy block_row(std::string_view name, std::string (*refusal)(const Problem&)) {
  return {name, refusal,
          [](const Problem& problem, const PlanOptions& options) {
            const Isa& isa = find_isa(options.target);
            return predicted_seconds(problem, isa, BlockKernel(problem, isa, std::optional<Lanes>(lanes...)));
          },
          [](const Problem& problem, const PlanOptions& options) -> std::shared_ptr<const Kernel> {
            return std::make_shared<const BlockKernel>(problem, find_isa(options.target),
                                                       std::optional<Lanes>(lanes...));
          }};
}

// `lanes`: of a kernel that has a choice.
template <class RowKernel, Lanes... lanes>
constexpr BackwardStrategy gradient_row(std::string_view name,
                                        std::string (*refusal)(const BackwardProblem&)) {
  return {name, refusal,
          [](const BackwardProblem& problem, const PlanOptions& options) {
            const Isa& isa = find_isa(options.target);
            return predicted_seconds(problem, isa, RowKernel(problem, isa, lanes...));
          },
          [](const BackwardProblem& problem,
             const PlanOptions& options) -> std::shared_ptr<const BackwardKernel> {
            return std::make_shared<const RowKernel>(problem, find_isa(options.target), lanes...);
          }};
}

}  // namespace
}  // namespace cpu

// Lanes along output channels: dense convolutions.
extern const Strategy cpu_conv_channel_lanes =
    cpu::block_row<cpu::Lanes::channels>("conv_channel_lanes", cpu::convolution_refusal);

// Lanes along pixels: depthwise convolutions and those with few output channels in a group.
extern const Strategy cpu_conv_pixel_lanes =
    cpu::block_row<cpu::Lanes::pixels>("conv_pixel_lanes", cpu::convolution_refusal);

// Lanes along the terms of a sum: convolutions of few output pixels with many weights.
extern const Strategy cpu_conv_term_lanes =
    cpu::block_row<cpu::Lanes::terms>("conv_term_lanes", cpu::own_refusal<cpu::GatheredConvolution>);

// Lanes along channels of several groups: depthwise convolutions and those of few channels in a group.
extern const Strategy cpu_conv_group_lanes =
    cpu::block_row<cpu::Lanes::groups>("conv_group_lanes", cpu::own_refusal<cpu::GroupConvolution>);

// Lanes along pixels that are read in place: 1x1 convolutions of contiguous tensors with few outputs.
extern const Strategy cpu_conv_planes =
    cpu::block_row<cpu::Lanes::planes>("conv_planes", cpu::own_refusal<cpu::PlaneConvolution>);

// Lanes along output channels of positions that are read by pointers: wide convolutions of channels last, and
// those of many weights.
extern const Strategy cpu_conv_indirect =
    cpu::block_row<cpu::Lanes::positions>("conv_indirect", cpu::own_refusal<cpu::IndirectConvolution>);

// Lanes along the terms of a sum that are read in place: few outputs of inputs in channels last.
extern const Strategy cpu_conv_run_lanes =
    cpu::block_row<cpu::Lanes::runs>("conv_run_lanes", cpu::own_refusal<cpu::RunConvolution>);

// No convolution: the block streams its input.
extern const Strategy cpu_tail = cpu::block_row<>("tail", cpu::tail_refusal);

// The same where a panel holds whole slabs.
extern const Strategy cpu_tail_slabs = {
    "tail_slabs", cpu::slab_tail_refusal,
    [](const Problem& problem, const PlanOptions& options) {
      const cpu::Isa& isa = cpu::find_isa(options.target);
      return cpu::predicted_seconds(problem, isa, cpu::SlabTail(problem, isa));
    },
    [](const Problem& problem, const PlanOptions& options) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cpu::SlabTail>(problem, cpu::find_isa(options.target));
    }};

// One tap and one input channel for each output: the tail that the block is. Contiguous blocks of 1.6 M
// elements take 0.6 to 0.9 of conv_planes' time in f32 and 0.4 of conv_group_lanes' in bf16 (AVX-512).
namespace cpu {
namespace {

const Strategy& row_of_tail(const Problem& tail, const PlanOptions& options) {
  if (!cpu_tail_slabs.refusal(tail).empty()) return cpu_tail;
  return cpu_tail_slabs.seconds(tail, options) < cpu_tail.seconds(tail, options) ? cpu_tail_slabs : cpu_tail;
}

}  // namespace
}  // namespace cpu

extern const Strategy cpu_conv_scaled = {"conv_scaled",
                                         [](const Problem& problem) {
                                           const std::string reason = scaled_refusal(problem);
                                           return reason.empty() ? cpu::tail_refusal(scaled_tail(problem))
                                                                 : reason;
                                         },
                                         [](const Problem& problem, const PlanOptions& options) {
                                           const Problem tail = scaled_tail(problem);
                                           return cpu::row_of_tail(tail, options).seconds(tail, options);
                                         },
                                         [](const Problem& problem, const PlanOptions& options) {
                                           const Problem tail = scaled_tail(problem);
                                           return cpu::row_of_tail(tail, options).build(tail, options);
                                         }};

// The gradients of a convolution alone.
extern const BackwardStrategy cpu_conv_backward = cpu::gradient_row<cpu::ConvBackward, cpu::Lanes::channels>(
    "conv_backward", cpu::conv_backward_refusal<cpu::Lanes::channels>);

// The same in groups of few channels.
extern const BackwardStrategy cpu_conv_backward_groups =
    cpu::gradient_row<cpu::ConvBackward, cpu::Lanes::groups>("conv_backward_groups",
                                                             cpu::conv_backward_refusal<cpu::Lanes::groups>);

// The gradients of a tail where a panel holds whole slabs.
extern const BackwardStrategy cpu_tail_backward_slabs =
    cpu::gradient_row<cpu::SlabBackward>("tail_backward_slabs", cpu::slab_backward_refusal);

// The gradients of any block without a convolution.
extern const BackwardStrategy cpu_tail_backward =
    cpu::gradient_row<cpu::TailBackward>("tail_backward", cpu::tail_backward_refusal);

std::vector<std::string> cpu_targets() {
  std::vector<std::string> names;
  for (const cpu::Isa* isa : cpu::isas()) names.push_back(isa->name);
  return names;
}

}  // namespace onepass
