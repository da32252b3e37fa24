// What a problem is predicted to take, without building a plan.
#include <algorithm>
#include <limits>

#include "onepass/backward.h"
#include "onepass/plan.h"
#include "plan/choice.h"
#include "plan/strategy.h"

namespace onepass {
namespace {

template <class Table, class ProblemType>
double least_seconds(const Table& table, const ProblemType& problem) {
  double least = std::numeric_limits<double>::infinity();
  for (const auto* row : table) {
    if (row->refusal(problem).empty()) least = std::min(least, fitted_seconds(*row, problem, {}));
  }
  return least;
}

}  // namespace

double predicted_seconds(const Problem& problem) {
  return least_seconds(strategies(problem.device.kind), problem);
}

double predicted_seconds(const BackwardProblem& problem) {
  return least_seconds(backward_strategies(problem.forward.device.kind), problem);
}

std::vector<Candidate> candidates(const Problem& problem) {
  return consider(strategies(problem.device.kind), problem, {});
}

std::vector<Candidate> candidates(const BackwardProblem& problem) {
  return consider(backward_strategies(problem.forward.device.kind), problem, {});
}

}  // namespace onepass
