// onepass check: runs a plan on random values and compares every element with the reference.
#include <iostream>

#include "onepass/error.h"
#include "tool/call.h"
#include "tool/commands.h"
#include "tool/compare.h"
#include "tool/executor.h"
#include "tool/expected.h"
#include "tool/progress.h"
#include "tool/timing.h"

namespace onepass::tool {
namespace {

struct Totals {
  int passed = 0;
  int failed = 0;
  int refused = 0;
};

Json result_json(const Plan& plan, uint64_t seed, const Comparison& comparison) {
  Json json{{"problem", plan.problem().text()},
            {"device", plan.problem().device.text()},
            {"strategy", plan.strategy()},
            {"seed", seed}};
  json.update(comparison.json());
  return json;
}

void print_one(const Plan& plan, uint64_t seed, const Comparison& comparison) {
  std::cout << plan.problem().text() << '\n'
            << "  strategy   " << plan.strategy() << ", " << place_text(plan.problem().device) << ", seed "
            << seed << '\n'
            << "  result     " << comparison.text() << '\n'
            << (comparison.passed() ? "PASS" : "FAIL") << '\n';
}

void print_line(const Plan& plan, const Comparison& comparison) {
  std::cout << (comparison.passed() ? "PASS " : "FAIL ") << plan.strategy() << ": " << plan.problem().text()
            << '\n'
            << "     " << comparison.text() << '\n';
}

void print_refusal(const Problem& problem, const Error& error) {
  std::cout << "left out: " << problem.text() << '\n' << "     " << error.what() << '\n';
}

Comparison check_plan(const Plan& plan, uint64_t seed, Executor& executor) {
  Call call(plan, seed, executor);
  call.run();
  call.fetch_output();
  return compare_samples(plan, call.tensors(), 0, plan.problem().output.sizes[0], executor);
}

int check_one(const Problem& problem, const Options& options, Executor& executor) {
  const Plan chosen = plan(problem, options.plan_options());
  const Comparison comparison = check_plan(chosen, options.seed, executor);
  if (options.json) {
    Json json = result_json(chosen, options.seed, comparison);
    json["tolerance_rule"] = tolerance_rule;
    std::cout << json.dump(2) << '\n';
  } else {
    print_one(chosen, options.seed, comparison);
  }
  return comparison.passed() ? good : wrong_result;
}

// Two lines a problem. A problem that a forced strategy refuses is counted, not failed.
int check_all(const std::vector<Problem>& problems, const Options& options, Executor& executor) {
  Totals totals;
  Json list = Json::array();
  std::string first_refusal;
  for (const Problem& problem : problems) {
    show_progress("check " + std::to_string(totals.passed + totals.failed + totals.refused + 1) + " of " +
                  std::to_string(problems.size()));
    try {
      const Plan chosen = plan(problem, options.plan_options());
      const Comparison comparison = check_plan(chosen, options.seed, executor);
      ++(comparison.passed() ? totals.passed : totals.failed);
      clear_progress();
      if (options.json) list.push_back(result_json(chosen, options.seed, comparison));
      if (!options.json) print_line(chosen, comparison);
    } catch (const Error& error) {
      if (totals.refused++ == 0) first_refusal = error.what();
      clear_progress();
      if (options.json) list.push_back({{"problem", problem.text()}, {"refused", error.what()}});
      if (!options.json) print_refusal(problem, error);
    }
  }
  if (totals.passed + totals.failed == 0) throw Error(first_refusal);
  if (options.json) {
    std::cout << list.dump(2) << '\n';
  } else {
    std::cout << "\n" << totals.passed << " passed, " << totals.failed << " failed";
    if (totals.refused > 0) std::cout << ", " << totals.refused << " left out";
    std::cout << "; seed " << options.seed << "; what rounding allows: onepass check --help\n";
  }
  return totals.failed == 0 ? good : wrong_result;
}

}  // namespace

int check(const Options& options) {
  runnable_device(options);
  const std::vector<Problem> problems = requested_problems(options);
  const auto executor = make_executor(requested_threads(options));
  if (options.file.empty()) return check_one(problems.front(), options, *executor);
  return check_all(problems, options, *executor);
}

}  // namespace onepass::tool
