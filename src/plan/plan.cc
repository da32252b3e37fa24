// Choosing a strategy for a problem, printing the choice, running it.
#include "onepass/plan.h"

#include <utility>

#include "plan/choice.h"
#include "plan/tuner.h"
#include "plan/verbose.h"

namespace onepass {

Plan::Plan(Problem problem, std::string strategy, std::vector<Candidate> candidates,
           std::shared_ptr<const Kernel> kernel)
    : problem_(std::move(problem)),
      strategy_(std::move(strategy)),
      candidates_(std::move(candidates)),
      kernel_(std::move(kernel)) {}

Plan plan(const Problem& problem, const PlanOptions& options) {
  problem.validate();
  const auto table = strategies(problem.device.kind);
  if (!options.strategy.empty()) find_row(table, options.strategy);
  std::vector<Candidate> candidates = consider(table, problem, options);
  const Tuner* const tuning = options.tune && options.strategy.empty() ? tuner(problem.device.kind) : nullptr;
  std::string chosen =
      tuning ? tuning->forward(problem, candidates, options) : choose(candidates, options.strategy).strategy;
  std::shared_ptr<const Kernel> kernel = build_chosen(table, problem, options, candidates, chosen);
  return {problem, chosen, std::move(candidates), std::move(kernel)};
}

size_t Plan::workspace_bytes() const { return kernel_->workspace_bytes(); }
size_t Plan::packed_bytes() const { return kernel_->packed_bytes(); }
uint64_t Plan::packing() const { return kernel_->packing(); }

Accuracy Plan::accuracy() const { return kernel_->accuracy(); }

std::string Plan::explain() const {
  return explain_choice(problem_.text(), strategy_, problem_.device, candidates_, *kernel_,
                        fitted(strategy_, element_bytes(problem_)));
}

void Plan::run(const Arguments& arguments, void* workspace, Executor& executor) const {
  check_call(arguments.parameters.size(), problem_, *kernel_, workspace);
  if (arguments.packed != nullptr) check_packed(problem_, *kernel_, arguments.packed);
  check_executor(problem_, executor);
  run_call(*this, problem_.device, {}, [&] { kernel_->run(arguments, workspace, executor); });
}

void Plan::run(const Arguments& arguments, void* workspace, Stream stream) const {
  check_call(arguments.parameters.size(), problem_, *kernel_, workspace);
  if (arguments.packed != nullptr) check_packed(problem_, *kernel_, arguments.packed);
  run_call(*this, problem_.device, stream, [&] { kernel_->launch(arguments, workspace, stream); });
}

void Plan::pack(const std::vector<const void*>& parameters, void* packed, Executor& executor) const {
  check_parameters(parameters.size(), problem_);
  check_packed(problem_, *kernel_, packed);
  check_executor(problem_, executor);
  kernel_->pack(parameters, packed, executor);
}

void Plan::pack(const std::vector<const void*>& parameters, void* packed, Stream stream) const {
  check_parameters(parameters.size(), problem_);
  check_packed(problem_, *kernel_, packed);
  kernel_->launch_pack(parameters, packed, stream);
}

}  // namespace onepass
