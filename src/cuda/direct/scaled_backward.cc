// The row "scaled_backward": the gradients of a block whose convolution has one tap and one input channel for
// each output, by the row for gradients of tails that is fastest for the tail that the block is.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "block/scaled.h"
#include "cuda/notes.h"
#include "cuda/runtime/cut_for.h"
#include "cuda/tail/tail.h"
#include "plan/choice.h"

namespace onepass {
namespace cuda {
namespace {

// The rows for gradients of this tail, with their cost. Plans of an export for other batches have the same
// row.
std::vector<Candidate> tail_gradient_rows(const BackwardProblem& tail) {
  std::vector<Candidate> candidates;
  BackwardProblem judged(tail);
  int64_t& batch = judged.forward.input.sizes[0];
  batch = CutFor::instead_of(batch);
  for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) {
    if (row->takes_tails && row->refusal(tail).empty())
      candidates.push_back({std::string(row->name), row->seconds(judged, {}), ""});
  }
  return candidates;
}

class ScaledBackward final : public BackwardKernel {
 public:
  explicit ScaledBackward(const BackwardProblem& problem) : problem_(problem) {
    const BackwardProblem tail = scaled_tail(problem);
    std::vector<Candidate> candidates = tail_gradient_rows(tail);
    row_ = choose(candidates, "").strategy;
    kernel_ = build_chosen(backward_strategies(Device::Kind::cuda), tail, PlanOptions{}, candidates, row_);
  }

  static std::string refusal(const BackwardProblem& problem) {
    std::string reason = scaled_refusal(problem.forward);
    if (!reason.empty()) return reason;
    if (problem.forward.precision == Precision::tf32_away) return "tf32_away: gradients round ties to even";
    const BackwardProblem tail = scaled_tail(problem);
    reason = tail_refusal(tail);
    return reason.empty() && tail_gradient_rows(tail).empty() ? "no row takes the block as a tail" : reason;
  }

  static double seconds(const BackwardProblem& problem, const PlanOptions&) {
    return choose(tail_gradient_rows(scaled_tail(problem)), "").seconds;
  }

  size_t workspace_bytes() const override { return kernel_->workspace_bytes(); }
  bool reads_statistics() const override { return kernel_->reads_statistics(); }

  std::string describe() const override {
    return "convolution: stages of the tail\nruns: " + row_ + '\n' + kernel_->describe();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_rounding(problem_.forward) + kernel_->numerics();
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    kernel_->launch(arguments, workspace, stream);
  }

 private:
  BackwardProblem problem_;
  std::string row_;
  std::shared_ptr<const BackwardKernel> kernel_;
};

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_scaled_backward{
    "scaled_backward", cuda::ScaledBackward::refusal, cuda::ScaledBackward::seconds,
    [](const BackwardProblem& problem, const PlanOptions&) -> std::shared_ptr<const BackwardKernel> {
      return std::make_shared<const cuda::ScaledBackward>(problem);
    }};

}  // namespace onepass
