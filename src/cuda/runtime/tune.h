// Which of the rows that are predicted to be close is fastest on this GPU: measured once, kept on disk.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "plan/strategy.h"

namespace onepass::cuda {

// The name of the row; the cheapest by prediction where no other is close, or where they cannot be measured
// (no memory is left, the plan is for another GPU than those present).
std::string fastest_row(const Problem& problem, const std::vector<Candidate>& candidates,
                        const PlanOptions& options);
std::string fastest_row(const BackwardProblem& problem, const std::vector<Candidate>& candidates,
                        const PlanOptions& options);

}  // namespace onepass::cuda
