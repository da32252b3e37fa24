// What the rows for gradients of tails share.
#include "cuda/tail/backward/backward.h"

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

std::string held_slab_refusal(const BackwardProblem& problem) {
  std::string reason = tail_refusal(problem);
  if (!reason.empty()) return reason;
  if (!problem.wants_input()) return "the input's gradient is not wanted";
  const TailShape shape = backward_shape(problem);
  if (shape.parts.norm == nullptr) return "the block has no norm";
  if (shape.order != Order::planar) return "channels lie after space: a row is not contiguous";
  if (has_other_sums(problem, shape.parts)) {
    return "a gradient is wanted that is not one value for each channel";
  }
  return "";
}

}  // namespace onepass::cuda
