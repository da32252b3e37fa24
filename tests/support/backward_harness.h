// Runs a backward plan on hostile memory and random operands, and compares its gradients with the reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "onepass/backward.h"
#include "support/gradient_bound.h"
#include "support/harness.h"
#include "support/place.h"

namespace onepass::testing {

struct BackwardOperands {
  Operands forward;
  std::vector<double> output_gradient;
};
BackwardOperands random_backward_operands(const BackwardProblem& problem, Distribution distribution,
                                          uint64_t seed);

// The gradients as dense NCHW values, the input's first; empty where not wanted.
using GradientValues = std::vector<std::vector<double>>;
bool same_bits(const GradientValues& a, const GradientValues& b);

struct BackwardOutcome {
  GradientValues gradients;
  std::string damage;
};

// Everything that a forward and a backward call need, between guards.
class BackwardMemory {
 public:
  BackwardMemory(const BackwardProblem& problem, const BackwardOperands& operands, const Place& place);

  Arguments forward_arguments();
  // After a forward that wrote the statistics has finished.
  BackwardArguments backward_arguments();
  // Of a backward that has finished.
  BackwardOutcome outcome();

 private:
  static void take(Buffer& buffer, const TensorSpec& spec, bool wanted, BackwardOutcome& outcome);

  const BackwardProblem& problem_;
  Buffer input_;
  Buffer output_;
  Buffer output_gradient_;
  Buffer input_gradient_;
  Buffer statistics_;
  std::vector<Buffer> parameters_;
  std::vector<Buffer> gradients_;
};

// Forward for the statistics, where there is a norm, then backward.
BackwardOutcome run(const BackwardPlan& backward, const BackwardOperands& operands, const Place& place,
                    const PlanOptions& forward_options = {});

struct GradientComparison {
  int64_t checked = 0;    // elements
  int64_t unchecked = 0;  // that no f32 implementation can compute (see gradient_bound.h)
  std::string errors;     // the first wrong element of each gradient, and damage; empty where all is well

  GradientComparison& operator+=(const GradientComparison& other);
};

GradientComparison compare(const BackwardProblem& problem, const BackwardOperands& operands,
                           const BackwardOutcome& outcome);
// The same where what is expected is known already.
GradientComparison compare(const BackwardProblem& problem, const ExpectedGradients& expected,
                           const BackwardOutcome& outcome);

// The blocks without a convolution of tests/cases.txt.
std::vector<Problem> tails_of_the_list(const Device& device);
// The stages behind the convolution of every other case, at the size of its result.
std::vector<Problem> tails_of_convolutions(const Device& device);

}  // namespace onepass::testing
