// What the rows for gradients of tails share.
#include "cuda/tail/backward/backward.h"

#include "cuda/notes.h"

namespace onepass::cuda {
namespace {

// Gradients of arguments that are not one value a channel are summed in another way.
bool has_other_sums(const BackwardProblem& problem, const TailParts& parts) {
  for (const auto* stages : {&parts.before, &parts.after}) {
    for (const TailParts::Stage& stage : *stages) {
      if (stage.parameter < 0 || argument_kind(stage.pointwise.op) == ArgumentKind::tensor) continue;
      if (stage.pointwise.per != Per::channel &&
          problem.wants_parameter(static_cast<size_t>(stage.parameter))) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

TailShape backward_shape(const BackwardProblem& problem) {
  const TailParts parts(problem.forward.block, problem.forward.input.sizes);
  return {problem.forward, large_gradients(problem, parts)};
}

std::string held_slab_refusal(const BackwardProblem& problem, Order order) {
  std::string reason = tail_refusal(problem);
  if (!reason.empty()) return reason;
  if (!problem.wants_input()) return "the input's gradient is not wanted";
  const TailShape shape = backward_shape(problem);
  if (shape.parts.norm == nullptr) return "the block has no norm";
  if (shape.order != order) {
    return order == Order::planar ? "channels lie after space: a row is not contiguous"
                                  : "channels lie before space: they are no strips";
  }
  if (has_other_sums(problem, shape.parts)) {
    return "a gradient is wanted that is not one value for each channel";
  }
  return "";
}

bool TailGradientKernel::set_arguments(TailBackwardParameters& p, const BackwardArguments& arguments,
                                       Stream stream) const {
  if (shape_.elements() == 0) {
    clear_gradients(problem_, arguments, stream);
    return false;
  }
  const Alignment alignment(shape_, problem_, arguments);
  p.input = arguments.input;
  p.output_gradient = arguments.output_gradient;
  p.statistics = arguments.statistics;
  p.control = nullptr;
  p.parts = nullptr;
  p.sums = nullptr;
  p.totals = nullptr;
  p.slab_sums = nullptr;
  p.input_gradient = arguments.input_gradient;
  p.aligned = alignment.bits();
  p.phase = alignment.phase();
  p.batch = shape_.batch;
  p.parameter = arguments.parameters;
  p.gradient = arguments.parameter_gradients;
  return true;
}

std::string TailGradientKernel::describe_memory() const {
  return "saved by forward: the input and the statistics of each slab\nworkspace: " +
         std::to_string(workspace_bytes()) + " bytes\n";
}

std::vector<std::string> TailGradientKernel::numerics() const {
  return notes_of_chains(problem_.forward.block, bits_of(problem_.forward, problem_.input_gradient.dtype));
}

}  // namespace onepass::cuda
