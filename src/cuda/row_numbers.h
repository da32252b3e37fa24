// The numbers of a row for one problem: found once, for refusal, cost and build.
#pragma once

#include <memory>
#include <optional>

namespace onepass::cuda {

// `Numbers(problem)`, kept until this thread asks for another problem's: a plan asks a row for its refusal,
// its cost and its kernel in this order.
template <class Numbers, class AnyProblem>
std::shared_ptr<const Numbers> numbers_of(const AnyProblem& problem) {
  thread_local std::optional<AnyProblem> last;
  thread_local std::shared_ptr<const Numbers> numbers;
  if (!last || !(*last == problem)) {
    numbers = std::make_shared<const Numbers>(problem);
    last = problem;
  }
  return numbers;
}

}  // namespace onepass::cuda
