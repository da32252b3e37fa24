// Shared by forward and backward plans: the choice among rows, its text, and checks of a call.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "onepass/error.h"
#include "plan/build_error.h"
#include "plan/fitted.h"
#include "plan/strategy.h"

namespace onepass {

// A row of either table; throws Error listing them all where none has the name.
template <class Row>
const Row& find_row(std::span<const Row* const> table, std::string_view name) {
  std::string names;
  for (const Row* row : table) {
    if (row->name == name) return *row;
    names += (names.empty() ? "" : ", ") + std::string(row->name);
  }
  throw Error("strategy \"" + std::string(name) + "\" is unknown, must be one of " + names);
}

template <class Row, class ProblemType>
std::vector<Candidate> consider(std::span<const Row* const> table, const ProblemType& problem,
                                const PlanOptions& options) {
  std::vector<Candidate> candidates;
  for (const Row* row : table) {
    Candidate candidate{std::string(row->name), 0, row->refusal(problem)};
    if (candidate.reason.empty()) candidate.seconds = fitted_seconds(*row, problem, options);
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

// The row to build, of those considered: the forced one or the cheapest.
const Candidate& choose(const std::vector<Candidate>& candidates, const std::string& forced);

// Marks the row that could not be built with its reason, and warns. Rethrows the error where no other row
// accepts.
void drop_row(std::vector<Candidate>& candidates, const std::string& row, const BuildError& error);

// Builds the chosen row, or the next best one where that fails. A forced row must build.
template <class Row, class ProblemType>
auto build_chosen(std::span<const Row* const> table, const ProblemType& problem, const PlanOptions& options,
                  std::vector<Candidate>& candidates, std::string& chosen) {
  for (;;) {
    try {
      return find_row(table, chosen).build(problem, options);
    } catch (const BuildError& error) {
      if (!options.strategy.empty()) throw;
      drop_row(candidates, chosen, error);
      chosen = choose(candidates, "").strategy;
    }
  }
}

// The problem, every row with its cost or its reason, then the numbers of the chosen one.
std::string explain_choice(const std::string& problem, const std::string& chosen, const Device& device,
                           const std::vector<Candidate>& candidates, const BuiltStrategy& built,
                           const Fitted* fit);

// Throws Error unless a call fits its plan.
void check_call(size_t given_parameters, const Problem& problem, const BuiltStrategy& built,
                const void* workspace);
void check_parameters(size_t given, const Problem& problem);
// Throws Error unless the row keeps packed weights and the memory is aligned.
void check_packed(const Problem& problem, const BuiltStrategy& built, const void* packed);
void check_executor(const Problem& problem, const Executor& executor);

}  // namespace onepass
