// A set small enough for compute-sanitizer, which slows kernels a hundredfold: gpu_test
// --gtest_filter='Small*'. tests/turns_test.cc checks that every row has a problem.
#include "gpu/pool.h"
#include "onepass/error.h"
#include "onepass/onepass.h"
#include "plan/strategy.h"

namespace onepass::testing {
namespace {

using Small = GpuTest;

const Device gpu = Device::cuda();

// Kernels are compiled side by side and run one by one: compute-sanitizer loses track of launches otherwise.
void try_each(const std::vector<Problem>& all, const std::function<void(const Problem&)>& compile,
              const std::function<std::string(const Problem&, const GpuStream&)>& check) {
  try_all(std::ssize(all), [&](int64_t index, const GpuStream&) {
    compile(all[static_cast<size_t>(index)]);
    return std::string();
  });
  const GpuStream stream;
  for (const Problem& problem : all) {
    const std::string errors = check(problem, stream);
    if (!errors.empty()) ADD_FAILURE() << errors;
  }
}

void check_forward(const SmallProblems& list, const Check& check) {
  const auto rows_of = [&list](const Problem& problem) { return rows_named(list.prefix, problem); };
  try_each(
      list.problems,
      [&](const Problem& problem) {
        for (const std::string& row : rows_of(problem)) plan(problem, {row, ""});
      },
      [&](const Problem& problem, const GpuStream& stream) {
        const std::vector<std::string> rows = rows_of(problem);
        return forward_errors(problem, rows, check, stream);
      });
}

// The list for rows whose names begin so.
SmallProblems list_of(const std::string& prefix) {
  for (SmallProblems& list : small_forward(gpu)) {
    if (list.prefix == prefix) return std::move(list);
  }
  throw Error("no list for " + prefix);
}

TEST_F(Small, Forward) { check_forward(list_of(""), {.seed = 1, .options = {.statistics = true}}); }

TEST_F(Small, ForwardOfWideConvolutions) { check_forward(list_of("gemm_"), {.seed = 2}); }

TEST_F(Small, ForwardOfNarrowConvolutions) { check_forward(list_of("narrow"), {.seed = 6}); }
TEST_F(Small, ForwardOfBandedConvolutions) { check_forward(list_of("banded"), {.seed = 7}); }

TEST_F(Small, ForwardOfScaledChannels) { check_forward(list_of("scaled"), {.seed = 7}); }

TEST_F(Small, ForwardOfManySlabs) {
  check_forward(list_of("tail_"), {.placements = {Placement::elements}, .seed = 4});
}

TEST_F(Small, ForwardByTurns) { check_forward(list_of("gemm_pingpong"), {.seed = 5}); }

TEST_F(Small, Backward) {
  const std::vector<Problem> all = small_backward(gpu);
  try_each(
      all,
      [](const Problem& problem) {
        const BackwardProblem backward(problem);
        for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) {
          if (row->refusal(backward).empty()) plan_backward(backward, {std::string(row->name), ""});
        }
      },
      [](const Problem& problem, const GpuStream& stream) {
        return backward_errors(BackwardProblem(problem), {.seed = 3}, stream);
      });
}

}  // namespace
}  // namespace onepass::testing
