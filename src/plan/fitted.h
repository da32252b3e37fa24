// What the fit over drawn problems (scripts/fit_costs.py) says of predicted seconds.
#pragma once

#include <cstdint>
#include <string_view>

#include "plan/strategy.h"

namespace onepass {

struct Fitted {
  std::string_view what;  // a row, or a class of PyTorch's convolutions
  int64_t element_bytes = 0;
  double factor = 1;  // on the cost
  int problems = 0;   // that were measured
  // Prediction and measurement are so many times apart: typically, and in one of ten cases at least.
  double typical = 1;
  double rarely = 1;
};

// Null where nothing was fitted. The table is that of a GPU: src/cuda/costs/fitted.inc.
const Fitted* fitted(std::string_view what, int64_t element_bytes);

inline double fitted_factor(std::string_view what, int64_t element_bytes) {
  const Fitted* const found = fitted(what, element_bytes);
  return found == nullptr ? 1 : found->factor;
}

inline const Problem& forward_of(const Problem& problem) { return problem; }
inline const Problem& forward_of(const BackwardProblem& problem) { return problem.forward; }

template <class AnyProblem>
int64_t element_bytes(const AnyProblem& problem) {
  return byte_size(forward_of(problem).input.dtype);
}

// The cost of a row, as fitted.
template <class Row, class AnyProblem>
double fitted_seconds(const Row& row, const AnyProblem& problem, const PlanOptions& options) {
  return row.seconds(problem, options) * fitted_factor(row.name, element_bytes(problem));
}

}  // namespace onepass
