// Choosing a strategy for a problem, printing the choice, running it.
#include "onepass/plan.h"

#include <cstdint>
#include <iomanip>
#include <sstream>

#include "onepass/error.h"
#include "plan/strategy.h"

namespace onepass {
namespace {

std::string names_of_strategies() {
  std::string names;
  for (const Strategy* strategy : strategies()) {
    names += (names.empty() ? "" : ", ") + std::string(strategy->name);
  }
  return names;
}

const Strategy& find_strategy(std::string_view name) {
  for (const Strategy* strategy : strategies()) {
    if (strategy->name == name) return *strategy;
  }
  throw Error("strategy \"" + std::string(name) + "\" is unknown, must be one of " + names_of_strategies());
}

Candidate consider(const Strategy& strategy, const Problem& problem, const PlanOptions& options) {
  Candidate candidate{std::string(strategy.name), 0, strategy.refusal(problem)};
  if (candidate.reason.empty()) candidate.seconds = strategy.seconds(problem, options);
  return candidate;
}

const Candidate& choose(const std::vector<Candidate>& candidates, const std::string& forced) {
  const Candidate* best = nullptr;
  for (const Candidate& candidate : candidates) {
    if (!forced.empty() && candidate.strategy != forced) continue;
    if (!candidate.reason.empty()) {
      if (forced.empty()) continue;
      throw Error("strategy \"" + forced + "\" cannot run this problem: " + candidate.reason);
    }
    if (best == nullptr || candidate.seconds < best->seconds) best = &candidate;
  }
  if (best == nullptr) throw Error("no strategy accepts this problem");
  return *best;
}

std::string milliseconds(double seconds) {
  std::ostringstream out;
  out << std::setprecision(3) << seconds * 1e3 << " ms";
  return out.str();
}

}  // namespace

Plan::Plan(Problem problem, std::string strategy, std::vector<Candidate> candidates,
           std::shared_ptr<const Kernel> kernel)
    : problem_(std::move(problem)),
      strategy_(std::move(strategy)),
      candidates_(std::move(candidates)),
      kernel_(std::move(kernel)) {}

Plan plan(const Problem& problem, const PlanOptions& options) {
  problem.validate();
  if (!options.strategy.empty()) find_strategy(options.strategy);
  std::vector<Candidate> candidates;
  for (const Strategy* strategy : strategies()) candidates.push_back(consider(*strategy, problem, options));
  const std::string chosen = choose(candidates, options.strategy).strategy;
  std::shared_ptr<const Kernel> kernel = find_strategy(chosen).build(problem, options);
  return {problem, chosen, std::move(candidates), std::move(kernel)};
}

size_t Plan::workspace_bytes() const { return kernel_->workspace_bytes(); }

std::string Plan::explain() const {
  std::ostringstream out;
  out << problem_.text() << "\n\n";
  for (const Candidate& candidate : candidates_) {
    out << (candidate.strategy == strategy_ ? "* " : "  ") << std::left << std::setw(20) << candidate.strategy;
    out << (candidate.reason.empty() ? milliseconds(candidate.seconds) + " predicted" : "no: " + candidate.reason)
        << '\n';
  }
  out << "\n" << strategy_ << " with " << problem_.device.threads
      << (problem_.device.threads == 1 ? " thread\n" : " threads\n");
  std::istringstream lines(kernel_->describe());
  for (std::string line; std::getline(lines, line);) out << "  " << line << '\n';
  return out.str();
}

void Plan::run(const Arguments& arguments, void* workspace, Executor& executor) const {
  if (arguments.parameters.size() != problem_.parameters.size()) {
    throw Error("the call has " + std::to_string(arguments.parameters.size()) + " parameters, the block takes " +
                std::to_string(problem_.parameters.size()));
  }
  if (executor.concurrency() > problem_.device.threads) {
    throw Error("the executor runs " + std::to_string(executor.concurrency()) +
                " threads, the plan was made for at most " + std::to_string(problem_.device.threads));
  }
  if (workspace_bytes() > 0 && (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 64 != 0)) {
    throw Error("the workspace must be " + std::to_string(workspace_bytes()) + " bytes aligned to 64");
  }
  kernel_->run(arguments, workspace, executor);
}

}  // namespace onepass
