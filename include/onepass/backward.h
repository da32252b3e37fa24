// The backward pass of a block: its problem, its memory and its plan. It mirrors problem.h and plan.h.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "onepass/executor.h"
#include "onepass/export.h"
#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass {

class BackwardKernel;

// The gradients of a block's input and parameters from the gradient of its output.
struct ONEPASS_API BackwardProblem {
  Problem forward;
  TensorSpec output_gradient;  // of the output's sizes, strides of 0 included
  TensorSpec input_gradient;
  std::vector<TensorSpec> parameter_gradients;  // one for each of forward.parameters
  std::vector<bool> wanted;                     // the input's gradient, then each parameter's

  // All gradients are wanted and dense. Each has the type and layout of the tensor it belongs to.
  explicit BackwardProblem(Problem forward);

  bool wants_input() const { return wanted[0]; }
  bool wants_parameter(size_t index) const { return wanted[index + 1]; }

  // Throws Error unless the specs have the shapes the block gives them and can be addressed. Specs of
  // gradients that are not wanted are not checked.
  void validate() const;
  // The forward's text and what is wanted of it.
  std::string text() const;

  bool operator==(const BackwardProblem&) const = default;
};

// The memory of one call, laid out as the problem's specs say; null for a gradient that is not wanted.
struct BackwardArguments {
  const void* input = nullptr;
  std::vector<const void*> parameters;
  const void* output_gradient = nullptr;
  const float* statistics = nullptr;  // what the forward wrote: Arguments::statistics
  void* input_gradient = nullptr;
  std::vector<void*> parameter_gradients;
  const void* output = nullptr;  // what the forward gave, or null: with it some plans save a pass
};

class ONEPASS_API BackwardPlan {
 public:
  const BackwardProblem& problem() const { return problem_; }
  const std::string& strategy() const { return strategy_; }
  const std::vector<Candidate>& candidates() const { return candidates_; }
  size_t workspace_bytes() const;
  // Whether run() reads BackwardArguments::statistics, so that the forward has to save them.
  bool reads_statistics() const;
  // Whether BackwardArguments::input_gradient may be the input itself, which is then overwritten.
  bool may_overwrite_input() const;
  std::string explain() const;

  // As Plan::run. Outputs must not overlap inputs, except where may_overwrite_input() allows it.
  void run(const BackwardArguments& arguments, void* workspace, Executor& executor) const;
  void run(const BackwardArguments& arguments, void* workspace, Stream stream) const;

 private:
  void check(const BackwardArguments& arguments, const void* workspace) const;
  friend ONEPASS_API BackwardPlan plan_backward(const BackwardProblem& problem, const PlanOptions& options);
  BackwardPlan(BackwardProblem problem, std::string strategy, std::vector<Candidate> candidates,
               std::shared_ptr<const BackwardKernel> kernel);

  BackwardProblem problem_;
  std::string strategy_;
  std::vector<Candidate> candidates_;
  std::shared_ptr<const BackwardKernel> kernel_;
};

// The cheapest strategy that accepts the problem, or the one the options force. Throws Error when there is
// none.
ONEPASS_API BackwardPlan plan_backward(const BackwardProblem& problem, const PlanOptions& options = {});

// The prediction of the cheapest row that accepts the problem, without building it; infinite where none does.
ONEPASS_API double predicted_seconds(const BackwardProblem& problem);
ONEPASS_API std::vector<Candidate> candidates(const BackwardProblem& problem);

}  // namespace onepass
