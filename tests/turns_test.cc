// The turns of the GPU suite: together they take every pair of a problem and a row, and none takes much more
// than its share.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>

#include "cuda/runtime/compile.h"
#include "onepass/error.h"
#include "onepass/onepass.h"
#include "plan/strategy.h"
#include "support/backward_harness.h"
#include "support/lists.h"
#include "support/settings.h"

namespace onepass::testing {
namespace {

const Device gpu = Device::cuda_architecture("sm_90a");

using Pairs = std::set<std::pair<std::string, std::string>>;

Pairs all_pairs(const std::vector<Problem>& problems, const RowsOf& rows_of) {
  Pairs pairs;
  for (const Problem& problem : problems) {
    for (const std::string& row : rows_of(problem)) pairs.emplace(problem.text(), row);
  }
  return pairs;
}

TEST(Turns, TakeEveryPairOfACaseAndARow) {
  Pairs taken;
  size_t least = SIZE_MAX;
  size_t most = 0;
  for (int64_t turn = 0; turn < turns_in_all; ++turn) {
    const std::vector<ProblemAndRow> pairs = cases_in_turn(gpu, turn);
    for (const auto& [problem, row] : pairs) taken.emplace(problem.text(), row);
    least = std::min(least, pairs.size());
    most = std::max(most, pairs.size());
  }
  const Pairs all = all_pairs(gpu_cases(gpu), accepting_rows);
  EXPECT_EQ(taken, all);
  EXPECT_GT(all.size(), 370u);  // more than one row takes most cases
  EXPECT_LE(most, least + 2);   // of two kinds, each dealt evenly
  EXPECT_LE(most, 150u);        // kernels of one run
}

TEST(Turns, TakeEveryRowOfEveryProblemOfTheLists) {
  for (const auto& [problems, rows_of] : {std::pair(wide_problems(gpu), RowsOf(wide_rows)),
                                          std::pair(thin_forward_problems(gpu), RowsOf(thin_rows))}) {
    Pairs taken;
    for (int64_t turn = 0; turn < turns_in_all; ++turn) {
      const std::vector<std::string> rows = one_row_each(problems, rows_of, turn);
      ASSERT_EQ(rows.size(), problems.size());
      for (size_t i = 0; i < rows.size(); ++i) {
        EXPECT_FALSE(rows[i].empty()) << "no row takes " << problems[i].text();
        taken.emplace(problems[i].text(), rows[i]);
      }
    }
    EXPECT_EQ(taken, all_pairs(problems, rows_of));
  }
}

TEST(Turns, TakeEveryProblemOfThePortableRowAndOfTheGradients) {
  for (const std::vector<Problem>& problems :
       {wide_problems(gpu), few_problems(gpu), tails_of_convolutions(gpu)}) {
    std::set<std::string> all;
    std::set<std::string> taken;
    for (const Problem& problem : problems) all.insert(problem.text());
    for (int64_t turn = 0; turn < turns_in_all; ++turn) {
      for (const Problem& problem : in_turn(problems, turn)) taken.insert(problem.text());
    }
    EXPECT_EQ(taken, all);
  }
  const int64_t count = std::ssize(thin_problems(gpu));
  std::set<int64_t> taken;
  for (int64_t turn = 0; turn < turns_in_all; ++turn) {
    for (const int64_t index : thin_gradients_in_turn(count, turn)) taken.insert(index);
  }
  EXPECT_EQ(std::ssize(taken), count);
}

// What a list of a few problems takes of each, two at a time.
TEST(Turns, TakeEveryRowTwoAtATime) {
  const std::vector<std::string> rows{"a", "b", "c", "d", "e"};
  for (int64_t index = 0; index < 7; ++index) {
    std::set<std::string> taken;
    for (int64_t turn = 0; turn < turns_in_all; ++turn) {
      const std::vector<std::string> some = rows_in_turn(rows, index, 2, turn);
      ASSERT_EQ(some.size(), 2u);
      EXPECT_NE(some[0], some[1]);
      taken.insert(some.begin(), some.end());
    }
    EXPECT_EQ(taken.size(), rows.size());
  }
  EXPECT_EQ(rows_in_turn({"a", "b"}, 3, 2, 1).size(), 2u);
  EXPECT_TRUE(rows_in_turn({}, 3, 2, 1).empty());
}

// A plan that is made, not only a row that does not refuse: constructors refuse too.
TEST(Sanitizer, HasAProblemForEveryRow) {
  const cuda::WithoutCompiling quickly;
  for (const Strategy* row : strategies(Device::Kind::cuda)) {
    int64_t planned = 0;
    for (const auto& [prefix, problems] : small_forward(gpu)) {
      for (const Problem& problem : problems) {
        const std::vector<std::string> rows = rows_named(prefix, problem);
        if (std::find(rows.begin(), rows.end(), row->name) == rows.end()) continue;
        EXPECT_NO_THROW(plan(problem, {std::string(row->name), ""})) << row->name << ": " << problem.text();
        ++planned;
      }
    }
    EXPECT_GT(planned, 0) << "compute-sanitizer never sees " << row->name
                          << ": no problem of Small.* is its own";
  }
}

TEST(Sanitizer, HasAProblemForEveryBackwardRow) {
  const cuda::WithoutCompiling quickly;
  for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) {
    int64_t planned = 0;
    for (const Problem& forward : small_backward(gpu)) {
      const BackwardProblem problem(forward);
      if (!row->refusal(problem).empty()) continue;
      EXPECT_NO_THROW(plan_backward(problem, {std::string(row->name), ""})) << row->name << forward.text();
      ++planned;
    }
    EXPECT_GT(planned, 0) << "compute-sanitizer never sees " << row->name
                          << ": no problem of Small.* is its own";
  }
}

class TurnOfTheEnvironment : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* text = std::getenv("ONEPASS_TEST_TURN")) before_ = text;
  }
  void TearDown() override {
    if (before_.empty()) {
      unsetenv("ONEPASS_TEST_TURN");
    } else {
      setenv("ONEPASS_TEST_TURN", before_.c_str(), 1);
    }
  }

 private:
  std::string before_;
};

TEST_F(TurnOfTheEnvironment, IsReadOrRefused) {
  unsetenv("ONEPASS_TEST_TURN");
  EXPECT_EQ(turn(), 0);
  setenv("ONEPASS_TEST_TURN", "5", 1);
  EXPECT_EQ(turn(), 5);
  for (const char* const text : {"", "-1", "3x", "two"}) {
    setenv("ONEPASS_TEST_TURN", text, 1);
    EXPECT_THROW(turn(), Error) << text;
  }
}

}  // namespace
}  // namespace onepass::testing
