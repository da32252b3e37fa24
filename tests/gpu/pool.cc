// What the tests on a GPU share.
#include "gpu/pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "block/convert.h"
#include "onepass/error.h"
#include "onepass/executor.h"
#include "plan/strategy.h"

namespace onepass::testing {
namespace {

constexpr int64_t most_failures = 20;

// The words with which the GPU was lost; empty while it works.
class LostGpu {
 public:
  std::string words() {
    const std::lock_guard lock(mutex_);
    return words_;
  }
  void set(const std::string& words) {
    const std::lock_guard lock(mutex_);
    if (words_.empty()) words_ = words;
  }

 private:
  std::mutex mutex_;
  std::string words_;
};
LostGpu& lost_gpu() {
  static LostGpu& lost = *new LostGpu;
  return lost;
}

// Never destroyed: the driver may be gone before the statics of a program are.
struct Pool {
  ThreadExecutor executor;
  std::vector<GpuStream> streams;

  Pool() : executor(std::max(2, static_cast<int>(std::thread::hardware_concurrency()))) {
    for (int i = 0; i < executor.concurrency(); ++i) streams.emplace_back();
  }
};
Pool& pool() {
  static Pool& made = *new Pool;
  return made;
}

// One attempt, whatever it throws.
std::string answer(const Attempt& attempt, int64_t index, const GpuStream& stream) {
  try {
    return attempt(index, stream);
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Hands indices to so many threads of the pool while there are any and nothing speaks against it.
template <class HasMore>
int64_t try_while(const Attempt& attempt, const HasMore& has_more, int64_t failures_allowed, int threads) {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> tried{0};
  std::atomic<int64_t> failures{0};
  std::mutex output;
  pool().executor.for_each(threads, [&](int64_t, int worker) {
    const GpuStream& stream = pool().streams[static_cast<size_t>(worker)];
    for (int64_t index = next++; has_more(index); index = next++) {
      if (failures >= failures_allowed || !lost_gpu().words().empty()) return;
      const std::string errors = answer(attempt, index, stream);
      ++tried;
      if (errors.empty()) continue;
      const std::lock_guard lock(output);
      if (failures++ < failures_allowed) ADD_FAILURE() << errors;
      if (!is_alive(0)) lost_gpu().set(errors);
    }
  });
  if (failures >= failures_allowed && failures_allowed > 1)
    ADD_FAILURE() << "stopped after " << failures << " failures, " << tried << " problems were tried";
  if (!lost_gpu().words().empty()) ADD_FAILURE() << "the GPU was lost: " << lost_gpu().words();
  return tried;
}

std::string described(const std::string& row, const Problem& problem, Distribution distribution,
                      Placement placement, uint64_t seed) {
  return row + ", " + std::string(name(distribution)) + ", " + std::string(name(placement)) + ", seed " +
         std::to_string(seed) + ": " + problem.text();
}

// Whether an error of a plan leaves the GPU working, so that other rows can be tried.
void rethrow_if_lost(const std::string& words) {
  if (is_alive(0)) return;
  lost_gpu().set(words);
  throw Error(words);
}

std::string row_errors(const Plan& plan, const Check& check, const std::vector<Operands>& operands,
                       const std::vector<Expected>& expected, const GpuStream& stream) {
  const Problem& problem = plan.problem();
  for (size_t i = 0; i < check.distributions.size(); ++i) {
    for (const Placement placement : check.placements) {
      const std::string what =
          described(plan.strategy(), problem, check.distributions[i], placement, check.seed);
      try {
        Outcome outcome = run(plan, operands[i], Place(stream, placement), check.options);
        outcome.comparison = compare(problem, expected[i], outcome.output);
        if (!outcome.passed()) return what + "\n  " + outcome.text() + '\n';
        if (!check.options.statistics || problem.block.norm() == nullptr) continue;
        const std::vector<float> statistics(expected[i].statistics.begin(), expected[i].statistics.end());
        const std::string error = statistics_error(statistics, outcome.statistics, expected[i].allowed);
        if (!error.empty()) return what + "\n  " + error + '\n';
      } catch (const Error& error) {
        rethrow_if_lost(what + "\n  " + error.what());
        return what + "\n  " + error.what() + '\n';
      }
    }
  }
  return "";
}

// What a check answers where kernels are only compiled.
std::string compiled(const Problem& problem, std::span<const std::string> rows) {
  for (const std::string& row : rows) plan(problem, {row, ""});
  return "";
}

}  // namespace

void GpuTest::SetUp() {
  static const std::string reason = [] {
    std::string missing = cuda::unavailable_reason();
    if (missing.empty()) std::printf("%s\n", cuda::describe_device(0).c_str());
    return missing;
  }();
  if (!reason.empty()) GTEST_FAIL() << "no GPU to test on: " << reason;
  if (!lost_gpu().words().empty()) GTEST_FAIL() << "the GPU was lost before: " << lost_gpu().words();
}

void try_all(int64_t count, const Attempt& attempt) {
  const int64_t tried = try_while(
      attempt, [count](int64_t index) { return index < count; }, most_failures,
      pool().executor.concurrency());
  EXPECT_TRUE(tried == count || ::testing::Test::HasFailure());
}

int64_t try_for(int64_t seconds, const Attempt& attempt) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(scaled(seconds));
  const int64_t tried = try_while(
      attempt, [end](int64_t index) { return index < 8 || Clock::now() < end; }, 1,
      pool().executor.concurrency() / 2);
  std::printf("%lld problems\n", static_cast<long long>(tried));
  ::testing::Test::RecordProperty("problems", std::to_string(tried));
  return tried;
}

void compile_all(const std::vector<ProblemAndRow>& list) {
  try_all(std::ssize(list), [&](int64_t index, const GpuStream&) {
    const auto& [problem, row] = list[static_cast<size_t>(index)];
    plan(problem, {row, ""});
    return std::string();
  });
}

std::vector<std::vector<bool>> few_and_many(size_t count) {
  std::vector<std::vector<bool>> subsets;
  for (const bool rest : {false, true}) {
    subsets.emplace_back(count, rest);
    for (size_t i = 0; i < count; ++i) {
      subsets.emplace_back(count, rest);
      subsets.back()[i] = !rest;
    }
  }
  return subsets;
}

namespace {

// Whether the row gets f32 that it rounds to tf32 itself: half of the seeds. Not on hard data, whose samples
// some rows do again by another row, which rounds otherwise.
Tf32Operands kind_of_operands(Distribution distribution, uint64_t seed) {
  const bool is_plain = distribution == Distribution::uniform || distribution == Distribution::normal;
  return is_plain && seed % 2 == 1 ? Tf32Operands::unrounded : Tf32Operands::rounded;
}

// What is expected of rows, computed once for all that are as accurate.
class ExpectedOfRows {
 public:
  ExpectedOfRows(const Problem& problem, const Check& check, const std::vector<Operands>& operands)
      : problem_(problem), check_(check), operands_(operands) {}

  const std::vector<Expected>& of(const Accuracy& accuracy) {
    for (const auto& [known, expected] : known_) {
      if (known == accuracy) return expected;
    }
    std::vector<Expected> expected;
    for (const auto& [input, parameters] : operands_) {
      expected.push_back(check_.options.statistics
                             ? expected_with_statistics(problem_, input, parameters, accuracy)
                             : expected_output(problem_, input, parameters, accuracy));
    }
    return known_.emplace_back(accuracy, std::move(expected)).second;
  }

 private:
  const Problem& problem_;
  const Check& check_;
  const std::vector<Operands>& operands_;
  std::list<std::pair<Accuracy, std::vector<Expected>>> known_;
};

}  // namespace

std::string forward_errors(const Problem& problem, std::span<const std::string> rows, const Check& check,
                           const GpuStream& stream) {
  if (rows.empty()) return "no row takes " + problem.text();
  if (compiles_only()) return compiled(problem, rows);
  std::vector<Operands> operands;
  for (const Distribution distribution : check.distributions)
    operands.push_back(
        random_operands(problem, distribution, check.seed, kind_of_operands(distribution, check.seed)));
  ExpectedOfRows expected(problem, check, operands);
  std::string errors;
  for (const std::string& row : rows) {
    try {
      const Plan by_row = plan(problem, {row, ""});
      errors += row_errors(by_row, check, operands, expected.of(by_row.accuracy()), stream);
    } catch (const Error& error) {
      rethrow_if_lost(error.what());
      errors += row + " of " + problem.text() + ": " + error.what() + '\n';
    }
  }
  return errors;
}

std::string forward_errors(const Problem& problem, const Check& check, const GpuStream& stream) {
  return forward_errors(problem, accepting_rows(problem), check, stream);
}

std::string not_finite_errors(const Problem& problem, std::span<const std::string> rows,
                              const GpuStream& stream) {
  if (compiles_only()) return compiled(problem, rows);
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double value : {infinity, -infinity, nan}) {
    for (const bool of_weight : {false, true}) {
      Operands operands = random_operands(problem, Distribution::normal, 3);
      std::vector<double>& values = of_weight ? operands.parameters[0] : operands.input;
      values[values.size() / 3] = value;
      for (const std::string& row : rows) {
        const Plan by_row = plan(problem, {row, ""});
        const Outcome outcome = run(by_row, operands, stream);
        const Comparison comparison = compare(problem, operands, outcome.output, by_row.accuracy());
        if (comparison.failures > 0)
          return row + (of_weight ? ", a weight of " : ", an input of ") + std::to_string(value) + ": " +
                 problem.text() + "\n  " + comparison.text();
      }
    }
  }
  return "";
}

std::string rounding_errors(const Problem& problem, std::span<const std::string> rows,
                            const GpuStream& stream) {
  if (!problem.rounds_to_tf32()) return "";
  if (compiles_only()) return compiled(problem, rows);
  const auto round = problem.precision == Precision::tf32_away ? round_to_tf32_away : round_to_tf32;
  Operands given = random_operands(problem, Distribution::normal, 9);
  Operands rounded = given;
  // Ties, a bit beside them, and anything.
  const auto move = [&](std::vector<double>& values, std::vector<double>& as_rounded) {
    for (size_t i = 0; i < values.size(); ++i) {
      // f16 has fewer bits for smaller magnitudes.
      const double x = std::abs(as_rounded[i]) < 0x1p-10 ? 1.0 : as_rounded[i];
      const double half = std::ldexp(1.0, std::ilogb(x) - 11);
      const double beside[] = {half, half * (1 - 0x1p-12), half * (1 + 0x1p-12), half * 0.3};
      values[i] = static_cast<float>(x + beside[i % 4]);
      as_rounded[i] = round(values[i]);
    }
  };
  move(given.input, rounded.input);
  move(given.parameters[0], rounded.parameters[0]);
  for (const std::string& row : rows) {
    const Plan p = plan(problem, {row, ""});
    const Outcome a = run(p, given, stream);
    const Outcome b = run(p, rounded, stream);
    if (!same_bits(a.output, b.output)) return row + " rounds otherwise: " + problem.text();
  }
  return "";
}

std::string other_bits(const Problem& problem, std::span<const std::string> rows, int runs,
                       const GpuStream& stream) {
  Problem single = problem;
  single.input.sizes[0] = single.output.sizes[0] = 1;
  // Of operands that each sample has for itself.
  const std::vector<Parameter> of_one = problem.block.parameters(single.input.sizes);
  for (size_t i = 0; i < of_one.size(); ++i) single.parameters[i].sizes = of_one[i].sizes;
  if (compiles_only()) return compiled(problem, rows) + compiled(single, rows);
  const Operands operands = random_operands(problem, Distribution::normal, 11);
  const auto cut = [&](const std::vector<double>& values, int64_t n) {
    const std::ptrdiff_t size = std::ssize(values) / problem.input.sizes[0];
    return std::vector<double>(values.begin() + n * size, values.begin() + (n + 1) * size);
  };
  for (const std::string& row : rows) {
    const Plan whole = plan(problem, {row, ""});
    const std::vector<double> output = run(whole, operands, stream).output;
    for (int i = 0; i < runs; ++i) {
      if (!same_bits(output, run(whole, operands, stream, {.statistics = i % 2 == 0}).output))
        return row + " gives other bits in run " + std::to_string(i) + ": " + problem.text();
    }
    const Plan alone = plan(single, {row, ""});
    for (int64_t n = 0; n < problem.input.sizes[0]; ++n) {
      Operands own{cut(operands.input, n), operands.parameters};
      for (size_t k = 0; k < of_one.size(); ++k) {
        if (single.parameters[k].sizes != problem.parameters[k].sizes)
          own.parameters[k] = cut(operands.parameters[k], n);
      }
      if (!same_bits(cut(output, n), run(alone, own, stream).output))
        return row + " gives other bits for sample " + std::to_string(n) + " alone: " + problem.text();
    }
  }
  return "";
}

namespace {

std::string row_errors(const BackwardPlan& backward, const Check& check,
                       const std::vector<BackwardOperands>& operands,
                       const std::vector<ExpectedGradients>& expected, const GpuStream& stream,
                       GradientComparison* total, const std::string& forward_row) {
  const BackwardProblem& problem = backward.problem();
  for (size_t i = 0; i < check.distributions.size(); ++i) {
    for (const Placement placement : check.placements) {
      const GradientComparison comparison = compare(
          problem, expected[i], run(backward, operands[i], Place(stream, placement), {forward_row, ""}));
      if (total != nullptr) *total += comparison;
      if (!comparison.errors.empty()) {
        return described(backward.strategy(), problem.forward, check.distributions[i], placement,
                         check.seed) +
               (problem.text() == BackwardProblem(problem.forward).text() ? "" : "\n  " + problem.text()) +
               "\n  " + comparison.errors;
      }
    }
  }
  return "";
}

// Forward rows give the statistics that gradients take.
std::string compiled(const BackwardProblem& problem, std::string_view prefix,
                     const std::string& forward_row) {
  for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) {
    if (row->name.starts_with(prefix) && row->refusal(problem).empty())
      plan_backward(problem, {std::string(row->name), ""});
  }
  return problem.forward.block.norm() == nullptr
             ? ""
             : compiled(problem.forward, std::vector<std::string>{forward_row});
}

std::string errors_by_rows(const std::string& prefix, const BackwardProblem& problem, const Check& check,
                           const GpuStream& stream, GradientComparison* total,
                           const std::string& forward_row) {
  if (compiles_only()) return compiled(problem, prefix, forward_row);
  std::vector<BackwardOperands> operands;
  std::vector<ExpectedGradients> expected;
  for (const Distribution distribution : check.distributions) {
    operands.push_back(random_backward_operands(problem, distribution, check.seed));
    const auto& [forward, output_gradient] = operands.back();
    expected.push_back(expected_gradients(problem, forward.input, forward.parameters, output_gradient));
  }
  std::string errors;
  bool is_taken = false;
  for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) {
    if (!row->name.starts_with(prefix) || !row->refusal(problem).empty()) continue;
    is_taken = true;
    try {
      const BackwardPlan backward = plan_backward(problem, {std::string(row->name), ""});
      errors += row_errors(backward, check, operands, expected, stream, total, forward_row);
    } catch (const Error& error) {
      rethrow_if_lost(problem.text() + ": " + error.what());
      errors += "backward of " + problem.text() + ": " + error.what() + '\n';
    }
  }
  return is_taken ? errors : "no row " + prefix + " takes " + problem.text();
}

}  // namespace

std::string backward_errors(const BackwardProblem& problem, const Check& check, const GpuStream& stream,
                            GradientComparison* total, const std::string& forward_row) {
  return errors_by_rows("", problem, check, stream, total, forward_row);
}

std::string backward_errors(const std::string& prefix, const BackwardProblem& problem, const Check& check,
                            const GpuStream& stream) {
  return errors_by_rows(prefix, problem, check, stream, nullptr, "");
}

}  // namespace onepass::testing
