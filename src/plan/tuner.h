// Chooses a row by running the candidates instead of comparing predictions. A device has one or none.
#pragma once

#include <string>
#include <vector>

#include "plan/strategy.h"

namespace onepass {

// Both functions return the name of an accepted candidate. They return the cheapest by prediction where no
// other is close to it, or where nothing can be measured.
struct Tuner {
  std::string (*forward)(const Problem& problem, const std::vector<Candidate>& candidates,
                         const PlanOptions& options);
  std::string (*backward)(const BackwardProblem& problem, const std::vector<Candidate>& candidates,
                          const PlanOptions& options);
};

// The tuner of a device; null where predictions alone decide.
const Tuner* tuner(Device::Kind device);

}  // namespace onepass
