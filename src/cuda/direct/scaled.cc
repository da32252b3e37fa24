// The row "scaled": a block whose convolution has one tap and one input channel for each output. It is the
// tail that the block is, by the row that is fastest for it: x is read once, and no f32 values in between.
#include <string>
#include <vector>

#include "block/scaled.h"
#include "cuda/notes.h"
#include "cuda/row_numbers.h"
#include "cuda/tail/tail.h"

namespace onepass {
namespace cuda {
namespace {

class Scaled final : public Kernel {
 public:
  explicit Scaled(const Problem& problem) : problem_(problem), tail_(build_tail(scaled_tail(problem))) {}

  static std::string refusal(const Problem& problem) {
    std::string reason = scaled_refusal(problem);
    if (!reason.empty()) return reason;
    const Problem tail = scaled_tail(problem);
    reason = tail_refusal(tail);
    return reason.empty() && tail_row(tail) == nullptr ? "no row takes the block as a tail" : reason;
  }

  static double seconds(const Problem& problem, const PlanOptions&) {
    const Problem tail = scaled_tail(problem);
    return tail_row(tail)->seconds(tail, {});
  }

  Accuracy accuracy() const override { return tail_.kernel->accuracy(); }
  size_t workspace_bytes() const override { return tail_.kernel->workspace_bytes(); }

  std::string describe() const override {
    return "convolution: one factor" + std::string(problem_.block.conv()->bias ? " and one addend" : "") +
           " a channel, stages of the tail\nruns: " + tail_.row + '\n' + tail_.kernel->describe();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_rounding(problem_) + tail_.kernel->numerics();
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    tail_.kernel->launch(arguments, workspace, stream);
  }

 private:
  Problem problem_;
  BuiltTail tail_;
};

}  // namespace

}  // namespace cuda

extern const Strategy cuda_scaled = cuda::row_of<cuda::Scaled>("scaled");

}  // namespace onepass
