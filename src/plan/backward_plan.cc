// Choosing a strategy for a backward problem, printing the choice, running it.
#include <utility>

#include "onepass/backward.h"
#include "plan/choice.h"
#include "plan/tuner.h"
#include "plan/verbose.h"

namespace onepass {
namespace {

// An empty tensor may have any pointer.
void check_pointer(const char* name, const void* pointer, const TensorSpec& spec) {
  if (pointer == nullptr && spec.byte_span() > 0) throw Error(std::string("the call has no ") + name);
}

}  // namespace

BackwardPlan::BackwardPlan(BackwardProblem problem, std::string strategy, std::vector<Candidate> candidates,
                           std::shared_ptr<const BackwardKernel> kernel)
    : problem_(std::move(problem)),
      strategy_(std::move(strategy)),
      candidates_(std::move(candidates)),
      kernel_(std::move(kernel)) {}

BackwardPlan plan_backward(const BackwardProblem& problem, const PlanOptions& options) {
  problem.validate();
  const auto table = backward_strategies(problem.forward.device.kind);
  if (!options.strategy.empty()) find_row(table, options.strategy);
  std::vector<Candidate> candidates = consider(table, problem, options);
  const Tuner* const tuning =
      options.tune && options.strategy.empty() ? tuner(problem.forward.device.kind) : nullptr;
  std::string chosen =
      tuning ? tuning->backward(problem, candidates, options) : choose(candidates, options.strategy).strategy;
  auto kernel = build_chosen(table, problem, options, candidates, chosen);
  return {problem, chosen, std::move(candidates), std::move(kernel)};
}

size_t BackwardPlan::workspace_bytes() const { return kernel_->workspace_bytes(); }

bool BackwardPlan::reads_statistics() const { return kernel_->reads_statistics(); }

bool BackwardPlan::may_overwrite_input() const { return kernel_->may_overwrite_input(); }

std::string BackwardPlan::explain() const {
  return explain_choice(problem_.text(), strategy_, problem_.forward.device, candidates_, *kernel_,
                        fitted(strategy_, element_bytes(problem_)));
}

void BackwardPlan::run(const BackwardArguments& arguments, void* workspace, Executor& executor) const {
  check(arguments, workspace);
  check_executor(problem_.forward, executor);
  run_call(*this, problem_.forward.device, {}, [&] { kernel_->run(arguments, workspace, executor); });
}

void BackwardPlan::run(const BackwardArguments& arguments, void* workspace, Stream stream) const {
  check(arguments, workspace);
  run_call(*this, problem_.forward.device, stream, [&] { kernel_->launch(arguments, workspace, stream); });
}

void BackwardPlan::check(const BackwardArguments& arguments, const void* workspace) const {
  check_call(arguments.parameters.size(), problem_.forward, *kernel_, workspace);
  if (arguments.parameter_gradients.size() != problem_.forward.parameters.size()) {
    throw Error("the call has " + std::to_string(arguments.parameter_gradients.size()) +
                " parameter gradients, must be one for each parameter, null where it is not wanted");
  }
  if (problem_.wants_input()) {
    check_pointer("input_gradient", arguments.input_gradient, problem_.input_gradient);
    if (arguments.input_gradient == arguments.input && problem_.input_gradient.byte_span() > 0 &&
        !may_overwrite_input()) {
      throw Error("the input's gradient lies where the input does, which this plan reads again");
    }
  }
  for (size_t i = 0; i < problem_.parameter_gradients.size(); ++i) {
    if (!problem_.wants_parameter(i)) continue;
    check_pointer("memory for a wanted parameter gradient", arguments.parameter_gradients[i],
                  problem_.parameter_gradients[i]);
  }
  if (reads_statistics() && arguments.statistics == nullptr && problem_.forward.input.byte_span() > 0) {
    throw Error(
        "the call has no statistics: the norm's gradient needs what forward wrote to Arguments::statistics");
  }
}

}  // namespace onepass
